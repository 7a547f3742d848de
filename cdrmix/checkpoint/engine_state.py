"""Turns a DeepSpeed engine's state into layout-independent fragments, and back, bit by bit.

Covered are ZeRO 1, 2 and 3 in fp32, bf16 and fp16, on the device or offloaded to the host
(DeepSpeed 0.19.8).

ZeRO 1 and 2 (DeepSpeedZeroOptimizer, and the BF16_Optimizer that DeepSpeed takes for ZeRO-1 with
float32 gradient accumulation): each parameter group is one flat float32 partition per rank;
`param._hp_mapping` gives the range of it that holds a parameter
(deepspeed/utils/tensor_fragment.py).

ZeRO-3 (deepspeed/runtime/zero/stage3.py): each parameter is cut by itself. Of W ranks, rank r holds
elements [r * n, (r + 1) * n) of its row-major order, n = ceil(elements / W); those beyond the end
are padding. The float32 masters of the shares stand one after another in the flat tensor of a
sub-group, which is a parameter group of the optimizer or, if that is large, a part of it.

The optimizer's state of a partition is created by its first step, and holds tensors of the
partition's shape and single numbers (`step`). An average of the weights is a part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from cdrmix import runtime
from cdrmix.checkpoint.checkpoint_file import CheckpointFile, check_names
from cdrmix.checkpoint.fragments import Box, Fragment, Span
from cdrmix.checkpoint.module_part import zero3_share
from cdrmix.checkpoint.plain_module import Elsewhere, LogicalName, nowhere, saved_tensors
from cdrmix.checkpoint.weight_source import WeightSource, check_source
from cdrmix.errors import StateError
from cdrmix.optimizers.average import AVERAGE_KINDS, begin_average, swap_average
from cdrmix.optimizers.muon import NEURON_SQUARE, Muon
from cdrmix.optimizers.muon_layout import Held
from cdrmix.parallel.tensor import is_copy, shard_of

_COUNTS = ("global_steps", "global_samples", "skipped_steps")
# Fields of DeepSpeed's DynamicLossScaler that change during training.
_LOSS_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class _Placement(NamedTuple):
    """Position of a local parameter or buffer in its logical tensor."""

    shape: tuple[int, ...]  # logical shape
    block: Box  # part of the logical tensor that this rank holds
    is_first_replica: bool  # on the first of the data ranks that hold this block
    is_copy: bool  # a rank outside the data group saves the same values


class Piece(NamedTuple):
    """Range of one parameter that lies in a partition of this rank, from `offset` on."""

    name: str
    placement: _Placement
    span: Span
    offset: int


class Partition(NamedTuple):
    """This rank's flat share of the parameters `names`; it may hold no piece of some of them."""

    master: torch.nn.Parameter
    names: list[str]
    pieces: list[Piece]
    group: dict[str, Any]  # parameter group of the optimizer
    ranks: Any  # process group whose ranks share the parameters out


def fragments(
    engine: Any, logical_name: LogicalName = str, *, elsewhere: Elsewhere = nowhere
) -> Iterator[Fragment]:
    """Yields this rank's part of masters, optimizer state, frozen parameters and buffers, but for
    those kept `elsewhere`. Over all ranks each element occurs exactly once. Called between two
    optimizer steps; values are views of live memory where possible: use or copy them before the
    next."""
    inner = engine.optimizer.optimizer
    states = inner.state
    for partition in partitions(engine, logical_name):
        pieces = [piece for piece in partition.pieces if not piece.placement.is_copy]
        for kind, value in {"param": partition.master, **states.get(partition.master, {})}.items():
            if torch.is_tensor(value) and value.shape == partition.master.shape:
                for piece in pieces:
                    view = value.detach().narrow(0, piece.offset, piece.span.numel).float()
                    yield Fragment(piece.name, kind, piece.placement.shape, piece.span, view)
                continue
            if torch.is_tensor(value) and value.numel() != 1:
                raise StateError(
                    f"the optimizer keeps {kind!r} of the shape {tuple(value.shape)} in its state, "
                    "neither of a parameter's shape nor one number: checkpoints cannot hold it"
                )
            # In float64, which holds any count of steps; a float32 does up to 2**24.
            number = torch.tensor([float(value)], dtype=torch.float64)
            for piece in pieces:
                # One rank alone holds a parameter's first logical element: that one saves it.
                if piece.span.start == 0 and not any(piece.span.block.offset):
                    yield Fragment(piece.name, kind, (), Span.whole(Box.whole(())), number)
    for of, span, square in _neuron_rows(inner):
        yield Fragment(of.name, NEURON_SQUARE, of.logical_shape[:-1], span, square)
    for is_saved, held in _untrained(engine, logical_name):
        if is_saved and not elsewhere(held.name):
            # Buffers are copied: a forward pass may change them.
            flat = held.values.reshape(-1)
            yield replace(held, values=flat.float() if held.kind == "param" else flat.clone())


