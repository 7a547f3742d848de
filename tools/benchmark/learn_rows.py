"""Lines of docs/benchmarks.md for what Muon and the parts of Stage B learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def _share(value: float) -> str:
    return f"{value:.3f}"


def muon_rows(result: dict[str, Any]) -> list[str]:
    """Muon, AdamW and the control by rate, means over the seeds."""
    rows = [
        f"A dense backbone of 2 blocks of width 64 on bytes of Python sources, {result['steps']} "
        "steps, WSD. At the best of three rates Muon is to be .10 nats a byte below AdamW, and its "
        "control without Newton-Schulz is not.",
        "",
        "| optimizer | peak rate of the matrices | held-out nats a byte | CPU s |",
        "|---|---|---|---|",
    ]
    names = {"adamw": "AdamW", "muon": "Muon", "normalised": "momentum over its norm"}
    for kind, rate in dict.fromkeys((row["kind"], row["rate"]) for row in result["rows"]):
        found = [row for row in result["rows"] if (row["kind"], row["rate"]) == (kind, rate)]
        loss, seconds = (sum(row[key] for row in found) / len(found) for key in ("loss", "seconds"))
        rows.append(f"| {names[kind]} | {rate:g} | {loss:.3f} | {seconds:.1f} |")
    return rows


def binding_rows(result: dict[str, Any]) -> list[str]:
    """Plastic adapters by rank and seed."""
    rows = [
        "Demanded are .90, and .80 at eight times the gap of 16 tokens that they learned at; at "
        "most .11 with plasticity off or the fast weights of another sequence (by chance .06), at "
        "most 2 for the largest fast weight, 120 s.",
        "",
        "| rank | pairs | seed | right | gap x8 | plastic off | weights of another "
        "| largest weight | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    shown = ("trained", "gap x8", "plastic off", "weights of another")
    for row in result["learned"]:
        shares = [_share(row[name]) for name in shown]
        rows.append(
            f"| {row['rank']} | {row['pairs']} | {row['seed']} | {' | '.join(shares)} "
            f"| {row['largest weight']:.2f} | {row['seconds']:.0f} |"
        )
    return rows


def registers_rows(result: dict[str, Any]) -> list[str]:
    """Working memory by seed."""
    rows = [
        "64 updates over eight windows, written two tokens a stride. Demanded are .90; at most .30 "
        "for the window alone and .20 for the slots of another text.",
        "",
        "| seed | right | 4x longer | window alone | slots of another text | CPU s |",
        "|---|---|---|---|---|---|",
    ]
    shown = ("trained", "4x longer", "window alone", "slots of another")
    for row in result["learned"]:
        shares = [_share(row[name]) for name in shown]
        rows.append(f"| {row['seed']} | {' | '.join(shares)} | {row['seconds']:.0f} |")
    return rows


def haystack_rows(result: dict[str, Any]) -> list[str]:
    """Needles among needles by place of the question and seed."""
    rows = [
        "Eight operations at eight windows. Demanded are .90 where the question is read first, and "
        "at most .05 above chance where it comes last.",
        "",
        "| question | seed | found | kept at most | CPU s |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(result["learned"], key=lambda each: each["question"]):
        rows.append(
            f"| {row['question']} | {row['seed']} | {_share(row['found'])} "
            f"| {_share(row['kept at most'])} | {row['seconds']:.0f} |"
        )
    return rows


def gate_rows(result: dict[str, Any]) -> list[str]:
    """The state carried through all segments, and through those committed."""
    agents = ("agent", "agent, whitened")
    of_each = ("", ", shuffled", ", committed")
    columns = ["all", "all, learned so", "facts", "none"]
    columns += [f"{agent}{what}" for agent in agents for what in of_each]
    rows = [
        "Right answers from the recurrent state; demanded of an agent is .10 more than of all at "
        "32 windows. `facts` commits those alone, `shuffled` as many segments as the agent before "
        "it, and `committed` is their share.",
        "",
        f"| seed | windows | {' | '.join(columns)} | CPU s |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for row in result["learned"]:
        shares = " | ".join(_share(row[name]) for name in columns)
        rows.append(f"| {row['seed']} | {row['windows']} | {shares} | {row['seconds']:.0f} |")
    return rows


def retrieval_rows(result: dict[str, Any]) -> list[str]:
    """Episodic retrieval by seed, and latency by size."""
    rows = [
        "Recall at 4 of 1,024 entries; demanded are .95, and .90 among ten times as many; at most "
        ".15 for raw keys.",
        "",
        "| seed | trained | among distractors | untrained | raw keys | CPU s |",
        "|---|---|---|---|---|---|",
    ]
    names = ("trained", "among distractors", "untrained", "raw")
    for row in result["learned"]:
        shares = " | ".join(_share(row[name]) for name in names)
        rows.append(f"| {row['seed']} | {shares} | {row['seconds']:.0f} |")
    return rows + latency_rows(result["latency"])


def latency_rows(latency: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of one query by the number of entries."""
    rows = ["", "| entries | key size | exact ms | FAISS ms |", "|---|---|---|---|"]
    for row in latency:
        faiss = "not installed" if row["faiss"] is None else f"{row['faiss']:.2f}"
        rows.append(f"| {row['entries']} | {row['key_size']} | {row['exact']:.2f} | {faiss} |")
    return rows


