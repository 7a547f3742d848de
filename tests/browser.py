"""A headless Chromium, driven by the DevTools protocol over two pipes."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--mute-audio", "--remote-debugging-pipe"),
    # Whatever the browser wants of its own leads nowhere.
    *("--proxy-server=127.0.0.1:9", "--proxy-bypass-list=127.0.0.1;localhost"),
)
_SECONDS = 60.0  # of an answer
# Before any script of a page: what the policy has refused, and what an injected script would set.
_RECORDER = """
window.refused = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.refused.push(`${event.effectiveDirective} ${event.blockedURI}`);
});
"""


def program() -> str | None:
    """Path of the browser; None where there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One page of a running browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []  # addresses, of all pages so far
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Network", "Page", "Runtime"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=_RECORDER)

    def open(self, address: str) -> None:
        """Opens a page and waits until its scripts have run."""
        self.call("Page.navigate", url=address)
        self.wait_for(f"location.href === {json.dumps(address)}")
        self.wait_for("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Value of an expression of the page, or of what it promises."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = _SECONDS) -> None:
        """Waits until an expression of the page is true."""
        deadline = time.monotonic() + seconds
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < deadline, (
                f"{condition}\n{self.value('document.body.innerText')}"
            )
            time.sleep(0.1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Result of a command; events that come meanwhile are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message | session).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], _SECONDS)
            part = os.read(self._from, 2**20) if ready else b""
            assert part, "the browser does not answer"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Starts a browser with an empty profile, and ends it with all its processes."""
    path = program()
    assert path is not None, "there is no browser"
    read_commands, to_browser = os.pipe()
    from_browser, write_answers = os.pipe()
    # It reads from descriptor 3 and writes to 4.
    script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
    ends = [str(read_commands), str(write_answers)]
    words = ["bash", "-c", script, "bash", *ends, path, *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        words,
        pass_fds=(read_commands, write_answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
