"""`cdrmix watch` on a terminal, and `cdrmix serve` in a real browser."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from cdrmix.cli import main
from tests import browser as browsers
from tests.browser import Browser
from tests.live_run import LiveRun

COMMAND = [sys.executable, "-m", "cdrmix.cli"]
# Takes the terminal over, which then sends the signal of Ctrl-C. A shell ignores it for what it
# starts in the background, such as these tests.
ON_TERMINAL = """
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from cdrmix.cli import main
sys.exit(main())
"""
SECONDS = 60.0
HOSTILE = "<img src=x onerror=window.hurt=1>"
LEAVE_SCREEN = b"\x1b[?1049l"


@contextmanager
def terminal(
    *words: str, columns: int = 80, kind: str = "xterm"
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command on a terminal of its own: its process, and the other end."""
    descriptor, inner = pty.openpty()
    resize(descriptor, columns)
    process = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, *words],
        # rich would take a size in the environment for the terminal's
        env={
            **{k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")},
            "TERM": kind,
        },
        **dict.fromkeys(("stdin", "stdout", "stderr"), inner),
        start_new_session=True,
    )
    os.close(inner)
    try:
        yield process, descriptor
    finally:
        process.kill()
        process.wait()
        os.close(descriptor)


def resize(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def read_until(descriptor: int, *texts: bytes) -> bytes:
    """Output up to the last of some texts, in their order."""
    out, place = b"", 0
    deadline = time.monotonic() + SECONDS
    for text in texts:
        while text not in out[place:]:
            assert time.monotonic() < deadline, (text, out[-3000:])
            if select.select([descriptor], [], [], 0.2)[0]:
                try:
                    out += os.read(descriptor, 2**16)
                except OSError:  # the other end is closed
                    assert text in out[place:], (text, out[-3000:])
        place = out.index(text, place) + len(text)
    return out


def test_watch_follows_a_run_and_a_resize_and_ends_with_0(tmp_path):
    run = LiveRun(tmp_path / "run")
    run.log(1, 2)
    with terminal("watch", "--interval", "0.2", str(run.path)) as (process, descriptor):
        read_until(descriptor, b"\x1b[?1049h", b"step 2 of 400", b"7.9800")
        run.log(3)
        read_until(descriptor, b"step 3 of 400", b"7.9700")
        resize(descriptor, 160)
        wide = read_until(descriptor, b"tokens per second").replace(b"\x1b[?25l", b"")
        assert max(map(len, wide.splitlines())) > 100
        os.write(descriptor, b"\x03")
        read_until(descriptor, LEAVE_SCREEN)
        assert process.wait(SECONDS) == 0


def test_watch_leaves_the_terminal_as_it_was_when_it_is_ended(tmp_path):
    run = LiveRun(tmp_path / "run")
    run.log(1)
    with terminal("watch", str(run.path)) as (process, descriptor):
        read_until(descriptor, b"step 1 of 400")
        process.terminate()
        read_until(descriptor, LEAVE_SCREEN)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM


def test_a_terminal_without_commands_gets_a_line_for_each_news(tmp_path):
    with terminal("watch", "--interval", "0.2", str(tmp_path / "later"), kind="dumb") as (
        process,
        descriptor,
    ):
        out = read_until(descriptor, b"waiting")
        run = LiveRun(tmp_path / "later")
        run.log(1)
        out += read_until(descriptor, b"step 1 of 400", b"loss 7.9900")
        run.log(2)
        out += read_until(descriptor, b"step 2 of 400")
        assert b"\x1b" not in out
        os.write(descriptor, b"\x03")
        assert process.wait(SECONDS) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that go on, one of them hostile, and one that has finished."""
    root = tmp_path_factory.mktemp("runs")
    first = LiveRun(root / "first")
    first.log(*range(1, 11), **{"eval/loss": 7.75})
    finished = LiveRun(root / "sweep" / "second", name="cdrmix-core-1b")
    finished.log(*range(1, 31))
    finished.finish()
    values = (finished.path / "config_snapshot.yaml").read_text()
    (finished.path / "config_snapshot.yaml").write_text(values.replace("2.0e-3", "5.0e-4"))
    hostile = LiveRun(root / HOSTILE, name=f'"><script>window.hurt=1</script>{HOSTILE}')
    hostile.log(1, **{f"suite/{HOSTILE}/x/y": 1.0})
    hostile.tell("WARNING", f"</code></section><script>window.hurt=1</script>{HOSTILE}")
    report = f"<script>window.hurt=1</script>{HOSTILE}<p id='shown'>shown</p>"
    (hostile.path / "report.html").write_text(report)
    return root


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and the address that it prints."""
    process = subprocess.Popen(
        [*COMMAND, "serve", str(folder), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with serving(folder) as (_, address):
        yield address


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if browsers.program() is None:
        pytest.skip("chromium is not installed")
    with browsers.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def shown_rows(page: Browser) -> list[str]:
    rows = "[...document.querySelectorAll('.runs tbody tr')].filter(row => !row.hidden)"
    return page.value(f"{rows}.map(row => row.dataset.key)")


def choose(page: Browser, field: str, value: str) -> None:
    event = "new Event('input', {bubbles: true})"
    element = f"document.getElementById({json.dumps(field)})"
    page.value(f"{element}.value = {json.dumps(value)}; {element}.dispatchEvent({event})")


def test_the_table_filters_and_sorts(page, server):
    page.open(f"{server}/")
    assert sorted(shown_rows(page)) == sorted(["first", "sweep/second", HOSTILE])
    choose(page, "words", "CORE-1B second")
    assert shown_rows(page) == ["sweep/second"]
    assert page.value("document.getElementById('count').textContent") == "1 of 3 runs"
    choose(page, "words", "")
    choose(page, "state", "running")
    assert sorted(shown_rows(page)) == sorted(["first", HOSTILE])
    choose(page, "state", "")
    for expected in (["1", "10", "30"], ["30", "10", "1"]):
        page.value("document.querySelector('button[data-column=\"4\"]').click()")
        cells = "[...document.querySelectorAll('.runs tbody tr')].map(r => r.cells[4].dataset.sort)"
        assert page.value(cells) == expected


def test_the_table_keeps_filter_and_choice_while_it_follows(page, server, folder):
    page.open(f"{server}/")
    choose(page, "words", "first")
    page.value("document.querySelector('input[value=first]').click()")
    LiveRun(folder / "third").log(1)
    try:
        page.wait_for("document.querySelectorAll('.runs tbody tr').length === 4")
        assert shown_rows(page) == ["first"]
        assert page.value("document.querySelector('input[value=first]').checked")
    finally:
        shutil.rmtree(folder / "third")


def test_the_page_of_a_run_follows_it_without_a_reload(page, server, folder):
    page.open(f"{server}/run/first")
    page.value("window.kept = true; document.querySelector('details').open = true")
    assert page.value("document.querySelectorAll('svg').length") >= 4
    curve = "document.querySelector('svg.plot').innerHTML"
    before = page.value(curve)
    assert "step 10 of 400" in page.value("document.body.innerText")
    with (folder / "first" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 11, "loss": 3.125, "step_seconds": 0.5}) + "\n")
    page.wait_for("document.body.innerText.includes('step 11 of 400')")
    page.wait_for(f"{curve} !== {json.dumps(before)}")
    assert "3.1250" in page.value("document.querySelector('.facts').innerText")
    assert page.value("window.kept && document.querySelector('details').open")


def test_a_server_that_is_gone_is_told(page, folder):
    with serving(folder) as (process, address):
        page.open(f"{address}/run/first")
        assert page.value("document.getElementById('connection').hidden")
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
        page.wait_for("!document.getElementById('connection').hidden")


def test_runs_are_compared_side_by_side(page, server):
    page.open(f"{server}/")
    assert page.value("document.getElementById('compare').disabled")
    for key in ("first", "sweep/second"):
        page.value(f"document.querySelector('input[value=\"{key}\"]').click()")
    page.value("document.getElementById('compare').click()")
    page.wait_for("location.pathname === '/compare' && document.readyState === 'complete'")
    text = page.value("document.body.innerText")
    texts = "row => [...row.cells].map(cell => cell.innerText)"
    cells = f"[...document.querySelectorAll('.plain tr')].map({texts})"
    rows = {key: sorted(values) for key, *values in page.value(cells)}
    assert rows["training.learning_rate"] == ["0.0005", "0.002"]
    assert "Comparison of 2 runs" in text
    assert page.value("document.querySelector('svg').innerHTML.includes('--c2')")


def test_hostile_names_and_contents_are_text(page, server, folder):
    for place in ("", f"run/{quote(HOSTILE)}", f"compare?run=first&run={quote(HOSTILE)}"):
        page.open(f"{server}/{place}")
        assert HOSTILE in page.value("document.body.innerText"), place
        assert page.value("window.hurt === undefined && !document.querySelector('img')"), place
        assert page.value("window.refused") == []
    # Of a report, which anybody may have written, nothing runs.
    page.open(f"{server}/report/{quote(HOSTILE)}")
    assert page.value("document.getElementById('shown').textContent") == "shown"
    assert page.value("window.hurt === undefined")
    page.open((folder / HOSTILE / "report.html").as_uri())
    page.wait_for("window.hurt === 1")  # the control: opened as a file it runs


def test_no_request_leaves(page, server):
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        other = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/"
        page.requests.clear()
        for place in ("", "run/first", "compare?run=first&run=sweep/second"):
            page.open(f"{server}/{place}")
            assert page.value("window.refused") == []
        outside = {urlsplit(url).netloc for url in page.requests if not url.startswith("data:")}
        assert outside == {urlsplit(server).netloc}
        # The control: a script of the page that asks elsewhere is refused by the policy.
        asked = f"fetch({json.dumps(other)}).then(() => 'answered', () => 'refused')"
        assert page.value(asked) == "refused"
        assert page.value("window.refused[0]").startswith("connect-src")


def answer(server: str, target: str, method: str = "GET", host: str | None = None):
    place = urlsplit(server)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=SECONDS)
    connection.request(method, target, headers={"Host": host or place.netloc})
    found = connection.getresponse()
    body = found.read().decode()
    connection.close()
    return found, body


