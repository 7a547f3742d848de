"""Check of Muon at the first steps of each start.

Frameworks have trained for weeks with a Muon that was plain SGD, was clipped after it had been
orthogonalised, or had no parameter at all, without a message. So the first step is counted and
computed again: each matrix is orthogonalised once, Muon has all matrices that the plan gives it,
and of three the way is computed in float32 beside it: from the gradient to what Newton-Schulz is
given, through Newton-Schulz, and from its result to the weights. Behind a projection that begins
with zeros a first gradient is zero, and so are updates of any kind: then the second step is looked
at as well, which no longer has them.

Newton-Schulz is looked at by itself because it is in bfloat16 on GPUs. There directions in which a
gradient has less than rounding come out as noise of full size, another for each order of the sums:
a result of rank one differed by 116 % from that in float32, and by 80 % from the same in bfloat16,
written otherwise. So results are weighed by what was given, in whose own directions they differed
by 6.6 % at most, whatever the spectrum, and bounded by the size of an orthogonal matrix elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.errors import StateError
from cdrmix.hooks import Hook, RunView, StepFigures
from cdrmix.log import get_logger
from cdrmix.optimizers.muon import Muon, Watched, scale_factor
from cdrmix.optimizers.muon_layout import Matrix
from cdrmix.optimizers.newton_schulz import Kind, coefficients
from cdrmix.planning.muon import muon_matrices

logger = get_logger(__name__)

_WATCHED = 3  # matrices that are computed again
_MOST_STEPS = 3  # of a start that are checked while a watched matrix has no gradient
# Share of the planned elements that Muon must have.
_LEAST_COVERED = 0.95
# Error as a share of what is right: a cosine of .999 and a norm off by 2 % come to this.
_LARGEST_ERROR = 0.05
# That of Newton-Schulz by itself, in bfloat16 at most .066 (polar in five steps; others .037).
# Plain momentum in its place is off by .22 and more.
_LARGEST_ERROR_OF_PRODUCTS = 0.1
# Root mean square of the singular values that Newton-Schulz gives; all sets end below 1.2 in
# float32, and in bfloat16 below 1.4.
_LARGEST_VALUE = 1.5
# Beside it, the rounding of a float32 weight to which a small step is added (of the weights' norm).
_ROUNDING = 2.0**-23


class OptimizerCheck(Hook):
    """Checks the first steps that Muon takes in a stage; other optimizers are not checked.

    A step that is skipped, has no gradient for the momentum, or a rate of 0 leaves the check to the
    next.
    """

    collective = True

    def __init__(self, *, tensor_ranks: int) -> None:
        self._tensor_ranks = tensor_ranks  # as planned
        self._left = 0
        self._watched: list[Watched] = []
        self._counted = 0  # matrices orthogonalised before the step

    def on_start(self, run: RunView) -> None:
        """Begins to check, if the engine's optimizer is Muon."""
        self._config: Config = run.config
        self._optimizer: Muon = run.engine.optimizer.optimizer
        self._left = _MOST_STEPS if isinstance(self._optimizer, Muon) else 0

    def on_end(self, outcome: Literal["done", "stopped"]) -> None:
        """Lets go of the optimizer, whose memory the next stage needs."""
        del self._optimizer
        self._watched = []

    def on_batch(self, batch: Mapping[str, Any]) -> None:
        """Watches the step that comes."""
        if self._left:
            self._watched = self._optimizer.watch(_WATCHED)
            self._counted = self._optimizer.newton_schulz.matrices

    def on_step(self, step: int, measured: StepFigures) -> None:
        """Checks a step. Raises StateError, on every rank, if any of them found a fault."""
        if not self._left:
            return
        optimizer, config = self._optimizer, self._config
        optimizer.watched = {}
        rates = [group["lr"] for group in optimizer.param_groups if group["is_muon"]]
        if measured.is_skipped or optimizer.is_spike or not any(rates):
            return
        orthogonalised = optimizer.newton_schulz.matrices - self._counted
        matrices, problems = _counts(
            optimizer, config, orthogonalised, tensor_ranks=self._tensor_ranks
        )
        is_idle = False
        for each in self._watched:
            wholes = _gathered(each)
            is_idle = is_idle or not wholes.gradient.any()
            problems += _differences(optimizer, config, each.matrix, wholes)
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
                *(matrices, len(self._watched)),
            )
        self._watched = []


def _counts(
    optimizer: Muon, config: Config, orthogonalised: int, *, tensor_ranks: int
) -> tuple[int, list[str]]:
    """Matrices over all ranks, and faults in their number and that of elements; collective."""
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
    found = []
    if done != owned:
        found.append(
            f"{done:.0f} matrices were orthogonalised in a step, and there are {owned:.0f}"
        )
    # Tensor ranks have parts of matrices, which count as matrices.
    if owned != matrices and tensor_ranks == 1:
        found.append(f"Muon has {owned:.0f} matrices, and the model has {matrices} for it")
    if covered < _LEAST_COVERED * elements:
        share = covered / elements
        found.append(f"Muon has {share:.1%} of the {elements:,} elements that are for it")
    return int(owned), found


