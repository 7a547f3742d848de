"""Muon for matrices with AdamW for the rest, on the flat partitions that DeepSpeed gives.

Muon's step for a matrix W of r rows and c columns, with gradient G and momentum M:

    M <- b M + (1 - b) G;   D = b M + (1 - b) G  (nesterov), or M
    O = Newton-Schulz(D);   W <- (1 - lr * decay) W - lr * factor(r, c) * O

as in Jordan et al. (Muon, 2024), with the factor .2 sqrt(max(r, c)) of Liu et al. (Moonlight, arXiv
2502.16982) by default. NorMuon (arXiv 2510.05491) divides each row of O by the root of its running
mean square v, and gives O its norm again.

DeepSpeed 0.19.8 has a Muon of its own, which this does not use: it refuses experts, pipeline
stages and tensor ranks where bf16 gradients are summed in float32 (runtime/bf16_optimizer.py),
keeps the momentum in bf16 under ZeRO-2, and clips the orthogonalised update (DeepSpeed #8439). To
DeepSpeed this is an optimizer like AdamW: all its layouts hand over gradients, and its gradient
norm is that of the gradients.

R rows, C columns of a matrix.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from cdrmix import runtime
from cdrmix.config.optimizer import OptimizerConfig
from cdrmix.config.schema import TrainingConfig
from cdrmix.optimizers.muon_layout import Exchange, Held, Matrix, matrices_of_ranks
from cdrmix.optimizers.newton_schulz import NewtonSchulz

MOMENTUM = "momentum_buffer"  # state of a partition of matrices
NEURON_SQUARE = "neuron_square"  # mean square of each row's updates, under NorMuon
_CLIP_EPSILON = 1e-6  # as DeepSpeed's clipping adds to the norm
_NEURON_EPSILON = 1e-8
# Steps whose gradient norms make the running median. Before there are so many no step is judged.
# Few, for the norms of a healthy start may grow a hundredfold within fifty steps.
_MEDIAN_STEPS = 16


def scale_factor(
    rows: int, columns: int, scale: Literal["match_rms", "spectral", "unit_rms"]
) -> float:
    """Factor on an orthogonalised update, [rows, columns]; see `optimizer.scale`."""
    if scale == "match_rms":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(max(1.0, ratio) if scale == "spectral" else ratio)


@dataclass
class Partition:
    """A flat partition of a parameter group on this rank."""

    held: Sequence[Held]  # of this rank
    decayed: Sequence[tuple[int, int]]  # start and length of each range that AdamW decays
    exchange: Exchange | None  # of Muon's matrices; None for AdamW
    matrices: Sequence[Matrix] = ()  # of the group, all ranks


@dataclass
class Watched:
    """One matrix before and after a step, in float32, for the check of the first step."""

    matrix: Matrix
    group: torch.distributed.ProcessGroup | None
    gradient: list[Tensor]  # this rank's pieces, as they were before DeepSpeed's step
    momentum: list[Tensor]
    before: list[Tensor]
    arrived: list[Tensor] = field(default_factory=list)  # gradients that the optimizer was given
    after: list[Tensor] = field(default_factory=list)
    # On the owner, [R, C]: of Newton-Schulz, and its result.
    given: Tensor | None = None
    orthogonal: Tensor | None = None
    neuron: Tensor | None = None  # rows' mean squares before the step, on the owner


class Muon(torch.optim.Optimizer):
    """Muon and AdamW in one object; a group's `is_muon` tells which.

    It is given to `deepspeed.initialize` and then told where its matrices lie, by `bind`. Before
    DeepSpeed's step `prepare` reads the gradients of all groups: DeepSpeed steps them one by one,
    and AdamW's are clipped by the norm of all of them together.
    """

    def __init__(
        self, groups: list[dict[str, Any]], optimizer: OptimizerConfig, training: TrainingConfig
    ) -> None:
        super().__init__(groups, {"lr": training.learning_rate})
        self.settings = optimizer
        self.clipping = training.gradient_clipping
        self._warmup_steps = training.warmup_steps
        self.newton_schulz = NewtonSchulz(optimizer.newton_schulz, optimizer.newton_schulz_steps)
        # Decay is applied by ranges: vectors and matrices share a group, so that each stage of a
        # pipeline has the same groups, and DeepSpeed the same collectives on all of them.
        self._adamw = torch.optim.AdamW(
            [group for group in self.param_groups if not group["is_muon"]],
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            weight_decay=0.0,
            fused=True,
        )
        self._adamw.state = self.state
        self._partitions: dict[int, Partition] = {}  # by id of the flat master
        self._masters: list[Tensor] = []
        self._norms: deque[float] = deque(maxlen=_MEDIAN_STEPS)  # of the matrices' gradients
        self._steps = 0  # with finite gradients
        self.spikes = 0  # steps whose gradients were left out of the momentum
        self.spike_ratio = 0.0  # of the last step's norm to the median where it was one, else 0
        self._clip = 1.0
        self.neurons: dict[tuple[str, int], Tensor] = {}  # [R] by matrix, of those owned here
        self.watched: dict[int, list[Watched]] = {}  # by id of the master

    def bind(
        self,
        master: Tensor,
        held: Sequence[Held],
        decays: Callable[[str], bool],
        *,
        is_muon: bool,
        group: torch.distributed.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Tells which pieces lie in a flat partition; collective over `group`, which shares it.

        Args:
            master: flat float32 partition, which the step will find in a parameter group.
            held: its pieces.
            decays: True for the names of parameters with weight decay.
            is_muon: as of its parameter group.
            group: None for one rank alone.
            device: of the products; the partition may be on the host.
        """
        decayed = [(each.offset, each.numel) for each in held if decays(each.name)]
        partition = Partition(held, decayed, None)
        if is_muon:
            by_rank: list[Any] = [list(held)]
            rank = 0
            if group is not None and torch.distributed.get_world_size(group) > 1:
                by_rank = [None] * torch.distributed.get_world_size(group)
                torch.distributed.all_gather_object(by_rank, list(held), group=group)
                rank = torch.distributed.get_rank(group)
            else:
                group = None
            partition.matrices = matrices_of_ranks(by_rank)
            partition.exchange = Exchange(partition.matrices, rank, group, device)
            if self.settings.neuron_norm:
                for matrix in partition.matrices:
                    if matrix.owner == rank:
                        self.neurons[matrix.key] = torch.zeros(matrix.rows, device=device)
        self._partitions[id(master)] = partition
        self._masters.append(master)

    @torch.no_grad()
    def prepare(self, gradients: Iterable[tuple[Tensor, Sequence[Tensor]]], scale: float) -> None:
        """Reads the gradients of the coming step; collective over all ranks.

        Args:
            gradients: each master with the gradients of its pieces, in their order.
            scale: of the gradients, by fp16's loss scale; they are not changed.
        """
        device = runtime.device()
        # Squares of AdamW's and of Muon's gradients. In float64: a float32 sum of millions of
        # squares loses the small ones.
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for master, pieces in gradients:
            partition = self._partitions[id(master)]
            is_muon = partition.exchange is not None
            for held, gradient in zip(partition.held, pieces, strict=True):
                if held.counts:
                    norm = torch.linalg.vector_norm(gradient.float())
                    sums[int(is_muon)] += norm.double().square().to(device)
            for watched in self.watched.get(id(master), ()):
                _record(watched, partition, pieces, 1 / scale)
        of_adamw, of_muon = runtime.all_reduce_sum(sums).sqrt().div(scale).tolist()
        self._clip = 1.0
        if self.clipping > 0 and of_adamw > self.clipping:
            self._clip = self.clipping / (of_adamw + _CLIP_EPSILON)
        self.spike_ratio = 0.0
        # Else the step is skipped, whosever gradients they are.
        if math.isfinite(of_adamw) and math.isfinite(of_muon):
            self._judge(of_muon)

    def _judge(self, norm: float) -> None:
        """Tells whether the norm of the matrices' gradients is a spike, and remembers it.

        Spikes are remembered too: one of sixteen does not move the median, and gradients that stay
        larger are the usual ones after eight steps.
        """
        limit = self.settings.max_spike
        is_judged = self._steps >= self._warmup_steps and len(self._norms) == _MEDIAN_STEPS
        if limit is not None and is_judged:
            median = statistics.median(self._norms)
            if norm > limit * median > 0:
                self.spikes += 1
                self.spike_ratio = norm / median
        self._steps += 1
        self._norms.append(norm)

    @property
    def is_spike(self) -> bool:
        """True if the last step's gradients were left out of the momentum."""
        return self.spike_ratio > 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes a step of the groups that DeepSpeed shows; collective over their groups.

        At a rate of 0 matrices keep their values, their momentum goes on, and nothing is exchanged.
        """
        assert closure is None, "DeepSpeed gives none"
        plain = []
        for group in self.param_groups:
            for master in group["params"]:
                if group["is_muon"]:
                    self._step_matrices(group, master)
                else:
                    self._decay_and_clip(group, master)
            if not group["is_muon"] and group["params"]:
                plain.append(group)
        if plain:
            self._adamw.param_groups = plain
            self._adamw.state = self.state  # which loading may have replaced
            self._adamw.step()

    def _decay_and_clip(self, group: dict[str, Any], master: Tensor) -> None:
        if master.grad is not None and self._clip < 1:
            master.grad.mul_(self._clip)
        for start, length in self._partitions[id(master)].decayed:
            master.narrow(0, start, length).mul_(1 - group["lr"] * group["decay"])

    def _step_matrices(self, group: dict[str, Any], master: Tensor) -> None:
        partition = self._partitions[id(master)]
        assert partition.exchange is not None, "its group is Muon's"
        gradient = master.grad if master.grad is not None else torch.zeros_like(master)
        state = self.state[master]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(master)
        momentum = state[MOMENTUM]
        beta = self.settings.momentum
        for watched in self.watched.get(id(master), ()):
            places = watched.matrix.pieces_of(partition.exchange.rank)
            watched.momentum = [_part(momentum, place).clone() for place in places]
            watched.before = [_part(master, place).clone() for place in places]
            watched.arrived = [_part(gradient, place).clone() for place in places]
            neuron = self.neurons.get(watched.matrix.key)
            watched.neuron = neuron if neuron is None else neuron.clone()
        if not self.is_spike:
            momentum.lerp_(gradient, 1 - beta)
        if group["lr"] == 0:
            return

        def direction(start: int, length: int) -> Tensor:
            followed = momentum.narrow(0, start, length)
            if self.is_spike or not self.settings.nesterov:
                return followed
            return gradient.narrow(0, start, length).lerp(followed, beta)

        for matrices in partition.exchange.rounds:
            self._step_round(group, master, partition.exchange, matrices, direction)
        for watched in self.watched.get(id(master), ()):
            places = watched.matrix.pieces_of(partition.exchange.rank)
            watched.after = [_part(master, place).clone() for place in places]

    def _step_round(
        self,
        group: dict[str, Any],
        master: Tensor,
        exchange: Exchange,
        matrices: Sequence[Matrix],
        direction: Callable[[int, int], Tensor],
    ) -> None:
        """Orthogonalises the matrices of a round where they are owned, and steps all pieces."""
        own = [matrix.pieces_of(exchange.rank) for matrix in matrices]
        values = [[direction(piece.offset, piece.numel) for piece in pieces] for pieces in own]
        whole = exchange.gather(matrices, values)
        owned = [matrix for matrix in matrices if matrix.owner == exchange.rank]
        updates = exchange.scatter(matrices, self._orthogonalised(owned, whole))
        rate = group["lr"]
        for matrix, pieces, of_matrix in zip(matrices, own, updates, strict=True):
            factor = scale_factor(matrix.rows, matrix.columns, self.settings.scale)
            for piece, update in zip(pieces, of_matrix, strict=True):
                part = _part(master, piece)
                part.mul_(1 - rate * group["decay"])
                part.add_(update.to(part.device), alpha=-rate * factor)

    def _orthogonalised(self, owned: Sequence[Matrix], whole: Sequence[Tensor]) -> list[Tensor]:
        """Updates of the matrices that this rank owns; those of one shape are one batch."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for place, matrix in enumerate(owned):
            by_shape.setdefault((matrix.rows, matrix.columns), []).append(place)
        updates = list(whole)
        for places in by_shape.values():
            batch = self.newton_schulz(torch.stack([whole[place] for place in places]))
            for place, update in zip(places, batch, strict=True):
                updates[place] = update
                for watched in (one for each in self.watched.values() for one in each):
                    if watched.matrix is owned[place]:
                        watched.given, watched.orthogonal = whole[place].clone(), update.clone()
                if self.settings.neuron_norm:
                    square = self.neurons[owned[place].key]
                    updates[place] = self._neuron_normed(square, update)
        return updates

    def _neuron_normed(self, square: Tensor, update: Tensor) -> Tensor:
        """Divides rows [R, C] by the root of their running mean square, [R], and keeps the norm."""
        square.lerp_(update.square().mean(-1), 1 - self.settings.neuron_beta)
        normed = update / (square.sqrt() + _NEURON_EPSILON).unsqueeze(-1)
        # A matrix without a gradient, as behind a projection of zeros, has an update of zeros.
        least = torch.finfo(normed.dtype).tiny
        return normed * (torch.linalg.norm(update) / torch.linalg.norm(normed).clamp(min=least))

    def neuron_rows(self) -> Iterator[tuple[Held, int, Tensor]]:
        """Yields NorMuon's state: a parameter, the first of its rows, and their mean squares.

        As of all state there is none of a partition before its first step.
        """
        for master in self._masters:
            for matrix in self.matrices(master) if self.state.get(master) else ():
                if (square := self.neurons.get(matrix.key)) is not None:
                    yield matrix.parameter, matrix.index * matrix.rows, square

    def forget(self) -> None:
        """Drops all state, as before the first step; what follows a step begins anew with it."""
        self.state.clear()
        for square in self.neurons.values():
            square.zero_()

    def matrices(self, master: Tensor) -> Sequence[Matrix]:
        """Muon's matrices of the group of a flat partition, on all ranks; none of AdamW's."""
        return self._partitions[id(master)].matrices

    def partitions(self) -> list[Partition]:
        """Flat partitions of this rank."""
        return list(self._partitions.values())

    def watch(self, number: int) -> list[Watched]:
        """Records `number` matrices at the next step: the first, the last and between.

        The largest are passed over where others are there: a check gathers them on each rank.
        """
        self.watched = {}
        candidates = [
            (id(master), matrix)
            for master in self._masters
            for matrix in self._partitions[id(master)].matrices
        ]
        sizes = sorted(matrix.rows * matrix.columns for _, matrix in candidates)
        most = sizes[len(sizes) // 2] if sizes else 0
        candidates = [each for each in candidates if each[1].rows * each[1].columns <= most]
        last = len(candidates) - 1
        places = sorted({round(n * last / max(1, number - 1)) for n in range(number)})
        found = []
        for place in places if candidates else ():
            master, matrix = candidates[place]
            exchange = self._partitions[master].exchange
            assert exchange is not None, "it has matrices"
            watched = Watched(matrix, exchange.group, [], [], [])
            self.watched.setdefault(master, []).append(watched)
            found.append(watched)
        return found

    def history(self) -> dict[str, Any]:
        """Steps, last norms and spikes so far, as JSON; the same on every rank."""
        return {"steps": self._steps, "norms": list(self._norms), "spikes": self.spikes}

    def load_history(self, saved: dict[str, Any]) -> None:
        """Goes on from `history` of an earlier start."""
        self._steps = int(saved["steps"])
        self._norms = deque(map(float, saved["norms"]), maxlen=_MEDIAN_STEPS)
        self.spikes = int(saved["spikes"])


def _part(flat: Tensor, place: Any) -> Tensor:
    """Values of a piece in a flat partition."""
    return flat.detach().narrow(0, place.offset, place.numel)


def _record(
    watched: Watched, partition: Partition, pieces: Sequence[Tensor], factor: float
) -> None:
    """Notes a matrix's gradient as it is before DeepSpeed's step."""
    assert partition.exchange is not None, "it has matrices"
    watched.gradient = []
    for place in watched.matrix.pieces_of(partition.exchange.rank):
        for held, gradient in zip(partition.held, pieces, strict=True):
            start = place.offset - held.offset
            if 0 <= start < held.numel:
                part = gradient.reshape(-1).narrow(0, start, place.numel)
                watched.gradient.append(part.float().mul(factor))
