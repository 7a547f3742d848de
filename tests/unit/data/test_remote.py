"""Shards behind a URL: copied ahead of the loader, bounded, verified, and taken up after faults."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdrmix.config.schema import DataConfig
from cdrmix.corpus.encode import write_roles
from cdrmix.data import remote
from cdrmix.data.loader import Loader
from cdrmix.data.remote import CacheSize, RemoteFile, RemoteFiles
from cdrmix.data.remote_folder import local_folder
from cdrmix.data.shards import read_manifest, verify_shards, write_manifest
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import DataError, UnreachableDataError
from tests.harness import ROOT
from tests.unit.data.token_folder import write_counting_folder

LENGTH = 4
SHARD_TOKENS = 400  # 100 samples
SHARD_BYTES = 2 * SHARD_TOKENS


class Server(ThreadingHTTPServer):
    """Serves a folder; `faults` are what befalls the next requests for a file."""

    def __init__(self, folder: Path) -> None:
        handler = functools.partial(Handler, directory=str(folder))
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: Counter[str] = Counter()
        self.faults: dict[str, list[str]] = {}
        self.sent_bytes = 0


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.requests[name] += 1
        faults = self.server.faults.get(name, [])
        fault = faults.pop(0) if faults else None
        if fault == "busy":
            self.send_error(503)
        elif fault == "long":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for _ in range(2**12):
                    self.wfile.write(bytes(2**20))
                    self.server.sent_bytes += 2**20
        elif fault in ("cut", "changed"):
            content = (Path(self.directory) / name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:-9] if fault == "cut" else bytes(len(content)))
        else:
            super().do_GET()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten shards of 100 samples each, and one of the last token."""
    return write_counting_folder(
        tmp_path / "remote", 10 * SHARD_TOKENS + 1, max_tokens=SHARD_TOKENS
    )


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(folder) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        # A copy ahead of use that met a stopped server would tell of it in the log of a later test.
        for copying in threading.enumerate():
            if copying.name == "shards-ahead":
                copying.join()
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "sleep", lambda seconds: None)


def config(url: str, cache: Path, **changes: Any) -> DataConfig:
    values = {"cache_bytes": 4 * SHARD_BYTES, "order": "windowed", "window_samples": 50}
    return DataConfig(path=url, cache_folder=str(cache), **(values | changes))