class _Whole(NamedTuple):
    """One matrix at a step, whole, [R, C] each; not a number where nothing was stepped."""

    gradient: Tensor  # before DeepSpeed's step
    arrived: Tensor  # gradient in it
    momentum: Tensor  # before the step, as
    before: Tensor  # are these weights
    after: Tensor
    given: Tensor  # to Newton-Schulz
    orthogonal: Tensor  # its result
    square: Tensor | None  # of NorMuon, [R], before the step


def _gathered(watched: Watched) -> _Whole:
    """Puts a watched matrix together; collective over the ranks that hold it."""
    matrix = watched.matrix
    values = [watched.gradient, watched.arrived, watched.momentum, watched.before, watched.after]
    own = [watched.given, watched.orthogonal, watched.neuron]
    mine = (
        [[x.cpu() for x in each] for each in values],
        [x if x is None else x.cpu() for x in own],
    )
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
    # These are on the owner alone.
    given, orthogonal, square = (
        next((of_rank[kind] for _, of_rank in gathered if of_rank[kind] is not None), None)
        for kind in range(len(own))
    )
    nothing = torch.full((matrix.rows, matrix.columns), float("nan"))
    given = nothing if given is None else given
    orthogonal = nothing if orthogonal is None else orthogonal
    gradient, arrived, momentum, before, after = whole
    return _Whole(gradient, arrived, momentum, before, after, given, orthogonal, square)


def _differences(optimizer: Muon, config: Config, matrix: Matrix, whole: _Whole) -> Iterator[str]:
    """Faults in the step of one matrix."""
    settings = config.optimizer
    gradient, before = whole.gradient, whole.before
    name = f"{matrix.parameter.name}[{matrix.index}]"
    if not _is_close(whole.arrived, gradient, gradient.norm()):
        yield (
            f"{name}: DeepSpeed changed the gradient: its norm was {gradient.norm():.3g} and is "
            f"{whole.arrived.norm():.3g}"
        )
    momentum = whole.momentum.lerp(gradient, 1 - settings.momentum)
    direction = gradient.lerp(momentum, settings.momentum) if settings.nesterov else momentum
    if not _is_close(whole.given, direction, direction.norm()):
        yield (
            f"{name}: Newton-Schulz was given a matrix of norm {whole.given.norm():.3g} where "
            f"{direction.norm():.3g} is right, and a cosine of "
            f"{_cosine(whole.given, direction):.4f} with it"
        )
    steps = settings.newton_schulz_steps
    if fault := orthogonal_fault(whole.given, whole.orthogonal, settings.newton_schulz, steps):
        yield f"{name}: {fault}"
    update = whole.orthogonal
    if settings.neuron_norm:
        assert whole.square is not None, "its owner has it"
        square = whole.square.lerp(update.square().mean(1), 1 - settings.neuron_beta)
        normed = update / (square.sqrt() + 1e-8)[:, None]
        update = torch.nan_to_num(normed * (update.norm() / normed.norm()))
    group = next(g for g in optimizer.param_groups if g["is_muon"])
    rate, decay = group["lr"], config.training.weight_decay
    taken = rate * scale_factor(matrix.rows, matrix.columns, settings.scale) * update
    expected = (1 - rate * decay) * before - taken
    rounding = _ROUNDING * float(before.norm())
    if not _is_close(whole.after, expected, taken.norm(), rounding):
        moved, planned = whole.after - before, expected - before
        yield (
            f"{name}: the step has a norm of {moved.norm():.3g} where {planned.norm():.3g} is "
            f"right, and a cosine of {_cosine(moved, planned):.4f} with it"
        )


def orthogonal_fault(given: Tensor, found: Tensor, kind: Kind, steps: int) -> str:
    """Fault in Newton-Schulz's result of a matrix, [R, C] both, float32; "" if it is right.

    Args:
        given: to Newton-Schulz.
        found: its result, of products in bfloat16 or float32.
        kind: `optimizer.newton_schulz`.
        steps: of the iteration.
    """
    right = _orthogonal(given, kind, steps)
    is_tall = given.shape[0] > given.shape[1]
    # Products on the short side: each singular value of the result is weighed by the given one.
    found_by, right_by = (given.T @ each if is_tall else each @ given.T for each in (found, right))
    error, size = (found_by - right_by).norm(), right_by.norm()
    if not error <= _LARGEST_ERROR_OF_PRODUCTS * size:  # also if it is not a number
        return (
            f"Newton-Schulz's result is off by {error / size:.1%} in the directions of what it was "
            f"given, and has a norm of {found.norm():.3g} where {right.norm():.3g} is right"
        )
    most = _LARGEST_VALUE * min(given.shape) ** 0.5
    if found.norm() > most:
        return f"Newton-Schulz's result has a norm of {found.norm():.3g}, above {most:.3g}"
    return ""


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


def _is_close(found: Tensor, right: Tensor, size: Tensor, rounding: float = 0.0) -> bool:
    return bool((found - right).norm() <= _LARGEST_ERROR * size + rounding)


def _orthogonal(matrix: Tensor, kind: Kind, steps: int) -> Tensor:
    """Newton-Schulz of one matrix, written plainly."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    safety = 1.01 if kind == "polar" and steps <= 5 else 1.0
    x = x / (safety * x.norm() + 1e-7)
    sets: Sequence[tuple[float, float, float]] = coefficients(kind, steps)
    for a, b, c in sets:
        product = x @ x.T
        x = a * x + b * product @ x + c * product @ product @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
