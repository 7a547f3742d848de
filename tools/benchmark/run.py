"""Runs the paired benchmarks and writes their results into docs/benchmarks.md.

    make bench                        all of them
    make bench ARGS='wkv7 moe'        some; the sections of the others stay as they are
    make bench ARGS='memory --flags=--most-ranks=2'    with flags of its own

Each benchmark is a module of this folder that measures both sides in one call, on one thread, in
CPU time, and prints JSON with --json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.benchmark.checkpoint_rows import checkpoint_rows, tier_rows
from tools.benchmark.data_rows import loader_rows, not_compared, reading_rows
from tools.benchmark.leak import leak_rows
from tools.benchmark.learn_rows import (
    binding_rows,
    cost_rows,
    frozen_stage_rows,
    gate_rows,
    haystack_rows,
    muon_rows,
    own_question_rows,
    policy_choice_rows,
    policy_rows,
    recipe_rows,
    registers_rows,
    retrieval_rows,
    table_rows,
)
from tools.benchmark.live import live_rows
from tools.benchmark.planned_time import planned_time_rows
from tools.benchmark.public_runs import public_rows
from tools.benchmark.step_rows import compiled_rows, step_rows
from tools.benchmark.trackers import tracker_rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"


def wkv7_rows(result: dict[str, Any]) -> list[str]:
    """Speed, error and kept memory of the WKV-7 op."""
    rows = [
        "The loop is `wkv7_reference`, which indexes its inputs token by token.",
        "",
        "| head size | form | ms CPU | times the loop | demanded |",
        "|---|---|---|---|---|",
    ]
    demanded = {("chunked", 64): "15", ("chunked", 128): "18"}
    for case in result["cases"]:
        for form, time in case["milliseconds"].items():
            speed = case["times_the_reference"][form]
            demand = demanded.get((form, case["head_dim"]), "")
            rows.append(f"| {case['head_dim']} | {form} | {time:.1f} | {speed:.1f} | {demand} |")
    rows += ["", "| head size | form | worst relative error | demanded |", "|---|---|---|---|"]
    for check in result["quality"]:
        for form, error in check["worst_relative_error"].items():
            rows.append(f"| {check['head_dim']} | {form} | {error:.1e} | 2e-6 |")
    rows += ["", "| head size | form | MB kept, B1 T512 H2 | of autograd's |", "|---|---|---|---|"]
    for check in result["quality"]:
        whole = check["saved_bytes"]["chunk form left to autograd"]
        for form, size in check["saved_bytes"].items():
            rows.append(f"| {check['head_dim']} | {form} | {size / 1e6:.3f} | {size / whole:.3f} |")
    return rows


def mamba_rows(result: dict[str, Any]) -> list[str]:
    """Speed of the scan's forms in a mixer, and of transformers' mixer."""
    rows = [
        "A forward and backward pass with 16 states, float32; transformers' mixer without kernels.",
        "",
        "| batch x tokens, width | form | ms CPU | times transformers' |",
        "|---|---|---|---|",
    ]
    for case in result["cases"]:
        size = f"{case['batch']} x {case['tokens']}, {case['width']}"
        for form, time in case["milliseconds"].items():
            rows.append(f"| {size} | {form} | {time:.1f} | {case['times_theirs'][form]:.1f} |")
    return rows


def moe_rows(result: dict[str, Any]) -> list[str]:
    """The MoE feed-forward beside a dense one."""
    times = result["milliseconds"]
    return [
        "| layer | ms CPU | of the dense time | demanded |",
        "|---|---|---|---|",
        f"| dense | {times['dense']:.1f} | 1.00 | |",
        f"| MoE | {times['moe']:.1f} | {result['moe_over_dense']:.2f} | at most 1.25 |",
    ]


def dedup_rows(result: dict[str, Any]) -> list[str]:
    """Near-dedup end to end beside its peers."""
    demanded = {"datatrove": "10", "datasketch": "1.5"}
    rows = [
        f"{result['documents']} documents of {result['megabytes']:.1f} MB, "
        "800 of them planted copies.",
        "",
        "| program | documents per CPU second | we are times as fast | demanded | recall at .8 |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in result["cpu_seconds"].items():
        ratio = f"{result['over_peer'][name]:.1f}" if name in result["over_peer"] else ""
        recall = result["recall_at_0.8"][name]
        speed = result["documents"] / seconds
        rows.append(f"| {name} | {speed:.0f} | {ratio} | {demanded.get(name, '')} | {recall:.3f} |")
    precision = result["precision_at_0.5"]
    rows += ["", f"Precision at .5: {precision:.3f}. Demanded are .98 of it and of recall."]
    return rows + not_compared(result)


def filters_rows(result: dict[str, Any]) -> list[str]:
    """Per-document steps beside datatrove's."""
    chain = result["chain"]
    personal = result["personal_data"]
    peer = result["peer"]
    rows = [
        f"{result['num_documents']} texts, {result['million_characters']:.2f} million characters: "
        "language, repetition, quality, C4's and FineWeb's rules, personal data, JSON lines.",
        "",
        "| chain | million characters per CPU second | texts kept |",
        "|---|---|---|",
    ]
    for name, speed in chain["million_characters_per_cpu_second"].items():
        rows.append(f"| {name} | {speed:.2f} | {chain['kept'][name]} |")
    compared = f"{chain['over_peer']:.1f} times as fast as {peer}'s" if peer else "not compared"
    rows += [
        "",
        f"Our chain is {compared}; demanded are 3 times.",
        "",
        "| step by itself, on all texts | million characters per CPU second |",
        "|---|---|",
        *(
            f"| {name} | {speed:.1f} |"
            for name, speed in result["steps_million_characters_per_cpu_second"].items()
        ),
        "",
        "| what | measured | demanded |",
        "|---|---|---|",
        "| language identification, texts of 1,000 characters per CPU second | "
        f"{result['language_documents_per_cpu_second']:.0f} | 4,000 |",
        f"| personal data, recall of {personal['planted']} planted | {personal['recall']:.3f} "
        "| .98 |",
        f"| personal data, precision among lookalikes | {personal['precision']:.3f} | .95 |",
    ]
    return rows