def copies(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.bin")}


def used_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.bin"):
        with contextlib.suppress(FileNotFoundError):  # thrown out meanwhile
            total += path.stat().st_size
    return total


def make_loader(folder: Path, **changes: Any) -> Loader:
    arguments = {
        "global_batch_size": 10,
        "micro_batch_size": 10,
        "data_rank": 0,
        "data_size": 1,
        "seed": 5,
        "shuffle": True,
        "window_samples": 50,
        "prefetch": 2,
    }
    return Loader(TokenDataset(folder, "train", LENGTH), **(arguments | changes))


@pytest.mark.parametrize("scheme", ["http", "file", "memory"])
def test_samples_of_a_url_are_those_of_the_folder(
    scheme: str, server: Server, folder: Path, tmp_path: Path
) -> None:
    url = server.url if scheme == "http" else folder.as_uri()
    if scheme == "memory":  # one of those that fsspec brings
        fsspec = pytest.importorskip("fsspec")
        url = "memory://shards"
        for path in folder.iterdir():
            fsspec.filesystem("memory").pipe(f"/shards/{path.name}", path.read_bytes())
    local = local_folder(config(url, tmp_path / "cache"), LENGTH)
    assert not copies(local), "shards come when they are needed"
    verify_shards(local, read_manifest(local))
    ours, theirs = make_loader(local), make_loader(folder)
    for _ in range(150):  # an epoch and a half
        assert ours.next()["input_ids"].tolist() == theirs.next()["input_ids"].tolist()
        assert used_bytes(local) <= 4 * SHARD_BYTES
    ours.close()
    theirs.close()


def test_each_shard_is_copied_once_an_epoch_though_the_cache_holds_few(
    server: Server, tmp_path: Path
) -> None:
    local = local_folder(config(server.url, tmp_path / "cache", window_samples=100), LENGTH)
    loader = make_loader(local, window_samples=100, global_batch_size=50, micro_batch_size=50)
    for _ in range(20):
        loader.next()
    loader.close()
    counts = {name: count for name, count in server.requests.items() if name.endswith(".bin")}
    assert len(counts) == 11
    # The last row of a shard ends in the next one's first token.
    assert sum(counts.values()) <= 2 * 11


def test_shards_are_there_before_they_are_asked_for(server: Server, tmp_path: Path) -> None:
    local = local_folder(config(server.url, tmp_path / "cache"), LENGTH)
    dataset = TokenDataset(local, "train", LENGTH)
    dataset.expect(np.arange(150, 350))
    wait_until(lambda: len(copies(local)) == 3)
    assert copies(local) == {f"train-code-{n:05d}.bin" for n in (1, 2, 3)}
    requests = sum(server.requests.values())
    dataset.rows(np.arange(150, 349))
    assert sum(server.requests.values()) == requests


def test_roles_come_with_their_tokens(server: Server, folder: Path, tmp_path: Path) -> None:
    manifest = read_manifest(folder)
    roles = np.arange(10 * SHARD_TOKENS + 1, dtype=np.uint8) % 4
    shards = tuple(write_roles(folder, manifest.shards, [roles]))
    write_manifest(folder, manifest.model_copy(update={"shards": shards}))
    settings = config(server.url, tmp_path / "cache", cache_bytes=6 * SHARD_BYTES)
    local = local_folder(settings, LENGTH)
    dataset = TokenDataset(local, "train", LENGTH)
    dataset.expect(np.arange(50, 150))
    wait_until(lambda: len(list(local.glob("*.roles"))) == len(copies(local)) == 2)
    requests = sum(server.requests.values())
    assert dataset.roles(np.arange(60, 62)).tolist() == 2 * [[0, 1, 2, 3, 0]]
    assert sum(server.requests.values()) == requests


def test_a_cache_that_cannot_be_written_is_told(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="data.cache_folder.*Not a directory"):
        local_folder(config(server.url, tmp_path / "file" / "cache"), LENGTH)
    local = local_folder(config(server.url, tmp_path / "cache"), LENGTH)
    (local / ".locks").write_text("")
    with pytest.raises(DataError, match="data.cache_folder.*locks: File exists"):
        TokenDataset(local, "train", LENGTH).rows(np.arange(3))


def wait_until(happened: Any) -> None:
    deadline = time.monotonic() + 5
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_passing_faults_are_forgiven(server: Server, tmp_path: Path) -> None:
    local = local_folder(config(server.url, tmp_path / "cache"), LENGTH)
    server.faults["train-code-00000.bin"] = ["busy", "cut", "changed", "busy"]
    rows = TokenDataset(local, "train", LENGTH).rows(np.arange(3))
    assert rows[:, 0].tolist() == [0, 4, 8]
    assert server.requests["train-code-00000.bin"] == 5


def test_a_lasting_fault_is_told_with_its_cause(server: Server, tmp_path: Path) -> None:
    local = local_folder(config(server.url, tmp_path / "cache"), LENGTH)
    dataset = TokenDataset(local, "train", LENGTH)
    server.faults["train-code-00000.bin"] = 20 * ["changed"]
    with pytest.raises(DataError, match=r"00000.bin: its sha256 is .*, the manifest says .* 7 att"):
        dataset.rows(np.arange(3))
    assert not copies(local)
    server.faults["train-code-00000.bin"] = 20 * ["busy"]
    with pytest.raises(UnreachableDataError, match="503"):
        dataset.rows(np.arange(3))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("{server}/nowhere", "manifest.json: HTTP Error 404"),
        ("file:///no/such/folder", "No such file"),
        ("nope://bucket/shards", "nope.*s3fs"),
    ],
)
def test_a_wrong_url_is_told_at_once(path: str, told: str, server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        local_folder(config(path.format(server=server.url), tmp_path / "cache"), LENGTH)
    assert sum(server.requests.values()) <= 1


def test_a_copy_damaged_since_is_told_and_copied_again(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(server.url, tmp_path / "cache")
    local = local_folder(settings, LENGTH)
    TokenDataset(local, "train", LENGTH).rows(np.arange(3))
    shard = local / "train-code-00000.bin"
    shard.write_bytes(bytes(SHARD_BYTES))
    assert local_folder(settings, LENGTH) == local
    assert TokenDataset(local, "train", LENGTH).rows(np.arange(3))[2, 0] == 8
    assert server.requests["train-code-00000.bin"] == 2
    assert f"{shard}: damaged (sha256 differs); copied again" in caplog.text


def test_a_start_that_does_not_reach_the_url_goes_on_with_the_copies(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(server.url, tmp_path / "cache", cache_bytes=20 * SHARD_BYTES)
    local = local_folder(settings, LENGTH)
    rows = TokenDataset(local, "train", LENGTH).rows(np.arange(1000))
    requests = Counter(server.requests)
    server.faults = {name: ["busy"] * 7 for name in ("manifest.json", "train-code-00000.bin")}
    assert local_folder(settings, LENGTH) == local
    assert "503" in caplog.text
    assert f"Going on with the copies in {local}" in caplog.text
    again = TokenDataset(local, "train", LENGTH).rows(np.arange(1000))
    assert np.array_equal(again, rows)
    assert server.requests - requests == {"manifest.json": 7}
    # Nothing is taken on trust: a record that is damaged, or of other content, counts for nothing.
    (record,) = (tmp_path / "cache").glob(".of-*")
    for folder_name in ("../elsewhere", "0123456789abcdef"):
        record.write_text(folder_name)
        server.faults = {"manifest.json": ["busy"] * 7}
        with pytest.raises(UnreachableDataError, match="503"):
            local_folder(settings, LENGTH)


def test_another_data_set_at_the_url_is_another_folder(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    settings = config(server.url, tmp_path / "cache")
    before = local_folder(settings, LENGTH)
    write_counting_folder(folder, 5 * SHARD_TOKENS + 1, max_tokens=SHARD_TOKENS)
    assert local_folder(settings, LENGTH) != before
    assert len(read_manifest(before).shards) == 11


def test_a_cache_too_small_for_the_order_is_refused(server: Server, tmp_path: Path) -> None:
    small = config(server.url, tmp_path, order="shuffled")
    with pytest.raises(DataError, match=r"cache_bytes = 3200: .* needs 8002 .*order = windowed"):
        local_folder(small, LENGTH)
    with pytest.raises(DataError, match="data.order = sequential needs 1600"):
        local_folder(config(server.url, tmp_path, order="sequential", cache_bytes=1500), LENGTH)
    local_folder(config(server.url, tmp_path, order="shuffled", cache_bytes=8002), LENGTH)


def test_processes_share_the_copies_and_what_a_killed_one_left_is_removed(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    settings = config(server.url, tmp_path / "cache")
    local = local_folder(settings, LENGTH)
    partial = local / ".train-code-00007.bin.partial"
    partial.write_bytes(bytes(SHARD_BYTES))
    os.utime(partial, (0, 0))
    code = (
        "import sys, numpy; from pathlib import Path; "
        "from cdrmix.config.schema import DataConfig; "
        "from cdrmix.data.remote_folder import local_folder; "
        "from cdrmix.data.token_dataset import TokenDataset; "
        "data = DataConfig.model_validate_json(sys.argv[1]); "
        f"folder = local_folder(data, {LENGTH}); "
        f"rows = TokenDataset(folder, 'train', {LENGTH}).rows(numpy.arange(400)); "
        "assert rows[:, 0].tolist() == list(range(0, 1600, 4))"
    )
    command = [sys.executable, "-c", code, settings.model_dump_json()]
    children = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [child.wait(timeout=30) for child in children] == [0, 0]
    assert not partial.exists()
    assert used_bytes(local) <= 4 * SHARD_BYTES


def test_nothing_is_fetched_beyond_what_the_manifest_promises(
    server: Server, tmp_path: Path
) -> None:
    local = local_folder(config(server.url, tmp_path / "cache"), LENGTH)
    server.faults["train-code-00000.bin"] = ["long"] * remote._ATTEMPTS
    with pytest.raises(DataError, match=f"00000.bin: has more than {SHARD_BYTES} bytes"):
        TokenDataset(local, "train", LENGTH).rows(np.arange(2))
    assert server.sent_bytes < remote._ATTEMPTS * 64 * 2**20, "of 4 GiB each"
    assert used_bytes(local) == 0


def test_a_full_disk_is_not_tried_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def no_space(url: str, path: Path, max_bytes: int) -> str:
        next(calls)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(remote, "_copy_once", no_space)
    file = RemoteFile("a.bin", 10, "0")
    with (
        pytest.raises(DataError, match="No space left on device"),
        RemoteFiles(server.url, tmp_path, CacheSize(100, 100, 100)).held(file),
    ):
        pass
    assert next(calls) == 1
