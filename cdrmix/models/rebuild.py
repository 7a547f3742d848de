"""Selective recomputation: results of cheap functions are computed again rather than kept.

Around a block, `rebuilding` has autograd keep what is dear, and of each result of a function that
was called through `cheaply` a note alone: which function, and which of its results. Whoever reads
such a tensor in the backward pass has the function run again, once for all of its readers, on
inputs that are kept or are rebuilt themselves. Nothing dear is run twice, and no exchange between
ranks, for none is in such a function. Hooks see each saved tensor once; no operator is intercepted,
as torch's selective checkpointing does, at a cost for each of them.

Results and gradients are those of the plain calls bit by bit: the function is run on equal inputs,
and differentiated as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef


class _Note(NamedTuple):
    """Record of a tensor that can be made again."""

    call: Any  # context of the `_Cheap` that made it
    number: int  # of its result
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _OfParameter(NamedTuple):
    """Record of a parameter whose values are gathered for each pass."""

    parameter: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]


class _Kept(NamedTuple):
    """Record of any other tensor, as hooks outside gave it."""

    value: Any
    unpack: Callable[[Any], Tensor]


class _Region:
    """Results of `cheaply` in a block so far, by the addresses of their storages."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # A weak reference keeps the address from being used again, whatever frees the memory.
        self.sources: dict[int, tuple[StorageWeakRef, Any, int]] = {}
        # ZeRO-3 lets go of a parameter behind its module, but not of what hooks were given. Vectors
        # stay so: they are small, and those of a norm are read where its own are not gathered.
        self.parameters = [each for each in parameters if len(getattr(each, "ds_shape", ())) > 1]
        outside = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.outside: tuple[Callable[..., Any], Callable[..., Any]] | None = outside

    def note(self, result: Tensor, call: Any, number: int) -> None:
        """Takes a tensor as the result of a call."""
        storage = result.untyped_storage()
        self.sources[storage._cdata] = (StorageWeakRef(storage), call, number)

    def pack(self, tensor: Tensor) -> Any:
        """Returns what is kept of a tensor that autograd saves."""
        view = (tensor.shape, tensor.stride())
        _, call, number = self.sources.get(tensor.untyped_storage()._cdata, (None, None, 0))
        if call is not None and tensor.dtype == call.dtypes[number]:
            return _Note(call, number, *view, int(tensor.storage_offset()))
        for parameter in self.parameters:
            if parameter.data_ptr() == tensor.data_ptr() != 0:
                return _OfParameter(parameter, *view)
        if isinstance(tensor, nn.Parameter):
            tensor = tensor.detach()  # whose values stay, whatever the parameter's become
        if self.outside is None:
            return tensor
        pack, unpack = self.outside
        return _Kept(pack(tensor), unpack)

    @staticmethod
    def unpack(kept: Any) -> Tensor:
        """Returns the tensor again."""
        if isinstance(kept, _Note):
            again = _again(kept.call)[1][kept.number].detach()
            return again.as_strided(kept.shape, kept.stride, kept.offset)
        if isinstance(kept, _OfParameter):
            data = kept.parameter.detach()
            return data.as_strided(kept.shape, kept.stride, data.storage_offset())
        if isinstance(kept, _Kept):
            return kept.unpack(kept.value)
        tensor: Tensor = kept
        return tensor


_regions: list[_Region] = []  # of blocks whose forward pass is under way, the inner one last


@contextlib.contextmanager
def rebuilding(block: nn.Module) -> Iterator[None]:
    """Has results of `cheaply` in a block rebuilt, where autograd would save them."""
    region = _Region(block.parameters())
    _regions.append(region)
    try:
        with torch.autograd.graph.saved_tensors_hooks(region.pack, region.unpack):
            yield
    finally:
        _regions.pop()


def is_rebuilding() -> bool:
    """True where `cheaply` may rebuild what it gives."""
    return bool(_regions)


def cheaply(function: Callable[..., Any], *inputs: Any) -> Any:
    """Calls a function whose results may be rebuilt: a tensor, or a tuple of them.

    It reads no tensors but its inputs, draws no random numbers, and changes nothing.
    """
    if not _regions or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*inputs)
    if not any(x.requires_grad for x in inputs if isinstance(x, Tensor)):
        return function(*inputs)  # no node would hold its inputs
    return _Cheap.apply(_regions[-1], function, *inputs)


class _Cheap(torch.autograd.Function):
    """Call of a cheap function: saves its inputs, and is run again for readers of its results and
    for its own gradients, which are those of what it is made of."""

    @staticmethod
    def forward(ctx: Any, region: _Region, function: Callable[..., Any], *inputs: Any) -> Any:
        results = function(*inputs)
        several = results if isinstance(results, tuple) else (results,)
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        read = {x.untyped_storage()._cdata for x in tensors}
        for number, result in enumerate(several):
            if result.untyped_storage()._cdata not in read:  # not an input as it is
                region.note(result, ctx, number)
        ctx.function = function
        ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]
        ctx.dtypes = [result.dtype for result in several]
        ctx.again = None
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, results = _again(ctx)
        ctx.again = None
        pairs = zip(results, gradients, strict=True)
        reached = [(result, gradient) for result, gradient in pairs if gradient is not None]
        wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        if not reached:
            return None, None, *(None for _ in inputs)
        outputs, entering = zip(*reached, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, entering, allow_unused=True))
        wants = (isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return None, None, *(next(found) if each else None for each in wants)


def _again(call: Any) -> tuple[list[Any], tuple[Tensor, ...]]:
    """Returns inputs and results of a call that is run again, once until its own backward pass."""
    if call.again is None:
        saved = iter(call.saved_tensors)
        needs = call.needs_input_grad[2:]
        inputs = [
            next(saved).detach().requires_grad_(need) if other is None else other[0]
            for other, need in zip(call.others, needs, strict=True)
        ]
        with torch.enable_grad():
            results = call.function(*inputs)
        call.again = (inputs, results if isinstance(results, tuple) else (results,))
    again: tuple[list[Any], tuple[Tensor, ...]] = call.again
    return again
