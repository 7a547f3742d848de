"""`cdrmix serve`: the pages on 127.0.0.1, read-only, for browsers of this machine.

Names of hosts are checked, so that a page elsewhere cannot read these under a name of its own that
leads here (DNS rebinding); nothing is loaded from elsewhere; what is shown comes from folders that
were found as runs, whatever an address says.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cdrmix.errors import ConfigError, StateError, TrainingError
from cdrmix.live import pages
from cdrmix.live.run_folder import open_regular
from cdrmix.live.runs import DAMAGE, Runs, ServedRun

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_HOSTS = ("127.0.0.1", "localhost")
_PACKAGE = Path(__file__).parent.parent
# Styles within the page: matplotlib writes some to each shape. No script but ours, no request to
# another place.
_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
# A report is a file that anybody may have written: nothing in it runs, and it has no origin.
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox; frame-ancestors 'none'"
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def serve(runs_dir: Path, *, host: str, port: int) -> None:
    """Serves the pages until the user ends it (INT, TERM).

    Raises:
        ConfigError: if the extra is not installed, the host is not this machine alone, or the port
            is taken.
        StateError: if the folder is missing.
    """
    if host not in _HOSTS:
        raise ConfigError(
            f"--host {host}: the pages have no password, and whoever reaches them reads all runs: "
            f"allowed are {' and '.join(_HOSTS)}. From another machine, forward the port there: "
            f"{_forward(port)}"
        )
    if not runs_dir.is_dir():
        raise StateError(f"{runs_dir}: not a folder. Give the one that holds the run directories")
    try:
        import uvicorn

        app = make_app(runs_dir)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cdrmix serve needs the package '{error.name}': pip install 'cdrmix[serve]'"
        ) from error
    listener = _listen(port)
    port = listener.getsockname()[1]
    print(f"Runs below {runs_dir} on http://127.0.0.1:{port}/ (Ctrl-C ends it)", flush=True)
    print(f"From another machine: {_forward(port)}", file=sys.stderr, flush=True)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    try:
        uvicorn.Server(settings).run(sockets=[listener])
    except KeyboardInterrupt:  # which the server raises again when it has ended
        pass
    finally:
        listener.close()


def _forward(port: int) -> str:
    """Command that brings the pages to another machine."""
    port = port or 8265
    return f"ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}"


def _listen(port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port {port}: allowed are 1 to 65535, or 0 for a free one")
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ConfigError(
            f"--port {port}: cannot be taken ({os.strerror(error.errno or 0)}). Give another, or 0 "
            "for a free one"
        ) from error


def make_app(root: Path) -> Starlette:
    """The application that answers for the runs below a folder."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.routing import Route

    site = _Site(root)
    routes = [
        Route("/", site.all_runs),
        Route("/run/{key:path}", site.one_run),
        Route("/compare", site.comparison),
        Route("/report/{key:path}", site.report),
        Route("/static/{name}", site.static),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[*_HOSTS], www_redirect=False)
    return Starlette(routes=routes, middleware=[hosts], exception_handlers={404: _not_found})


async def _not_found(request: Request, error: Exception) -> Response:
    return _page(pages.message_page("Not found", "There is no such page."), status=404)


class _Site:
    """Answers to requests. Pages are made one at a time: drawing and readers are for one thread."""

    def __init__(self, root: Path) -> None:
        self._runs = Runs(root)
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="pages")

    async def all_runs(self, request: Request) -> Response:
        return await self._answer(lambda: _page(pages.list_page(self._runs, _part(request))))

    async def one_run(self, request: Request) -> Response:
        def answer() -> Response:
            run = self._runs.get(request.path_params["key"])
            if run is None:
                return _no_run(request.path_params["key"])
            return _page(pages.run_page(self._runs, run, _part(request)))

        return await self._answer(answer)

    async def comparison(self, request: Request) -> Response:
        def answer() -> Response:
            keys = list(dict.fromkeys(request.query_params.getlist("run")))
            found = [(key, self._runs.get(key)) for key in keys]
            missing = [key for key, run in found if run is None]
            if missing:
                return _no_run(missing[0])
            if not 2 <= len(keys) <= pages.MOST_COMPARED:
                text = (
                    f"Choose from 2 to {pages.MOST_COMPARED} runs in the table; {len(keys)} given."
                )
                return _page(pages.message_page("Comparison", text), status=400)
            chosen = [cast(ServedRun, run) for _, run in found]
            return _page(pages.compare_page(self._runs, chosen, _part(request)))

        return await self._answer(answer)

    async def report(self, request: Request) -> Response:
        def answer() -> Response:
            run = self._runs.get(request.path_params["key"])
            if run is None:
                return _no_run(request.path_params["key"])
            try:
                with open_regular(run.path / "report.html") as file:
                    return _page(file.read(), policy=_REPORT_POLICY)
            except OSError as error:
                return _page(pages.message_page("No report", str(error)), status=404)

        return await self._answer(answer)

    async def static(self, request: Request) -> Response:
        file = pages.STATIC.get(request.path_params["name"])
        if file is None:
            return await _not_found(request, LookupError())
        return _page((_PACKAGE / file.path).read_bytes(), media_type=file.media_type)

    async def _answer(self, make: Callable[[], Response]) -> Response:
        def answer() -> Response:
            try:
                return make()
            except (TrainingError, *DAMAGE) as error:
                text = f"{type(error).__name__}: {error}"
                return _page(pages.message_page("This cannot be shown", text), status=500)

        return await asyncio.get_running_loop().run_in_executor(self._maker, answer)


def _part(request: Request) -> pages.Part:
    part = request.query_params.get("part")
    return cast(pages.Part, part) if part in ("main", "status") else "page"


def _no_run(key: str) -> Response:
    return _page(pages.message_page("Not found", f"There is no run {key} any more."), status=404)


def _page(
    content: str | bytes, *, status: int = 200, policy: str = _POLICY, media_type: str = "text/html"
) -> Response:
    from starlette.responses import Response

    headers = {**_HEADERS, "Content-Security-Policy": policy}
    return Response(content, status, headers, media_type)
