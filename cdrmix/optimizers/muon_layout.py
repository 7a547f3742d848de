"""Matrices of Muon over the ranks that hold them in pieces, and their way to one rank and back.

ZeRO leaves each rank a flat partition of a parameter group: whole matrices, and pieces of others.
Newton-Schulz needs whole ones. So each matrix has an owner, which receives its pieces in one
all-to-all, and returns those of the update in another; a matrix that lies on one rank stays there.
Parameters of several matrices (experts, two maps in one weight) are taken apart first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed
from torch import Tensor

from cdrmix.planning.muon import ROUND_ELEMENTS, maps_in_rows, newton_schulz_flops


@dataclass(frozen=True)
class Held:
    """Elements [start, start + numel) of a local parameter, which lie in a flat partition."""

    name: str  # logical
    logical_shape: tuple[int, ...]
    block_offset: tuple[int, ...]  # of the local parameter in the logical one
    shape: tuple[int, ...]  # of the local parameter
    start: int
    numel: int
    offset: int  # in the partition
    counts: bool  # in sums over all ranks: no rank outside the data group holds the same


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of a matrix in the partition of a rank."""

    rank: int  # in the partition's group
    start: int
    numel: int
    offset: int  # in the partition


@dataclass
class Matrix:
    """One matrix of a partitioned parameter."""

    parameter: Held  # that it belongs to; of the piece, the first one seen
    index: int  # among the matrices of the local parameter
    rows: int
    columns: int
    pieces: list[Piece] = field(default_factory=list)
    owner: int = -1  # rank in the group that orthogonalises it

    @property
    def key(self) -> tuple[str, int]:
        """Name of the parameter, and number of the matrix in it."""
        return self.parameter.name, self.index

    def pieces_of(self, rank: int) -> list[Piece]:
        """Pieces in the partition of a rank."""
        return [piece for piece in self.pieces if piece.rank == rank]