def test_only_names_of_this_machine_are_answered(server):
    assert answer(server, "/")[0].status == 200
    assert answer(server, "/", host="localhost:9999")[0].status == 200, "a forwarded port"
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", "0.0.0.0", "[::1"):
        found, body = answer(server, "/", host=host)
        assert (found.status, "first" in body) == (400, False), host


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_but_reading_is_answered(server, method):
    for target in ("/", "/run/first", "/compare?run=first&run=sweep/second"):
        assert answer(server, target, method)[0].status == 405


@pytest.mark.parametrize(
    "target",
    [
        "/run/../../etc/passwd",
        "/run/%2e%2e/%2e%2e/etc",
        "/run//etc",
        "/report/../secret",
        "/report/%2e%2e%2fsecret",
        "/static/../live/server.py",
        "/static/..%2fserver.py",
        "/static/frame.html",
        "/run/first/../../secret",
        "/run/",
        "/nothing",
    ],
)
def test_no_path_leads_out_of_the_runs(server, folder, target):
    (folder.parent / "secret").write_text("secret words")
    found, body = answer(server, target)
    assert found.status == 404
    assert "secret words" not in body
    assert "import" not in body


def test_a_report_that_is_a_link_is_not_followed(server, folder):
    secret = folder.parent / "words"
    secret.write_text("secret words")
    link = folder / "first" / "report.html"
    link.symlink_to(secret)
    try:
        found, body = answer(server, "/report/first")
        assert (found.status, "secret words" in body) == (404, False)
    finally:
        link.unlink()


def test_pages_say_what_they_may_load(server):
    for target in ("/", "/run/first", "/static/live.js", "/nothing"):
        headers = answer(server, target)[0].headers
        assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


def test_another_host_is_refused_with_the_way_to_come_from_there(folder, capsys):
    assert main(["serve", str(folder), "--host", "0.0.0.0"]) == 2
    assert "ssh -L 8265:127.0.0.1:8265" in capsys.readouterr().err


def test_a_port_that_is_taken_and_a_missing_folder_are_told(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be taken" in capsys.readouterr().err
    assert main(["serve", str(folder), "--port", "70000"]) == 2
    assert main(["serve", str(folder / "nothing")]) == 2
    assert "not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["uvicorn", "starlette"])
def test_a_missing_extra_is_told(folder, package, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["serve", str(folder)]) == 2
    assert "pip install 'cdrmix[serve]'" in capsys.readouterr().err
