"""The end of a data build: counts of each source, and a refusal where nothing is left of one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdrmix import cli
from cdrmix.corpus import task_run
from cdrmix.corpus.build import build_dataset
from cdrmix.corpus.encode import split_of
from cdrmix.corpus.inspection_page import inspection_table
from cdrmix.corpus.outcome import SourceOutcome, held_out, log_held_out
from cdrmix.corpus.recipe import load_recipe, recipe_yaml
from cdrmix.corpus.remote_jobs import Amounts, Pool
from cdrmix.corpus.source import SourceConfig

pytest.importorskip("rensa", reason="the [data] extra is not installed")

TEXTS = [f"Line {n} of a text about {n * 7919 % 1000} things.\n" * 20 for n in range(40)]


def write_recipe(folder: Path, *sources: dict[str, Any], **values: Any) -> Path:
    file = folder / "recipe.yaml"
    entries = [
        {"type": "local", "domain": "prose", "path": str(folder / f"{entry['name']}.jsonl")} | entry
        for entry in sources
    ]
    defaults = {"steps": [], "tokenizer": {"vocab_size": 300}, "shards": {"validation_share": 0.2}}
    file.write_text(json.dumps(defaults | {"sources": entries} | values))
    return file


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A good source `good`, and one without the field `text`, `bad`."""
    for name, key in (("good", "text"), ("bad", "body")):
        lines = (json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(TEXTS))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


