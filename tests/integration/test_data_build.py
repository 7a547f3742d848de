"""Data builds, whole: every kind of file, real kills, any number of workers, and training on it."""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cdrmix import cli
from cdrmix.corpus import build as build_module
from cdrmix.corpus import remote_jobs as pool_module
from cdrmix.corpus import task_run
from cdrmix.corpus.build import build_dataset
from cdrmix.corpus.recipe_steps import STEPS
from cdrmix.corpus.remote_jobs import Pool
from cdrmix.corpus.steps.normalise import Normalise
from cdrmix.data.document import Document, Drop
from cdrmix.data.shards import read_manifest
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import DataError
from tests.harness import ROOT, run_ranks
from tests.small_run import arguments, start

pytest.importorskip("rensa", reason="the [data] extra is not installed")

TASK_BYTES = 50_000
BUILD = (
    "import sys; from pathlib import Path; from cdrmix.corpus.build import build_dataset; "
    "build_dataset(Path(sys.argv[1]), Path(sys.argv[2]), workers=int(sys.argv[3]), "
    f"task_bytes={TASK_BYTES})"
)
SENTENCE = "The reader of part {n} finds that with every page the story of the {n}th ship goes on. "
TEXT_ROWS = [SENTENCE.format(n=n) * 12 for n in range(40)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over packages of the standard library and files of every kind, broken ones too."""
    folder = tmp_path_factory.mktemp("corpus")
    stdlib = Path(sysconfig.get_path("stdlib"))
    for package in ("asyncio", "json", "logging"):
        shutil.copytree(stdlib / package, folder / "code" / package)
    write_texts(folder / "texts")
    file = folder / "recipe.yaml"
    file.write_text(
        f"""
sources:
- {{name: stdlib, type: local, path: {folder}/code, domain: code}}
- {{name: texts, type: local, path: {folder}/texts, domain: prose}}
steps: [normalise, {{scrub: {{domains: [prose]}}}}, {{filter: {{domains: [code]}}}}, dedup]
tokenizer: {{vocab_size: 2048}}
mixture: {{phases: [{{weights: {{code: 1, prose: 1}}}}]}}
shards: {{validation_share: 0.1, max_tokens: 40000}}
"""
    )
    return file


def write_texts(folder: Path) -> None:
    """Texts as txt, md, html, jsonl, jsonl.gz and csv, two of them equal, and what is broken."""
    folder.mkdir()
    for number, text in enumerate(TEXT_ROWS[:10]):
        (folder / f"{number}.txt").write_text(text)
    (folder / "copy.md").write_text(TEXT_ROWS[3])
    (folder / "page.html").write_text(f"<html><body><p>{TEXT_ROWS[10]}</p></body></html>")
    (folder / "rows.jsonl").write_text("".join(map(as_json, TEXT_ROWS[11:20])) + "{broken\n")
    content = "".join(map(as_json, TEXT_ROWS[20:30])).encode()
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(TEXT_ROWS[30:])])
    (folder / "cut.txt.gz").write_bytes(gzip.compress(bytes(10_000) + content)[:-20])
    (folder / "binary.txt").write_bytes(b"\0\1\2")
    (folder / "header.csv").write_text("id,body\n1,x\n")
    (folder / "loop").symlink_to(folder)


def as_json(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file of a built folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def built(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's result, built by one process without interruption."""
    out = tmp_path_factory.mktemp("built") / "out"
    build_dataset(recipe, out, workers=1, task_bytes=TASK_BYTES)
    return out


@contextlib.contextmanager
def building(recipe: Path, out: Path, *, workers: int, **options: Any) -> Any:
    """A build in a process of its own, killed at the end."""
    argv = [sys.executable, "-c", BUILD, recipe, out, str(workers)]
    with subprocess.Popen(
        list(map(str, argv)), cwd=ROOT, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finished_tasks(out: Path) -> set[str]:
    return {path.name for path in out.glob("work/*/*") if not path.name.startswith(".")}


def wait_until(happened: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None, f"the build was over too early: {process.stderr.read()}"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children()
    return [child for child in found if "spawn_main" in " ".join(child.cmdline())]


def test_the_result_does_not_depend_on_the_number_of_workers(
    recipe: Path, built: Path, tmp_path: Path
) -> None:
    build_dataset(recipe, tmp_path / "out", workers=2, task_bytes=TASK_BYTES)
    assert digests(tmp_path / "out") == digests(built)
    assert not (built / "work").exists()


def test_every_document_is_in_the_shards_or_accounted_for(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "inspect", str(built), "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    prose = inspected["source"]["sources"]["texts"]
    assert prose["documents"] == len(TEXT_ROWS)
    *_, dedup = inspected["steps"]
    assert dedup["by_domain"]["prose"]["dropped"] == {"exact duplicate": 1}
    assert {(entry["file"], entry["reason"]) for entry in inspected["set_aside"]} >= {
        ("binary.txt", "NUL characters"),
        ("cut.txt.gz", "damaged compression"),
        ("header.csv", "no column 'text'"),
        ("loop", "symbolic link loop"),
        ("rows.jsonl", "invalid JSON"),
    }
    in_shards = sum(info.documents for info in read_manifest(built).splits.values())
    assert in_shards >= sum(s["documents"] for s in inspected["source"]["sources"].values())
    assert inspected["read"]["documents"] == inspected["steps"][0]["in"]
    (copied,) = [e for e in inspected["dropped"] if e["domain"] == "prose"]
    assert copied["id"] == "texts/copy.md#0"
    assert copied["text"].startswith("The reader of part 3")


def test_every_shard_names_its_sources(built: Path) -> None:
    manifest = read_manifest(built)
    shards = manifest.source["shards"]
    assert shards.keys() == {shard.stem for shard in manifest.shards}
    for shard in manifest.shards:
        assert shards[shard.stem] == {
            {"code": "stdlib", "prose": "texts"}[shard.domain]: shard.documents
        }
    assert len(manifest.shards) > 4, "max_tokens cuts the code into several shards"


def test_a_build_killed_at_any_time_goes_on_where_it_was(
    recipe: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for num_tasks in (2, 8):
        with building(recipe, out, workers=2) as process:
            wait_until(lambda wanted=num_tasks: len(finished_tasks(out)) >= wanted, process)
            workers = workers_of(process)
            process.send_signal(signal.SIGKILL)
            process.wait()
            psutil.wait_procs(workers, timeout=20)
            assert not [worker for worker in workers if worker.is_running()]
    done, made = finished_tasks(out), []
    assert len(done) >= 8
    original = task_run.new_folder
    monkeypatch.setattr(
        task_run, "new_folder", lambda path: (made.append(path.name), original(path))[1]
    )
    build_dataset(recipe, out, workers=1, task_bytes=TASK_BYTES)
    assert made
    assert not done & set(made), "what was done was done again"
    assert digests(out) == digests(built)


def test_a_killed_worker_loses_nothing(recipe: Path, built: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with building(recipe, out, workers=2) as process:
        wait_until(lambda: finished_tasks(out) and workers_of(process), process)
        workers_of(process)[0].kill()
        assert process.wait(timeout=60) == 0
    assert digests(out) == digests(built)


def die(job: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_that_keep_dying_end_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_MAX_DEATHS", 2)
    with Pool(2) as pool, pytest.raises(DataError, match="was killed 2 times.*out of memory"):
        pool.run_all(die, [1, 2], what="jobs")


class Killer:
    """A step that kills its process at one text, as the system does where memory is short, and
    that has no end at another."""

    name = "killer"

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        for document in documents:
            if "kill" in document.text:
                os.kill(os.getpid(), signal.SIGKILL)
            while "slow" in document.text:
                pass
            yield document


def run_with_killer(job: task_run.TaskJob) -> None:
    STEPS["killer"] = f"{__name__}:Killer"
    task_run.TimeLimit = functools.partial(task_run.TimeLimit, seconds=0.2)  # type: ignore[assignment, misc]
    task_run.run_task(job)


def test_a_file_that_kills_its_process_and_one_without_end_are_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"a": "good", "b": "kill", "c": "good", "d": "slow", "e": "good"}
    sources = tmp_path / "texts"
    sources.mkdir()
    for name, text in texts.items():
        (sources / f"{name}.txt").write_text(f"{text} words {name} " * 30)
    # One line of 400 MB, of which 400 kB lie here.
    (sources / "f.jsonl.gz").write_bytes(gzip.compress(bytes(2**20)) * 400)
    entry = {"name": "a", "type": "local", "path": str(sources), "domain": "prose"}
    recipe = {"sources": [entry], "steps": ["killer"], "tokenizer": {"vocab_size": 270}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    monkeypatch.setitem(STEPS, "killer", f"{__name__}:Killer")
    monkeypatch.setattr(build_module, "run_task", run_with_killer)
    build_dataset(tmp_path / "recipe.yaml", tmp_path / "out", workers=2)
    lines = (tmp_path / "out" / "set_aside.jsonl").read_text().splitlines()
    assert {(entry["file"], entry["reason"]) for entry in map(json.loads, lines)} == {
        ("b.txt", "ended the process that read it"),
        ("d.txt", "takes too long"),
        ("f.jsonl.gz", "takes too long to read"),
    }
    assert sum(info.documents for info in read_manifest(tmp_path / "out").splits.values()) == 3


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_build_stops_at_once_with_its_workers(
    recipe: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    argv = ["-m", "cdrmix.cli", "data", "build", "--config", recipe, "--out", tmp_path / "out"]
    command = [sys.executable, *map(str, argv), "--workers", "2"]

    # A shell has INT ignored by what it starts in the background.
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    with subprocess.Popen(background, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(workers_of(process)) == 2, process)
        workers = workers_of(process)
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 75
    assert "start again to continue" in stderr
    assert "Traceback" not in stderr
    psutil.wait_procs(workers, timeout=20)
    assert not [worker for worker in workers if worker.is_running()]


def test_a_full_disk_is_named_and_loses_nothing(recipe: Path, built: Path, tmp_path: Path) -> None:
    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    out = tmp_path / "out"
    with building(recipe, out, workers=1, preexec_fn=small_files_only) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "DataError" in stderr
    assert "Finished work stays" in stderr
    assert finished_tasks(out)
    build_dataset(recipe, out, workers=1, task_bytes=TASK_BYTES)
    assert digests(out) == digests(built)


def test_two_builds_into_one_folder_are_refused(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with building(recipe, out, workers=1) as process:
        wait_until(lambda: finished_tasks(out), process)
        with pytest.raises(DataError, match="another build is writing there"):
            build_dataset(recipe, out, workers=1)


def test_a_finished_folder_is_left_as_it_is(recipe: Path, built: Path, tmp_path: Path) -> None:
    before = digests(built)
    build_dataset(recipe, built, workers=1, task_bytes=TASK_BYTES)
    other = tmp_path / "other.yaml"
    other.write_text(recipe.read_text().replace("2048", "1024"))
    with pytest.raises(DataError, match="finished data set of another recipe"):
        build_dataset(other, built, workers=1, task_bytes=TASK_BYTES)
    assert digests(built) == before


def test_a_folder_of_something_else_is_refused(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="is not the folder of a data build"):
        build_dataset(recipe, tmp_path, workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_users_errors_end_with_code_2_and_a_message(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    entry = {"name": "a", "type": "local", "path": str(tmp_path / "none"), "domain": "prose"}
    recipe.write_text(json.dumps({"sources": [entry]}))
    folder = tmp_path / "copy"
    shutil.copytree(built, folder)
    shard = next(folder.glob("*.bin"))
    shard.write_bytes(bytes(shard.stat().st_size))
    for argv, told in (
        (
            ["build", "--config", str(recipe), "--out", str(tmp_path / "o")],
            "no such file or folder",
        ),
        (["build", "--config", str(tmp_path / "no.yaml")], "no such file"),
        (["verify", str(folder)], f"{shard}: altered"),
        (["inspect", str(tmp_path)], "manifest.json: not found"),
    ):
        assert cli.main(["data", *argv]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and told in error
    assert cli.main(["data", "verify", str(built)]) == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tokenizer": {"path": "nowhere"}}, "nowhere"),
        ({"steps": ["normalise", "filter"]}, "domain 'zebra' has no profile"),
    ],
)
def test_what_would_fail_late_is_refused_before_any_work(
    tmp_path: Path, options: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(TEXT_ROWS[0])
    recipe = tmp_path / "recipe.yaml"
    entry = {"name": "a", "type": "local", "path": str(tmp_path / "a.txt"), "domain": "zebra"}
    recipe.write_text(json.dumps({"sources": [entry], "steps": []} | options))
    out = tmp_path / "out"
    assert cli.main(["data", "build", "--config", str(recipe), "--out", str(out)]) == 2
    assert told in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dropped.jsonl", None),
        ("dropped.jsonl", b'{"x"'),
        ("set_aside.jsonl", None),
        ("set_aside.jsonl", b"\xff"),
        ("report.json", b"{"),
    ],
)
def test_a_damaged_file_of_the_report_is_named(
    built: Path,
    tmp_path: Path,
    name: str,
    content: bytes | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(built, folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    assert cli.main(["data", "inspect", str(folder)]) == 2
    assert f"{name}: cannot be read" in capsys.readouterr().err


def test_nothing_left_of_a_corpus_says_why(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("short")
    recipe = tmp_path / "recipe.yaml"
    entry = {"name": "a", "type": "local", "path": str(tmp_path / "texts"), "domain": "prose"}
    recipe.write_text(json.dumps({"sources": [entry], "steps": ["filter"]}))
    with pytest.raises(DataError, match=r"source 'a'.*no document is left.*filter: too short"):
        build_dataset(recipe, tmp_path / "out", workers=1)


def test_a_domain_that_may_be_empty_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in (("a", TEXT_ROWS[0]), ("b", "short")):
        (tmp_path / f"{name}.txt").write_text(text)
    entry = {"type": "local", "domain": "prose"}
    sources = [
        entry | {"name": "a", "path": str(tmp_path / "a.txt")},
        entry | {"name": "b", "path": str(tmp_path / "b.txt"), "domain": "code"},
    ]
    sources[1]["allow_empty"] = True
    recipe = tmp_path / "recipe.yaml"
    steps = [{"filter": {"domains": ["code"]}}]
    tokenizer = {"vocab_size": 300}
    recipe.write_text(json.dumps({"sources": sources, "steps": steps, "tokenizer": tokenizer}))
    build_dataset(recipe, tmp_path / "out", workers=1)
    assert "no document of domain code is left" in caplog.text
    assert "domain prose" not in caplog.text


def test_one_document_per_address_is_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows = [
            {"text": f"{name} {number}", "url": f"http://x.org/{number}/?utm_source={name}"}
            for number in range(5)
        ]
        (tmp_path / name / "rows.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    recipe = tmp_path / "recipe.yaml"
    sources = [
        {"name": name, "type": "local", "path": str(tmp_path / name), "domain": "web"}
        for name in ("a", "b")
    ]
    sources[1]["allow_empty"] = True  # every page of it is in a
    steps = ["url", {"url_dedup": {"max_per_host": 4}}]
    values = {"sources": sources, "steps": steps, "tokenizer": {"vocab_size": 300}}
    recipe.write_text(json.dumps(values))
    out = tmp_path / "out"
    assert cli.main(["data", "build", "--config", str(recipe), "--out", str(out)]) == 0
    assert cli.main(["data", "inspect", str(out)]) == 0
    table = capsys.readouterr().out
    assert "url_dedup: 10 documents with an address, 5 pages of 1 hosts" in table
    assert json.loads((out / "report.json").read_text())["steps"][1]["dropped"] == {
        "host has enough": 2,
        "same url": 4,
    }
    assert read_manifest(out).source["sources"]["a"]["documents"] == 4
    assert "with an address" in (out / "report.html").read_text()


def test_a_fault_of_a_step_names_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text(as_json("fine") + as_json("fatal"))
    recipe = tmp_path / "recipe.yaml"
    entry = {"name": "a", "type": "local", "path": str(tmp_path / "rows.jsonl"), "domain": "prose"}
    recipe.write_text(json.dumps({"sources": [entry], "steps": ["normalise", "scrub"]}))

    original = Normalise.__call__

    def failing(step: Normalise, documents: Any, drop: Any) -> Any:
        for document in original(step, documents, drop):
            assert document.text != "fatal", "a fault"
            yield document

    monkeypatch.setattr(Normalise, "__call__", failing)
    with pytest.raises(AssertionError, match="a fault") as caught:
        build_dataset(recipe, tmp_path / "out", workers=1)
    assert caught.value.__notes__ == ["step normalise, which took document a/rows.jsonl#1 last"]


def test_dropped_documents_are_kept_whole_when_asked(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(6):
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT_ROWS[0])
    recipe = tmp_path / "recipe.yaml"
    entry = {"name": "a", "type": "local", "path": str(tmp_path / "texts"), "domain": "prose"}
    values = {"sources": [entry], "steps": ["dedup"], "tokenizer": {"vocab_size": 300}}
    for keep, num_kept, length in ((False, 3, 500), (True, 5, len(TEXT_ROWS[0]))):
        recipe.write_text(json.dumps(values | {"keep_dropped": keep}))
        out = tmp_path / str(keep)
        build_dataset(recipe, out, workers=1)
        dropped = list(map(json.loads, (out / "dropped.jsonl").read_text().splitlines()))
        assert [len(entry["text"]) for entry in dropped] == num_kept * [length]


def test_a_model_trains_on_the_result(built: Path, tmp_path: Path) -> None:
    assert TokenDataset(built, "train", 64).num_samples > 1000
    argv = arguments(built, tmp_path / "run", "--max-steps", "2")
    assert run_ranks(start, 1, argv) == [0]
    *_, last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["step"] == 2
    recorded = (tmp_path / "run" / "checkpoints").rglob("*.json")
    assert any("over code, prose" in path.read_text() for path in recorded), "the recipe's mixture"