@contextlib.contextmanager
def before_each_step(engine: Any, action: Callable[[], None]) -> Iterator[None]:
    """Runs `action`, inside the context, before each change of weights and optimizer state."""
    # Of the inner optimizer: every engine steps it, and nothing else changes masters and moments.
    inner: torch.optim.Optimizer = engine.optimizer.optimizer
    hook = inner.register_step_pre_hook(lambda *_: action())
    try:
        yield
    finally:
        hook.remove()


def counters(engine: Any) -> dict[str, Any]:
    """Step counts and loss scaler state of the engine, as JSON; the same on every rank."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    is_dynamic = scaler is not None and scaler.dynamic
    # A static scale belongs to the configuration, which may have another on resuming.
    fields = {field: getattr(scaler, field) for field in _LOSS_SCALER_FIELDS if is_dynamic}
    return {**{count: getattr(engine, count) for count in _COUNTS}, "loss_scaler": fields or None}


def load_engine(
    engine: Any,
    checkpoint: CheckpointFile,
    logical_name: LogicalName = str,
    *,
    others: Container[str] = (),
    elsewhere: Elsewhere = nowhere,
    averages: bool = False,
) -> None:
    """Loads a checkpoint, saved at any layout and precision, into an engine in place; collective.
    Each rank reads its own part only. The engine is fresh or between two optimizer steps, `others`
    are logical names in the checkpoint that are read elsewhere, and what the saving run kept
    `elsewhere` stays as it is. An engine that `averages` its weights takes their average too, or
    begins one at the weights of a checkpoint without; other engines leave it there. Raises
    StateError on every rank if any of them found another model or could not read."""
    shapes = model_shapes(engine, logical_name)
    shapes = {name: shape for name, shape in shapes.items() if not elsewhere(name)}
    # Checked on all ranks before any of them changes its engine. A rank that failed alone would
    # leave the others in the collectives that follow.
    runtime.together(lambda: check_names(checkpoint, shapes, others=others))
    runtime.together(lambda: _read(engine, checkpoint, logical_name, elsewhere, averages=averages))
    _round_from_masters(engine)
    counts = checkpoint.state["engine"]
    for count in _COUNTS:
        setattr(engine, count, counts[count])
    # Accumulation may differ from the saving run's; the boundary between steps must hold.
    engine.micro_steps = counts["global_steps"] * engine.gradient_accumulation_steps()
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if counts["loss_scaler"] is not None and scaler is not None and scaler.dynamic:
        for field, value in counts["loss_scaler"].items():
            setattr(scaler, field, value)


def load_weights(
    engine: Any,
    source: WeightSource,
    logical_name: LogicalName = str,
    *,
    fresh: Container[str] = (),
) -> None:
    """Takes weights alone from elsewhere into an engine in place, at any layout; collective.

    Float32 masters, frozen parameters and persistent buffers are read, each rank its own part, and
    the weights in use rounded from the masters. The engine has taken no step: its optimizer's
    state, counters and loss scale stay as they are.

    Args:
        engine: of DeepSpeed, with its initial values.
        source: the weights, of any types.
        logical_name: of the module's names.
        fresh: logical names that `source` need not have; they keep their values.
    Raises:
        StateError: on every rank, if names or shapes differ, or any of them could not read; a
            DataError from a folder of safetensors.
    """
    shapes = model_shapes(engine, logical_name)
    runtime.together(lambda: check_source(source, shapes, fresh=fresh))
    runtime.together(lambda: _read_weights(engine, source, logical_name))
    _round_from_masters(engine)


@contextlib.contextmanager
def averaged(engine: Any) -> Iterator[None]:
    """Puts the average of an engine that has one into the place of its weights, for a forward pass
    inside the context, and afterwards the weights back, bit by bit; collective, between two
    optimizer steps. An error inside must come on every rank."""
    _use_other_weights(engine)
    try:
        yield
    finally:
        _use_other_weights(engine)


def _use_other_weights(engine: Any) -> None:
    swap_average(engine)
    _round_from_masters(engine)
    if engine.pipeline_parallelism:  # the masters of both embeddings may differ in the last bits
        engine.module.align_embeddings()


def model_shapes(engine: Any, logical_name: LogicalName) -> dict[str, tuple[int, ...]]:
    """Logical shape of each parameter and persistent buffer of the model, by logical name;
    collective."""
    shapes = {
        logical_name(name): _placement(engine, tensor).shape
        for name, tensor, _ in saved_tensors(engine.module)
    }
    if engine.pipeline_parallelism:  # a stage holds a part of the names; the check is of the model
        parts: list[Any] = [None] * engine.grid.pipe_parallel_size
        group = engine.grid.get_pipe_parallel_group()
        torch.distributed.all_gather_object(parts, shapes, group=group)
        shapes = {name: shape for part in parts for name, shape in part.items()}
    return shapes


def _round_from_masters(engine: Any) -> None:
    """Makes the weights in use from the masters, as after a step; collective."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        optimizer.update_lp_params()
        return
    # A forward pass may have left parameters gathered; their shares are replaced next.
    optimizer.parameter_offload.partition_all_parameters()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    persistent = optimizer.persistent_parameters  # small ones, whole on every rank
    if persistent:
        persistent[0].all_gather(persistent)


