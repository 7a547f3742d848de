"""The domains of a split as one dataset in the order of a mixture, and previews of a mixture.

A preview compares the shares that a built folder's mixture asks for with the shares that a run
draws, before there is a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdrmix.config.problems import validate
from cdrmix.config.schema import MixtureConfig
from cdrmix.data.mixture import Mixture, Phase, draw_sources
from cdrmix.data.shards import MANIFEST_FILE, Manifest
from cdrmix.data.token_dataset import SplitDataset, permute_epochs
from cdrmix.errors import DataError


class MixedDataset(SplitDataset):
    """Samples of several domains, each cut by itself, numbered one domain after the other.

    Raises:
        DataError: if the split is missing, a domain too short, or the mixture not usable.
    """

    def __init__(
        self, folder: Path, split: str, sequence_length: int, mixture: MixtureConfig
    ) -> None:
        super().__init__(folder, split, sequence_length, by_domain=True)
        tokens = _domain_tokens(self.manifest, split)
        sizes = domain_samples(self.manifest, split, sequence_length)
        self._plan = plan_mixture(mixture, sizes, sequence_length)
        self.mixture = self._plan.describe()
        domains = self._plan.domains
        self._begins = np.cumsum([0, *(sizes[name] for name in domains)])
        self.num_samples = int(self._begins[-1])
        # Domain after domain, a sample is sequence_length tokens further than the one before it,
        # except for the tail that is left out at the end of each earlier domain.
        self._shifts = np.cumsum([0, *(tokens[name] for name in domains)])[:-1]
        self._shifts -= self._begins[:-1] * sequence_length

    def order(
        self, numbers: NDArray[np.int64], seed: int | None, window: int | None = None
    ) -> NDArray[np.int64]:
        """Orders as `TokenDataset`, but with a permutation per domain and epoch of it."""
        sources, cursors = self._plan.locate(numbers)
        indices = np.empty_like(numbers)
        for source in np.unique(sources).tolist():
            in_domain = sources == source
            key = None if seed is None else (seed, source)
            # Each domain counts its own epochs, under a key with its own number.
            begin, end = self._begins[source : source + 2]
            size = int(end - begin)
            places = permute_epochs(cursors[in_domain], size, key, window=window)
            indices[in_domain] = begin + places
        return indices

    def _positions(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """First token of each sample in the stream of all domains."""
        domains = np.searchsorted(self._begins, indices, side="right") - 1
        return indices * self.sequence_length + self._shifts[domains]


def domain_samples(manifest: Manifest, split: str, sequence_length: int) -> dict[str, int]:
    """Number of samples in each domain of a split; 0 if it is shorter than one sample."""
    tokens = _domain_tokens(manifest, split)
    return {name: max(0, count - 1) // sequence_length for name, count in tokens.items()}


def _domain_tokens(manifest: Manifest, split: str) -> dict[str, int]:
    tokens: Counter[str] = Counter()
    for shard in manifest.shards:
        if shard.split == split:
            tokens[shard.domain] += shard.tokens
    return tokens


def plan_mixture(
    config: MixtureConfig, num_samples: Mapping[str, int], sequence_length: int
) -> Mixture:
    """Lays out the mixture of a configuration for domains of `num_samples` each.

    Raises:
        DataError: if it is not usable with these domains.
    """
    phases = []
    for phase in config.phases:
        weights = num_samples if phase.weights is None else phase.weights
        length = phase.samples
        if phase.tokens is not None:
            length = -(-phase.tokens // sequence_length)  # rounded up: a phase has a sample
        phases.append(Phase(weights, length, phase.change))
    return Mixture(num_samples, phases, temperature=config.temperature)


def built_mixture(manifest: Manifest) -> MixtureConfig | None:
    """Mixture in the recipe that a folder was built by, or None; a DataError if it is none."""
    values = manifest.source.get("mixture")
    if values is None:
        return None
    mixture, problems = validate(values, MixtureConfig)
    if mixture is None:
        text = "; ".join(f"{'.'.join(problem.path)}: {problem.text}" for problem in problems)
        raise DataError(f"{MANIFEST_FILE}: source.mixture: {text}")
    return mixture


# The shortest of the shipped configurations, so that small domains have samples; shares do not
# depend on it.
SEQUENCE_LENGTH = 256
_NUM_PARTS = 48  # of the course, for a picture of it


def mixture_course(
    manifest: Manifest, config: MixtureConfig, *, sequence_length: int = SEQUENCE_LENGTH
) -> dict[str, Any]:
    """Shares asked for and drawn, phase by phase and over the whole course.

    A last phase without a length is taken to be as long as there are samples.

    Returns:
        `sequence_length`; `samples`, length of the course (count); `available`, samples in each
        domain; `whole`, `phases` and `parts`: shares by domain, as `draw_sources` returns them,
        with their `start` and `stop`. Or `problem`, the reason why the mixture cannot be drawn.
    """
    available = domain_samples(manifest, "train", sequence_length)
    try:
        mixture = plan_mixture(config, available, sequence_length)
    except DataError as error:
        return {"sequence_length": sequence_length, "problem": str(error)}

    def draw(start: int, stop: int) -> dict[str, Any]:
        return {"start": start, "stop": stop, "domains": draw_sources(mixture, start, stop)}

    total = sum(available.values())
    ends = list(accumulate(phase.num_samples or total for phase in mixture.phases))
    phases = [
        {"change": phase.change} | draw(start, stop)
        for phase, start, stop in zip(mixture.phases, [0, *ends[:-1]], ends, strict=True)
    ]
    # Summed over the phases: sampled points of the whole range could miss a short phase.
    whole: dict[str, dict[str, float]] = {}
    for phase in phases:
        part = (phase["stop"] - phase["start"]) / ends[-1]
        for name, share in phase["domains"].items():
            sums = whole.setdefault(name, {"asked": 0.0, "drawn": 0.0, "samples": 0})
            sums["asked"] += part * share["asked"]
            sums["drawn"] += part * share["drawn"]
            sums["samples"] += share["samples"]
    bounds = [ends[-1] * part // _NUM_PARTS for part in range(_NUM_PARTS + 1)]
    return {
        "sequence_length": sequence_length,
        "samples": ends[-1],
        "available": available,
        "whole": {"start": 0, "stop": ends[-1], "domains": whole},
        "phases": phases,
        "parts": [draw(start, stop) for start, stop in pairwise(bounds) if start < stop],
    }
