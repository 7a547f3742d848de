"""One start of the deepspeed launcher, and what it hands over to its ranks in private files.

A command line passes through shells (pdsh gives its words to one on each host, unquoted), and ps
shows it to every user. So the launcher's command line holds no values of the user and no secrets:
each rank begins as launch/rank.py, which reads them from a file and becomes the training script.
"""

import contextlib
import ctypes
import json
import os
import platform
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from cdrmix.cluster.hosts import Host, address_for_others, free_port_on, is_this_machine
from cdrmix.cluster.messages import MET, Outcome, await_outcome, is_listed, read_outcome
from cdrmix.cluster.starts import COMMANDED_VARIABLE
from cdrmix.config.load import shipped
from cdrmix.config.redaction import REDACTED
from cdrmix.config.schema import Config
from cdrmix.errors import EXIT_FAULT, EXIT_INFRASTRUCTURE, EXIT_USER_ERROR, ConfigError
from cdrmix.log import get_logger

logger = get_logger(__name__)

FOLDER_VARIABLE = "CDRMIX_LAUNCH_FOLDER"
_FLAG = "--handed-over"
_FILE = "ranks.json"
# A file server may show a new file to other hosts some seconds late.
_SECONDS_TO_SEE = 20.0
# Variables of a rank that the launcher alone sets.
_OF_THE_LAUNCHER = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK"),
    *("CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
# Special between a shell's double quotes, in which DeepSpeed puts an unusual value.
_SPECIAL = re.compile(r'([\\"$`])')
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


def _check_paths_for_shells() -> None:
    """Raises ConfigError if a path that the launcher gives to other hosts would not arrive."""
    paths = {"the present folder": Path.cwd(), "Python": sys.executable, "CDRmix": _RANK}
    for what, path in paths.items():
        if shlex.quote(str(path)) != str(path) or "%" in str(path):
            raise ConfigError(
                f"--hostfile: {what} is at {str(path)!r}, and DeepSpeed's launcher gives this "
                "path to shells of other hosts as it is. Use one of letters, digits and _./+,:=@-"
            )


class LauncherStart(contextlib.AbstractContextManager["LauncherStart"]):
    """A running start of the launcher; leaving the context ends its remaining processes."""

    def __init__(
        self,
        hosts: Sequence[Host],
        arguments: Sequence[str],
        *,
        ranks_per_host: int | None,
        folder: Path,
        variables: Mapping[str, str],
        script: Path = TRAIN,
        output: IO[str] | None = None,
    ) -> None:
        """Starts `deepspeed ... launch/rank.py`, which becomes `script arguments`.

        Args:
            hosts: of a hostfile; none for this machine.
            ranks_per_host: default as the launcher decides.
            folder: existing folder of this start alone, seen by all hosts.
            variables: environment of the ranks on all hosts.
            output: file for all that launcher and ranks print; default where this process does.
        Raises:
            ConfigError: if a path cannot pass the shells of other hosts.
            InfrastructureError: if the first host cannot be reached.
        """
        self._folder = folder.resolve()
        self._began = time.monotonic()
        if hosts:
            _check_paths_for_shells()
        order = {"script": str(script), "arguments": [*arguments], "variables": {**variables}}
        write_private(self._folder / _FILE, json.dumps(order))
        end_with_parent: Callable[[], object] | None = None
        if sys.platform == "linux":  # the kernel sends the child SIGTERM when `cdrmix launch` dies
            end_with_parent = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM)
        first, *others = [host.name for host in hosts] or ["localhost"]
        words = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "critical"]
        # chosen last: another program may take it before rank 0 binds it
        words += ["--master_port", str(free_port_on(first))]
        if not hosts:
            words += ["--hostfile", os.devnull]  # else it takes /job/hostfile where there is one
        else:
            hostfile = self._folder / "hostfile"
            hostfile.write_text("".join(f"{h.name} slots={h.slots}\n" for h in hosts))
            address = address_for_others(first, others)
            words += ["--hostfile", str(hostfile), "--master_addr", address]
            if not others and not is_this_machine(first):
                words.append("--force_multi")  # else one host is taken to be this one
        if ranks_per_host is not None:
            words += ["--num_gpus", str(ranks_per_host)]
        self._process = subprocess.Popen(
            [*words, str(_RANK)],
            env=_environment(variables, self._folder, over_ssh=bool(hosts)),
            stdin=subprocess.DEVNULL,  # ssh would read what the user types
            stdout=output,
            stderr=output,
            # a session of its own: Ctrl-C in the terminal reaches `cdrmix launch` alone, which asks
            # the ranks to save, and `__exit__` can signal all of them as one process group
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - this process has no other thread here
        )

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

    def wait_for_launcher(self, seconds: float) -> int | None:
        """Waits at most so many seconds for the launcher to end; its exit code, if it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def __exit__(self, *_: object) -> None:
        """Ends every process of this start on this machine, and the launchers on the others."""
        if self._process.poll() is None:
            self._process.terminate()  # DeepSpeed's own handler ends the launchers over ssh
            self.wait_for_launcher(_SECONDS_TO_FOLLOW)
        # the group too, because a launcher that was killed leaves its ranks behind
        for number, seconds in ((signal.SIGTERM, _SECONDS_AFTER_TERM), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + seconds
            signalled: int = number
            while time.monotonic() < deadline:
                self._process.poll()  # a zombie would count as a process of the group
                try:
                    os.killpg(self._process.pid, signalled)
                except ProcessLookupError:
                    return
                signalled = 0  # from now on it only asks whether a process is left
                time.sleep(_POLL_SECONDS)


def _environment(variables: Mapping[str, str], folder: Path, *, over_ssh: bool) -> dict[str, str]:
    """Environment of the launcher.

    Over ssh, DeepSpeed puts parts of it and the whole of a file into the command lines of pdsh, so
    the ranks' variables are left out there: each rank reads them from the hand-over.
    """
    ours = {FOLDER_VARIABLE: str(folder)}
    if COMMANDED_VARIABLE in variables:
        ours[COMMANDED_VARIABLE] = variables[COMMANDED_VARIABLE]
    if over_ssh:
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


def users_files() -> list[Path]:
    """The user's ~/.deepspeed_env, if it exists; refused if others may write it.

    DeepSpeed also reads one in the current folder. That file may have come with somebody's
    checkout, and would choose libraries and programs for every rank, so it is ignored here.
    """
    home = Path.home() / ".deepspeed_env"
    here = Path.cwd() / ".deepspeed_env"
    if here != home and here.exists():
        logger.warning(
            "%s: not taken over, because it may have come with the checkout. Put its lines into "
            "~/.deepspeed_env, or into launch.environment of the configuration",
            here,
        )
    if not home.is_file():
        return []
    entry = home.stat()
    if entry.st_uid not in (os.getuid(), 0) or entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{home}: others may write it, and it chooses programs for every rank. Try: chmod "
            f"go-w {home}"
        )
    return [home]


def write_environment_file(
    path: Path, *, inherited: Sequence[Path], variables: Mapping[str, str]
) -> None:
    """Writes the private file of variables that DeepSpeed's launcher reads (0.19.8: runner.py).

    Lines of the user's own files go first, without the blank lines and comments that the launcher
    fails on; then the variables, escaped so that each value arrives unchanged. Raises ConfigError
    if a line of the user's is not NAME=VALUE.
    """
    lines = []
    for file in inherited:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            text = line.strip().removeprefix("export ").strip()
            if not text or text.startswith("#"):
                continue
            if not _ASSIGNMENT.fullmatch(text):
                raise ConfigError(f"{file}:{number}: not NAME=VALUE, as every line must be")
            lines.append(text)
    for name, value in variables.items():
        # pdsh replaces %n and the like in the command lines that it passes on
        lines.append(name + "=" + _SPECIAL.sub(r"\\\1", value).replace("%", "%%"))
    write_private(path, "".join(f"{line}\n" for line in lines))


def write_private(path: Path, text: str) -> None:
    """Writes a file that its owner alone can read, from its first byte on."""
    # O_EXCL makes a new file, never one that somebody else has put there with other permissions
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def set_aside(path: Path) -> Path:
    """Renames a file to its name with `.before`, or `.before-2` and on where it is taken: what was
    set aside earlier may hold the work of a person too. Returns the new path."""
    kept = path.with_name(f"{path.name}.before")
    number = 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.before-{number}")
    path.replace(kept)
    return kept


def train_arguments(
    config: Path | None, overrides: Sequence[str], profile: str | None
) -> list[str]:
    """Command line of launch/train.py without --run-dir and --resume."""
    arguments = [] if config is None else ["--config", str(config)]
    for override in overrides:
        arguments += ["--set", override]
    return arguments if profile is None else [*arguments, "--profile", profile]


def launch_environment(config: Config) -> dict[str, str]:
    """Variables of `launch.environment`; values left out of a snapshot come from this process.

    Raises ConfigError that names those which this process lacks too.
    """
    variables = dict(config.launch.environment)
    redacted = [name for name, value in variables.items() if value == REDACTED]
    missing = [name for name in redacted if name not in os.environ]
    if missing:
        raise ConfigError(
            "\n".join(
                f"launch.environment.{name} = {REDACTED}: a snapshot holds no values. Give --set "
                f"launch.environment.{name}=VALUE, or export {name}"
                for name in missing
            )
        )
    return variables | {name: os.environ[name] for name in redacted}


def become_rank() -> NoReturn:
    """Turns this process into the script that was handed over, with its variables."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, ""))
    order = _order(folder)
    if order is None:
        print(
            f"error: {platform.node()}: cannot read {folder / _FILE}, which was written for it. "
            "All hosts of a run must see its run directory. Try `cdrmix doctor --hostfile HOSTS "
            "--folder DIR`",
            file=sys.stderr,
        )
        sys.exit(EXIT_USER_ERROR)
    variables = {n: v for n, v in order["variables"].items() if n not in _OF_THE_LAUNCHER}
    if "PATH" in variables:  # the interpreter's programs (such as ninja) must be found all the same
        programs = str(Path(sys.executable).parent)
        variables["PATH"] = os.pathsep.join([programs, variables["PATH"]])
    os.environ.update(variables)
    # a new program, so that its loader and libraries see the variables from their beginning
    os.execv(sys.executable, [sys.executable, "-u", order["script"], _FLAG, *sys.argv[1:]])


def arguments_of(words: Sequence[str]) -> list[str]:
    """Command line of a script that was started by `words`, without the program.

    After `become_rank` it is the one handed over, with the launcher's words.
    """
    if _FLAG not in words:
        return list(words)
    order = _order(Path(os.environ[FOLDER_VARIABLE]))
    assert order is not None, "read a moment ago by the same process"
    return [*order["arguments"], *(word for word in words if word != _FLAG)]


def _order(folder: Path) -> dict[str, Any] | None:
    deadline = time.monotonic() + _SECONDS_TO_SEE
    # without a folder this was not started by `cdrmix launch`, and no file will come
    while folder.name and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            order: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            return order
        time.sleep(0.5)
    return None
