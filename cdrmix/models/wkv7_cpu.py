"""WKV-7 on CPUs: the C++ recurrence of wkv7_cpu.cpp, compiled at first use.

A compiler is optional: `load` says why there is no kernel, and the op then runs in its chunked
form. Plain C ABI and ctypes, so neither Python's nor PyTorch's headers are needed and a build takes
two seconds.
"""

# B batch, T time, H heads, K key dim, V value dim

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cdrmix.log import get_logger
from cdrmix.models.wkv7_reference import is_differentiated
from cdrmix.runtime import cache_dir

log = get_logger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_COMPILERS = ("c++", "g++", "clang++")
_BUILD_SECONDS = 300  # it takes two; a machine can be busy
# Contraction into fused multiply-add is GCC's default, not clang's; -ffast-math is left out, so
# that not-a-number stays what it is.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast")
_COST = "The WKV-7 op runs in its chunked form, at about half the speed."


def wkv7_cpu(
    inputs: Sequence[Tensor], s0: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs WKV-7 as `wkv7_reference`, through the recurrence of `load_kernel`, in float32."""
    converted = [x.float().contiguous() for x in inputs]
    start = None if s0 is None else s0.float().contiguous()
    starts = None
    if segment_ids is not None:
        starts = torch.zeros(segment_ids.shape, dtype=torch.uint8)
        starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    saves = is_differentiated(converted, start)
    y, s = _Recurrence.apply(starts, saves, start, *converted)
    return y.to(inputs[3].dtype), s


def _pointers(tensors: Sequence[Tensor | None]) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in tensors]


def _struct(*tensors: Tensor | None) -> ctypes.Array:
    """Packs pointers as the struct Inputs or Gradients of wkv7_cpu.cpp has them."""
    return (ctypes.c_void_p * len(tensors))(*_pointers(tensors))


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, starts: Tensor | None, saves: bool, s0: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        kernel = load_kernel()
        assert isinstance(kernel, ctypes.CDLL), f"the C++ recurrence was not built: {kernel}"
        ctx.kernel = kernel
        r, _, _, v, _, _ = inputs
        batch, time, heads, key = r.shape
        value = v.shape[3]
        y = torch.empty_like(v)
        s = v.new_empty(batch, heads, value, key)
        sa = states = None
        if saves:
            sa = torch.empty_like(v)  # S_{t-1} a_t
            tiles = -(-time // kernel.wkv7_tile())
            states = v.new_empty(batch, heads, tiles, value, key)  # that enter tiles of tokens
            ctx.save_for_backward(*inputs, starts, sa, states)
        ctx.has_start = s0 is not None
        ctx.shape = (ctypes.c_int64 * 5)(batch, time, heads, key, value)
        buffers = _pointers([s0, y, s, sa, states])
        threads = torch.get_num_threads()
        kernel.wkv7_forward(ctx.shape, _struct(*inputs, starts), *buffers, threads)
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, ds: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, starts, sa, states = ctx.saved_tensors
        dy = dy.contiguous()
        ds = ds.contiguous()
        gradients = [torch.empty_like(x) for x in inputs]
        ds0 = torch.empty_like(ds) if ctx.has_start else None
        ctx.kernel.wkv7_backward(
            ctx.shape,
            _struct(*inputs, starts),
            *_pointers([sa, states, dy, ds]),
            _struct(*gradients, ds0),
            torch.get_num_threads(),
        )
        return (None, None, ds0, *gradients)


@functools.cache
def load_kernel() -> ctypes.CDLL | str:
    """Returns the kernel, built on first use, or the reason why there is none, logged once.

    The library stays in the user's cache folder under a name that holds a digest of its source, its
    flags, the compiler's version and the CPU's features, so that machines may share the folder.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        log.info("No C++ compiler (%s) was found. %s", ", ".join(_COMPILERS), _COST)
        return "no C++ compiler was found; install g++, for example"
    try:
        path = _library_path(compiler)
        try:
            kernel = ctypes.CDLL(str(path))
        except OSError:  # not there, or cut short when a machine went down
            _build(compiler, path)
            kernel = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("The WKV-7 kernel cannot be built or loaded: %s. %s", error, _COST)
        return str(error)
    for function in (kernel.wkv7_forward, kernel.wkv7_backward):
        function.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int]  # addresses, and the threads
        function.restype = None
    return kernel


def _library_path(compiler: str) -> Path:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=_BUILD_SECONDS
    ).stdout
    # All that -march=native depends on: flags of Linux, elsewhere the processor's name.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), None)
    cpu_features = f"{platform.machine()} {flags or platform.processor()}"
    digest = hashlib.sha256(_SOURCE.read_bytes())
    digest.update("\n".join((version, *_FLAGS, cpu_features)).encode())
    return _private_folder() / f"wkv7-{digest.hexdigest()[:16]}.so"


@functools.cache
def _private_folder() -> Path:
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


def _build(compiler: str, path: Path) -> None:
    """Compiles in a temporary folder and renames into place: several ranks may race for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    problems = []
    for openmp in (["-fopenmp"], []):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            command = [compiler, *_FLAGS, *openmp, str(_SOURCE), "-o", str(built)]
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
        log.info("The WKV-7 kernel uses one thread, without OpenMP: %s", problems[0])
