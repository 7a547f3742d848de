"""The domains of a split as one dataset, in the order of a mixture.

What a built folder's mixture asks for against what a run draws, before there is a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdrmix.config.schema import MixtureConfig
from cdrmix.data.mixture import Mixture, Phase, draw_sources
from cdrmix.data.shards import Manifest, manifest_digest, read_manifest
from cdrmix.data.token_dataset import TokenStream, permute_epochs
from cdrmix.errors import DataError


class MixedDataset:
    """Samples of several domains, each cut for itself, numbered one domain after the other.

    Args:
        folder: a built folder.
        split: name of a split in its manifest.
        sequence_length: T (tokens).
        mixture: shares of the domains.
    Attributes:
        num_samples: samples in all domains together (count).
        mixture: digest and domains of the mixture, for the identity of a position.
        manifest, manifest_digest, bytes_per_token: as in `TokenDataset`.
    Raises:
        DataError: if the split is missing, a domain too short, or the mixture not usable.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        sequence_length: int,
        mixture: MixtureConfig,
    ) -> None:
        self.folder = Path(folder)
        self.split = split
        self.sequence_length = sequence_length
        self.manifest = read_manifest(self.folder)
        self.manifest_digest = manifest_digest(self.manifest)
        totals = self.manifest.splits.get(split)
        if totals is None:
            raise DataError(
                f"{self.folder}: no split '{split}'. "
                f"Splits here: {', '.join(self.manifest.splits) or 'none'}."
            )
        self.bytes_per_token = totals.text_bytes / totals.tokens
        shards = [shard for shard in self.manifest.shards if shard.split == split]
        tokens = _domain_tokens(self.manifest, split)
        sizes = domain_samples(self.manifest, split, sequence_length)
        plan = plan_mixture(mixture, sizes, sequence_length)
        self._plan, self.mixture = plan, plan.describe()
        self._begins = np.cumsum([0, *(sizes[name] for name in plan.domains)])
        self.num_samples = int(self._begins[-1])
        # Domain after domain, a sample is sequence_length tokens further than the one before it,
        # but for what is left over at the end of each earlier domain.
        self._shifts = np.cumsum([0, *(tokens[name] for name in plan.domains)])[:-1]
        self._shifts -= self._begins[:-1] * sequence_length
        ordered = sorted(shards, key=lambda shard: shard.domain)
        self._stream = TokenStream(self.folder, ordered, self.manifest.dtype)
        self._roles = TokenStream(self.folder, ordered, "uint8", suffix="roles")

    def order(
        self, numbers: NDArray[np.int64], seed: int | None, window: int | None = None
    ) -> NDArray[np.int64]:
        """Sample at each global sample number, any shape.

        Args:
            seed: key of a permutation per domain and epoch of it; None: stored order.
            window: permute windows of that many samples, and samples within each; None: all.
        """
        sources, cursors = self._plan.locate(numbers)
        indices = np.empty_like(numbers)
        for source in np.unique(sources).tolist():
            chosen = sources == source
            key = None if seed is None else (seed, source)
            begin, end = self._begins[source : source + 2]
            size = int(end - begin)
            indices[chosen] = begin + permute_epochs(cursors[chosen], size, key, window=window)
        return indices

    def draw(self, start: int, stop: int) -> dict[str, dict[str, float]]:
        """Shares of the domains asked for and drawn in global samples start to stop - 1; see
        `cdrmix.data.mixture.draw_sources`."""
        return draw_sources(self._plan, start, stop)

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples `indices` [n] as an array [n, T + 1], int64.

        Raises:
            IndexError: if an index is outside 0 .. num_samples - 1.
            DataError: if a shard is missing or truncated.
        """
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.num_samples:
            raise IndexError(f"samples {indices.min()} to {indices.max()} of {self.num_samples}")
        return self._stream.rows(self._positions(indices).tolist(), self.sequence_length + 1)

    def roles(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Roles of the tokens of `rows(indices)`, of the same shape; see `ShardInfo`."""
        return self._roles.rows(self._positions(indices).tolist(), self.sequence_length + 1)

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Have the shards of samples that are read soon, any shape, at hand; see `TokenStream`."""
        self._stream.expect(self._positions(indices))

    def _positions(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the stream of all domains each sample begins."""
        domains = np.searchsorted(self._begins, indices, side="right") - 1
        return indices * self.sequence_length + self._shifts[domains]


