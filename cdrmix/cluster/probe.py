"""What one host tells of itself for `cdrmix doctor`: runs there, prints one JSON object."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cdrmix.cluster.devices import driver_devices, unusable_devices
from cdrmix.cluster.handover import FOLDER_VARIABLE
from cdrmix.cluster.messages import LAUNCHER_LOCK
from cdrmix.network import interface_towards

# What has to be the same on all hosts for equal results, or for the ranks to understand each other.
PACKAGES = ("torch", "deepspeed", "numpy", "transformers", "tokenizers", "safetensors", "pydantic")
_SHARED_MEMORY = Path("/dev/shm")
_OURS_IN_SHARED_MEMORY = ("deepspeed_", "torch_")
_WATCHDOG = "cdrmix.cluster.watchdog"
_SECONDS_TO_CONNECT = 5.0
_SECONDS_TO_LISTEN = 60.0


def look(folder: str, towards: str) -> dict[str, Any]:
    """This host: versions, devices, clock, interface, free space, leftovers.

    Args:
        folder: of the runs; its file system is asked for free space.
        towards: address of the first host, to which the ranks here talk.
    """
    devices = _devices()
    usable = _num_usable()
    return {
        "host": platform.node(),
        "python": f"{platform.python_version()} at {sys.executable}",
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": devices,
        "unusable": unusable_devices(usable),
        "cores": len(os.sched_getaffinity(0)),
        "interface": interface_towards(towards),
        "disk_free_bytes": shutil.disk_usage(folder).free if os.path.isdir(folder) else None,
        "shared_memory_free_bytes": _free(_SHARED_MEMORY),
        "processes": [f"{number} {words}" for number, words in _processes()],
        "files": [str(path) for path in _files()],
        "time": time.time(),
    }


def remove_leftovers() -> dict[str, Any]:
    """End this user's orphaned ranks and launchers, and delete their files in shared memory."""
    removed = []
    for number, words in _processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, 9)
            removed.append(f"process {number} {words}")
    for path in _files():
        path.unlink(missing_ok=True)
        removed.append(str(path))
    return {"removed": removed}


def write(path: str, text: str) -> dict[str, Any]:
    """Write a file as a checkpoint is written: beside its name, made durable, renamed."""
    temporary = Path(f"{path}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return {"written": path}


def read(path: str) -> dict[str, Any]:
    """The text of a file that another host wrote, or None."""
    # what NFS remembers of a folder is forgotten by opening it
    for attempt in range(5):
        os.listdir(Path(path).parent)
        if Path(path).is_file():
            return {"text": Path(path).read_text(encoding="utf-8")}
        time.sleep(attempt)
    return {"text": None}


def listen() -> None:
    """Print a free port, then take calls on it for a minute."""
    with socket.create_server(("", 0)) as server:
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        deadline = time.monotonic() + _SECONDS_TO_LISTEN
        while (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                server.accept()[0].close()
            except TimeoutError:
                return


def call(address: str, port: str) -> dict[str, Any]:
    """Whether a connection to another host succeeds; why not."""
    try:
        socket.create_connection((address, int(port)), timeout=_SECONDS_TO_CONNECT).close()
    except OSError as error:
        return {"error": str(error)}
    return {"error": None}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _num_usable() -> int:
    """Number of devices that torch can use; not asked where there are none."""
    if not driver_devices():
        return 0
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def _devices() -> list[str]:
    """Names and memory of the devices, by NVIDIA's own program; of others the maker alone."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
        names = done.stdout.splitlines() if done.returncode == 0 else []
    except (FileNotFoundError, subprocess.TimeoutExpired):
        names = []
    others = driver_devices()
    if names:
        others.pop("NVIDIA", None)
    return names + [maker for maker, count in others.items() for _ in range(count)]


def _free(path: Path) -> int | None:
    return shutil.disk_usage(path).free if path.is_dir() else None


def _processes() -> Iterator[tuple[int, str]]:
    """This user's ranks, launchers and watchdogs whose starter is gone and whose run is over.

    The mark of a start in the environment tells them from other programs. A starter that is gone
    is not enough: in a container, process 1 may have started them itself. While the run directory
    or the start is locked, somebody is at work. A rank with a watchdog is no leftover either: it
    trains, started by a shell that has been left (nohup).
    """
    marked: dict[int, tuple[int, str, Path]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        except OSError:  # it ended meanwhile
            continue
        mark = f"{FOLDER_VARIABLE}=".encode()
        for variable in variables:
            if variable.startswith(mark):
                start = Path(os.fsdecode(variable.removeprefix(mark)))
                marked[int(folder.name)] = (int(parent), words, start)
    watched = {parent for parent, words, _ in marked.values() if _WATCHDOG in words}
    for number, (starter, command, start) in marked.items():
        is_left = starter == 1 and number not in watched
        locks = (start.parent.parent / ".lock", start / LAUNCHER_LOCK)
        if is_left and all(map(_is_free, locks)):
            yield number, command[:80]


def _is_free(lock: Path) -> bool:
    """Whether nobody holds a lock; one that cannot be looked at may be held."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _files() -> Iterator[Path]:
    """This user's files in shared memory that no process has open or mapped."""
    used = set(_mapped())
    for path in _SHARED_MEMORY.glob("*") if _SHARED_MEMORY.is_dir() else ():
        try:
            is_users = path.stat().st_uid == os.getuid()
        except OSError:
            continue
        if is_users and path.name.startswith(_OURS_IN_SHARED_MEMORY) and str(path) not in used:
            yield path


def _mapped() -> Iterator[str]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            for line in maps.read_text().splitlines():
                name = line.partition(str(_SHARED_MEMORY))
                if name[1]:
                    yield "".join(name[1:])
        except OSError:  # another user's, or ended
            continue


def main(words: list[str]) -> None:
    """`look FOLDER ADDRESS`, `write PATH TEXT`, `read PATH`, `call ADDRESS PORT`, `listen` or
    `remove_leftovers`."""
    if words[0] == "listen":
        listen()
        return
    actions: dict[str, Callable[..., dict[str, Any]]] = {
        "look": look,
        "write": write,
        "read": read,
        "call": call,
        "remove_leftovers": remove_leftovers,
    }
    print(json.dumps(actions[words[0]](*words[1:])))
