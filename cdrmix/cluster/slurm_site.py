"""The SLURM of this machine, where there is one: its partitions, its devices, its sbatch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cdrmix.cluster.sbatch_options import time_limit_seconds
from cdrmix.errors import ConfigError

_SECONDS_TO_ANSWER = 15
# Names that sites give their devices in GRES and features, by the presets of `cdrmix plan`. A GH200
# and an RTX A1000 are other devices.
_DEVICE_NAMES = (
    (r"(?<![a-z])h100(?!\d)", "h100-80"),
    (r"(?<![a-z])h200(?!\d)", "h200-141"),
    (r"(?<![a-z])a100(?!\d)", "a100-80"),
    ("mi300x", "mi300x-192"),
    (r"(?<!\d)4090(?!\d)", "rtx4090-24"),
)


@dataclass(frozen=True)
class Nodes:
    """Nodes of partitions; None where SLURM tells no figure."""

    partitions: str  # their names
    longest_seconds: int | None  # time limit of the partition that allows most; None: no limit
    cores: int | None  # of the node that has fewest
    memory_gib: float | None  # of the node that has least
    devices: tuple[str, ...]  # GRES and features, as the site names them
    most_cores: int | None  # of the node that has most
    most_memory_gib: float | None  # of the node that has most


def find_nodes(partition: str | None, *, for_gpus: bool) -> Nodes | None:
    """Asks sinfo about partitions ("a" or "a,b"), or the default one; None where it tells nothing.

    `for_gpus` leaves out nodes without GPUs, if any have some by the names of their GRES. Raises
    ConfigError if there is no such partition.
    """
    lines = _output("sinfo", "--noheader", "--format=%P|%l|%c|%m|%G|%f")
    rows = [line.split("|") for line in lines or () if line.count("|") == 5]
    if not rows:
        return None
    known = [row[0].rstrip("*") for row in rows]
    if partition is None:
        rows = [row for row in rows if row[0].endswith("*")]
    else:
        wanted = partition.split(",")
        missing = [name for name in wanted if name not in known]
        if missing:
            raise ConfigError(
                f"--option partition={partition}: no partition {missing[0]} here. There are "
                f"{', '.join(dict.fromkeys(known))}"
            )
        rows = [row for row in rows if row[0].rstrip("*") in wanted]
    if not rows:  # a cluster without a default partition
        return None
    limits = [_seconds(row[1]) for row in rows]
    if for_gpus:
        rows = [row for row in rows if row[4].startswith("gpu") or ",gpu" in row[4]] or rows
    # a node without RealMemory in slurm.conf has 1 MiB for SLURM
    memory = [mib / 1024 for mib in (_number(row[3]) for row in rows) if mib > 1]
    cores = [number for number in (_number(row[2]) for row in rows) if number]
    return Nodes(
        partitions=",".join(dict.fromkeys(row[0].rstrip("*") for row in rows)),
        longest_seconds=None if None in limits else max(each for each in limits if each),
        cores=min(cores, default=None),
        memory_gib=min(memory, default=None),
        devices=tuple(dict.fromkeys(text for row in rows for text in row[4:6])),
        most_cores=max(cores, default=None),
        most_memory_gib=max(memory, default=None),
    )


def preset_of(names: Iterable[str]) -> tuple[str, str] | None:
    """Preset of devices as a site names them, such as gpu:h100:8, and the name that says so.

    None where no name is known, where names are of several presets, and where one has another
    memory than the preset: an A100 of 40 GB, a part of a device.
    """
    found = {}
    for name in names:
        for word in re.split(r"[,&|\[\]()]", name.lower()):
            presets = {preset for device, preset in _DEVICE_NAMES if re.search(device, word)}
            sizes = re.findall(r"(\d+)gb?(?![a-z])", word)
            for preset in presets:
                is_whole = all(size == preset.rpartition("-")[2] for size in sizes)
                found[preset if is_whole else f"part of {preset}"] = name
    if len(found) != 1:
        return None
    preset, name = next(iter(found.items()))
    return None if preset.startswith("part of") else (preset, name)


def options_of_sbatch() -> list[str]:
    """Long options that the sbatch of this machine lists, those of plugins too; none without it."""
    lines = _output("sbatch", "--help") or ()
    return sorted({name for line in lines for name in re.findall(r"--([a-z][a-z0-9-]+)", line)})


def would_start(script: str) -> str:
    """Has sbatch look at a script without queueing it; returns when and where it would start.

    Raises ConfigError without sbatch, or with its message if it refuses.
    """
    try:
        done = _sbatch("--test-only", script)
    except FileNotFoundError:
        raise ConfigError(
            f"no program sbatch here. Queue {script} on a login node of the cluster"
        ) from None
    if done.returncode:
        raise ConfigError(f"{script}: sbatch refuses it: {_message(done)}")
    return _message(done)


def submit(script: str) -> str:
    """Queues a script and returns the job's number; ConfigError if sbatch refuses it."""
    done = _sbatch("--parsable", script)
    if done.returncode:
        raise ConfigError(f"{script}: sbatch refuses it: {_message(done)}")
    return done.stdout.strip().partition(";")[0]


def _sbatch(flag: str, script: str) -> subprocess.CompletedProcess[str]:
    words = ["sbatch", flag, "--", script]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def _message(done: subprocess.CompletedProcess[str]) -> str:
    """Lines of sbatch without its own mark."""
    marks = r"^(sbatch: )?(error: )?"
    return "\n".join(re.sub(marks, "", line) for line in done.stderr.strip().splitlines())


def _output(*command: str) -> Sequence[str] | None:
    """Lines that a program prints; None where it is missing, fails, or does not answer."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS_TO_ANSWER
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def _seconds(text: str) -> int | None:
    """Time limit of a partition; no limit where sinfo shows one in words of its own."""
    try:
        return time_limit_seconds(text)
    except ConfigError:
        return None


def _number(text: str) -> int:
    """Number such as 64, or the least of nodes that differ, 64+; 0 for anything else."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0
