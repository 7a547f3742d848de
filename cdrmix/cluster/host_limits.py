"""Limits of one host that end a run: for `cdrmix doctor`, read on that host. No torch."""

import hashlib
import os
import re
import resource
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import cdrmix

_ROOT = Path(cdrmix.__file__).resolve().parents[1]
# Sources that ranks run; a host with others would compute something else.
_SOURCES = ("cdrmix/**/*.py", "cdrmix/**/*.cpp", "launch/*.py")
# Any of them builds the recurrence for CPUs at first use (models/wkv7_cpu.py).
_COMPILERS = ("c++", "g++", "clang++")
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Linux's own default, where the setting cannot be read.
_EPHEMERAL_PORTS = (32768, 60999)


def limits(folder: Path, root: Path = Path("/")) -> dict[str, Any]:
    """Limits of this process, which ranks started in the same way have too; None: no limit.

    Args:
        folder: of the runs; its free inodes are told.
        root: of the files of the kernel.
    """
    open_files, most_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    inodes = os.statvfs(folder) if folder.is_dir() else None
    return {
        "open_files": open_files if open_files != resource.RLIM_INFINITY else None,
        "most_open_files": most_open_files if most_open_files != resource.RLIM_INFINITY else None,
        "locked_bytes": locked_bytes if locked_bytes != resource.RLIM_INFINITY else None,
        "infiniband": sorted(path.name for path in root.glob("sys/class/infiniband/*")),
        "tasks_left": tasks_left(root),
        # file systems that make inodes as they are needed, such as btrfs, count none
        "free_inodes": inodes.f_favail if inodes is not None and inodes.f_files else None,
        "ports": ephemeral_ports(root),
    }


def tasks_left(root: Path = Path("/")) -> int | None:
    """Number of processes and threads that may still be started; None if nothing limits them."""
    left = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # the kernel exempts root
        processes = psutil.process_iter(["uids", "num_threads"])
        own = [p for p in processes if p.info["uids"] and p.info["uids"].real == os.getuid()]
        left.append(soft - sum(process.info["num_threads"] or 1 for process in own))
    # a group's limit holds for all groups below it (cgroup v2, then v1)
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, group = line.split(":", 2)
            if kinds in ("", "pids"):
                top = root / "sys/fs/cgroup" / kinds
                folder = top / group.strip("/")
                for each in (folder, *folder.parents):
                    with suppress(OSError, ValueError):  # "max" is no number
                        most = int((each / "pids.max").read_text(encoding="utf-8"))
                        used = int((each / "pids.current").read_text(encoding="utf-8"))
                        left.append(most - used)
                    if each == top:
                        break
    return min(left, default=None)


def ephemeral_ports(root: Path = Path("/")) -> tuple[int, int]:
    """First and last TCP port of those that the kernel chooses: for ranks, gloo and NCCL too."""
    with suppress(OSError, ValueError):
        text = (root / "proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")
        first, last = map(int, text.split())
        return first, last
    return _EPHEMERAL_PORTS


def unknown_interfaces(variables: Mapping[str, str], names: Collection[str]) -> list[str]:
    """Assignments NAME=VALUE by which gloo or NCCL would find no interface among `names`.

    Both take a list with commas. To gloo each entry is a name. To NCCL it is the beginning of one,
    or with `=` before the list the whole name; `^` before the list excludes.
    """
    wrong = []
    for variable in _INTERFACE_VARIABLES:
        value = variables.get(variable, "").strip()
        if not value:
            continue
        is_nccl = variable.startswith("NCCL")
        if is_nccl and value.startswith("^"):
            listed = value[1:].removeprefix("=").split(",")
            exact = value[1:].startswith("=")
            usable = [n for n in names if not _is_any(n, listed, is_exact=exact) and n != "lo"]
        elif is_nccl:
            listed = value.removeprefix("=").split(",")
            usable = [n for n in names if _is_any(n, listed, is_exact=value.startswith("="))]
        else:  # gloo opens each of the list, and fails on the first that is not there
            usable = [*names] if {*value.split(",")} <= {*names} else []
        if not usable:
            wrong.append(f"{variable}={value}")
    return wrong


def _is_any(name: str, listed: Collection[str], *, is_exact: bool) -> bool:
    # NCCL allows a port behind the name, eth0:4000
    words = [word.partition(":")[0] for word in listed if word]
    return name in words if is_exact else any(name.startswith(word) for word in words)


def temporary_folder() -> dict[str, str | None]:
    """Folder of temporary files, and the error of writing a file there, or None."""
    # not tempfile.gettempdir, which passes over a folder that it cannot write; compilers do not
    folder = os.environ.get("TMPDIR") or "/tmp"
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(65536))
            file.flush()
    except OSError as error:
        return {"folder": folder, "error": error.strerror or str(error)}
    return {"folder": folder, "error": None}


def compilers() -> dict[str, Any]:
    """C++ compiler of this host, or None, and Python's header, which Triton's kernels need."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    return {"compiler": found, "has_python_header": header.is_file()}


def own_version(root: Path = _ROOT) -> tuple[str, str]:
    """Digest of the sources of CDRmix on this host; version, commit, digest and path as a text."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in root.glob(pattern)):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    commit = ""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        with suppress(FileNotFoundError, subprocess.TimeoutExpired):
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=5
            ).stdout.strip()
            commit = f"commit {done}, " if re.fullmatch("[0-9a-f]+", done) else ""
    short = digest.hexdigest()[:8]
    return digest.hexdigest(), f"{cdrmix.__version__}, {commit}sources {short} at {root}"
