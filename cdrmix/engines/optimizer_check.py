"""Check of Muon at the first step of each start.

Frameworks have trained for weeks with a Muon that was plain SGD, was clipped after it had been
orthogonalised, or had no parameter at all, without a message. So the first step is counted and
computed again: each matrix is orthogonalised once, Muon has all matrices that the plan gives it,
and three of them end where a plain computation in float32 puts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.errors import StateError
from cdrmix.log import get_logger
from cdrmix.optimizers.muon import Muon, Watched, scale_factor
from cdrmix.optimizers.newton_schulz import coefficients
from cdrmix.planning.muon import muon_matrices

logger = get_logger(__name__)

_WATCHED = 3  # matrices that are computed again
# Share of the planned elements that Muon must have.
_LEAST_COVERED = 0.95
# Error of a step, as a share of it: a cosine of .999 and a norm off by 2 % come to this. Products
# in bfloat16 come to a tenth.
_LARGEST_ERROR = 0.05
# Beside it, the rounding of a float32 weight to which a small step is added (of the weights' norm).
_ROUNDING = 2.0**-23


class OptimizerCheck:
    """Checks the first step that Muon takes; other optimizers are not checked."""

    def __init__(self) -> None:
        self._is_due = True

    @contextlib.contextmanager
    def of_step(self, engine: Any, config: Config) -> Iterator[None]:
        """Watches the step that is taken inside the context, and checks it; collective.

        A step that DeepSpeed skipped, or at a rate of 0, leaves the check to the next.

        Raises:
            StateError: on every rank, if any of them found a fault.
        """
        optimizer = engine.optimizer.optimizer
        if not (self._is_due and isinstance(optimizer, Muon)):
            yield
            return
        watched = optimizer.watch(_WATCHED)
        counted = optimizer.newton_schulz.matrices
        skipped = engine.skipped_steps
        yield
        optimizer.watched = {}
        rates = [group["lr"] for group in optimizer.param_groups if group["is_muon"]]
        if engine.skipped_steps > skipped or not any(rates):
            return
        self._is_due = False
        problems = list(_counts(optimizer, config, optimizer.newton_schulz.matrices - counted))
        for each in watched:
            problems += _differences(optimizer, config, each)
        # Each rank has its own matrices, and all must agree to stop.
        found = [text for texts in runtime.all_gather_object(problems) for text in texts]
        if found:
            listed = "\n".join(f"  {text}" for text in dict.fromkeys(found))
            raise StateError(
                f"optimizer.kind = muon: the first step is not Muon's:\n{listed}\nNothing was "
                "saved. Try optimizer.kind = adamw, and report this with plan.json"
            )
        if runtime.rank() == 0:
            total, _ = muon_matrices(config)
            logger.info(
                "muon: checked: %d matrices orthogonalised once, %d of them computed again",
                *(total, len(watched)),
            )


def _counts(optimizer: Muon, config: Config, orthogonalised: int) -> Iterator[str]:
    """Faults in the numbers of matrices and elements over all ranks; collective."""
    matrices, elements = muon_matrices(config)
    # Of ranks that hold the same matrices each one has its share of them, and of elements.
    here = sum(
        held.numel
        for partition in optimizer.partitions()
        for held in partition.held
        if partition.exchange is not None and held.counts
    )
    bound = sum(
        matrix.owner == partition.exchange.rank
        for partition in optimizer.partitions()
        if partition.exchange is not None
        for matrix in partition.matrices
    )
    sums = torch.tensor([orthogonalised, here, bound], dtype=torch.float64)
    done, covered, owned = runtime.all_reduce_sum(sums.to(runtime.device())).tolist()
    if done != owned:
        yield f"{done:.0f} matrices were orthogonalised in a step, and there are {owned:.0f}"
    # Tensor ranks have parts of matrices, which count as matrices.
    if owned != matrices and config.parallel.tensor == 1:
        yield f"Muon has {owned:.0f} matrices, and the model has {matrices} for it"
    if covered < _LEAST_COVERED * elements:
        yield f"Muon has {covered / elements:.1%} of the {elements:,} elements that are for it"


def _differences(optimizer: Muon, config: Config, watched: Watched) -> Iterator[str]:
    """Faults in the step of one matrix; collective over the ranks that hold it."""
    settings = config.optimizer
    matrix = watched.matrix
    shape = (matrix.rows, matrix.columns)
    values = [watched.gradient, watched.arrived, watched.momentum, watched.before, watched.after]
    gathered = [(values, watched.neuron)]
    if watched.group is not None:
        gathered = [([], None)] * torch.distributed.get_world_size(watched.group)
        mine = ([[x.cpu() for x in each] for each in values], watched.neuron)
        torch.distributed.all_gather_object(gathered, mine, group=watched.group)
    whole = []
    for kind in range(len(values)):
        flat = torch.full((matrix.rows * matrix.columns,), float("nan"))
        for rank, (of_rank, _) in enumerate(gathered):
            # A piece that was not stepped at all is missing, and stays not a number.
            for piece, part in zip(matrix.pieces_of(rank), of_rank[kind], strict=False):
                flat[piece.start : piece.start + piece.numel] = part.cpu()
        whole.append(flat.view(shape))
    gradient, arrived, momentum, before, after = whole
    neuron = next((each for _, each in gathered if each is not None), None)
    name = f"{matrix.parameter.name}[{matrix.index}]"
    if not _is_close(arrived, gradient, gradient.norm()):
        yield (
            f"{name}: DeepSpeed changed the gradient: its norm was {gradient.norm():.3g} and is "
            f"{arrived.norm():.3g}"
        )
    group = next(g for g in optimizer.param_groups if g["is_muon"])
    rate, decay = group["lr"], config.training.weight_decay
    momentum = momentum.lerp(gradient, 1 - settings.momentum)
    direction = gradient.lerp(momentum, settings.momentum) if settings.nesterov else momentum
    update = _orthogonal(direction, settings.newton_schulz, settings.newton_schulz_steps)
    if settings.neuron_norm:
        assert neuron is not None, "its owner has it"
        square = neuron.cpu().lerp(update.square().mean(1), 1 - settings.neuron_beta)
        normed = update / (square.sqrt() + 1e-8)[:, None]
        update = normed * (update.norm() / normed.norm())
    taken = rate * scale_factor(*shape, settings.scale) * update
    expected = (1 - rate * decay) * before - taken
    rounding = _ROUNDING * float(before.norm())
    if not _is_close(after, expected, taken.norm(), rounding):
        moved, planned = after - before, expected - before
        cosine = torch.nn.functional.cosine_similarity(moved.flatten(), planned.flatten(), dim=0)
        yield (
            f"{name}: the step has a norm of {moved.norm():.3g} where {planned.norm():.3g} is "
            f"right, and a cosine of {cosine:.4f} with it"
        )


def _is_close(found: Tensor, right: Tensor, size: Tensor, rounding: float = 0.0) -> bool:
    return bool((found - right).norm() <= _LARGEST_ERROR * size + rounding)


def _orthogonal(matrix: Tensor, kind: Any, steps: int) -> Tensor:
    """Newton-Schulz of one matrix, written plainly."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    safety = 1.01 if kind == "polar" and steps <= 5 else 1.0
    x = x / (safety * x.norm() + 1e-7)
    sets: Sequence[tuple[float, float, float]] = coefficients(kind, steps)
    for a, b, c in sets:
        product = x @ x.T
        x = a * x + b * product @ x + c * product @ product @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
