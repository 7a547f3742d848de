"""Faults of the infrastructure that pass: `cdrmix launch` goes on, and no secret is left behind."""

from __future__ import annotations

import json
import os
import threading
import time
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from tests.cluster.supervised_launch import SupervisedLaunch
from tests.small_run import arguments, overrides

pytestmark = pytest.mark.usefixtures("leaves_nothing")

STEPS = 4
SETTINGS = ("checkpoint.every_steps=2", "evaluation.every_steps=null")

# Read by every Python that finds it. In `cdrmix launch`, the first port that is chosen is taken by
# somebody else before the ranks bind it.
PORT_TAKEN = """
import socket, sys
if "launch" in sys.orig_argv and "cdrmix.cli" in sys.orig_argv:
    import cdrmix.network
    choose, taken = cdrmix.network.free_port, []
    def free_port():
        if taken:
            return choose()
        taken.append(socket.create_server(("0.0.0.0", 0)))
        return taken[0].getsockname()[1]
    cdrmix.network.free_port = free_port
"""
# The store's patience, a minute, made short: two attempts, two seconds apart.
IMPATIENT = """
import importlib.abc, importlib.util, sys
class Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "cdrmix.data.remote":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), setattr(module, "_ATTEMPTS", 2))
        return spec
sys.meta_path.insert(0, Patch())
"""


def add_to_every_python(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def starts(run_dir: Path) -> list[int]:
    lines = (run_dir / "starts.jsonl").read_text().splitlines()
    return [json.loads(line)["exit_code"] for line in lines]


def test_a_port_that_was_taken_is_another_one_at_the_next_start(
    small_corpus: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_to_every_python(tmp_path / "site", PORT_TAKEN, monkeypatch)
    secret = "launch.environment.TOKEN=hunter2"
    run = arguments(small_corpus, None, *overrides([*SETTINGS, secret]), "--max-steps", str(STEPS))
    with SupervisedLaunch(run_dir, ["--nproc", "1", *run]) as launch:
        assert launch.wait() == 0, launch.output
        assert "the ranks cannot meet there" in launch.output
        assert "start 1 was lost at step 0" in launch.output
        assert "hunter2" not in launch.output
    assert starts(run_dir) == [0], "the first one ended before it became a run"
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert any(path.name == "state.json" for path in files)
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []
    assert "TOKEN: <redacted>" in (run_dir / "config_snapshot.yaml").read_text()


def test_a_store_that_is_away_is_waited_for(
    small_corpus: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_to_every_python(tmp_path / "site", IMPATIENT, monkeypatch)
    back = threading.Event()

    class Store(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            super().do_GET() if back.is_set() else self.send_error(503)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), partial(Store, directory=str(small_corpus)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    settings = [
        *SETTINGS,
        f"data.path=http://127.0.0.1:{server.server_port}",
        f"data.cache_folder={tmp_path / 'cache'}",
    ]
    run = arguments(small_corpus, None, *overrides(settings), "--max-steps", str(STEPS))
    try:
        with SupervisedLaunch(run_dir, ["--nproc", "1", *run]) as launch:
            launch.wait_until(lambda: "start 1 was lost" in launch.output)
            time.sleep(1)
            back.set()
            assert launch.wait() == 0, launch.output
            assert "503" in launch.output
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert starts(run_dir) == [69, 0]