def partitions(engine: Any, logical_name: LogicalName) -> Iterator[Partition]:
    """Partitions of this rank, in the optimizer's order."""
    names = {id(p): logical_name(name) for name, p in engine.module.named_parameters()}
    masters = zip(_masters(engine), _groups_of_masters(engine), strict=True)
    for (master, parameters), (group, ranks) in masters:
        pieces = []
        for param in parameters:
            if engine.zero_optimization_stage() == 3:
                start, numel = zero3_share(param)
                # ZeRO-3 keeps a range for each gradient, which is that of its share of the master.
                number = engine.optimizer.get_param_id(param)
                offset = int(engine.optimizer.grad_position[number][1])
            else:
                # None where this rank's flat partition holds nothing of the parameter.
                mapping: Any = param._hp_mapping  # type: ignore[attr-defined]
                if mapping is None:
                    continue
                start = mapping.lp_fragment_address.start
                numel = mapping.lp_fragment_address.numel
                offset = mapping.hp_fragment_address.start
            if numel:
                placement = _placement(engine, param)
                span = Span(placement.block, start, numel)
                pieces.append(Piece(names[id(param)], placement, span, offset))
        yield Partition(master, [names[id(p)] for p in parameters], pieces, group, ranks)


def _masters(engine: Any) -> list[tuple[torch.nn.Parameter, list[torch.nn.Parameter]]]:
    """Flat float32 masters, each with the trained parameters that it holds shares of."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        flat = optimizer.fp32_partitioned_groups_flat
        return list(zip(flat, optimizer.fp16_groups, strict=True))
    assert engine.zero_optimization_stage() in (1, 2), "written for ZeRO stages 1 to 3"
    # 0.19.8 links `_hp_mapping` in the order before the round-robin shuffle, which is wrong.
    assert not engine.zero_round_robin_gradients(), "round_robin_gradients cannot be saved"
    masters = [master for group in optimizer.optimizer.param_groups for master in group["params"]]
    # BF16_Optimizer has another name for the same lists of parameters.
    is_bf16_optimizer = hasattr(optimizer, "bf16_groups")
    groups = optimizer.bf16_groups if is_bf16_optimizer else optimizer.bit16_groups
    return list(zip(masters, groups, strict=True))


def _groups_of_masters(engine: Any) -> list[tuple[dict[str, Any], Any]]:
    """Parameter group, and process group, of each of `_masters`."""
    optimizer = engine.optimizer
    groups = optimizer.optimizer.param_groups
    if engine.zero_optimization_stage() == 3:
        numbers = range(len(optimizer.fp16_groups))
        by_number = optimizer.sub_group_to_group_id
        return [(groups[by_number[n]], optimizer._get_sub_group_process_group(n)) for n in numbers]
    return list(zip(groups, optimizer.real_dp_process_group, strict=True))


def _placement(engine: Any, tensor: torch.Tensor) -> _Placement:
    """Placement of a parameter or buffer: a block of experts, a shard of a tensor rank, or all."""
    # ZeRO-3 leaves an empty tensor of a parameter, and its shape in `ds_shape`.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    copied = is_copy(tensor)
    if getattr(tensor, "allreduce", True):
        is_first = torch.distributed.get_rank(engine.optimizer.dp_process_group) == 0
        if shard := shard_of(tensor):
            return _Placement(shard.logical_shape, Box(shard.offset, shape), is_first, copied)
        return _Placement(shape, Box.whole(shape), is_first, copied)
    name: str = tensor.group_name  # type: ignore[attr-defined]
    # DeepSpeed's expert group holds one copy of a layer's experts, in order; its expert data group
    # holds the replicas of one rank's.
    experts = engine.expert_parallel_group[name]
    replicas = engine.expert_data_parallel_group[name]
    first = torch.distributed.get_rank(experts) * shape[0]
    total = torch.distributed.get_world_size(experts) * shape[0]
    is_first = torch.distributed.get_rank(replicas) == 0
    block = Box((first, *(0 for _ in shape[1:])), shape)
    return _Placement((total, *shape[1:]), block, is_first, copied)


def _untrained(engine: Any, logical_name: LogicalName) -> Iterator[tuple[bool, Fragment]]:
    """Frozen parameters and persistent buffers, which have no masters, each with whether this rank
    saves it. Values have the types, and undivided ones the shapes, of the engine."""
    # By the optimizer's groups, not by requires_grad, which each phase of Stage B sets anew.
    trained = {id(p) for _, parameters in _masters(engine) for p in parameters}
    for name, tensor, kind in saved_tensors(engine.module):
        if id(tensor) in trained:
            continue
        placement = _placement(engine, tensor)
        span = Span.whole(placement.block)
        values = tensor.detach()
        is_saved = placement.is_first_replica and not placement.is_copy
        # Of what is not trained, ZeRO-3 partitions the parameters.
        if kind == "param" and engine.zero_optimization_stage() == 3:
            span = Span(placement.block, *zero3_share(tensor))
            values = tensor.ds_tensor.detach().narrow(0, 0, span.numel)
            is_saved = span.numel > 0
        yield is_saved, Fragment(logical_name(name), kind, placement.shape, span, values)


def _read(
    engine: Any,
    checkpoint: CheckpointFile,
    logical_name: LogicalName,
    elsewhere: Elsewhere,
    *,
    averages: bool,
) -> None:
    """Reads this rank's part of a checkpoint; the phase of loading without collectives."""
    with torch.no_grad():
        for _, held in _untrained(engine, logical_name):
            if elsewhere(held.name):
                continue
            values = checkpoint.read(held.name, held.kind, held.span)
            held.values.copy_(values.reshape(held.values.shape))
    parts = list(partitions(engine, logical_name))
    is_untrained = all(checkpoint.kinds(n) == ["param"] for part in parts for n in part.names)
    if is_untrained:  # saved before the first step: the optimizer starts anew, too
        inner = engine.optimizer.optimizer
        if isinstance(inner, Muon):
            inner.forget()
        else:
            inner.state.clear()
        # DeepSpeed links each parameter to its state once, at the first step that follows.
        engine.optimizer._hp_optimizer_states_linked = False
    elif not all(engine.optimizer.optimizer.state.get(part.master) for part in parts):
        # The optimizer creates its state, in its own types, by a step that changes nothing: the
        # masters are read afterwards in any case. A rate of zero also tells gradient clipping of
        # Stage B that no part learns in this step.
        inner = engine.optimizer.optimizer
        rates = [group["lr"] for group in inner.param_groups]
        gradients = [part.master.grad for part in parts]
        for group in inner.param_groups:
            group["lr"] = 0.0
        for part in parts:
            part.master.grad = torch.zeros_like(part.master)
        if engine.zero_optimization_stage() == 3:
            # The inner optimizer holds the master of one sub-group at a time.
            for number in range(len(engine.optimizer.fp16_groups)):
                engine.optimizer._optimizer_step(number)
        else:
            inner.step()
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["lr"] = rate
        for part, gradient in zip(parts, gradients, strict=True):
            part.master.grad = gradient
    for partition in parts:
        state = engine.optimizer.optimizer.state.get(partition.master, {})
        _read_partition(state, partition, checkpoint, averages=averages)
    if not is_untrained:
        for of, span, square in _neuron_rows(engine.optimizer.optimizer):
            square.copy_(checkpoint.read(of.name, NEURON_SQUARE, span))