def matrices_of_ranks(held_by_rank: Sequence[Sequence[Held]]) -> list[Matrix]:
    """Every matrix of a parameter group with its pieces and its owner, alike on all ranks.

    A matrix that lies on one rank belongs to it. Others go, the largest first, to that of their
    ranks with least to do.
    """
    found: dict[tuple[str, int], Matrix] = {}
    for rank, every in enumerate(held_by_rank):
        for held in every:
            *_, rows, columns = held.shape
            rows //= maps_in_rows(held.name)
            size = rows * columns
            end = held.start + held.numel
            for index in range(held.start // size, -(-end // size)):
                first, last = max(held.start, index * size), min(end, (index + 1) * size)
                matrix = found.setdefault(
                    (held.name, index), Matrix(held, index, rows=rows, columns=columns)
                )
                offset = held.offset + first - held.start
                matrix.pieces.append(Piece(rank, first - index * size, last - first, offset))
    work = [0] * len(held_by_rank)
    matrices = list(found.values())
    whole = [each for each in matrices if len({piece.rank for piece in each.pieces}) == 1]
    split = [each for each in matrices if len({piece.rank for piece in each.pieces}) > 1]
    split.sort(key=lambda each: -each.rows * each.columns)  # stable, and so alike on all ranks
    for matrix in [*whole, *split]:
        matrix.owner = min({piece.rank for piece in matrix.pieces}, key=lambda r: (work[r], r))
        work[matrix.owner] += newton_schulz_flops(matrix.rows, matrix.columns, 1)
    return matrices


class Exchange:
    """Way of the matrices of a group to their owners and back, seen from one rank.

    Args:
        matrices: from `matrices_of_ranks`.
        rank: of this process in `group`.
        group: holds the partitions; None for one rank alone.
        device: on which matrices are put together; partitions may be on the host.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        rank: int,
        group: torch.distributed.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.group = group
        self.device = device
        self.size = torch.distributed.get_world_size(group) if group is not None else 1
        # of bounded size, each exchanged at once; alike on all ranks of the group
        self.rounds = rounds_of(matrices, ROUND_ELEMENTS)

    def gather(self, matrices: Sequence[Matrix], values: Sequence[list[Tensor]]) -> list[Tensor]:
        """Whole matrices of one round that this rank owns, [rows, columns] each, in its order.

        `values` are, for each matrix of the round, this rank's pieces, flat.
        """
        sent: list[list[Tensor]] = [[] for _ in range(self.size)]
        sizes: list[list[int]] = [[] for _ in range(self.size)]
        for matrix, own in zip(matrices, values, strict=True):
            if matrix.owner != self.rank:
                sent[matrix.owner] += own
                continue
            for piece in matrix.pieces:
                if piece.rank != self.rank:
                    sizes[piece.rank].append(piece.numel)
        arrived = self._all_to_all(matrices, sent, sizes)
        whole = []
        for matrix, own in zip(matrices, values, strict=True):
            if matrix.owner != self.rank:
                continue
            arrived[self.rank] = iter(own)
            flat = torch.empty(matrix.rows * matrix.columns, device=self.device)
            for piece in matrix.pieces:
                flat.narrow(0, piece.start, piece.numel).copy_(next(arrived[piece.rank]))
            whole.append(flat.view(matrix.rows, matrix.columns))
        return whole

    def scatter(self, matrices: Sequence[Matrix], whole: Sequence[Tensor]) -> list[list[Tensor]]:
        """This rank's pieces of each matrix of a round, flat; `whole` are those that it owns."""
        sent: list[list[Tensor]] = [[] for _ in range(self.size)]
        sizes: list[list[int]] = [[] for _ in range(self.size)]
        here = iter(whole)
        owned: dict[tuple[str, int], Tensor] = {}
        for matrix in matrices:
            if matrix.owner != self.rank:
                sizes[matrix.owner] += [piece.numel for piece in matrix.pieces_of(self.rank)]
                continue
            owned[matrix.key] = next(here).reshape(-1)
            for piece in matrix.pieces:
                if piece.rank != self.rank:
                    values = owned[matrix.key].narrow(0, piece.start, piece.numel)
                    sent[piece.rank].append(values)
        arrived = self._all_to_all(matrices, sent, sizes)
        return [
            [
                owned[matrix.key].narrow(0, piece.start, piece.numel)
                if matrix.owner == self.rank
                else next(arrived[matrix.owner])
                for piece in matrix.pieces_of(self.rank)
            ]
            for matrix in matrices
        ]

    def _all_to_all(
        self, matrices: Sequence[Matrix], sent: list[list[Tensor]], sizes: list[list[int]]
    ) -> list[Iterator[Tensor]]:
        """Pieces that come from each rank, of these sizes, in the order of its sending."""
        # Alike on all ranks: those that have nothing to send or receive take part as well.
        is_spread = any(p.rank != each.owner for each in matrices for p in each.pieces)
        if self.group is None or not is_spread:
            return [iter(()) for _ in sent]
        leaving = [piece.to(self.device) for of_rank in sent for piece in of_rank]
        outgoing = torch.cat([torch.empty(0, device=self.device), *leaving])
        incoming = torch.empty(sum(map(sum, sizes)), device=self.device)
        splits = [sum(of_rank) for of_rank in sizes]
        torch.distributed.all_to_all_single(
            incoming,
            outgoing,
            splits,
            [sum(piece.numel() for piece in of_rank) for of_rank in sent],
            group=self.group,
        )
        by_rank = zip(incoming.split(splits), sizes, strict=True)
        return [iter(part.split(of_rank)) for part, of_rank in by_rank]


def rounds_of(matrices: Sequence[Matrix], limit: int) -> list[list[Matrix]]:
    """Matrices that are exchanged and orthogonalised together, alike on all ranks.

    Of each owner a round has consecutive matrices of at most `limit` elements, or a larger one
    alone: in the order of the model they would lie on few owners, for whom all others would wait.
    """
    rounds: list[list[Matrix]] = []
    filled: dict[int, tuple[int, int]] = {}  # by owner: its last round, and its elements in it
    for matrix in matrices:
        size = matrix.rows * matrix.columns
        number, elements = filled.get(matrix.owner, (0, 0))
        if elements and elements + size > limit:
            number, elements = number + 1, 0
        filled[matrix.owner] = number, elements + size
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(matrix)
    return rounds
