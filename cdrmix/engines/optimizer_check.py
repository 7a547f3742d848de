"""Check of Muon at the first steps of each start.

Frameworks have trained for weeks with a Muon that was plain SGD, was clipped after it had been
orthogonalised, or had no parameter at all, without a message. So the first step is counted and
computed again: each matrix is orthogonalised once, Muon has all matrices that the plan gives it,
and three of them end where a plain computation in float32 puts them. Behind a projection that
begins with zeros a first gradient is zero, and so are updates of any kind: then the second step
is looked at as well, which no longer has them.
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
_MOST_STEPS = 3  # of a start that are checked while a watched matrix has no gradient
# Share of the planned elements that Muon must have.
_LEAST_COVERED = 0.95
# Error of a step, as a share of it: a cosine of .999 and a norm off by 2 % come to this. Products
# in bfloat16 come to a tenth.
_LARGEST_ERROR = 0.05
# Beside it, the rounding of a float32 weight to which a small step is added (of the weights' norm).
_ROUNDING = 2.0**-23


class OptimizerCheck:
    """Checks the first steps that Muon takes; other optimizers are not checked."""

    def __init__(self) -> None:
        self._left = _MOST_STEPS

    @contextlib.contextmanager
    def of_step(self, engine: Any, config: Config) -> Iterator[None]:
        """Watches the step that is taken inside the context, and checks it; collective.

        A step that is skipped, has no gradient for the momentum, or a rate of 0 leaves the check to
        the next.

        Raises:
            StateError: on every rank, if any of them found a fault.
        """
        optimizer = engine.optimizer.optimizer
        if not (self._left and isinstance(optimizer, Muon)):
            yield
            return
        watched = optimizer.watch(_WATCHED)
        counted = optimizer.newton_schulz.matrices
        skipped = engine.skipped_steps
        yield
        optimizer.watched = {}
        rates = [group["lr"] for group in optimizer.param_groups if group["is_muon"]]
        if engine.skipped_steps > skipped or optimizer.is_spike or not any(rates):
            return
        problems = list(_counts(optimizer, config, optimizer.newton_schulz.matrices - counted))
        is_idle = False
        for each in watched:
            wholes = _gathered(each)
            is_idle = is_idle or not wholes[0].any()
            problems += _differences(optimizer, config, each, wholes)
        # Each rank has its own matrices, and all must agree to stop.
        gathered = runtime.all_gather_object((problems, is_idle))
        found = [text for texts, _ in gathered for text in texts]
        if found:
            listed = "\n".join(f"  {text}" for text in dict.fromkeys(found))
            raise StateError(
                f"optimizer.kind = muon: the first step is not Muon's:\n{listed}\nNothing was "
                "saved. Try optimizer.kind = adamw, and report this with plan.json"
            )
        is_first = self._left == _MOST_STEPS
        self._left = self._left - 1 if any(idle for _, idle in gathered) else 0
        if is_first:
            logger.info(
                "muon: checked: each of %d matrices orthogonalised once, %d computed again",
                *(muon_matrices(config)[0], len(watched)),
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


def _gathered(watched: Watched) -> list[Tensor]:
    """Gradient before and in DeepSpeed's step, momentum, weights before and after, of one matrix.

    Whole, and not a number where nothing was stepped; collective over the ranks that hold it.
    """
    matrix = watched.matrix
    values = [watched.gradient, watched.arrived, watched.momentum, watched.before, watched.after]
    mine = ([[x.cpu() for x in each] for each in values], watched.neuron)
    gathered: list[Any] = [mine]
    if watched.group is not None:
        gathered = [None] * torch.distributed.get_world_size(watched.group)
        torch.distributed.all_gather_object(gathered, mine, group=watched.group)
    whole = []
    for kind in range(len(values)):
        flat = torch.full((matrix.rows * matrix.columns,), float("nan"))
        for rank, (of_rank, _) in enumerate(gathered):
            for piece, part in zip(matrix.pieces_of(rank), of_rank[kind], strict=False):
                flat[piece.start : piece.start + piece.numel] = part
        whole.append(flat.view(matrix.rows, matrix.columns))
    watched.neuron = next((square for _, square in gathered if square is not None), None)
    return whole


def _differences(
    optimizer: Muon, config: Config, watched: Watched, whole: Sequence[Tensor]
) -> Iterator[str]:
    """Faults in the step of one matrix, from what `_gathered` gives."""
    settings = config.optimizer
    matrix = watched.matrix
    shape = (matrix.rows, matrix.columns)
    gradient, arrived, momentum, before, after = whole
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
        assert watched.neuron is not None, "its owner has it"
        square = watched.neuron.cpu().lerp(update.square().mean(1), 1 - settings.neuron_beta)
        normed = update / (square.sqrt() + 1e-8)[:, None]
        update = torch.nan_to_num(normed * (update.norm() / normed.norm()))
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
