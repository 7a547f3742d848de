"""State of one host for `cdrmix doctor`: runs on that host and prints one JSON object. No torch."""

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from cdrmix.cluster.handover import FOLDER_VARIABLE
from cdrmix.cluster.host_limits import (
    compilers,
    limits,
    own_version,
    temporary_folder,
    unknown_interfaces,
)
from cdrmix.cluster.messages import LAUNCHER_LOCK
from cdrmix.cluster.tier_leftovers import left_tiers, remove_left_tiers
from cdrmix.network import address_towards, interface_towards

# Must be equal on all hosts, for equal results and so that the ranks understand each other.
PACKAGES = ("torch", "deepspeed", "numpy", "transformers", "tokenizers", "safetensors", "pydantic")
_SHARED_MEMORY = Path("/dev/shm")
_RANKS_FILES = ("deepspeed_", "torch_")
_WATCHDOG = "cdrmix.cluster.watchdog"
_LONGEST_BUILD_SECONDS = 1_800.0  # of an operator, on a slow host
_SECONDS_TO_CONNECT = 5.0
_SECONDS_TO_LISTEN = 60.0
# Variables by which a user asks for fewer devices, or for none.
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def driver_devices(root: Path = Path("/")) -> dict[str, int]:
    """Number of devices by maker, if there are any, whether or not torch can use them."""
    nvidia = [path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    counts = {"NVIDIA": len(nvidia), "AMD": 0}
    if (root / "dev/kfd").exists():
        # processors are nodes of this list too, with no SIMD units
        for node in root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
            text = node.read_text(encoding="utf-8", errors="replace")
            counts["AMD"] += re.search(r"^simd_count [1-9]", text, re.MULTILINE) is not None
    return {maker: count for maker, count in counts.items() if count}


class RocmDevice(NamedTuple):
    """Device as AMD's own program tells of it."""

    name: str
    memory_bytes: int | None


def rocm_devices() -> list[RocmDevice]:
    """AMD's devices by rocm-smi; none where it is missing or says nothing of use.

    Its JSON has a card by name, with its series and memory under keys whose capitals differ
    between versions.
    """
    query = ["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        cards = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    devices = []
    for card in cards.values() if isinstance(cards, dict) else ():
        told = {key.lower(): value for key, value in card.items()} if isinstance(card, dict) else {}
        memory = str(told.get("vram total memory (b)", ""))
        if "card series" in told or memory:
            size = int(memory) if memory.isdecimal() else None
            devices.append(RocmDevice(str(told.get("card series", "AMD")), size))
    return devices


def unusable_devices(usable: int, root: Path = Path("/")) -> str | None:
    """Message about devices that torch cannot use although no variable hides them, or None.

    `usable` is the number that torch sees.
    """
    counts = driver_devices(root)
    is_asked = os.environ.get("DS_ACCELERATOR") == "cpu" or any(n in os.environ for n in HIDING)
    if is_asked or usable >= sum(counts.values()):
        return None
    devices = " and ".join(f"{count} {maker}" for maker, count in counts.items())
    return (
        f"this host has {devices} devices, and the installed torch can use {usable}: what it "
        "cannot use stands still. Install the torch build for this maker and driver (CUDA or "
        "ROCm), look at the permissions of /dev/nvidia* or /dev/kfd, or set DS_ACCELERATOR=cpu to "
        "train on CPUs"
    )


def _devices() -> tuple[list[str], int]:
    """Devices of this host, each with name and memory or else its maker, and how many torch can
    use."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    devices: list[str] = []
    with contextlib.suppress(FileNotFoundError, subprocess.TimeoutExpired):
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
        devices = done.stdout.splitlines() if done.returncode == 0 else []
    counts = driver_devices()
    usable = 0
    if counts:  # torch takes seconds to import, in a process of its own
        command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        usable = int(done.stdout) if done.returncode == 0 else 0
    if devices:
        counts.pop("NVIDIA", None)
    if "AMD" in counts and (cards := rocm_devices()):
        counts.pop("AMD")
        devices += [
            f"{card.name}, {card.memory_bytes >> 20} MiB" if card.memory_bytes else card.name
            for card in cards
        ]
    devices += [maker for maker, count in counts.items() for _ in range(count)]
    return devices, usable


def look(folder: str, towards: str, variables: str = "{}") -> dict[str, Any]:
    """Versions, devices, clock, interface, limits, free space and leftovers of this host.

    Args:
        folder: of the runs.
        towards: address of the first host, which ranks connect to.
        variables: JSON object of those that a start hands to the ranks of this host.
    """
    os.environ.update(json.loads(variables))
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os.environ.pop("NCCL_SOCKET_IFNAME", None)  # ranks on CPUs talk by gloo alone
    packages: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    devices, usable = _devices()
    free = [
        shutil.disk_usage(path).free if os.path.isdir(path) else None
        for path in (folder, _SHARED_MEMORY)
    ]
    try:
        address = address_towards(towards)
    except OSError:
        address = None
    return {
        "cdrmix": own_version(),
        "python": [platform.python_version(), f"{platform.python_version()} at {sys.executable}"],
        "packages": packages,
        "devices": devices,
        "unusable": unusable_devices(usable),
        "cores": len(os.sched_getaffinity(0)),
        "is_for_cpus": os.environ.get("DS_ACCELERATOR") == "cpu",
        "interface": interface_towards(towards),
        "address": address,
        "unknown_interfaces": unknown_interfaces(os.environ, psutil.net_if_addrs()),
        "limits": limits(Path(folder)),
        "temporary": temporary_folder(),
        **compilers(),
        "disk_free_bytes": free[0],
        "shared_memory_free_bytes": free[1],
        "processes": [f"{number} {words}" for number, words in _processes()],
        "files": [
            str(path)
            for path in (*_files(), *_build_locks(), *left_tiers(_SHARED_MEMORY, Path(folder)))
        ],
        "time": time.time(),
    }


def remove_leftovers() -> dict[str, Any]:
    """Ends this user's orphaned ranks and launchers, and deletes their files in shared memory, the
    locks of their builds and checkpoints in memory that no run can go on from."""
    lines = []
    for number, words in _processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, 9)
            lines.append(f"process {number} {words}")
    for path in (*_files(), *_build_locks()):
        path.unlink(missing_ok=True)
        lines.append(str(path))
    return {"removed": [*lines, *remove_left_tiers(_SHARED_MEMORY)]}


def write(path: str, text: str) -> dict[str, Any]:
    """Writes a file as checkpoints are written: under a temporary name, synced, renamed."""
    # a name without the sync could survive a crash of the server before its content does
    temporary = Path(f"{path}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return {"written": path}


def read(path: str) -> dict[str, Any]:
    """Reads a file that another host wrote; its text, or None."""
    # opening a folder makes an NFS client drop its cached entries, if not at once
    for attempt in range(5):
        os.listdir(Path(path).parent)
        if Path(path).is_file():
            return {"text": Path(path).read_text(encoding="utf-8")}
        time.sleep(attempt)
    return {"text": None}


def listen() -> None:
    """Prints a free port, then accepts connections on it for a minute."""
    with socket.create_server(("", 0)) as server:
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        deadline = time.monotonic() + _SECONDS_TO_LISTEN
        while (seconds := deadline - time.monotonic()) > 0:
            server.settimeout(seconds)
            try:
                server.accept()[0].close()
            except TimeoutError:
                return


def call_addresses(places: str) -> dict[str, Any]:
    """Connects to other hosts, at once; the error for each that cannot be reached.

    `places` is a JSON object of their addresses and ports by name.
    """

    def error_of(place: tuple[str, int]) -> str | None:
        try:
            socket.create_connection(place, timeout=_SECONDS_TO_CONNECT).close()
        except OSError as error:
            return error.strerror or str(error)
        return None

    named = {name: (address, port) for name, (address, port) in json.loads(places).items()}
    with ThreadPoolExecutor(max_workers=64) as pool:
        errors = dict(zip(named, pool.map(error_of, named.values()), strict=True))
    return {"errors": {name: error for name, error in errors.items() if error}}


def _processes() -> Iterator[tuple[int, str]]:
    """This user's ranks, launchers and watchdogs without a parent whose run is over.

    They are known by the variable that marks a start. A parent that is gone is not enough: in a
    container, process 1 may have started them itself. While the run directory or the start is
    locked, the run goes on. A rank with a watchdog is no leftover either: it trains, started by a
    shell that has ended (nohup).
    """
    candidates: dict[int, tuple[int, str, Path]] = {}  # parent, command line, folder of the start
    for process in psutil.process_iter(["uids", "environ", "cmdline", "ppid"]):
        # None where it cannot be read: another user's process, or one that has ended meanwhile
        start = (process.info["environ"] or {}).get(FOLDER_VARIABLE)
        if start and process.info["uids"] and process.info["uids"].effective == os.getuid():
            # bytes that are no UTF-8 are replaced: printing their stand-ins would raise
            words = " ".join(process.info["cmdline"] or ()).encode(errors="replace").decode()
            candidates[process.pid] = (process.info["ppid"], words, Path(start))
    watched = {parent for parent, words, _ in candidates.values() if _WATCHDOG in words}
    for number, (parent, words, folder) in candidates.items():
        # orphans become children of process 1, unless a subreaper takes them
        if parent != 1 or number in watched:
            continue
        for lock in (folder.parent.parent / ".lock", folder / LAUNCHER_LOCK):
            try:
                with lock.open() as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except FileNotFoundError:
                continue
            except OSError:  # held, or not to be read, and may be held
                break
        else:
            yield number, words[:80]


def _files() -> Iterator[Path]:
    """This user's files in shared memory that no process has mapped."""
    in_use = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # another user's process, or one that has ended
            for line in maps.read_text().splitlines():
                _, folder, rest = line.partition(str(_SHARED_MEMORY))
                in_use.add(folder + rest)
    for path in _SHARED_MEMORY.glob("*") if _SHARED_MEMORY.is_dir() else ():
        try:
            is_users = path.stat().st_uid == os.getuid()
        except OSError:  # it was deleted meanwhile
            continue
        if is_users and path.name.startswith(_RANKS_FILES) and str(path) not in in_use:
            yield path


def _build_locks() -> Iterator[Path]:
    """Locks of killed builds of DeepSpeed's operators, for which later ranks wait without end.

    A builder keeps its lock open (torch 2.13, utils/file_baton.py). One that no process of this
    host has open may be of another host, where the folder is shared, unless it is old.
    """
    default = Path.home() / ".cache" / "torch_extensions"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default)
    opened = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # another user's process, or one that has ended
            opened.add(os.readlink(descriptor))
    for path in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        with contextlib.suppress(OSError):  # the build has ended meanwhile
            is_old = time.time() - path.stat().st_mtime > _LONGEST_BUILD_SECONDS
            if is_old and str(path.resolve()) not in opened and os.access(path.parent, os.W_OK):
                yield path


def main(words: list[str]) -> None:
    """Runs one of the functions above by its name, and prints what it returns."""
    actions: dict[str, Callable[..., Any]] = {
        action.__name__: action
        for action in (look, write, read, listen, call_addresses, remove_leftovers)
    }
    told = actions[words[0]](*words[1:])
    if told is not None:  # `listen` speaks for itself
        print(json.dumps(told))
