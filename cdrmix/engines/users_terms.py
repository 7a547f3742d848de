"""Terms of the loss that a user writes: counted before a step, and summed in each micro-batch."""

# B batch, T time, D hidden, V vocabulary, P terms

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cdrmix.config.objectives import TermConfig
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.models.backbone import Scorer
from cdrmix.planning.plugins import LossTerm, terms_of

# Tensors of a batch that a term may read.
_READ = ("input_ids", "labels", "kinds", "segment_ids")


def label_of(term: TermConfig) -> str:
    """Name of what a term counts, among those that ranks exchange before a step."""
    return f"term/{term.label}"


def term_names(config: Config) -> tuple[str, ...]:
    """Those names, in order."""
    plugins = config.objectives.plugins if config.objectives else ()
    return tuple(label_of(each) for each in plugins)


def own_counts(batch: Mapping[str, Tensor], config: Config) -> list[float]:
    """Counts of each term over a rank's share of a batch, of tensors [A, B, T].

    Raises ConfigError if one is below 0 or no number.
    """
    found = []
    for each, term in terms_of(config.objectives):
        micro_batches = range(len(batch["labels"]))
        counts = [float(term.count(_read(batch, number))) for number in micro_batches]
        if not all(math.isfinite(count) and count >= 0 for count in counts):
            raise ConfigError(f"objectives.plugins: {each.use} counts {counts}: give 0 or more")
        found.append(sum(counts))
    return found


def _read(batch: Mapping[str, Tensor], number: int | None = None) -> dict[str, Tensor]:
    """Tensors for a term: of a micro-batch, or of one of several by its number."""
    read = {name: batch[name] for name in _READ if name in batch}
    return read if number is None else {name: each[number] for name, each in read.items()}


@dataclass(frozen=True)
class UsersTerms:
    """Terms of a user's of one micro-batch.

    Attributes:
        terms: as configured.
        factors: on the total of each.
        batch: tensors [B, T].
        head: of the model.
    """

    terms: Sequence[tuple[TermConfig, LossTerm]]
    factors: Sequence[float]
    batch: Mapping[str, Tensor]
    head: Scorer

    def losses(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the terms by their factors, with gradients, and each one's total, [P], without.

        Raises ConfigError if a total is no scalar. `hidden`: [B, T, D].
        """
        totals = []
        for each, term in self.terms:
            total = term.total(hidden, partial(self.head.logits, hidden), _read(self.batch))
            if not isinstance(total, Tensor) or total.dim():
                raise ConfigError(
                    f"objectives.plugins: {each.use}: `total` returns no scalar tensor"
                )
            totals.append(total.float())
        stacked = torch.stack(totals)
        return (stacked * stacked.new_tensor(self.factors)).sum(), stacked.detach()