def _neuron_rows(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[Held, Span, torch.Tensor]]:
    """NorMuon's mean squares on this rank: of a parameter, the span of its rows, values."""
    for held, first, square in optimizer.neuron_rows() if isinstance(optimizer, Muon) else ():
        rows = Box(held.block_offset[:-1], held.shape[:-1])
        yield held, Span(rows, first, len(square)), square


def _read_weights(engine: Any, source: WeightSource, logical_name: LogicalName) -> None:
    """Reads this rank's part of a source; the phase of `load_weights` without collectives."""
    there = set(source.names())

    def fill(target: torch.Tensor, name: str, kind: str, span: Span) -> None:
        values = source.read(name, span)
        if kind == "param" and not values.is_floating_point():
            raise StateError(
                f"{source.path}: {name} is of type {str(values.dtype).removeprefix('torch.')}, and "
                "a parameter is a floating-point number. Give weights that are not quantised"
            )
        target.copy_(values.reshape(target.shape))

    with torch.no_grad():
        for _, held in _untrained(engine, logical_name):
            if held.name in there:
                fill(held.values, held.name, held.kind, held.span)
        for partition in partitions(engine, logical_name):
            for piece in partition.pieces:
                if piece.name in there:
                    target = partition.master.detach().narrow(0, piece.offset, piece.span.numel)
                    fill(target, piece.name, "param", piece.span)


