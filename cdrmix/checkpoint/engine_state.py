"""A DeepSpeed engine's state as layout-independent fragments, and back, bit by bit.

`fragments` and `load` are for engines; `load_module` fills a plain module from the same fragments.

Engines: ZeRO 1, 2 and 3 in fp32, bf16 and fp16, on the device or offloaded to the host. Under ZeRO
1 and 2 (DeepSpeedZeroOptimizer, and the BF16_Optimizer that DeepSpeed takes for ZeRO-1 with float32
gradient accumulation) each parameter group is one flat float32 partition per rank;
`param._hp_mapping` says which range of which parameter lies where in it
(deepspeed/utils/tensor_fragment.py, 0.19.8). `zero3` says the same of ZeRO-3. The optimizer's state
of a partition comes into being at the first step and holds tensors of the partition's shape and
single numbers (`step`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cdrmix import runtime
from cdrmix.checkpoint import partitioned
from cdrmix.checkpoint.checkpoint_file import CheckpointReader, check_names
from cdrmix.checkpoint.fragments import Box, Fragment, Span
from cdrmix.errors import StateError
from cdrmix.parallel.tensor import is_copy, shard_of

LogicalName = Callable[[str], str]

# What changes while training in DeepSpeed's DynamicLossScaler.
_LOSS_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class _Placement:
    """Where a local parameter lies in its logical tensor, and who else holds the same block.

    `is_copy` where a rank outside the data group saves the same values.
    """

    shape: tuple[int, ...]
    block: Box
    is_first_replica: bool
    is_copy: bool


@dataclass(frozen=True)
class _Piece:
    """The range of one parameter that lies in a partition of this rank, from `offset` on."""

    name: str
    placement: _Placement
    span: Span
    offset: int

    def of(self, partition: torch.Tensor) -> torch.Tensor:
        """This piece's elements of a flat, detached partition, as a view."""
        return partition.narrow(0, self.offset, self.span.numel)

    def has_first_element(self) -> bool:
        """Whether the parameter's very first logical element is here: true on one rank."""
        return self.span.start == 0 and not any(self.span.block.offset)


@dataclass(frozen=True)
class _Partition:
    """This rank's flat share of some parameters; `names` are all of theirs."""

    master: torch.nn.Parameter
    names: list[str]
    pieces: list[_Piece]


def fragments(engine: Any, logical_name: LogicalName = str) -> Iterator[Fragment]:
    """What this rank holds of masters, optimizer state, frozen parameters and buffers.

    Over all ranks each element comes exactly once. Values are views of live memory where they can
    be: use or copy them before the optimizer steps. Buffers, which a forward pass may change, are
    copies.

    Args:
        engine: from deepspeed.initialize, between two optimizer steps.
        logical_name: the module's name of a parameter or buffer -> logical name.
    """
    states = engine.optimizer.optimizer.state
    for partition in _partitions(engine, logical_name):
        pieces = [piece for piece in partition.pieces if not piece.placement.is_copy]
        for kind, value in {"param": partition.master, **states.get(partition.master, {})}.items():
            if _is_spread_like(value, partition.master):
                yield from _fragments_of(pieces, kind, value)
                continue
            number = torch.tensor([float(value)], dtype=torch.float64)
            for piece in pieces:
                if piece.has_first_element():
                    yield Fragment(piece.name, kind, (), Span.whole(Box.whole(())), number)
    for piece, share in _frozen_shares(engine, logical_name):
        yield from _fragments_of([piece], "param", share)
    for name, tensor, kind, placement in _unpartitioned(engine, logical_name):
        if placement.is_first_replica and not placement.is_copy:
            values = tensor.detach().reshape(-1)
            values = values.float() if kind == "param" else values.clone()
            yield Fragment(name, kind, placement.shape, Span.whole(placement.block), values)


@contextlib.contextmanager
def before_each_step(engine: Any, action: Callable[[], None]) -> Iterator[None]:
    """While this lasts, have `action` done whenever weights and optimizer state begin to change."""
    inner: torch.optim.Optimizer = engine.optimizer.optimizer
    hook = inner.register_step_pre_hook(lambda *_: action())
    try:
        yield
    finally:
        hook.remove()


