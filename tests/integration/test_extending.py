"""The examples of docs/extending.md and docs/tracking.md, copied out of the pages and run."""

from __future__ import annotations

import json
import mailbox
import re
import shutil
from pathlib import Path

import pytest
import yaml

from cdrmix import cli
from cdrmix.corpus.build import build_dataset
from cdrmix.monitoring.sinks import read_metrics
from cdrmix.monitoring.suite_results import read_results
from tests.harness import ROOT, run_ranks
from tests.small_run import CONFIG, STEPS, arguments, overrides, start

# A block of Python, and what the page calls its file before or behind it.
_BEFORE = re.compile(r"`(\w+\.py)`[^`]*?\n+```python\n(.*?)```", re.DOTALL)
_BEHIND = re.compile(r"```python\n((?:(?!```).)*)```\s+in `(\w+\.py)`", re.DOTALL)


def examples() -> dict[str, str]:
    """Code of each example by the name of its file."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    found = dict(_BEFORE.findall(text))
    text = (ROOT / "docs" / "tracking.md").read_text(encoding="utf-8")
    return found | {name: code for code, name in _BEHIND.findall(text)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the examples in `plugins`."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    for name, code in examples().items():
        (plugins / name).write_text(code, encoding="utf-8")
    return tmp_path


def test_every_example_has_a_file() -> None:
    pages = [(ROOT / "docs" / name).read_text() for name in ("extending.md", "tracking.md")]
    num_blocks = sum(page.count("```python\n") for page in pages)
    assert len(examples()) == num_blocks
    assert {
        "patience.py",
        "embedding_norm.py",
        "plain_words.py",
        "mails.py",
        "spaced.py",
        "my_trackers.py",
        "weights.py",
    } <= {*examples()}


def track(argv: list[str]) -> int:
    """`cdrmix track` in a process of its own, which has imported no plug-in."""
    return cli.main(["track", *argv])


def test_a_hook_a_tracker_and_a_rule_of_retention_in_a_run(
    folder: Path, small_corpus: Path
) -> None:
    config = folder / "run.yaml"
    shutil.copy(ROOT / CONFIG, config)
    run = folder / "run"
    tracker = {"use": "my_trackers:CsvTracker", "options": {"metric": "grad_norm"}}
    rule = {"use": "spaced:Spaced", "options": {"every": 4}}
    settings = {
        "hooks": [
            {"use": "patience:Patience", "options": {"evaluations": 50}},
            {"use": "embedding_norm:EmbeddingNorm", "unsafe": True},
        ],
        "monitoring.trackers": [tracker],
        "checkpoint.retention": rule,
        "checkpoint.every_steps": 2,
        "evaluation.suites": [{"name": "weights:Weights", "every_steps": 4}],
        "evaluation.suites_share": 1.0,
        "evaluation.best_by": "Weights/all/mean_power",
    }
    words = overrides([f"{key}={json.dumps(value)}" for key, value in settings.items()])
    assert run_ranks(start, 1, arguments(small_corpus, run, *words, config=config)) == [0]
    before, *lines = read_metrics(run / "metrics.jsonl")
    assert before["step"] == 0 and before["plugin/EmbeddingNorm/norm"] > 0
    assert lines[-1]["plugin/EmbeddingNorm/norm"] != before["plugin/EmbeddingNorm/norm"]
    assert [line["plugin/Patience/evaluations_without_gain"] for line in lines] == [0] * STEPS
    [table] = run.rglob("grad_norm.csv")
    first_copy = table.read_text()
    steps = [int(row.split(",")[0]) for row in first_copy.splitlines()]
    assert steps == list(range(1, STEPS + 1))
    # A copy made anew finds the class, too, and has the run's options for it.
    table.unlink()
    assert run_ranks(track, 1, [str(run), "--to", tracker["use"]]) == [0]
    [table] = run.rglob("grad_norm.csv")
    assert table.read_text() == first_copy
    kept = [int(each.name) for each in (run / "checkpoints").iterdir() if each.name.isdigit()]
    assert {4, 8} <= {*kept} and not {2, 6} & {*kept}
    (result,) = [each for each in read_results(run) if each.step == STEPS]
    assert result.suite == "Weights" and result.settings["suite"] == "weights:Weights"
    assert lines[3]["suite/Weights/all/mean_power"] > 0
    # A run that goes on finds them, though nobody names the folder.
    snapshot = yaml.safe_load((run / "config_snapshot.yaml").read_text())
    assert snapshot["plugins"] == str(folder / "plugins")
    records = json.loads(next((run / "starts").glob("*.json")).read_text())
    assert {*records["plugins"]} == {
        *(
            "embedding_norm:EmbeddingNorm",
            "patience:Patience",
            "my_trackers:CsvTracker",
            "spaced:Spaced",
            "weights:Weights",
        )
    }


def test_a_block_a_schedule_an_optimizer_and_a_term_train(folder: Path, small_corpus: Path) -> None:
    config = folder / "run.yaml"
    shutil.copy(ROOT / CONFIG, config)
    run = folder / "run"
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(model:.*?)```", page, re.DOTALL)
    given = yaml.safe_load(text)
    # Fewer layers, and a model smaller than the page's.
    given["model"] |= {"mixers": ["rwkv", *given["model"]["mixers"][1:2]], "moe": None}
    given["model"]["transformer_fraction"] = 0.25
    settings = {
        f"{section}.{key}": value for section in given for key, value in given[section].items()
    }
    settings |= {"training.max_steps": 3, "training.learning_rate": 1e-3}
    words = overrides([f"{key}={json.dumps(value)}" for key, value in settings.items()])
    assert run_ranks(start, 1, arguments(small_corpus, run, *words, config=config)) == [0]
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[0]["objective/Flat/loss"] > 0
    records = json.loads(next((run / "starts").glob("*.json")).read_text())
    assert {*records["plugins"]} == {"pairs:Pairs", "waves:Waves", "sign:Sign", "flat:Flat"}
    lines_of_block = [line for line in examples()["pairs.py"].splitlines() if line.strip()]
    assert len(lines_of_block) <= 40


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_and_a_step_in_a_build(folder: Path, workers: int) -> None:
    (folder / "mails").mkdir()
    for name in ("first", "second"):
        box = mailbox.mbox(folder / "mails" / f"{name}.mbox")
        for number in range(12):
            text = "Dear reader,  there is news of the harvest. " * 8 + f"{name} {number}"
            box.add(f"Subject: {name} {number}\n\n{text}{'x' * 50 * (number == 3)}\n")
        box.close()
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    recipe = {"tokenizer": {"vocab_size": 300}, "shards": {"validation_share": 0.3}}
    for block in re.findall(r"```yaml\n((?:steps|sources):.*?)```", page, re.DOTALL):
        recipe |= yaml.safe_load(block)
    recipe["sources"][0]["options"]["folder"] = str(folder / "mails")  # type: ignore[index]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    built = build_dataset(folder / "recipe.yaml", folder / "out", workers=workers)
    report = json.loads((folder / "out" / "report.json").read_text())
    _, step, check = report["steps"]
    assert step["dropped"] == {"a word too long": 2} and check["out"] == 22
    assert built.splits["train"].tokens > 0
    # Whatever the number of workers.
    digests = {shard.stem: shard.bin.sha256 for shard in built.shards}
    assert json.dumps(digests) == BUILT.setdefault("digests", json.dumps(digests))


BUILT: dict[str, str] = {}  # by the first build of this process


def test_the_table_shows_what_a_file_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = folder / "run.yaml"
    shutil.copy(ROOT / CONFIG, config)
    with config.open("a") as file:
        file.write("hooks: [{use: 'patience:Patience'}, {use: 'patience:Patients', name: b}]\n")
    assert cli.main(["plugins", "--config", str(config), "--json"]) == 2
    told = capsys.readouterr()
    right, wrong = json.loads(told.out)["named"]
    assert right["key"] == "hooks[0]" and right["file"] == str(folder / "plugins" / "patience.py")
    assert right["options"] == {"evaluations": "int = 3"} and len(right["sha256"]) == 64
    assert "has no Patients. Did you mean Patience?" in wrong["error"]
    assert "hooks[1]: patience:Patients" in told.err
