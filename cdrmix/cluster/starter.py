"""One start of the deepspeed launcher: prepares it, watches it, and ends all its processes."""

import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from cdrmix.cluster.handover import FOLDER_VARIABLE, hand_over, users_files, write_environment_file
from cdrmix.cluster.hosts import Host, address_for_others, free_port_on, is_this_machine
from cdrmix.cluster.messages import MET, Outcome, await_outcome, is_listed, read_outcome
from cdrmix.cluster.starts import COMMANDED_VARIABLE
from cdrmix.config.load import shipped
from cdrmix.errors import EXIT_FAULT, EXIT_INFRASTRUCTURE, EXIT_USER_ERROR, ConfigError

TRAIN = shipped("launch") / "train.py"
_RANK = shipped("launch") / "rank.py"
_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# DeepSpeed's launcher looks at its ranks once a second and gives them 30 s after a SIGTERM.
_SECONDS_TO_FOLLOW = 20.0
_SECONDS_AFTER_TERM = 35.0
# The head writes it while the ranks end; a file server may show it to this host later.
_SECONDS_FOR_OUTCOME = 3.0
# pdsh waits for the ssh of each host, and by default ssh waits forever for a host that is cut off.
_SSH_KEEPALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3 -o ConnectTimeout=10"


@dataclass(frozen=True)
class LaunchPlace:
    """Hosts of a hostfile, or this machine (no hosts), and the number of ranks on each."""

    hosts: tuple[Host, ...] = ()
    ranks_per_host: int | None = None

    @property
    def first(self) -> str:
        """Name of the host of rank 0."""
        return self.hosts[0].name if self.hosts else "localhost"


