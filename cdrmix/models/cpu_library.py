"""Compiles C++ kernels for CPUs at first use, and loads them.

Plain C ABI and ctypes, so neither Python's nor PyTorch's headers are needed and a build takes two
seconds. A compiler is optional: `load_library` says why there is no library, and its callers have
another form.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from cdrmix.log import get_logger
from cdrmix.runtime import cache_dir

log = get_logger(__name__)

_COMPILERS = ("c++", "g++", "clang++")
_BUILD_SECONDS = 300  # it takes two; a machine can be busy
# Contraction into fused multiply-add is GCC's default, not clang's; -ffast-math is left out, so
# that not-a-number stays what it is.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast")


def load_library(source: Path, *, name: str, cost: str) -> ctypes.CDLL | str:
    """Returns the library of a source file, built on first use, or the reason why there is none.

    The library stays in the user's cache folder under a name that holds a digest of its source and
    the headers beside it, its flags, the compiler's version and the CPU's features, so that
    machines may share the folder.

    Args:
        source: C++17 file with functions of a C ABI.
        name: in messages, "WKV-7 kernel" for example.
        cost: sentence for the log that says what runs instead and what that costs.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        log.info("No C++ compiler (%s) was found. %s", ", ".join(_COMPILERS), cost)
        return "no C++ compiler was found; install g++, for example"
    try:
        path = library_path(compiler, source)
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # not there, or cut short when a machine went down
            _build(compiler, source, path, name)
            return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("The %s cannot be built or loaded: %s. %s", name, error, cost)
        return str(error)


def can_take(*tensors: Tensor | None) -> bool:
    """Returns True where kernels of ours compute with these: float32, and on the CPU.

    Not while torch.compile traces, which fuses the eager forms itself, nor under transforms of
    torch.func and in subclasses of tensors, which see PyTorch's operations alone.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return all(
        type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu"
        for x in tensors
        if x is not None
    )


def library_path(compiler: str, source: Path) -> Path:
    """Returns the file of the library that this compiler makes of a source file here."""
    # All that -march=native depends on: flags of Linux, elsewhere the processor's name.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), None)
    cpu_features = f"{platform.machine()} {flags or platform.processor()}"
    digest = hashlib.sha256(source.read_bytes())
    for header in sorted(source.parent.glob("*.h")):
        digest.update(header.read_bytes())
    digest.update("\n".join((_version(compiler), *_FLAGS, cpu_features)).encode())
    return private_folder() / f"{source.stem}-{digest.hexdigest()[:16]}.so"


@functools.cache
def _version(compiler: str) -> str:
    command = [compiler, "--version"]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_BUILD_SECONDS
    ).stdout


@functools.cache
def private_folder() -> Path:
    """Returns a folder of kernels that no other user can write, as its files are executed.

    A cache folder that others can write, or own, or one with such files, is not used.
    """
    folder = cache_dir() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    entries = [folder.lstat(), *(path.lstat() for path in folder.glob("*.so"))]
    others_write = stat.S_IWGRP | stat.S_IWOTH
    is_private = all(x.st_uid == os.getuid() and not x.st_mode & others_write for x in entries)
    if is_private and stat.S_ISDIR(entries[0].st_mode):
        return folder
    private = Path(tempfile.mkdtemp(prefix="cdrmix-kernels-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    log.warning(
        "%s: others can write it, or own it, so its kernels are not run: they are compiled anew in "
        "%s. Remove that folder to have them kept",
        folder,
        private,
    )
    return private


def _build(compiler: str, source: Path, path: Path, name: str) -> None:
    """Compiles in a temporary folder and renames into place: several ranks may race for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    problems = []
    for openmp in (["-fopenmp"], []):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            command = [compiler, *_FLAGS, *openmp, str(source), "-o", str(built)]
            process = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_BUILD_SECONDS
            )
            problem = process.stderr.strip()[:500]
            if process.returncode == 0:
                try:
                    ctypes.CDLL(str(built))
                except OSError as error:  # an OpenMP runtime that the linker did not ask for
                    problem = str(error)
                else:
                    built.chmod(0o700)
                    os.replace(built, path)
                    break
        problems.append(f"`{' '.join(command)}`: {problem}")
    else:
        raise OSError("; ".join(problems))
    if problems:
        log.info("The %s uses one thread, without OpenMP: %s", name, problems[0])