def whole_fragments(
    tensors: Mapping[str, torch.Tensor], logical_name: LogicalName = str
) -> Iterator[Fragment]:
    """Parameters that no engine holds, whole; for one rank to save.

    Args:
        tensors: by the module's name of each.
        logical_name: as in `fragments`.
    """
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        values = tensor.detach().reshape(-1).float()
        yield Fragment(logical_name(name), "param", shape, Span.whole(Box.whole(shape)), values)


def counters(engine: Any) -> dict[str, Any]:
    """The engine's step counts and its loss scaler's state, as JSON; the same on every rank."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    is_dynamic = scaler is not None and scaler.dynamic
    fields = (
        {field: getattr(scaler, field) for field in _LOSS_SCALER_FIELDS} if is_dynamic else None
    )
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "loss_scaler": fields,
    }


def load_engine(
    engine: Any,
    reader: CheckpointReader,
    logical_name: LogicalName = str,
    *,
    others: Container[str] = (),
) -> None:
    """Put a checkpoint into an engine, in place, whatever layout and precision it was saved at.

    Every rank calls this and reads only what it holds. The weights in use are refreshed from the
    masters, as after an optimizer step.

    Args:
        engine: from deepspeed.initialize, fresh or between two optimizer steps.
        reader: an open checkpoint; its `state["engine"]` must be what `counters` gave.
        logical_name: the module's name of a parameter or buffer -> logical name.
        others: logical names in the checkpoint that somebody else reads.
    Raises:
        StateError: on every rank, if any of them found another model or could not read.
    """
    shapes = _shapes(engine, logical_name)
    runtime.together(lambda: check_names(reader, shapes, others=others))
    runtime.together(lambda: _read(engine, reader, logical_name))
    if _is_zero3(engine):
        partitioned.refresh_weights(engine.optimizer)
    else:
        engine.optimizer.update_lp_params()
    _restore_counters(engine, reader.state["engine"])


def load_module(
    module: torch.nn.Module,
    reader: CheckpointReader,
    logical_name: LogicalName = str,
    *,
    others: Container[str] = (),
) -> None:
    """Fill a plain module, with all experts in this process, from the float32 master weights.

    Args:
        module: parameters on any device, of any float type; one tensor at a time is read.
        reader: an open checkpoint.
        logical_name: module's name of a parameter or buffer -> logical name.
        others: logical names in the checkpoint that somebody else reads.
    Raises:
        StateError: if names or shapes differ.
    """
    tensors = {
        logical_name(name): tensor
        for name, tensor in (*module.named_parameters(), *_persistent_buffers(module))
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_names(reader, shapes, others=others)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(reader.full(name, reader.content_kind(name)))


def _persistent_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Name and tensor of the buffers that belong to a module's saved state."""
    saved = module.state_dict(keep_vars=True)
    return [(name, tensor) for name, tensor in module.named_buffers() if name in saved]


def _is_zero3(engine: Any) -> bool:
    return engine.zero_optimization_stage() == 3


def _partitions(engine: Any, logical_name: LogicalName) -> Iterator[_Partition]:
    """The partitions of this rank, in the optimizer's order."""
    names = {id(p): logical_name(name) for name, p in engine.module.named_parameters()}
    for master, parameters in _masters(engine):
        found = (_piece(engine, names[id(p)], p) for p in parameters)
        pieces = [piece for piece in found if piece is not None]
        yield _Partition(master, [names[id(p)] for p in parameters], pieces)


def _masters(engine: Any) -> list[tuple[torch.nn.Parameter, list[torch.nn.Parameter]]]:
    """Flat float32 masters, and the trained parameters that they hold shares of."""
    optimizer = engine.optimizer
    if _is_zero3(engine):
        return list(partitioned.sub_groups(optimizer))
    assert engine.zero_optimization_stage() in (1, 2), "written for ZeRO stages 1 to 3"
    # 0.19.8 links `_hp_mapping` in the order before the round-robin shuffle: it would be wrong.
    assert not engine.zero_round_robin_gradients(), "round_robin_gradients cannot be saved"
    masters = [master for group in optimizer.optimizer.param_groups for master in group["params"]]
    is_bf16_optimizer = hasattr(optimizer, "bf16_groups")
    groups = optimizer.bf16_groups if is_bf16_optimizer else optimizer.bit16_groups
    return list(zip(masters, groups, strict=True))