def _read_partition(
    state: dict[str, Any], partition: Partition, checkpoint: CheckpointFile, *, averages: bool
) -> None:
    """Fills the masters of one partition and their `state`, which the optimizer has created. Raises
    StateError if another kind of optimizer, or other parameter groups, saved the checkpoint."""
    # Of every name in the group: ranks that hold nothing of a parameter must fail as the others do.
    kept = [kind for kind in state if kind not in AVERAGE_KINDS]
    for name in partition.names:
        saved = set(checkpoint.kinds(name)) - {"param", NEURON_SQUARE, *AVERAGE_KINDS}
        if saved != set(kept):
            raise StateError(
                f"{checkpoint.path}: {name} was saved with optimizer state {sorted(saved)}, this "
                f"optimizer keeps {sorted(kept)}. Resume with the optimizer that it was saved with"
            )
    _fill(["param", *kept], state, partition, checkpoint)
    if averages and state:  # none before the first step, when the optimizer has no state either
        begin_average(state, partition.master)
        _fill(AVERAGE_KINDS if checkpoint.has_average else (), state, partition, checkpoint)


def _fill(
    kinds: Iterable[str], state: dict[str, Any], partition: Partition, checkpoint: CheckpointFile
) -> None:
    """Reads kinds of one partition in place: its master, and what is in its `state`."""
    for kind in kinds:
        value = partition.master if kind == "param" else state[kind]
        if torch.is_tensor(value) and value.shape == partition.master.shape:
            for piece in partition.pieces:  # padding between them stays as it is
                target = value.detach().narrow(0, piece.offset, piece.span.numel)
                # Under no name, which would keep it in memory while the next one is read.
                target.copy_(checkpoint.read(piece.name, kind, piece.span))
            continue
        # One number for all parameters of a group, such as the step count.
        numbers = {checkpoint.read(name, kind).item() for name in partition.names}
        if len(numbers) != 1:
            raise StateError(
                f"{checkpoint.path}: parameters of one group were saved with different {kind} "
                f"counts {sorted(numbers)}; resume with the parameter groups that they were saved "
                "with"
            )
        number = numbers.pop()
        # In place and in the optimizer's own type: AdamW holds a tensor, CPUAdam an int.
        state[kind] = value.fill_(number) if torch.is_tensor(value) else type(value)(number)
