"""Optimizer of Stage A: made for a model, joined to DeepSpeed's engine, and described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.engine_state import Partition
from cdrmix.config.plugin import is_plugin
from cdrmix.config.schema import Config
from cdrmix.engines.run import JsonObject
from cdrmix.engines.run_directory import PARAMETER_GROUPS, RunDirectory
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import write_json_atomic
from cdrmix.optimizers.adamw import adamw
from cdrmix.optimizers.groups import muon
from cdrmix.optimizers.muon import Muon, scale_factor
from cdrmix.optimizers.muon_layout import Held
from cdrmix.optimizers.users import users_optimizer
from cdrmix.parallel.apply import logical_name_in
from cdrmix.planning.plugins import optimizer_of

logger = get_logger(__name__)


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Makes the configured optimizer for this rank's part of a model.

    Raises:
        PlanError: if a parameter of the model is of no known part, and Muon would have to know it.
        ConfigError: if an optimizer of a user's is other than it declares.
    """
    if config.optimizer.kind == "muon":
        return muon(model, config, logical_name_in(config.model))
    of_user = optimizer_of(config.optimizer)
    if of_user is not None:
        return users_optimizer(model, config, of_user)
    return adamw(model, config.training)


def join(engine: Any, optimizer: Muon, config: Config) -> None:
    """Tells Muon where its matrices lie in an engine, and has it see each step's gradients.

    Collective. DeepSpeed's optimizers are called at the end of a step's micro-batches alone, once
    their gradients are reduced, by every kind of engine.
    """
    name = logical_name_in(config.model)
    parts = list(engine_state.partitions(engine, name))
    vectors = {name(own) for own, p in engine.module.named_parameters() if len(_shape(p)) < 2}
    for part in parts:
        optimizer.bind(
            part.master,
            [_held(piece) for piece in part.pieces],
            lambda of: of not in vectors,
            is_muon=part.group["is_muon"],
            group=part.ranks,
            device=engine.device,
        )
    zero = engine.optimizer
    take_step = zero.step

    def step(*args: Any, **kwargs: Any) -> Any:
        gradients = ((part.master, _gradients(engine, n, part)) for n, part in enumerate(parts))
        optimizer.prepare(gradients, scale=float(getattr(zero, "loss_scale", 1.0)))
        if optimizer.is_spike and runtime.rank() == 0:
            logger.warning(
                "warning: step %d: the norm of the matrices' gradients is %.3g times its recent "
                "median: they are left out of the momentum (optimizer.max_spike: %g; spike %d)",
                *(engine.global_steps + 1, optimizer.spike_ratio),
                *(config.optimizer.max_spike, optimizer.spikes),
            )
        return take_step(*args, **kwargs)

    zero.step = step


