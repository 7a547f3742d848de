"""Options of sbatch: names, time limits and sizes as it reads them, checked before it does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from cdrmix.errors import ConfigError

# Long options of sbatch 22.05 to 24.11, without those that only ask sbatch something.
_LISTED = """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
    constraint container container-id contiguous core-spec cores-per-socket cpu-freq
    cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
    exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold input job-name
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks
    ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode
    output overcommit oversubscribe partition power prefer priority profile propagate qos quiet
    reboot requeue reservation segment signal sockets-per-node spread-job stepmgr switches
    thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid use-min-nodes
    verbose wait wait-all-nodes wckey
"""
NAMES = frozenset(_LISTED.split())
# Those of them that the plan or the script reads the value of.
_WITH_VALUES = frozenset(
    ("cpus-per-task", "gpus", "gpus-per-node", "gpus-per-task", "gres", "mem", "partition")
    + ("signal", "time")
)
# The script depends on them: a flag of `cdrmix slurm` for each, or none.
OF_FLAGS = {
    "nodes": "give --nodes",
    "ntasks": "give --nodes and --gpus-per-node, a rank a device",
    "ntasks-per-node": "give --gpus-per-node, a rank a device",
    "ntasks-per-gpu": "give --gpus-per-node, a rank a device",
    "array": "give --chain K",
    "batch": "give --starter",
    "wrap": "the script has its own commands",
}
_OF_A_PLUGIN = "container-"  # of pyxis, which many sites have for containers
TIME_FORMS = "MINUTES, MINUTES:SECONDS, HH:MM:SS, DAYS-HH, DAYS-HH:MM, DAYS-HH:MM:SS or UNLIMITED"
_TIME = re.compile(
    r"(?P<days>[0-9]{1,6})-(?P<h>[0-9]{1,2})(:(?P<m>[0-9]{1,2})(:(?P<s>[0-9]{1,2}))?)?"
    r"|(?P<hours>[0-9]{1,6}):(?P<mm>[0-9]{1,2}):(?P<ss>[0-9]{1,2})"
    r"|(?P<minutes>[0-9]{1,8})(:(?P<seconds>[0-9]{1,2}))?",
    re.ASCII,
)
_UNITS_GIB = {"K": 2**-20, "M": 2**-10, "G": 1, "T": 2**10}
_SIGNAL = re.compile(r"(?:RB|BR|B):(?:SIG)?(?:USR1|10)(?:@(\d{1,5}))?", re.ASCII)
_DEFAULT_NOTICE_SECONDS = 60  # of sbatch, where --signal has no @SECONDS


def time_limit_seconds(text: str) -> int | None:
    """Reads a time limit in any form that sbatch takes; None: there is no limit.

    Raises ConfigError where sbatch would refuse it, would read another time than it says (minutes
    or seconds from 60, hours from 24 behind days), or takes 0 for no limit.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    found = _TIME.fullmatch(text)
    if not found:
        raise ConfigError(f"--time {text!r}: give {TIME_FORMS}, such as {_example(text)}")
    fields = {name: int(value) for name, value in found.groupdict().items() if value is not None}
    limits = {"h": 24, "m": 60, "s": 60, "mm": 60, "ss": 60, "seconds": 60}
    names = {"h": "hours", "m": "minutes", "s": "seconds", "mm": "minutes", "ss": "seconds"}
    for field, value in fields.items():
        if value >= limits.get(field, value + 1):
            raise ConfigError(
                f"--time {text!r}: {value} {names.get(field, field)}, allowed are 0 to "
                f"{limits[field] - 1} there. Give {TIME_FORMS}"
            )
    of = fields.get
    total = of("days", 0) * 86_400 + (of("h", 0) + of("hours", 0)) * 3_600
    total += (of("m", 0) + of("mm", 0) + of("minutes", 0)) * 60
    total += of("s", 0) + of("ss", 0) + of("seconds", 0)
    if total == 0:
        raise ConfigError(f"--time {text!r}: SLURM takes 0 for no limit. Give UNLIMITED, or a time")
    return total


