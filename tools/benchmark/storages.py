"""Bytes that a rank holds, by the storages behind its tensors, each counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Storages = dict[int, torch.UntypedStorage]


def storages(tensors: Iterable[Tensor | None]) -> Storages:
    """Memory behind tensors, each piece once."""
    pieces = (tensor.untyped_storage() for tensor in tensors if tensor is not None)
    return {piece.data_ptr(): piece for piece in pieces}


def total(pieces: Storages) -> int:
    """Bytes of storages."""
    return sum(piece.nbytes() for piece in pieces.values())


def without(pieces: Storages, others: Storages) -> Storages:
    """The first that are not among the second."""
    return {key: piece for key, piece in pieces.items() if key not in others}


def saved(run: Callable[[], Any], *, known: Storages) -> tuple[Storages, Any]:
    """Bytes that autograd saves while `run` computes, without known tensors; and its result."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return without(storages(kept), known), result


def largest_unit(run: Callable[[], Tensor], *, known: Storages) -> Storages:
    """Bytes saved by the largest unit when it is recomputed, without its inputs.

    Of units inside it, which are recomputed one by one, it has the largest and that one's inputs.
    """
    from cdrmix.models import recompute

    depth = 0
    most: list[Storages] = [{}, {}]  # by depth: units, and units inside of one

    def measuring(unit: Callable[..., Any], *inputs: Any) -> Any:
        nonlocal depth
        read = storages(x for x in inputs if torch.is_tensor(x))
        depth += 1
        kept, result = saved(lambda: unit(*inputs), known=known | read)
        depth -= 1
        if depth == 0:
            kept |= most[1]
            most[1] = {}
        else:
            kept |= {key: piece for key, piece in read.items() if key not in known}
        most[depth] = max(most[depth], kept, key=total)
        return result

    with mock.patch.object(recompute, "_recomputed", measuring):
        run()
    return most[0]


class Rebuilt:
    """Bytes that selective recomputation has made again, at the fullest moment of `run`.

    Attributes:
        most: those bytes, with what the functions save that are run again.
    """

    def __init__(self, *, known: Storages) -> None:
        self.known = known
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def run(self, backward: Callable[[], Any]) -> Any:
        """Runs a backward pass."""
        from cdrmix.models import rebuild

        original = rebuild._again

        def measuring(call: Any) -> Any:
            if call.again is not None:
                return original(call)
            inside, result = saved(lambda: original(call), known=self.known)
            inputs = storages(x for x in result[0] if torch.is_tensor(x))
            for piece in (without(inside, inputs) | storages(result[1])).values():
                self._live[piece._cdata] = (StorageWeakRef(piece), piece.nbytes())
            del piece, inside
            alive = [size for weak, size in self._live.values() if not weak.expired()]
            self.most = max(self.most, sum(alive))
            return result

        with mock.patch.object(rebuild, "_again", measuring):
            return backward()


def weight_storages(engine: Any) -> Storages:
    """Weights: under ZeRO-3 a rank's shares, and what it keeps whole beside them."""
    parameters = list(engine.module.parameters())
    if engine.zero_optimization_stage() < 3:
        return storages(parameters)
    whole = [parameter for parameter in parameters if parameter.ds_persist]
    return storages([*(parameter.ds_tensor for parameter in parameters), *whole])


def gradient_storages(engine: Any) -> Storages:
    """Gradients that are kept from one micro-step to the next."""
    optimizer = engine.optimizer
    tensors = [parameter.grad for parameter in engine.module.parameters()]
    tensors.append(getattr(optimizer, "grad_partitions_flat_buffer", None))
    tensors += getattr(optimizer, "fp32_groups_gradients_flat", [])
    for kind in ("averaged_gradients", "all_grad_tensors"):
        for group in getattr(optimizer, kind, {}).values():
            tensors += group or []
    return storages(tensors)


def optimizer_storages(engine: Any) -> Storages:
    """Masters, moments, averages and step counts."""
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    return storages([*masters(engine), *(value for value in states if torch.is_tensor(value))])


def masters(engine: Any) -> list[Tensor]:
    """Float32 masters, which the optimizer's groups hold but for ZeRO-3."""
    groups = engine.optimizer.param_groups
    cut = getattr(engine.optimizer, "fp32_partitioned_groups_flat", [])
    return [*cut, *(master for group in groups for master in group["params"])]


def host_storages(engine: Any) -> Storages:
    """Bytes that offloading moves to the host, whatever this machine's device is."""
    settings = engine._config.zero_config
    optimizer = engine.optimizer
    tensors = []
    if settings.offload_optimizer is not None:
        tensors += [master.grad for master in masters(engine)]
        tensors += getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", [])
        tensors += getattr(optimizer, "accumulated_grads_in_cpu", {}).values()
        for buffer in ("temp_grad_buffer_for_cpu_offload", "grad_partitions_flat_buffer"):
            tensors.append(getattr(optimizer, buffer, None))
    if settings.offload_param is not None:
        tensors += [parameter.ds_tensor for parameter in engine.module.parameters()]
    states = optimizer_storages(engine) if settings.offload_optimizer is not None else {}
    return storages(tensors) | states