def built(recipe: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and stderr of a build in the folder of the recipe."""
    out = str(recipe.parent / "out")
    argv = ["data", "build", "--config", str(recipe), "--out", out, "--workers", "1"]
    code = cli.main(argv)
    return code, capsys.readouterr().err


def test_a_source_of_which_nothing_is_left_is_an_error_with_its_reason(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = built(
        write_recipe(rows, {"name": "good"}, {"name": "bad", "domain": "code"}), capsys
    )
    assert code == 2
    assert "source 'bad' (domain code, path" in err
    assert "1 file, 0 documents read, 40 set aside (no text in field 'text' 40)" in err
    assert "Most frequent reason: no text in field 'text' (40; its fields: id, body)" in err
    assert "Set text_field" in err and "allow_empty: true" in err
    assert "source 'good'" not in err


def test_what_is_allowed_to_be_empty_is_warned_about_and_keeps_the_work(
    rows: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = [{"name": "good"}, {"name": "bad", "domain": "code"}]
    assert built(write_recipe(rows, *sources), capsys)[0] == 2
    sources[1] |= {"allow_empty": True}
    recipe = write_recipe(rows, *sources)
    # Whatever reads a file again fails.
    monkeypatch.setattr(task_run, "read_file", None)
    assert built(recipe, capsys)[0] == 0
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    [bad] = [text for text in levels if "source bad" in text]
    assert levels[bad] == "WARNING" and bad.endswith("0 out, 0 tokens")
    assert "no document of domain code is left to train on: its sources are empty" in caplog.text


def test_nothing_of_a_corpus_is_an_error_though_each_source_may_be_empty(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = built(write_recipe(rows, {"name": "bad", "allow_empty": True}), capsys)
    assert code == 2
    assert "no document is left of the corpus" in err and "no text in field 'text' 40" in err


def test_a_recipe_that_says_nothing_of_empty_sources_is_the_recipe_that_it_was(rows: Path) -> None:
    def sources(**values: Any) -> list[dict[str, Any]]:
        recipe = load_recipe(write_recipe(rows, {"name": "bad", **values}))
        return yaml.safe_load(recipe_yaml(recipe))["sources"]

    assert "allow_empty" not in sources()[0] and sources() == sources(allow_empty=False)
    assert sources(allow_empty=True)[0]["allow_empty"] is True


def test_the_end_of_a_build_tells_what_became_of_each_source(
    rows: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with (rows / "good.jsonl").open("a") as file:
        file.write("{broken\n" + json.dumps({"text": TEXTS[3]}) + "\n" + '{"text": "short"}\n')
    steps = [{"length": {"min_characters": 9}}, "dedup"]
    recipe = write_recipe(rows, {"name": "good"}, steps=steps)
    assert built(recipe, capsys)[0] == 0
    messages = [record.getMessage() for record in caplog.records]
    [line] = [text for text in messages if "source good" in text]
    manifest = json.loads((rows / "out" / "manifest.json").read_text())
    tokens = sum(split["tokens"] for split in manifest["splits"].values())
    out = sum(split["documents"] for split in manifest["splits"].values())
    assert "1 file, 42 documents read, 1 set aside (invalid JSON 1), " in line
    assert "dropped (length 1: " in line and "dedup " in line
    assert line.endswith(f"{out:,} out, {tokens:,} tokens")
    assert messages[-1].endswith(f"cdrmix data inspect {rows / 'out'}")


def test_a_step_that_drops_a_whole_source_is_named(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [{"length": {"min_characters": 10_000_000}}]
    code, err = built(write_recipe(rows, {"name": "good"}, steps=steps), capsys)
    assert code == 2
    assert "Most frequent reason: length: " in err and "the step 'length'" in err


def test_a_domain_that_was_held_out_whole_is_warned_about(
    rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (rows / "one.jsonl").write_text(json.dumps({"text": TEXTS[0]}) + "\n")
    sources = [{"name": "good"}, {"name": "one", "domain": "code"}]
    recipe = write_recipe(rows, *sources, shards={"validation_share": 0.97})
    build_dataset(recipe, rows / "out", workers=1)
    assert "domain code is left to train on: all of it, 1 document, was held out" in caplog.text


def test_a_domain_of_which_nothing_was_held_out_is_told(
    rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (rows / "one.jsonl").write_text(json.dumps({"text": TEXTS[0]}) + "\n")
    sources = [{"name": "good"}, {"name": "one", "domain": "code"}]
    build_dataset(write_recipe(rows, *sources), rows / "out", workers=1)
    [line] = [text for text in caplog.messages if "was held out, so evaluations" in text]
    assert "no document of domain code was held out" in line and "prose" not in line


def test_the_progress_of_a_build_is_in_bytes_and_tokens(
    rows: Path,
) -> None:
    seen: dict[str, Any] = {}

    class Watched(Pool):
        def run_all(self, function: Any, jobs: Any, *, what: str, **options: Any) -> None:
            seen[what] = options["amounts"]
            super().run_all(function, jobs, what=what, **options)

    recipe = write_recipe(rows, {"name": "good"}, steps=["dedup"])
    manifest = build_dataset(recipe, rows / "out", workers=1, engine=Watched(1))
    text_bytes = sum(len(text.encode()) for text in TEXTS)
    assert seen["pass 1"] == Amounts("B", [(rows / "good.jsonl").stat().st_size])
    assert seen["pass 2"] == Amounts("B", [text_bytes])
    assert seen["encode"].unit == "B" and sum(seen["encode"].of_jobs) <= text_bytes
    counts = [manifest.splits[split].tokens for split in ("train", "validation")]
    assert seen["shards"] == Amounts("tokens", counts)


def test_a_long_document_that_was_held_out_is_told_with_both_shares(
    rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held_out = [n for n in range(40) if split_of(f"good/good.jsonl#{n}", 0.2) == "validation"]
    texts = list(TEXTS)
    texts[held_out[0]] *= 50
    (rows / "good.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_dataset(write_recipe(rows, {"name": "good"}), rows / "out", workers=1)
    [record] = [each for each in caplog.records if "held out" in each.getMessage()]
    splits = json.loads((rows / "out" / "manifest.json").read_text())["splits"]
    tokens = 100 * splits["validation"]["tokens"] / sum(s["tokens"] for s in splits.values())
    assert record.levelname == "WARNING"
    assert (
        f"shards.validation_share 20 %: held out {len(held_out)} documents "
        f"({100 * len(held_out) / 40:.3g} %) with {tokens:.3g} % of the tokens; whole documents"
    ) in record.getMessage()


def test_a_build_that_held_out_nothing_warns_that_training_refuses_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_held_out(held_out({"train": (98, 9_800), "validation": (0, 0)}, 0.01))
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "warning: " in record.getMessage()
    assert "training will refuse the data set; raise shards.validation_share above 0.01" in (
        record.getMessage()
    )


def test_shares_that_agree_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_held_out(held_out({"train": (980, 98_000), "validation": (20, 2_000)}, 0.02))
    [record] = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage().endswith("2 %: held out 20 documents (2 %) with 2 % of the tokens")


@pytest.fixture
def mixed_kinds(rows: Path) -> Path:
    """A recipe of csv, jsonl and text files, with wrong rows and duplicates in each kind."""
    entries = [text.replace("Line", "Entry").replace("text", "log") for text in TEXTS]
    table = [f'{n},"{text}"' for n, text in enumerate(entries)]
    (rows / "log.csv").write_text("\n".join(["id,text", *table, "9", "1,2,3", table[0]]) + "\n")
    with (rows / "good.jsonl").open("a") as file:
        file.write("{broken\n" + '{"body": "x"}\n' + '{"text": "short"}\n')
    folder = rows / "texts"
    folder.mkdir()
    for n in range(8):
        (folder / f"{n}.txt").write_text(f"Text {n % 7} of a folder.\n" * 9)
    (folder / "bad.txt").write_bytes(b"\xff\xfa")
    (folder / "link").symlink_to(folder)
    (folder / "picture.png").write_bytes(b"no text")
    sources = [
        {"name": "log", "path": str(rows / "log.csv"), "domain": "docs"},
        {"name": "good"},
        {"name": "texts", "path": str(folder)},
    ]
    return write_recipe(
        rows, *sources, steps=["normalise", {"length": {"min_characters": 9}}, "dedup"]
    )


def report_of(recipe: Path, out: Path, **options: Any) -> dict[str, Any]:
    build_dataset(recipe, out, workers=1, **options)
    return json.loads((out / "report.json").read_text())


def test_the_report_tells_what_became_of_each_row(mixed_kinds: Path) -> None:
    out = mixed_kinds.parent / "out"
    sources = report_of(mixed_kinds, out)["sources"]
    assert [(each["name"], each["domain"], each["files"]) for each in sources] == [
        ("log", "docs", 1),
        ("good", "prose", 1),
        ("texts", "prose", 10),
    ]
    log, good, texts = sources
    assert (log["rows"], log["set_aside"]) == (43, {"row does not fit the header": 2})
    assert good["rows"] == 43
    assert good["set_aside"] == {"invalid JSON": 1, "no text in field 'text'": 1}
    assert good["dropped"]["length"] == 1
    assert (texts["rows"], texts["dropped"]) == (10, {"dedup": 1})
    assert texts["set_aside"] == {"invalid utf-8": 1, "symbolic link loop": 1}
    assert log["bytes"] == (mixed_kinds.parent / "log.csv").stat().st_size
    for each in sources:
        gone = sum(each["set_aside"].values()) + sum(each["dropped"].values())
        assert each["rows"] == gone + each["documents"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert sum(each["tokens"] for each in sources) == sum(
        split["tokens"] for split in manifest["splits"].values()
    )
    of_source = manifest["source"]["sources"]
    assert {each["name"]: each["documents"] for each in sources} == {
        name: source["documents"] for name, source in of_source.items()
    }


def test_a_resumed_build_and_more_workers_leave_the_same_report(mixed_kinds: Path) -> None:
    class Killed(Exception):
        pass

    class Ending(Pool):
        def run_all(self, function: Any, jobs: Any, *, what: str, **options: Any) -> None:
            if what == "shards":
                raise Killed
            super().run_all(function, jobs, what=what, **options)

    out = mixed_kinds.parent / "resumed"
    with pytest.raises(Killed):
        build_dataset(mixed_kinds, out, workers=1, engine=Ending(1))
    resumed = report_of(mixed_kinds, out)
    build_dataset(mixed_kinds, mixed_kinds.parent / "two", workers=2)
    two = json.loads((mixed_kinds.parent / "two" / "report.json").read_text())
    assert resumed == two == report_of(mixed_kinds, mixed_kinds.parent / "whole")
    assert resumed["sources"] and resumed["held_out"]


def test_a_document_that_a_later_pass_sets_aside_is_one_row() -> None:
    def entry(count: int) -> dict[str, Any]:
        return {"reason": "takes too long", "detail": "", "count": count}

    def step(entered: int, out: int) -> dict[str, Any]:
        return {"name": "dedup", "in": entered, "out": out, "dropped": {"near": entered - out}}

    values = {"name": "a", "type": "local", "path": "a", "domain": "b"}
    outcome = SourceOutcome(SourceConfig.model_validate(values))
    outcome.add(
        [
            {"documents": 9, "steps": [], "set_aside": [entry(2)]},  # never read: 11 rows
            {"documents": 5, "steps": [step(8, 5)], "set_aside": [entry(1)]},
        ]
    )
    counts = outcome.as_json(tokens=50)
    assert (counts["rows"], counts["documents"]) == (11, 5)
    assert (counts["set_aside"], counts["dropped"]) == ({"takes too long": 3}, {"dedup": 3})


def test_the_report_has_the_share_that_was_held_out(mixed_kinds: Path) -> None:
    out = mixed_kinds.parent / "out"
    found = report_of(mixed_kinds, out)["held_out"]
    splits = json.loads((out / "manifest.json").read_text())["splits"]
    whole = {key: sum(split[key] for split in splits.values()) for key in ("documents", "tokens")}
    assert found == {
        "validation_share": 0.2,
        **{key: splits["validation"][key] for key in whole},
        **{f"share_of_{key}": splits["validation"][key] / whole[key] for key in whole},
    }


def test_inspect_has_a_row_for_each_source_within_80_columns(
    mixed_kinds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = mixed_kinds.parent / "out"
    sources = report_of(mixed_kinds, out)["sources"]
    assert cli.main(["data", "inspect", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("source "))
    assert lines[start].split() == (
        ["source", "files", "rows", "set", "aside", "dropped", "documents", "tokens"]
    )
    of_sources = lines[start : lines.index("", start)]
    for each in sources:
        gone = [sum(each[key].values()) for key in ("set_aside", "dropped")]
        numbers = [each["files"], each["rows"], *gone, each["documents"], each["tokens"]]
        [line] = [line for line in of_sources if line.startswith(f"{each['name']} ")]
        assert line.split()[1:] == [f"{number:,}" for number in numbers]
    assert "  set aside: invalid JSON 1, no text in field 'text' 1" in of_sources
    assert max(map(len, of_sources)) <= 80
    told = " ".join(" ".join(lines).split())
    assert "Held out: shards.validation_share 20 % was asked for; drawn were " in told


def test_long_names_and_large_numbers_stay_within_80_columns() -> None:
    many = {
        "name": "a-name-of-a-source-that-is-longer-than-its-column",
        "domain": "web",
        "files": 1_234_567,
        "rows": 98_765_432_109,
        "bytes": None,
        "set_aside": {f"reason number {n}": 10**9 + n for n in range(6)},
        "dropped": {"dedup": 12_345_678_901},
        "documents": 56_789_012_345,
        "tokens": 7 * 10**12,
    }
    known = {"tokens": {}, "vocab_size": 1, "source": {}, "shards": [], "mixture": None}
    table = inspection_table({**known, "set_aside": [], "dropped": [], "sources": [many]})
    assert "98.8B" in table and "7T" in table
    assert max(map(len, table.splitlines())) <= 80


def test_phases_and_clusters_are_told_in_plain_words(
    mixed_kinds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = json.loads(mixed_kinds.read_text())
    phases = [
        {"weights": {"prose": 1}, "samples": 20},
        {"weights": {"prose": 1, "docs": 1}, "samples": 200, "change": "linear"},
        {"weights": {"docs": 1}},
    ]
    mixed_kinds.write_text(json.dumps(recipe | {"mixture": {"phases": phases}}))
    out = mixed_kinds.parent / "out"
    report_of(mixed_kinds, out)
    assert cli.main(["data", "inspect", str(out), "--sequence-length", "16"]) == 0
    text = capsys.readouterr().out
    assert "phase 1, 20 samples: the same shares throughout\n" in text
    assert "phase 2, 200 samples: from the shares of phase 1 in a straight line to its" in text
    assert "phase 3, to the end of the run: the same shares throughout; shown for " in text
    assert " samples, step" not in text and "all phases, " in text
    assert re.search(r"\n  \d+ clusters? of 2 documents\n", text)