def encode_rows(result: dict[str, Any]) -> list[str]:
    """Encoding beside Hugging Face."""
    rows = ["| encoder | million tokens per CPU second |", "|---|---|"]
    for name, rate in result["million_tokens_per_cpu_second"].items():
        rows.append(f"| {name} | {rate:.2f} |")
    return [
        *rows,
        "",
        f"Ours is {result['over_peer']:.1f} times as fast; demanded are 3. The ids are equal in "
        f"{result['equal']:,} of {result['documents']:,} documents.",
    ]


def data_memory_rows(result: dict[str, Any]) -> list[str]:
    """Largest resident sizes while building a large corpus."""
    return [
        f"{result['corpus_bytes'] / 1e9:.1f} GB of text with the default steps and tokenizer, "
        f"{result['workers']} workers, {result['tokens'] / 1e6:,.0f} million tokens, "
        f"{result['seconds'] / 60:.0f} minutes.",
        "",
        "| process | largest resident size, MB | demanded |",
        "|---|---|---|",
        f"| worker | {result['worker_bytes'] / 1e6:.0f} | under 2,000 |",
        f"| the build itself | {result['build_bytes'] / 1e6:.0f} | |",
    ]


def layouts_rows(result: dict[str, Any]) -> list[str]:
    """Two ranks by axis, against two data ranks."""
    rows = [
        f"Four blocks of width 256 with 8 experts, {result['tokens']:,} tokens a step in four "
        f"micro-steps, {result['steps']} steps a round after one to warm up.",
        "",
        "| two ranks as | wall time a step, ms | of data | CPU time of both, of data | exchanged "
        "by a rank in a step, MB |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        parts = [f"{kind.replace('_', ' ')} {n / 1e6:.1f}" for kind, n in row["bytes"].items()]
        rows.append(
            f"| {row['layout']} | {1e3 * row['seconds']['wall']:.0f} | "
            f"{row['of_data']['wall']:.2f} | {row['of_data']['cpu']:.2f} | {', '.join(parts)} |"
        )
    return rows


def train_rows(result: dict[str, Any]) -> list[str]:
    """`make train`, set-up not counted."""
    summary = result["summary"]
    losses = summary["baselines"]
    return [
        f"{summary['steps']} steps on two ranks in {result['seconds']:.0f} s of wall time, "
        "start-up, evaluations and report included; demanded are 300 s.",
        "",
        "| predictor | nats per held-out token |",
        "|---|---|",
        f"| cdrmix-core-tiny | {summary['evaluation']['loss']:.4f} |",
        f"| smoothed bigram, counted on the same tokens | {losses['bigram_loss']:.4f} |",
        f"| smoothed unigram | {losses['unigram_loss']:.4f} |",
    ]


def memory_rows(result: dict[str, Any]) -> list[str]:
    """The plan's bytes per rank beside what ranks hold."""
    parts = ("weights", "gradients", "optimizer", "activations")
    from tools.benchmark.memory import peak_lines

    rows = [
        "Measured MB of a rank, and by how much the plan is off; demanded are 0 for states and 5 % "
        "for activations.",
        "",
        *(f"{line}.  " for line in peak_lines(result["cuda"])),
        "",
        f"| configuration | {' | '.join(parts)} |",
        f"|---|{'---|' * len(parts)}",
    ]
    for row in result["rows"]:
        cells = []
        for part in parts:
            found = row["measured"][part]
            guess = row["predicted"][part]
            off = "0" if guess == found else f"{guess / found - 1:+.2%}"
            cells.append(f"{found / 1e6:.2f}, {off}")
        rows.append(f"| {row['case']['name']} | {' | '.join(cells)} |")
    if result["left_out"]:
        rows += ["", f"Not measured, for too many ranks: {'; '.join(result['left_out'])}."]
    return rows


def goodput_rows(result: dict[str, Any]) -> list[str]:
    """A run in which ranks are killed."""
    rows = [
        f"cdrmix-core-tiny, {result['steps']} steps on two ranks under `cdrmix launch`, a "
        f"checkpoint each 10 steps, a rank killed in every {result['steps_per_kill']} steps.",
        "",
        "| killed at steps | gone on from | productive of all steps | demanded | lost, seconds | "
        "from the end of a start to the next command, seconds | start-ups, seconds | "
        "productive of the wall time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        cost = run["goodput"]
        rows.append(
            f"| {', '.join(map(str, run['killed_at']))} | {', '.join(map(str, run['resumed_at']))} "
            f"| {cost['share_of_steps']:.1%} | 95 % | {cost['redone_seconds']:.1f} "
            f"| {cost['down_seconds']:.1f} | {cost['start_up_seconds']:.1f} of {cost['starts']} "
            f"| {cost['share']:.1%} of {cost['seconds']:.0f} s |"
        )
    return rows


def notice_rows(result: dict[str, Any]) -> list[str]:
    """A rank that is killed or stopped."""
    deadline = result["deadline_seconds"]
    demanded = {"killed": "10", "stopped": f"{deadline + 5} (deadline {deadline} + 5)"}
    rows = [
        "| rank 1 is | noticed after, seconds, median | at most | demanded | "
        "first step of the next start after the notice, seconds, median |",
        "|---|---|---|---|---|",
    ]
    for fault, costs in result["seconds"].items():
        notice, restart = ([cost[what] for cost in costs] for what in ("notice", "restart"))
        rows.append(
            f"| {fault} | {statistics.median(notice):.1f} | {max(notice):.1f} | {demanded[fault]} "
            f"| {statistics.median(restart):.1f} |"
        )
    return rows


def start_up_rows(result: dict[str, Any]) -> list[str]:
    """From the command to the first step."""
    rows = [
        "`deepspeed --num_gpus 2 launch/train.py`, cdrmix-core-tiny, seconds of wall time as rank "
        "0 measures them. A part ends where the run says so: where ranks differ, one waits for the "
        "others in the next part that needs them. The launcher is DeepSpeed's own: its command, "
        "and the process that it starts for this host, import all of DeepSpeed one by one, and "
        "MLflow with it where that is installed, about 2 s each.",
        "",
        "| part | seconds, median | least |",
        "|---|---|---|",
    ]
    for name, seconds in result["seconds"].items():
        part = (
            name.removesuffix("seconds").replace("_", " ").strip() or "from command to first step"
        )
        rows.append(f"| {part} | {statistics.median(seconds):.2f} | {min(seconds):.2f} |")
    return rows


def hf_trainer_rows(result: dict[str, Any]) -> list[str]:
    """A Hugging Face model in this trainer and in transformers' own."""
    rows = [
        "A Llama of 4 layers, 2 ranks, ZeRO-2, float32, the same samples and learning rates; CPU",
        f"time of all processes for {result['tokens']:,} tokens, starting and ending left out.",
        "",
        "| trainer | tokens per CPU second | peak memory of a rank, MiB |",
        "|---|---|---|",
    ]
    names = ("CDRmix", "transformers.Trainer")
    for name, rate, peak in zip(
        names, result["tokens_per_cpu_second"], result["peak_bytes"], strict=True
    ):
        rows.append(f"| {name} | {rate:,.0f} | {peak / 2**20:,.0f} |")
    difference = result["worst_loss_difference"]
    rows += [
        "",
        f"Ratio {result['ratio']:.2f}; demanded is 1.0. Of {result['steps']} steps the losses "
        f"differ by at most {difference:.1e}; demanded are 1e-4.",
    ]
    return rows


def quality_rows(result: dict[str, Any]) -> list[str]:
    """Held-out loss of each arm beside the core's."""
    rows = [
        f"{result['steps']} steps of the core, nats per held-out token. Each arm at the best of "
        "its learning rates (at the first seed); the range is over "
        f"{result['rounds']} seeds. `mod` trains for as many FLOPs as the core, the others for as "
        "many tokens. `llama` has as many parameters as the core uses for a token, `mixtral` as "
        "many as it has in all.",
        "",
        "| arm | loss | range | less than the core | best rate | of rates | steps |",
        "|---|---|---|---|---|---|---|",
    ]
    means = {arm["name"]: statistics.mean(arm["losses"]) for arm in result["arms"]}
    for arm in result["arms"]:
        name, losses = arm["name"], arm["losses"]
        less = f"{means['core'] - means[name]:+.3f}" if "core" in means else ""
        tried = ", ".join(arm["losses_by_rate"])
        rows.append(
            f"| {name} | {means[name]:.4f} | {min(losses):.4f} to {max(losses):.4f} | {less} "
            f"| {arm['best_rate']:g} | {tried} | {arm['steps']} |"
        )
    for arm in result["arms"]:
        before = arm["before_cooldown"]
        averages = [run["eval/ema_loss"] for run in before if "eval/ema_loss" in run]
        if averages:
            weights = statistics.mean(run["eval/loss"] for run in before)
            rows += [
                "",
                f"`{arm['name']}`, before its cooldown at 80 % of the steps: {weights:.4f} of the "
                f"weights, {statistics.mean(averages):.4f} of their average.",
            ]
    return rows


# name of the module and section: heading, and how its JSON becomes lines
SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    "wkv7": ("WKV-7 op", wkv7_rows),
    "step": ("Training step", step_rows),
    "compiled": ("Compiled blocks", compiled_rows),
    "mamba": ("Mamba mixer", mamba_rows),
    "moe": ("MoE feed-forward", moe_rows),
    "loader": ("Loader", loader_rows),
    "reading": ("Reading from a slow disk", reading_rows),
    "data_filters": ("Data: steps on documents", filters_rows),
    "data_dedup": ("Data: near-duplicates", dedup_rows),
    "data_encode": ("Data: encoding", encode_rows),
    "data_memory": ("Data: memory of a build", data_memory_rows),
    "layouts": ("Layouts on two ranks", layouts_rows),
    "checkpoint": ("Checkpoints in the background", checkpoint_rows),
    "tiers": ("Checkpoints in tiers", tier_rows),
    "train": ("make train", train_rows),
    "hf_trainer": ("A Hugging Face model beside transformers' Trainer", hf_trainer_rows),
    "quality": ("Held-out loss beside peers, by optimizer and objective", quality_rows),
    "muon": ("Muon beside AdamW", muon_rows),
    "leak": ("Leaks over 2,000 steps", leak_rows),
    "memory": ("Memory against the plan", memory_rows),
    "planned_time": ("Where a step's planned time goes", planned_time_rows),
    "public_runs": ("The plan's time against published runs", public_rows),
    "start_up": ("Start-up", start_up_rows),
    "live": ("Live view", live_rows),
    "trackers": ("Trackers and hooks", tracker_rows),
    "goodput": ("Goodput with killed ranks", goodput_rows),
    "notice": ("Notice of a lost rank", notice_rows),
    "learn_binding": ("Stage B: plastic adapters bind beyond the window", binding_rows),
    "learn_registers": ("Stage B: working memory tracks registers", registers_rows),
    "learn_retrieval": ("Stage B: episodic retrieval", retrieval_rows),
    "learn_haystack": ("Stage B: a needle among needles, few of them kept", haystack_rows),
    "learn_gate": ("Stage B: the recurrent state, carried always or by choice", gate_rows),
    "learn_policy": ("Stage B: the memory agent", policy_rows),
    "policy_choices": ("Stage B: choices of the agent's learning", policy_choice_rows),
    "reasoning_table": ("Stage B: the whole beside its rivals", table_rows),
    "learn_recipes": ("Stage B: recipes, shrunk, around a frozen backbone", recipe_rows),
    "own_questions": ("Stage B: questions of a user's own", own_question_rows),
    "frozen_stages": ("Stage B: a frozen backbone on two stages", frozen_stage_rows),
    "reasoning": ("Stage B: what it costs", cost_rows),
}


def machine() -> str:
    """Processor, cores and versions, in one line."""
    import torch

    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    name = cpu[1].strip() if cpu else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}"