def _shape(parameter: Any) -> tuple[int, ...]:
    """Shape of a local parameter; ZeRO-3 leaves an empty tensor of it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _held(piece: engine_state.Piece) -> Held:
    placement, block = piece.placement, piece.span.block
    return Held(
        name=piece.name,
        logical_shape=placement.shape,
        block_offset=block.offset,
        shape=block.shape,
        start=piece.span.start,
        numel=piece.span.numel,
        offset=piece.offset,
        counts=not placement.is_copy,
    )


def _gradients(engine: Any, number: int, part: Partition) -> list[Tensor]:
    """Reduced gradients of a partition's pieces before a step of DeepSpeed 0.19.8, in their order.

    They are one flat tensor with the optimizer on the host (where they are copied to as they are
    reduced) and in BF16_Optimizer, and a list by parameter elsewhere.
    """
    zero = engine.optimizer
    flat: Tensor | None = None
    if hasattr(zero, "fp32_groups_gradient_flat_partition"):  # BF16_Optimizer
        flat = zero.fp32_groups_gradient_flat_partition[number]
    elif getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        if hasattr(zero, "_wait_for_offload_copies"):
            zero._wait_for_offload_copies()
        flat = part.master.grad
    if flat is not None:
        return [flat.narrow(0, piece.offset, piece.span.numel) for piece in part.pieces]
    found: Sequence[Tensor] = zero.averaged_gradients[number]
    lists = [each for each in found if not getattr(each, "_zero_padding", False)]
    # ZeRO-3 lists a share of every parameter, which may be padding alone.
    if engine.zero_optimization_stage() == 3:
        shares = dict(zip(part.names, lists, strict=True))
        lists = [shares[piece.name].narrow(0, 0, piece.span.numel) for piece in part.pieces]
    return lists


def parameter_table(engine: Any, config: Config) -> JsonObject:
    """Optimizer, group, shape and scale factor of each trained parameter of the model; collective.

    It is read off the engine. Raises AssertionError if a parameter is in no group, or in two.
    """
    own = dict(_rows(engine, config))
    table: JsonObject = {}
    blocks: dict[str, dict[tuple[int, ...], int]] = {}  # matrices of each block of a parameter
    for rows in runtime.all_gather_object(own):
        for name, (row, of_blocks) in rows.items():
            table[name] = row
            blocks.setdefault(name, {}).update(of_blocks)
    for name, of_blocks in blocks.items():
        if of_blocks:
            table[name]["matrices"] = sum(of_blocks.values())
    return {name: table[name] for name in sorted(table)}


def _rows(
    engine: Any, config: Config
) -> Iterator[tuple[str, tuple[JsonObject, dict[tuple[int, ...], int]]]]:
    """Yields name and row of each parameter of this rank, with the number of Muon's matrices in
    each block that it knows of: expert and tensor ranks have blocks of their own."""
    optimizer = engine.optimizer.optimizer
    name = logical_name_in(config.model)
    shapes = engine_state.model_shapes(engine, name)
    trained = {name(own) for own, p in engine.module.named_parameters() if p.requires_grad}
    seen: set[str] = set()
    other = config.optimizer.kind if is_plugin(config.optimizer.kind) else "adamw"
    for part in engine_state.partitions(engine, name):
        is_muon = part.group.get("is_muon", False)
        bound = optimizer.matrices(part.master) if isinstance(optimizer, Muon) else ()
        for each in part.names:
            assert each not in seen, f"{each} is in two groups"
            seen.add(each)
            shape = shapes[each]
            row: JsonObject = {
                "optimizer": "muon" if is_muon else other,
                "group": part.group["name"],
                "shape": list(shape),
            }
            matrices = [matrix for matrix in bound if matrix.parameter.name == each]
            blocks = Counter(matrix.parameter.block_offset for matrix in matrices)
            if matrices:
                rows, columns = matrices[0].rows, matrices[0].columns
                row["factor"] = scale_factor(rows, columns, config.optimizer.scale)
            yield each, (row, dict(blocks))
    assert trained == seen, f"in no group: {sorted(trained - seen)}"


def record_groups(directory: RunDirectory, engine: Any, config: Config) -> None:
    """Write that table into a run directory, and log how much each optimizer trains; collective."""
    table = parameter_table(engine, config)
    path = directory.path / PARAMETER_GROUPS
    runtime.first_rank_does(lambda: write_json_atomic(path, table))
    counts = []
    for kind in dict.fromkeys(("muon", "adamw", config.optimizer.kind)):
        rows = [row for row in table.values() if row["optimizer"] == kind]
        elements = sum(torch.Size(row["shape"]).numel() for row in rows)
        matrices = sum(row.get("matrices", 0) for row in rows)
        held = f"{matrices} matrices" if matrices else f"{len(rows)} tensors"
        if rows:
            counts.append(f"{kind} {held}, {elements / 1e6:.3g}M parameters")
    if runtime.rank() == 0:
        logger.info("optimizer: %s (%s)", "; ".join(counts), PARAMETER_GROUPS)
