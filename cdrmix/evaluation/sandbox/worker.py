"""A zygote as the host sees it: started, asked for one program after the other, ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cdrmix.errors import InfrastructureError, PlanError
from cdrmix.evaluation.sandbox.folder import remove_folder
from cdrmix.evaluation.sandbox.judging import lines_of, verdict_of
from cdrmix.evaluation.sandbox.landlock import landlock_version
from cdrmix.evaluation.sandbox.levels import guards_of, interpreter_reach, zygote_command
from cdrmix.evaluation.sandbox.messages import Ended, receive_message, send_message
from cdrmix.evaluation.sandbox.program import LevelName, Limits, Program, Verdict

_SECONDS_TO_START = 60.0
_SECONDS_TO_END = 10.0
_LONGEST_LINE = 200
# Sets and numbers of a program do not change from one run to the next.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "TZ": "UTC",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Worker:
    """Runs programs one after the other, each in a process and a folder of its own.

    Raises:
        DataError: a package of the limits is not installed.
    """

    def __init__(
        self, level: LevelName, limits: Limits, guards: tuple[str, ...] | None = None
    ) -> None:
        """Starts a zygote.

        Args:
            guards: of `runner.GUARDS`, fewer of them to show what each of them stops; None: all
                that the level has.
        """
        self._level, self._limits = level, limits
        self._guards = guards_of(level) if guards is None else guards
        self._reach = interpreter_reach(limits.packages)
        self._start()

    def _start(self) -> None:
        self._is_ready = self._is_closed = False
        self.folder = Path(tempfile.mkdtemp(prefix="cdrmix-sandbox-"))
        self._errors = os.memfd_create("errors")
        try:
            self._process = subprocess.Popen(
                zygote_command(self._level, self.folder, self._reach),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=self.folder,
                env=_ENVIRONMENT,
                start_new_session=True,  # Ctrl-C goes to the host, which ends it in order
            )
        except OSError as error:
            remove_folder(self.folder)
            os.close(self._errors)
            raise InfrastructureError(
                f"sandbox {self._level}: no process could be started: {error}"
            ) from error
        assert self._process.stdin and self._process.stdout
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        reach = self._reach
        self._send(
            {
                "guards": self._guards,
                "landlock": landlock_version(),
                "folder": str(self.folder),
                "folders": [*reach.folders, *reach.packages],
                "files": reach.files,
                "listed": reach.listed,
                "paths": reach.paths,
            }
        )

    def _send(self, message: dict[str, Any]) -> None:
        try:
            send_message(self._input, message)
        except BrokenPipeError:
            raise self._lost("ended") from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            return receive_message(self._output, seconds)
        except Ended as ended:
            raise self._lost(str(ended)) from None

    def _lost(self, what: str) -> InfrastructureError:
        """Error of a zygote that is gone, with the last line that it said."""
        # No program writes to the zygote's stderr.
        lines = os.pread(self._errors, 1 << 16, 0).decode(errors="replace").splitlines()
        words = f": {lines[-1][:_LONGEST_LINE]}" if lines else ""
        self.close()
        return InfrastructureError(
            f"sandbox {self._level}: its process {what}, exit status {self._process.returncode}"
            f"{words}. Evaluate again; where it comes back, look for what ends processes on this "
            "machine (memory, a container's rules)"
        )

    @property
    def process(self) -> int:
        """Process id of the zygote, or of what started it."""
        return self._process.pid

    def run(self, program: Program, wall_seconds: float) -> Verdict:
        """Runs one program to its end.

        Raises:
            InfrastructureError: the zygote was lost, twice with this program.
            PlanError: the kernel refuses one of the guards.
        """
        try:
            return self._run(program, wall_seconds)
        except InfrastructureError:
            self._start()
            return self._run(program, wall_seconds)

    def _run(self, program: Program, wall_seconds: float) -> Verdict:
        if not self._is_ready:
            self._receive(_SECONDS_TO_START)
            self._is_ready = True
        nonce = secrets.token_hex(16)
        self._send({**asdict(self._limits), "wall_seconds": wall_seconds})
        self._send(
            {
                "nonce": nonce,
                "setup": program.setup,
                "source": program.source,
                "tests": program.tests,
                "expressions": [case.expression for case in program.cases],
            }
        )
        # The zygote ends a program by itself; that it does not answer means that it is gone.
        reply = self._receive(wall_seconds + _SECONDS_TO_START)
        lines = lines_of(reply["report"], nonce)
        if lines and lines[-1].get("kind") == "fault":
            raise PlanError(
                f"sandbox {self._level}: a guard could not be put on: {lines[-1].get('message')}. "
                "No program is run without it"
            )
        return verdict_of(program, self._limits, reply, lines)

    def close(self) -> None:
        """Ends the zygote and removes its folder; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        # Not by closing the pipe alone, which a process that the host forked may hold open too.
        with contextlib.suppress(OSError, ValueError):
            send_message(self._input, {})
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_folder(self.folder)
        os.close(self._errors)