def section(name: str, python: str, flags: list[str]) -> str:
    """Run one benchmark with an interpreter and flags; its section of the page."""
    module = f"tools.benchmark.{name}"
    print(f"measuring {name} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        ["env", "OMP_NUM_THREADS=1", python, "-m", module, "--json", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    heading, rows = SECTIONS[name]
    told = [flag for flag in flags if not flag.startswith("--rounds")]  # they stand behind it
    today = datetime.datetime.now(datetime.UTC).date()
    load = os.getloadavg()[0]
    lines = [
        f"## {heading}",
        "",
        f"`{' '.join(('python -m', module, *told))}`, rounds: {result['rounds']}, {today}, "
        f"load {load:.1f}.",
        f"{machine()}.",
        "",
        *rows(result),
    ]
    return "\n".join(lines) + "\n"


def place(page: str, name: str, text: str) -> str:
    """The page with the named section replaced, or added before the end."""
    begin = f"<!-- begin {name} -->"
    end = f"<!-- end {name} -->"
    block = f"{begin}\n{text}{end}"
    if begin not in page:
        return f"{page.rstrip()}\n\n{block}\n"
    head, _, rest = page.partition(begin)
    return head + block + rest.partition(end)[2]


def main() -> None:
    """Run the named benchmarks, or all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*SECTIONS, []], help="default: all")
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter of an environment that has the peers; default: this one",
    )
    parser.add_argument("--rounds", type=int, help="measured rounds; default: each one's own")
    parser.add_argument("--flags", default="", help="further flags of each benchmark that is named")
    arguments = parser.parse_args()
    flags = [] if arguments.rounds is None else [f"--rounds={arguments.rounds}"]
    flags += shlex.split(arguments.flags)
    for name in arguments.names or list(SECTIONS):
        text = section(name, arguments.python, flags)
        print(text)
        PAGE.write_text(place(PAGE.read_text(encoding="utf-8"), name, text), encoding="utf-8")


if __name__ == "__main__":
    main()