def policy_rows(result: dict[str, Any]) -> list[str]:
    """The memory agent by seed, and reward times return."""
    rows = [
        "Success of greedy actions after 150 iterations; demanded are .90 with at most 8 "
        "operations; at most .15 for random actions, .02 with cache_write masked, 120 s.",
        "",
        "| seed | success | operations | by branches | at -.05 | random | masked | all splice "
        "| CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["learned"]:
        others = ("branches", "lenient branches", "random", "cache_write masked", "all splice")
        shares = " | ".join(_share(row[name]["success"]) for name in others)
        rows.append(
            f"| {row['seed']} | {_share(row['trained']['success'])} "
            f"| {row['trained']['operations']:.1f} | {shares} | {row['seconds']:.0f} |"
        )
    return [
        *rows,
        "",
        f"Where successes are rare, after {result['iterations']} iterations (seed 0); gated costs "
        "are taken from successes alone, divided returns are centred too:",
        "",
        "| costs and returns | success | operations |",
        "|---|---|---|",
        *(
            f"| {name} | {_share(cell['success'])} | {cell['operations']:.1f} |"
            for name, cell in result["two by two"].items()
        ),
    ]


def policy_choice_rows(result: dict[str, Any]) -> list[str]:
    """Baselines and clips by iterations, the order of lengths, and credit: means over the seeds."""
    counts = result["checked at"]
    rows = [
        "Success of greedy actions after so many iterations, mean over the seeds and the range.",
        "",
        f"| choice | {' | '.join(str(n) for n in counts)} |",
        "|---|" + "---|" * len(counts),
    ]
    choices = result["choices"]
    for name in dict.fromkeys(row["name"] for row in choices):
        successes = [row["success"] for row in choices if row["name"] == name]
        cells = [_spread(column) for column in zip(*successes, strict=True)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    untrained = result["untrained"]
    random = ", ".join(f"{_share(value)} at {ratio}x" for ratio, value in untrained.items())
    rows += [
        "",
        f"Lengths, after {result['iterations']} iterations of one length each; a random agent has "
        f"{random}. Iterations that earn have a success among their {result['episodes']} episodes.",
        "",
        f"| lengths | {' | '.join(f'{ratio}x' for ratio in untrained)} | earn | CPU s | seeds |",
        "|---|" + "---|" * len(untrained) + "---|---|---|",
    ]
    lengths = result["lengths"]
    for name in dict.fromkeys(row["name"] for row in lengths):
        found = [row for row in lengths if row["name"] == name]
        cells = [_spread([row["success"][ratio] for row in found]) for ratio in untrained]
        cells.append(_share(sum(row["earning"] for row in found) / len(found)))
        cells.append(f"{sum(row['seconds'] for row in found) / len(found):.0f}")
        cells.append(str(len(found)))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows + _credit_rows(result["credits"], result["read iterations"])


def _credit_rows(learned: Sequence[dict[str, Any]], iterations: int) -> list[str]:
    """Finds and operations of agents, by credit and weight of the entropy."""
    lengths = learned[0]["lengths"]
    segments = " | ".join(f"{each['segments']:.0f} segments" for each in lengths.values())
    rows = [
        "",
        f"Credit and weight of the entropy, after {iterations} iterations of 16 texts: share of "
        "the evidence in the window and operations, of 64, in greedy episodes on 32 unseen texts; "
        "means over the seeds and the range. The longest texts are longer than those of training.",
        "",
        f"| credit, weight | {segments} | CPU s | seeds |",
        "|---|" + "---|" * len(lengths) + "---|---|",
    ]
    for name in dict.fromkeys(row["name"] for row in learned):
        found = [row for row in learned if row["name"] == name]
        cells = []
        for length in lengths:
            columns = [row["lengths"][length] for row in found]
            operations = sum(each["operations"] for each in columns) / len(columns)
            cells.append(f"{_spread([each['found'] for each in columns])}, {operations:.1f}")
        cells.append(f"{sum(row['seconds'] for row in found) / len(found):.0f}")
        cells.append(str(len(found)))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def _spread(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    return f"{_share(mean)} ({_share(min(values))} to {_share(max(values))})"


def table_rows(result: dict[str, Any]) -> list[str]:
    """The agent, its rivals and its controls, by seed, wording, length and task."""
    rows = [
        "Share of right answers with its 95 % interval by Wilson, retrievals and writes, and "
        "seconds of a text on one thread; columns as in [reasoning.md](reasoning.md#evaluation). A "
        "window has 64 tokens. `backbone` reads the last window alone. Trained rivals begin as the "
        "backbone of the finished reader.",
    ]
    for table in result["tables"]:
        seconds = "" if table.get("seconds") is None else f", {table['seconds']:.0f} s of training"
        parts = [
            (f"{wording} wording, 8 windows", cells) for wording, cells in table["columns"].items()
        ]
        parts += [(f"{ratio} windows", cells) for ratio, cells in table["long"].items()]
        for title, by_task in parts:
            rows += ["", f"Seed {table['seed']}{seconds}: {title}.", ""]
            trained = {
                f"{name}, trained": found[title.split()[0]]
                for name, found in table["trained"].items()
                if title.split()[0] in found
            }
            rows += _columns_of(by_task, trained)
    return rows


def _columns_of(
    by_task: dict[str, dict[str, Any]], trained: dict[str, dict[str, Any]]
) -> list[str]:
    """One table: a row for each column of the controls, and for each trained rival."""
    heads = [f"`{task}` | operations | s" for task in by_task]
    rows = [f"| answers from | {' | '.join(heads)} |", "|---" * (3 * len(heads) + 1) + "|"]
    of_all = {
        name: [cells.get(name) for cells in by_task.values()]
        for name in next(iter(by_task.values()))
    }
    of_all |= {name: [found[task] for task in by_task] for name, found in trained.items()}
    for name, cells in of_all.items():
        rows.append(f"| {name} | {' | '.join(_with_cost(each) for each in cells)} |")
    return rows


def _with_cost(cell: dict[str, Any] | None) -> str:
    if not cell:
        return "- | - | -"
    operations = cell.get("operations")
    seconds = cell.get("seconds")
    return (
        f"{_with_interval(cell)} | {'-' if operations is None else f'{operations:.1f}'} "
        f"| {'-' if seconds is None else f'{seconds:.2f}'}"
    )


def recipe_rows(result: dict[str, Any]) -> list[str]:
    """Shrunk recipes around a frozen backbone: the agent, its rivals and its controls."""
    rows = [
        "Share of right answers with its 95 % interval by Wilson over texts of eight windows; the "
        "same texts, backbone and seed for all recipes; seconds of training.",
        "",
        "| recipe | task | s | agent | operations | oracle | words | all | random | -write |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["recipes"]:
        for task, columns in row["scores"].items():
            shown = [
                _with_interval(columns[name])
                for name in ("oracle", "words", "all", "random", "-write")
            ]
            rows.append(
                f"| {row['recipe']} | `{task}` | {row['seconds']:.0f} | "
                f"{_with_interval(columns['agent'])} | {columns['agent']['operations']:.1f} | "
                f"{' | '.join(shown)} |"
            )
    return rows


def own_question_rows(result: dict[str, Any]) -> list[str]:
    """Held-out rows of a user's own file, answered by the agent and by its controls."""
    columns = ("agent", "oracle", "words", "words-once", "all", "all-once", "-plastic", "-write")
    rows = [
        "The commands of [reasoning.md](reasoning.md#your-own-questions) on files of 200 rows by "
        "`write_notes`, a tenth held out; exact matches with their 95 % interval by Wilson, and "
        "wall time from the first command to the scores.",
        "",
        f"| file | s | {' | '.join(columns)} | operations | backbone alone |",
        "|---|---|" + "---|" * len(columns) + "---|---|",
    ]
    for each in result["learned"]:
        found = each["row"]["controls"]
        cells = " | ".join(_with_interval(found[name]) for name in columns)
        rows.append(
            f"| {each['file']} | {each['seconds']:.0f} | {cells} | "
            f"{found['agent']['operations']:.1f} | {_share(each['row']['backbone_score'])} |"
        )
    return rows


def _with_interval(cell: dict[str, Any]) -> str:
    if cell.get("low") is None:
        return _share(cell["score"])
    return f"{_share(cell['score'])} ({_share(cell['low'])} to {_share(cell['high'])})"


def frozen_stage_rows(result: dict[str, Any]) -> list[str]:
    """Wall time of a lesson by the way its rows go through the stages."""
    rows = [
        f"A lesson of the joint phase, {result['texts']} texts in windows of 256 tokens, forward "
        "and backward: 8 blocks of width 256 with experts, ranks of one thread. Medians of "
        f"{result['rounds']} rounds, in which the ways take turns.",
        "",
        "| read by | s a lesson | times as long as in pieces |",
        "|---|---|---|",
    ]
    for name, seconds in result["seconds"].items():
        rows.append(f"| {name} | {seconds:.2f} | {result['faster_than'][name]:.2f} |")
    return rows


def cost_rows(result: dict[str, Any]) -> list[str]:
    """Cost of Stage B beside its backbone."""
    rows = [
        "Milliseconds at the 1B's size; demanded are 10 for an operation of the memory, 5 for an "
        "adapter's update.",
        "",
        "| operation | ms |",
        "|---|---|",
        *(f"| {name} | {value:.2f} |" for name, value in result["operations"].items()),
        "",
        "With memory over the backbone alone; demanded are 1.30 for time and 1.20 for memory.",
        "",
        "| shape | reading | decoding | bytes |",
        "|---|---|---|---|",
    ]
    for scale, overhead in result["overhead"].items():
        memory = result["memory"][scale]["ratio"]
        rows.append(
            f"| {scale} | {overhead['reading']:.2f} | {overhead['decoding']:.2f} | {memory:.3f} |"
        )
    return rows + latency_rows(result["latency"])