def _mapping(param: torch.nn.Parameter) -> Any:
    """Where the parameter lies in this rank's partition; None if nothing of it does."""
    return param._hp_mapping  # type: ignore[attr-defined]


def _piece(engine: Any, name: str, param: torch.nn.Parameter) -> _Piece | None:
    """The range of a trained parameter that this rank holds; None if it holds nothing of it."""
    placement = _placement(engine, param)
    if _is_zero3(engine):
        start, numel = partitioned.share(param)
        offset = partitioned.offset(engine.optimizer, param)
    elif _mapping(param) is None:
        return None
    else:
        local = _mapping(param).lp_fragment_address
        flat = _mapping(param).hp_fragment_address
        start = local.start
        numel = local.numel
        offset = flat.start
    return _Piece(name, placement, Span(placement.block, start, numel), offset) if numel else None


def _placement(engine: Any, tensor: torch.Tensor) -> _Placement:
    """Expert parameters are a block of experts, in order of expert rank; others are whole, or the
    box that tensor parallelism left of them."""
    # what ZeRO-3 has partitioned shows nothing of its shape
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    copied = is_copy(tensor)
    if getattr(tensor, "allreduce", True):
        is_first = torch.distributed.get_rank(engine.optimizer.dp_process_group) == 0
        shard = shard_of(tensor)
        if shard is not None:
            return _Placement(shard.logical_shape, Box(shard.offset, shape), is_first, copied)
        return _Placement(shape, Box.whole(shape), is_first, copied)
    name: str = tensor.group_name  # type: ignore[attr-defined]
    experts = engine.expert_parallel_group[name]
    replicas = engine.expert_data_parallel_group[name]
    first = torch.distributed.get_rank(experts) * shape[0]
    total = torch.distributed.get_world_size(experts) * shape[0]
    is_first = torch.distributed.get_rank(replicas) == 0
    block = Box((first, *(0 for _ in shape[1:])), shape)
    return _Placement((total, *shape[1:]), block, is_first, copied)


def _frozen(engine: Any) -> list[tuple[str, torch.nn.Parameter]]:
    trained = {id(p) for _, parameters in _masters(engine) for p in parameters}
    return [(name, p) for name, p in engine.module.named_parameters() if id(p) not in trained]


def _frozen_shares(engine: Any, logical_name: LogicalName) -> Iterator[tuple[_Piece, torch.Tensor]]:
    """This rank's shares of frozen parameters, which ZeRO-3 alone partitions too."""
    for name, param in _frozen(engine) if _is_zero3(engine) else ():
        placement = _placement(engine, param)
        (start, numel) = partitioned.share(param)
        if numel:
            span = Span(placement.block, start, numel)
            yield _Piece(logical_name(name), placement, span, 0), partitioned.held(param)


def _unpartitioned(
    engine: Any, logical_name: LogicalName
) -> Iterator[tuple[str, torch.Tensor, str, _Placement]]:
    """Persistent buffers and, but for ZeRO-3, frozen parameters: whole on every replica."""
    for name, param in () if _is_zero3(engine) else _frozen(engine):
        yield logical_name(name), param, "param", _placement(engine, param)
    for name, buffer in _persistent_buffers(engine.module):
        yield logical_name(name), buffer, "buffer", _placement(engine, buffer)


def _is_spread_like(value: Any, master: torch.Tensor) -> bool:
    """Whether a piece of optimizer state has one element per master weight."""
    return torch.is_tensor(value) and value.shape == master.shape


def _fragments_of(pieces: list[_Piece], kind: str, partition: torch.Tensor) -> Iterator[Fragment]:
    """Pieces of a flat partition, in its order."""
    values = partition.detach().float()
    for piece in pieces:
        yield Fragment(piece.name, kind, piece.placement.shape, piece.span, piece.of(values))


def _shapes(engine: Any, logical_name: LogicalName) -> dict[str, tuple[int, ...]]:
    """Logical names and shapes of the whole model, whose parts pipeline stages hold; collective."""
    tensors = (*engine.module.named_parameters(), *_persistent_buffers(engine.module))
    own = {logical_name(name): _placement(engine, tensor).shape for name, tensor in tensors}
    if not engine.pipeline_parallelism:
        return own
    parts: list[Any] = [None] * engine.grid.pipe_parallel_size
    torch.distributed.all_gather_object(parts, own, group=engine.grid.get_pipe_parallel_group())
    return {name: shape for part in parts for name, shape in part.items()}