def domain_samples(manifest: Manifest, split: str, sequence_length: int) -> dict[str, int]:
    """Samples in each domain of a split (count); one with too few tokens for a sample has none."""
    tokens = _domain_tokens(manifest, split)
    return {name: max(0, count - 1) // sequence_length for name, count in tokens.items()}


def _domain_tokens(manifest: Manifest, split: str) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for shard in manifest.shards:
        if shard.split == split:
            tokens[shard.domain] = tokens.get(shard.domain, 0) + shard.tokens
    return tokens


def plan_mixture(
    config: MixtureConfig, num_samples: Mapping[str, int], sequence_length: int
) -> Mixture:
    """The mixture that a configuration asks for.

    Args:
        num_samples: samples in each domain.
        sequence_length: tokens per sample.
    Raises:
        DataError: if it is not usable with these domains.
    """
    phases = [
        Phase(
            weights=num_samples if phase.weights is None else phase.weights,
            num_samples=phase.samples
            if phase.tokens is None
            else -(-phase.tokens // sequence_length),
            change=phase.change,
        )
        for phase in config.phases
    ]
    return Mixture(num_samples, phases, temperature=config.temperature)


# As short as any shipped configuration's, so that small domains have samples; shares do not depend
# on it.
SEQUENCE_LENGTH = 256
_NUM_PARTS = 48  # of the course, for a picture of it


def mixture_course(
    manifest: Manifest, config: MixtureConfig, *, sequence_length: int = SEQUENCE_LENGTH
) -> dict[str, Any]:
    """Shares asked for and drawn, phase by phase and over the whole course.

    A last phase without a length is looked at for as many samples as there are.

    Args:
        manifest: of a built folder.
        sequence_length: T (tokens).
    Returns:
        `sequence_length`; `samples`, length of the course (count); `available`, samples in each
        domain; `whole`, `phases` and `parts`: shares by domain, as `draw` gives them, with the
        `start` and `stop` that they are of. Or `problem`, why this mixture cannot be drawn.
    """
    available = domain_samples(manifest, "train", sequence_length)
    try:
        mixture = plan_mixture(config, available, sequence_length)
    except DataError as error:
        return {"sequence_length": sequence_length, "problem": str(error)}
    ends = _phase_ends(mixture, sum(available.values()))
    phases = [
        {"change": phase.change} | _drawn(mixture, start, stop)
        for phase, start, stop in zip(mixture.phases, [0, *ends[:-1]], ends, strict=True)
    ]
    parts = [ends[-1] * part // _NUM_PARTS for part in range(_NUM_PARTS + 1)]
    return {
        "sequence_length": sequence_length,
        "samples": ends[-1],
        "available": available,
        "whole": _together(phases, ends[-1]),
        "phases": phases,
        "parts": [
            _drawn(mixture, start, stop)
            for start, stop in zip(parts, parts[1:], strict=False)
            if start < stop
        ],
    }


def _drawn(mixture: Mixture, start: int, stop: int) -> dict[str, Any]:
    return {"start": start, "stop": stop, "domains": draw_sources(mixture, start, stop)}


def _together(phases: Sequence[dict[str, Any]], num_samples: int) -> dict[str, Any]:
    """Phase by phase, since no phase's share may be missed between the points of a long range."""
    domains: dict[str, dict[str, float]] = {}
    for phase in phases:
        part = (phase["stop"] - phase["start"]) / num_samples
        for name, share in phase["domains"].items():
            total = domains.setdefault(name, {"asked": 0.0, "drawn": 0.0, "samples": 0})
            total["asked"] += part * share["asked"]
            total["drawn"] += part * share["drawn"]
            total["samples"] += share["samples"]
    return {"start": 0, "stop": num_samples, "domains": domains}


def _phase_ends(mixture: Mixture, num_samples: int) -> list[int]:
    """Global sample number that each phase ends before."""
    return list(accumulate(phase.num_samples or num_samples for phase in mixture.phases))