def _example(text: str) -> str:
    """Time limit that a text such as '2days' or '36h' may mean, in a form of sbatch."""
    wanted = re.fullmatch(r"\s*(\d{1,4})\s*(d|h|m)[a-z]*\s*", text.lower())
    if not wanted:
        return "24:00:00 or 2-00:00:00"
    number = int(wanted[1])
    return {"d": f"{number}-00:00:00", "h": f"{number}:00:00", "m": f"{number}"}[wanted[2]]


def notice_seconds(signal: str) -> int:
    """Seconds between the signal and the time limit, of a value of --signal.

    Raises ConfigError if it is not USR1 to the script, which waits for that.
    """
    found = _SIGNAL.fullmatch(signal.upper())
    if not found:
        raise ConfigError(
            f"--option signal={signal}: the script waits for USR1, sent to it alone. Give "
            "signal=B:USR1@SECONDS"
        )
    return int(found[1] or _DEFAULT_NOTICE_SECONDS)


def memory_gib(text: str, *, flag: str = "--mem") -> float:
    """Reads a size of sbatch, such as 64G, in GiB; without a unit it is MiB. ConfigError if wrong.

    0 is the whole memory of a node.
    """
    found = re.fullmatch(r"(\d{1,9})([KMGT]?)B?", text.upper(), re.ASCII)
    if not found:
        raise ConfigError(
            f"{flag} {text!r}: give a whole number with K, M, G or T, such as 64G; 0 asks for all "
            "memory of a node"
        )
    return int(found[1]) * _UNITS_GIB[found[2] or "M"]


def fewest_devices(options: Mapping[str, str | None], *, nodes: int) -> tuple[str, int] | None:
    """Option that asks for the fewest devices of a node, and their number; None where none tells.

    `gpus-per-task` is left out: what it comes to depends on the tasks.
    """
    counts: dict[str, int] = {}
    for name in ("gres", "gpus-per-node", "gpus"):
        words = (options.get(name) or "").split(",")
        if name == "gres":  # other resources stand there too
            words = [word for word in words if re.match(r"gpu(:|$)", word)]
        # COUNT, KIND:COUNT, or a kind alone, which is one device
        counted = [re.search(r"(?:^|:)(\d{1,6})$", word, re.ASCII) for word in words if word]
        if counted:
            total = sum(int(found[1]) if found else 1 for found in counted)
            counts[f"{name}={options[name]}"] = total // nodes if name == "gpus" else total
    return min(counts.items(), key=lambda item: item[1], default=None)


def read_options(
    options: Sequence[str], *, of_site: Sequence[str]
) -> tuple[dict[str, str | None], list[str], list[str]]:
    """Reads NAME=VALUE or NAME of --option; a later one replaces an earlier one of its name.

    Args:
        of_site: names that the sbatch of this machine lists, which has options of its plugins;
            empty where there is none.
    Returns:
        Options by name, problems, and warnings about names that only a plugin may know.
    """
    read: dict[str, str | None] = {}
    problems, warnings = [], []
    for option in options:
        name, separator, value = option.partition("=")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*(=[^\x00-\x1f\x7f]*)?", option):
            problems.append(f"--option {option!r}: give NAME or NAME=VALUE, such as partition=gpu")
            continue
        if name in _WITH_VALUES and not value:
            problems.append(f"--option {option}: give a value, {name}=VALUE")
        elif name in OF_FLAGS:
            problems.append(f"--option {option}: {OF_FLAGS[name]}")
        elif name not in NAMES and name not in of_site:
            known = sorted({*NAMES, *of_site})
            near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
            if name.startswith(_OF_A_PLUGIN) and not of_site:
                near = []
            unknown = f"--option {option}: sbatch has no long option --{name}"
            if near or len(name) == 1 or of_site:
                meant = f". Did you mean {near[0]}?" if near else "; see sbatch --help"
                problems.append(unknown + meant)
            else:
                warnings.append(f"{unknown} of its own: a plugin of the site must know it")
        read[name] = value if separator else None
    return read, problems, warnings