def _read(engine: Any, reader: CheckpointReader, logical_name: LogicalName) -> None:
    """The part of loading that one rank does alone."""
    with torch.no_grad():
        for name, tensor, kind, placement in _unpartitioned(engine, logical_name):
            values = reader.read(name, kind, block=placement.block)
            tensor.copy_(values.reshape(tensor.shape))
        for piece, share in _frozen_shares(engine, logical_name):
            _fill(share, piece, reader, "param")
    partitions = list(_partitions(engine, logical_name))
    is_untrained = all(reader.kinds(n) == ["param"] for part in partitions for n in part.names)
    if is_untrained:
        _forget_optimizer_state(engine)
    else:
        _materialise_optimizer_state(engine)
    for partition in partitions:
        for piece in partition.pieces:
            _fill(partition.master, piece, reader, "param")
        if not is_untrained:
            _read_optimizer_state(engine.optimizer.optimizer, partition, reader)


def _fill(flat: torch.Tensor, piece: _Piece, reader: CheckpointReader, kind: str) -> None:
    span = piece.span
    piece.of(flat.detach()).copy_(
        reader.read(piece.name, kind, block=span.block, start=span.start, numel=span.numel)
    )


def _forget_optimizer_state(engine: Any) -> None:
    """For a checkpoint from before the first step: the optimizer starts as it did then."""
    engine.optimizer.optimizer.state.clear()
    engine.optimizer._hp_optimizer_states_linked = False


def _materialise_optimizer_state(engine: Any) -> None:
    """Let the optimizer make its own state, in its own types, by a step that changes nothing.

    Learning rate and gradients are zero; the masters are read afterwards in any case.
    """
    inner = engine.optimizer.optimizer
    masters = [master for master, _ in _masters(engine)]
    if all(inner.state.get(p) for p in masters):
        return
    rates = [group["lr"] for group in inner.param_groups]
    gradients = [p.grad for p in masters]
    for group in inner.param_groups:
        group["lr"] = 0.0
    for p in masters:
        p.grad = torch.zeros_like(p)
    if _is_zero3(engine):
        partitioned.step_each(engine.optimizer)
    else:
        inner.step()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
    for p, gradient in zip(masters, gradients, strict=True):
        p.grad = gradient


def _read_optimizer_state(
    inner: torch.optim.Optimizer, partition: _Partition, reader: CheckpointReader
) -> None:
    state = inner.state[partition.master]
    _check_kinds(partition, set(state), reader)
    for kind, value in state.items():
        if _is_spread_like(value, partition.master):
            for piece in partition.pieces:
                _fill(value, piece, reader, kind)
        else:
            number = _shared_number(partition, reader, kind)
            # In place and in the optimizer's own type: AdamW holds a tensor, CPUAdam an int.
            state[kind] = value.fill_(number) if torch.is_tensor(value) else type(value)(number)


def _check_kinds(partition: _Partition, kinds: set[str], reader: CheckpointReader) -> None:
    for name in partition.names:
        saved = set(reader.kinds(name)) - {"param"}
        if saved != kinds:
            raise StateError(
                f"{reader.path}: {name} was saved with optimizer state {sorted(saved)}, this "
                f"optimizer keeps {sorted(kinds)}. Resume with the optimizer that it was saved with"
            )


def _shared_number(partition: _Partition, reader: CheckpointReader, kind: str) -> float:
    """The one number that all parameters of a group have, such as the step count."""
    numbers = {reader.read(name, kind).item() for name in partition.names}
    if len(numbers) != 1:
        raise StateError(
            f"{reader.path}: parameters of one group were saved with different {kind} counts "
            f"{sorted(numbers)}; resume with the parameter groups that they were saved with"
        )
    return numbers.pop()


def _restore_counters(engine: Any, saved: dict[str, Any]) -> None:
    engine.global_steps = saved["global_steps"]
    engine.global_samples = saved["global_samples"]
    engine.skipped_steps = saved["skipped_steps"]
    # Accumulation may differ from the saving run's: what must hold is the boundary.
    engine.micro_steps = saved["global_steps"] * engine.gradient_accumulation_steps()
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if saved["loss_scaler"] is not None and scaler is not None and scaler.dynamic:
        for field, value in saved["loss_scaler"].items():
            setattr(scaler, field, value)
