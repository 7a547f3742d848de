"""Launches Triton kernels of our own, and says where they may be used.

On CUDA, in float32 and 16 bits, where Triton is installed and the kernel's output and gradients
have passed a check on such a device (triton_checks.py); elsewhere the eager forms compute. Triton
comes with torch's builds for GPUs. Its interpreter (TRITON_INTERPRET=1) runs the same kernels on
CPUs, for tests.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from cdrmix.log import get_logger
from cdrmix.models import checked_kernels

log = get_logger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256
_DEVICE_TYPES: tuple[str, ...] = ("cuda",)
# tests/parity/test_graphs.py holds the figure to what is counted.
_COST = (
    "PyTorch computes instead: same results; without any of these kernels an RWKV block of "
    "cdrmix-core-1b moves 2.9 times as many bytes beside its products."
)

_is_off = contextvars.ContextVar("_is_off", default=False)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Has PyTorch compute everything, so that its forms can be timed where kernels would run."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


def can_run(kernel: str, *tensors: Tensor | None, compiled_for: int | None = None) -> bool:
    """Returns True where a kernel computes with these tensors: one CUDA device, one float type.

    Not while torch.compile traces, which fuses the eager forms itself, nor under transforms of
    torch.func and in subclasses of tensors, which see PyTorch's operations alone. The first call
    for a type and a size runs the check, unless an earlier process has kept its outcome.

    Args:
        kernel: name of the function, as in triton_checks.py.
        tensors: all that are of the type of the activations.
        compiled_for: features of a head or choices of a token, if it is compiled for a number.
    """
    present = [x for x in tensors if x is not None]
    like = present[0]
    if like.device.type not in _DEVICE_TYPES or like.dtype not in DTYPES:
        return False
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if is_traced or _is_off.get():
        return False
    are_alike = all(
        type(x) in (Tensor, nn.Parameter)
        and (x.dtype, x.device) == (like.dtype, like.device)
        and x.numel() > 0
        for x in present
    )
    return are_alike and passes(kernel, like.device, like.dtype, compiled_for)


def is_whole_head(head_dim: int) -> bool:
    """Returns True for sizes of heads that kernels take: powers of two to LARGEST_HEAD."""
    return head_dim <= LARGEST_HEAD and head_dim & (head_dim - 1) == 0


@functools.cache
def passes(kernel: str, device: torch.device, dtype: torch.dtype, compiled_for: int | None) -> bool:
    """Returns True where a kernel has passed its check on such a device, for a type and a size.

    A kernel that fails is told of once, with what that costs.
    """
    from cdrmix.models import triton_checks  # which imports the forms that ask here

    if not _has_triton():
        return False
    problems: list[str] = []

    def find() -> dict[str, Any] | None:
        check = functools.partial(triton_checks.problem, kernel, device, dtype, compiled_for)
        problem = checked_kernels.in_clean_thread(device, check)
        if problem is None:
            return {"passed": True}
        problems.append(problem)
        return None

    case = {"dtype": dtype, "compiled_for": compiled_for}
    key = checked_kernels.key_of(kernel, _sources(), device, case)
    outcome = checked_kernels.settle(key, find)
    if outcome is None:
        log.warning("%s. %s", problems[0], _COST)
    return outcome is not None


@functools.cache
def _has_triton() -> bool:
    """Returns True if Triton can be imported; says once what it costs if not."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        log.warning("Triton cannot be imported (%s): no kernels of our own. %s", error, _COST)
        return False
    return True


def _sources() -> Sequence[Path]:
    """Returns all files that the outcome of a check depends on."""
    folder = Path(__file__).parent
    return [*sorted(folder.glob("*triton*.py")), folder / "clamped_recurrence.py"]


@functools.cache
def _load(module: str) -> ModuleType:
    return import_module(f"cdrmix.models.{module}")


def launch(module: str, kernel: str, grid: tuple[int, ...], *arguments: Any, **sizes: Any) -> None:
    """Runs a kernel of a module of cdrmix.models on the device of its first tensor.

    Args:
        grid: number of programs along each axis.
        arguments: tensors, each read or written once; tuples of them; None; numbers.
        sizes: what the kernel is compiled for.
    """
    device = arguments[0].device
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        getattr(_load(module), kernel)[grid](*arguments, **sizes)


def sum_tiles(tiles: Tensor, like: Tensor) -> Tensor:
    """Adds the sums of tiles, [tiles, ...] float32, in a fixed order, to the type of `like`."""
    return tiles.sum(0).to(like.dtype)
