"""Verbs over input that somebody hostile made: it may be refused or read, and reaches nothing else.

`ATTEMPTS` is the table of what is tried. Each attempt makes its input below `box`, which is the
working directory, and says what is called with it, what exit code is expected and what the message
names. The test watches what Python itself does meanwhile: whatever is written lies in the folders
that the call names, no connection is opened, no program is started, nothing is unpickled, and
`home` stays as it was.

Another verb: write a function that makes its input and gives the arguments, and add rows.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot  # noqa: F401 (makes folders when imported)
import numpy as np
import pytest

from cdrmix import cli
from cdrmix.config.schema import DataConfig
from cdrmix.corpus.remote_jobs import run_call
from cdrmix.data.loader import Loader
from cdrmix.data.remote_folder import local_folder
from cdrmix.data.shards import (
    TokenizerInfo,
    new_manifest,
    read_manifest,
    verify_shards,
    write_file,
    write_manifest,
    write_shards,
)
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import load_tokenizer, train_tokenizer
from cdrmix.errors import TrainingError

URL = "http://127.0.0.1:9/data"  # a port that nobody listens at
BAIT = ".bashrc"
NAMES = {
    "absolute name": "/tmp/cdrmix-hostile",
    "name above the folder": "../home/shard",
    "name in another folder": "sub/shard",
    "newline in a name": "train\nx",
    "newline after a name": "train\n",
    "control characters in a name": "train\x1b[2J",
    "option-like name": "--checkpoint-action=exec=sh",
    "hidden name": ".bashrc",
    "empty name": "",
    "name of 5,000 characters": "a" * 5000,
    "URL as a name": URL,
}
_CODE = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")
_NETWORK = ("socket.connect", "socket.getaddrinfo", "urllib.Request")
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod")


@dataclass
class Attempt:
    """One hostile input.

    Attributes:
        what: for the table.
        make: makes the input in a folder beside `home`; gives the arguments of `call`.
        call: the verb; gives its exit code.
        codes: allowed exit codes.
        says: part of the message.
    """

    what: str
    make: Callable[[Path, Path], list[str]]
    call: Callable[[list[str]], int] = cli.main
    codes: tuple[int, ...] = (2, 3)
    says: str = ""


@dataclass
class Watch:
    """Takes down what Python does while it is on; audit hooks cannot be removed."""

    is_on: bool = False
    events: list[tuple[str, Any]] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if isinstance(path, str | bytes) and writes:
                self.events.append(("write", os.fsdecode(path)))
        elif event in _CHANGES:
            # The last argument of most is the descriptor of the folder that a name is in.
            is_below = event in ("os.mkdir", "os.remove", "os.rmdir") and arguments[-1] != -1
            folder = os.readlink(f"/proc/self/fd/{arguments[-1]}") if is_below else ""
            self.events.append(("write", os.path.join(folder, os.fsdecode(arguments[0]))))
        elif event in (*_CODE, *_NETWORK):
            self.events.append((event, arguments))


@functools.cache
def watch() -> Watch:
    hook = Watch()
    sys.addaudithook(hook)
    return hook


# --- data sets ---


@pytest.fixture(scope="session")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole folder of two shards, with a tokenizer and a report."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    folder.mkdir()
    content = train_tokenizer(["a few words"] * 3, 270).to_str().encode()
    tokenizer = write_file(folder / "tokenizer.json", content)
    eos_id = load_tokenizer(folder).eos_id
    documents = [(np.array([*range(20, 60), eos_id]), 40)] * 5
    shards = [
        shard
        for split in ("train", "validation")
        for shard in write_shards(folder, documents, split=split, domain="code", dtype="uint16")
    ]
    info = TokenizerInfo(file="tokenizer.json", sha256=tokenizer.sha256, num_tokens=270)
    write_manifest(
        folder,
        new_manifest(shards, vocab_size=270, tokenizer=info, eos_id=eos_id, source={"text": URL}),
    )
    return folder


_whole: list[Path] = []


def load(arguments: list[str]) -> int:
    """Open a data set as training and evaluation do."""
    data = DataConfig(path=arguments[0], cache_folder="cache", order="sequential")
    try:
        folder = local_folder(data, 16)
        manifest = read_manifest(folder)
        verify_shards(folder, manifest)
        load_tokenizer(folder).decode(range(30))
        for split in ("train", "validation"):
            dataset = TokenDataset(folder, split, 16)
            sizes = {"global_batch_size": 2, "micro_batch_size": 2, "data_rank": 0, "data_size": 1}
            loader = Loader(dataset, **sizes, seed=0, shuffle=False, prefetch=0)
            loader.next()
            loader.close()
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


VERBS: dict[str, tuple[Callable[[list[str]], int], list[str], list[str]]] = {
    "inspect": (cli.main, ["data", "inspect"], []),
    "inspect --json": (cli.main, ["data", "inspect", "--json"], []),
    "verify": (cli.main, ["data", "verify"], []),
    "export": (cli.main, ["data", "export"], ["--out", "out"]),
    "load": (load, [], []),
    "load a URL": (load, ["file://"], []),
}


def on_data_set(
    what: str,
    change: Callable[[Path, Path], None],
    verbs: str = "inspect,verify,export,load",
    **options: Any,
) -> list[Attempt]:
    """An attempt for each verb on a copy of the whole data set that `change` has made hostile."""

    def attempt(verb: str) -> Attempt:
        call, before, after = VERBS[verb]

        def make(box: Path, home: Path) -> list[str]:
            folder = box / "data"
            shutil.copytree(_whole[0], folder)
            change(folder, home)
            if before == ["file://"]:
                return [f"file://{folder}"]
            return [*before, "data", *after]

        return Attempt(f"{verb}: {what}", make, call, **options)

    return [attempt(verb) for verb in verbs.split(",")]


def manifest_with(*path: str | int, value: Any) -> Callable[[Path, Path], None]:
    def change(folder: Path, home: Path) -> None:
        values = json.loads((folder / "manifest.json").read_bytes())
        inner = values
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        (folder / "manifest.json").write_text(json.dumps(values))

    return change


def file_with(name: str, content: bytes | str) -> Callable[[Path, Path], None]:
    """Change a file, and what the manifest says of it."""
    content = content.encode() if isinstance(content, str) else content

    def change(folder: Path, home: Path) -> None:
        before = (folder / name).read_bytes() if (folder / name).exists() else b""
        (folder / name).write_bytes(content)
        text = (folder / "manifest.json").read_text()
        old, new = (hashlib.sha256(c).hexdigest() for c in (before, content))
        text = text.replace(old, new)
        (folder / "manifest.json").write_text(text)

    return change


def tokenizer_with(change_values: Callable[[Any], None]) -> Callable[[Path, Path], None]:
    def change(folder: Path, home: Path) -> None:
        values = json.loads((folder / "tokenizer.json").read_bytes())
        change_values(values)
        file_with("tokenizer.json", json.dumps(values))(folder, home)

    return change


def pipe(name: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, home: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def huge(name: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, home: Path) -> None:
        os.truncate(folder / name, 2**40)  # sparse

    return change


def hide_shard(folder: Path, home: Path) -> None:
    (folder / "remote.json").write_text(json.dumps({"url": URL, "max_bytes": 10**9}))
    (folder / "train-code-00000.bin").unlink()


def slow_pattern(values: Any) -> None:
    values["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a|a)*(a|a)*$b"


def same_ids(values: Any) -> None:
    vocabulary = values["model"]["vocab"]
    vocabulary["a"] = vocabulary["b"]


def no_byte(values: Any) -> None:
    vocabulary = values["model"]["vocab"]
    vocabulary["zz"] = vocabulary.pop("z")


DEEP = "[" * 1_000_000
ALL = "inspect,verify,export,load,load a URL"
DATA_SETS = [
    *(
        attempt
        for what, name in NAMES.items()
        for place in ("stem", "split", "domain")
        for attempt in on_data_set(
            f"{what} as {place}",
            manifest_with("shards", 0, place, value=name),
            verbs=ALL if place == "stem" else "inspect",
            says="manifest.json",
        )
    ),
    *(
        attempt
        for what, name in NAMES.items()
        for attempt in on_data_set(
            f"{what} as tokenizer",
            manifest_with("tokenizer", "file", value=name),
            says="tokenizer.file",
        )
    ),
    *on_data_set("stem twice", manifest_with("shards", 1, "stem", value="train-code-00000")),
    *on_data_set("more tokens than bytes", manifest_with("shards", 0, "tokens", value=10**12)),
    *on_data_set("negative size", manifest_with("shards", 0, "bin", "bytes", value=-1)),
    *on_data_set("other sums", manifest_with("splits", "train", "tokens", value=10**15)),
    *on_data_set("deep nesting", file_with("manifest.json", DEEP), verbs=ALL),
    *on_data_set("nested source", file_with("manifest.json", '{"source":' + DEEP)),
    *on_data_set("pipe as manifest", pipe("manifest.json"), says="not a regular file"),
    *on_data_set("manifest of a terabyte", huge("manifest.json"), says="at most"),
    *on_data_set(
        "URL in a marker of a cache", hide_shard, verbs="load,verify,export", says="No such file"
    ),
    *on_data_set("lengths of an index", file_with("train-code-00000.idx", bytes(500)), "verify"),
    *on_data_set(
        "lengths that do not fit",
        file_with("train-code-00000.idx", (_idx := bytes(33) + b"\xff" * 4 * 5) + bytes(90)),
        "export",
    ),
    *on_data_set("pipe as tokenizer", pipe("tokenizer.json"), "export,load"),
    *on_data_set("tokenizer of a terabyte", huge("tokenizer.json"), "inspect", codes=(0,)),
    *on_data_set("deep tokenizer", file_with("tokenizer.json", DEEP), "export,load"),
    *on_data_set(
        "pattern that takes for ever", tokenizer_with(slow_pattern), "export,load", says="pattern"
    ),
    *on_data_set("ids that stand twice", tokenizer_with(same_ids), "export,load"),
    *on_data_set("byte without token", tokenizer_with(no_byte), "export,load"),
    *on_data_set("pipe as report", pipe("report.json"), "inspect", says="not a regular file"),
    *on_data_set("deep report", file_with("report.json", DEEP), "inspect", says="report.json"),
    *on_data_set("list as report", file_with("report.json", "[]"), "inspect,inspect --json"),
    *on_data_set("report of other kinds", file_with("report.json", '{"steps": 1}'), "inspect"),
]


# --- builds ---


def build_of(
    fill: Callable[[Path, Path], Any], source: dict[str, Any] | None = None
) -> Callable[[Path, Path], list[str]]:
    """A build by one process of what `fill` puts into `texts`, beside one good file."""

    def make(box: Path, home: Path) -> list[str]:
        (box / "texts").mkdir()
        (box / "texts" / "good.txt").write_text("some words of an honest text " * 20)
        fill(box, home)
        entry = {"name": "a", "type": "local", "path": "texts", "domain": "prose"}
        recipe = {
            "sources": [entry | (source or {})],
            "steps": [],
            "tokenizer": {"vocab_size": 270},
        }
        (box / "recipe.yaml").write_text(json.dumps(recipe))
        return ["data", "build", "--config", "recipe.yaml", "--out", "out", "--workers", "1"]

    return make


def linked_out(name: str) -> Callable[[Path, Path], None]:
    def fill(box: Path, home: Path) -> None:
        (box / "out").mkdir()
        (box / "out" / ".lock").touch()
        (box / "out" / name).unlink(missing_ok=True)
        (box / "out" / name).symlink_to(home if name == "work" else home / BAIT)

    return fill


def named_files(box: Path, home: Path) -> None:
    for name in ("a\nb.txt", "\x1b[2J.txt", "--out=..txt", "$(touch x).txt"):
        (box / "texts" / name).write_text("another text " * 20)


def tar_of(box: Path, home: Path) -> None:
    with tarfile.open(box / "texts" / "a.tar", "w") as archive:
        for name in ("../../home/.bashrc.txt", "/tmp/cdrmix-hostile.txt", "-a.txt", "b\n.txt"):
            member = tarfile.TarInfo(name)
            member.size = 5
            archive.addfile(member, io.BytesIO(b"words"))
        link = tarfile.TarInfo("c.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)


def tar_header(box: Path, home: Path) -> None:
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 400_000_000
    (box / "texts" / "a.tar").write_bytes(member.tobuf() + bytes(10_000))


def tar_headers(box: Path, home: Path) -> None:
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 2
    (box / "texts" / "a.tar").write_bytes((member.tobuf() + b"a".ljust(512, b"\0")) * 3000)


def deep_json(box: Path, home: Path) -> None:
    for name in ("a.json", "a.jsonl"):
        (box / "texts" / name).write_text(DEEP)


def saved_with(filename: str) -> Callable[[Path, Path], None]:
    def fill(box: Path, home: Path) -> None:
        state = {"_data_files": [{"filename": filename}]}
        (box / "texts" / "state.json").write_text(json.dumps(state))

    return fill


def described_by(name: str) -> Callable[[Path, Path], None]:
    def fill(box: Path, home: Path) -> None:
        configs = f"configs:\n- config_name: default\n  data_files: {json.dumps(name)}\n"
        (box / "texts" / "README.md").write_text(f"---\n{configs}---\n")

    return fill


def recipe_of(text: str) -> Callable[[Path, Path], list[str]]:
    def make(box: Path, home: Path) -> list[str]:
        (box / "recipe.yaml").write_text(text)
        return ["data", "build", "--config", "recipe.yaml", "--out", "out", "--workers", "1"]

    return make


HUGGINGFACE = {"type": "huggingface"}
BUILDS = [
    *(
        Attempt(f"build: link {name} in --out", build_of(linked_out(name)), says="symbolic link")
        for name in (".lock", "work", "report.json", "train-prose-00000.bin", "manifest.json")
    ),
    Attempt("build: names of files", build_of(named_files), codes=(0,)),
    Attempt("build: names and links in a tar", build_of(tar_of), codes=(0,)),
    Attempt("build: tar header of 400 MB", build_of(tar_header), codes=(0,)),
    Attempt("build: 3,000 tar headers in a row", build_of(tar_headers), codes=(0,)),
    Attempt("build: deep JSON", build_of(deep_json), codes=(0,)),
    Attempt("build: URL as a path", build_of(lambda *_: 0, {"path": URL}), says="no such file"),
    *(
        Attempt(f"build: {what} in state.json", build_of(saved_with(name), HUGGINGFACE))
        for what, name in NAMES.items()
        if "/" in name
    ),
    *(
        Attempt(
            f"build: {name} in a README", build_of(described_by(name), HUGGINGFACE), says="configs"
        )
        for name in (URL, "/etc/passwd", "../home/*", "zip://a::" + URL, "hf://datasets/a/b")
    ),
    Attempt("build: tag in YAML", recipe_of("sources: !!python/object/apply:os.system [id]")),
    Attempt("build: deep recipe", recipe_of("sources: " + "[" * 20_000)),
    Attempt("build: parameters of a step", recipe_of("sources: [1]\nsteps: [{'os:system': {}}]")),
]


# --- jobs of a build on another machine ---


def call_job(arguments: list[str]) -> int:
    try:
        run_call(Path(arguments[0]), 0)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def planted_job(box: Path, home: Path) -> list[str]:
    (box / "jobs").mkdir()
    (box / "jobs").chmod(0o775)
    (box / "jobs" / "0.job").write_bytes(b"cos\nsystem\n(S'id'\ntR.")
    return ["jobs"]


JOBS = [Attempt("job: planted in a folder of a group", planted_job, call_job, says="0700")]

ATTEMPTS = [*DATA_SETS, *BUILDS, *JOBS]


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_set: Path) -> Iterator[Path]:
    _whole[:] = [data_set]
    folder = tmp_path / "box"
    folder.mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / BAIT).write_text("mine")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield folder
    watch().is_on = False


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.what[:70])
def test_what_is_handed_over_reaches_nothing(
    attempt: Attempt, box: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = box.parent / "home"
    arguments = attempt.make(box, home)
    named = [box / name for name in ("out", "cache")]  # the folders that a call may write to
    hook = watch()
    hook.events, hook.is_on = [], True
    try:
        code = attempt.call(arguments)
    finally:
        hook.is_on = False
    captured = capsys.readouterr()
    assert code in attempt.codes, captured.err
    if code:
        assert "Traceback" not in captured.err
        assert captured.err.count("error: ") == 1
        assert attempt.says in captured.err
    assert not set(map(chr, range(32))) - {"\n", "\t"} & set(captured.out + captured.err)
    for event, value in hook.events:
        if event == "urllib.Request" and str(value[0]).startswith(arguments[0]):
            continue  # what the call names
        assert event == "write", f"{event}: {value}"
        path = Path(box, value).resolve()
        inside = any(path == folder or folder in path.parents for folder in named)
        # A folder that appears whole or not at all is made beside its name.
        beside = any(part.startswith(".out.building-") for part in path.parts)
        assert inside or beside or path == Path("/dev/null") or "__pycache__" in path.parts, path
    assert sorted(path.name for path in home.iterdir()) == [BAIT]
    assert (home / BAIT).read_text() == "mine"