class LauncherStart:
    """A running start of the launcher; leaving the context ends its remaining processes."""

    def __init__(
        self,
        place: LaunchPlace,
        arguments: Sequence[str],
        *,
        folder: Path,
        variables: Mapping[str, str],
        script: Path = TRAIN,
    ) -> None:
        """Starts `deepspeed ... launch/rank.py`, which becomes `script arguments`.

        Args:
            folder: existing folder of this start alone, seen by all hosts.
            variables: environment of the ranks on all hosts.
        Raises:
            ConfigError: if a path cannot pass the shells of other hosts.
            InfrastructureError: if the first host cannot be reached.
        """
        self._folder = folder.resolve()
        self._began = time.monotonic()
        paths = {"the present folder": Path.cwd(), "Python": sys.executable, "CDRmix": _RANK}
        for what, path in paths.items() if place.hosts else ():
            if shlex.quote(str(path)) != str(path) or "%" in str(path):
                raise ConfigError(
                    f"--hostfile: {what} is at {str(path)!r}, and DeepSpeed's launcher gives this "
                    "path to shells of other hosts as it is. Use one of letters, digits and "
                    "_./+,:=@-"
                )
        hand_over(self._folder, script=script, arguments=arguments, variables=variables)
        end_with_parent: Callable[[], object] | None = None
        if sys.platform == "linux":  # the kernel sends the child SIGTERM when `cdrmix launch` dies
            end_with_parent = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM)
        # chosen last: another program may take it before rank 0 binds it
        self.port = free_port_on(place.first)
        words = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "critical"]
        words += ["--master_port", str(self.port)]
        if not place.hosts:
            words += ["--hostfile", os.devnull]  # else it takes /job/hostfile where there is one
        else:
            hostfile = self._folder / "hostfile"
            lines = [f"{host.name} slots={host.slots}\n" for host in place.hosts]
            hostfile.write_text("".join(lines))
            address = address_for_others(place.first, [host.name for host in place.hosts[1:]])
            words += ["--hostfile", str(hostfile), "--master_addr", address]
            if len(place.hosts) == 1 and not is_this_machine(place.first):
                words.append("--force_multi")  # else one host is taken to be this one
        if place.ranks_per_host is not None:
            words += ["--num_gpus", str(place.ranks_per_host)]
        self._process = subprocess.Popen(
            [*words, str(_RANK)],
            env=_environment(place, variables, self._folder),
            stdin=subprocess.DEVNULL,  # ssh would read what the user types
            # a session of its own: Ctrl-C in the terminal reaches `cdrmix launch` alone, which asks
            # the ranks to save, and `__exit__` can signal all of them as one process group
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - this process has no other thread here
        )

    def __enter__(self) -> Self:
        return self

    def wait(self, *, start_seconds: float) -> Outcome:
        """Waits for the outcome; the ranks of all hosts must have met after `start_seconds`."""
        while self._process.poll() is None:
            # the ranks have ended by then; a launcher that waits for a lost host may not follow
            if read_outcome(self._folder) is not None:
                self.wait_for_launcher(_SECONDS_TO_FOLLOW)
                break
            late = time.monotonic() - self._began > start_seconds
            if late and not is_listed(self._folder, MET):
                return Outcome(EXIT_FAULT, f"the ranks did not meet in {start_seconds:.0f} s", 0)
            time.sleep(_POLL_SECONDS)
        outcome = await_outcome(self._folder, _SECONDS_FOR_OUTCOME)
        if outcome is not None:
            return outcome
        code = self._process.poll()
        if code in (EXIT_USER_ERROR, EXIT_INFRASTRUCTURE):
            return Outcome(code, "the launcher refused to start", 0)
        # 0 is no proof of a good end: the launcher also exits so when a signal ends its ranks
        end = "did not end" if code is None else f"ended with code {code}"
        return Outcome(EXIT_FAULT, f"the deepspeed launcher {end} and no rank said why", 0)

    def wait_for_launcher(self, seconds: float) -> None:
        """Waits at most so many seconds for the launcher to end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def __exit__(self, *_: object) -> None:
        """Ends every process of this start on this machine, and the launchers on the others."""
        if self._process.poll() is None:
            self._process.terminate()  # DeepSpeed's own handler ends the launchers over ssh
            self.wait_for_launcher(_SECONDS_TO_FOLLOW)
        # the group too, because a launcher that was killed leaves its ranks behind
        for number, seconds in ((signal.SIGTERM, _SECONDS_AFTER_TERM), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + seconds
            if not self._signal_all(number):
                return
            while self._signal_all(0) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def _signal_all(self, number: int) -> bool:
        """Signals the processes of this start; False if none is left."""
        self._process.poll()  # a zombie would count as a process of the group
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def _environment(place: LaunchPlace, variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Environment of the launcher.

    Over ssh, DeepSpeed puts parts of it and the whole of a file into the command lines of pdsh, so
    the ranks' variables are left out there: each rank reads them from the hand-over.
    """
    ours = {FOLDER_VARIABLE: str(folder)}
    if COMMANDED_VARIABLE in variables:
        ours[COMMANDED_VARIABLE] = variables[COMMANDED_VARIABLE]
    if place.hosts:
        environment = {**os.environ, **ours}
        environment |= {n: value for n, value in variables.items() if re.match("PDSH_|SSH_", n)}
    else:
        environment = {**os.environ, **variables, **ours}
    # finds the interpreter's programs, such as ninja, without an activated environment
    programs = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([programs, environment.get("PATH", os.defpath)])
    ssh = environment.get("PDSH_SSH_ARGS_APPEND", "")
    environment["PDSH_SSH_ARGS_APPEND"] = f"{ssh} {_SSH_KEEPALIVE}".strip()
    file = folder / "deepspeed_env"
    named = {**environment, **variables}
    accelerator = {name: named[name] for name in ["DS_ACCELERATOR"] if name in named}
    write_environment_file(file, inherited=users_files(), variables={**accelerator, **ours})
    environment |= {**accelerator, "DS_ENV_FILE": str(file)}
    return environment
