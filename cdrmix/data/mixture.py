"""Samples of several domains in the order of a mixture, and previews of a mixture.

The order is a pure function of the global sample number.

A mixture is a list of phases; a phase asks for shares of domains, constant or changing over its
length. Length and difficulty are properties of domains: a curriculum from short to long, or from
easy to hard, has domains of their own for these and shifts the shares between them.

A phase is cut into blocks in which each domain has a whole number of slots, and a block is filled
as one processor is scheduled fairly (Baruah et al., Proportionate Progress, 1996): the earliest
deadline first, so that at any slot each domain is within one sample of its share of the block.
Counts of earlier samples follow from the blocks before and one table, at any position at once.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdrmix.config.problems import validate
from cdrmix.config.schema import Config, MixtureConfig
from cdrmix.data.shards import MANIFEST_FILE, Manifest
from cdrmix.data.token_dataset import SplitDataset, domain_tokens, permute_epochs
from cdrmix.errors import DataError

Change = Literal["step", "linear", "cosine"]

# Slots of a block, and so the grain of a share: 0.0001 where the shares are constant.
_BLOCK_SLOTS = 10_000
# Changing shares go in this many steps, with blocks of 100 slots in a phase too short for more.
_CHANGE_STEPS = 64
_CHANGE_BLOCK_SLOTS = (10_000, 1_000, 100)
_TARGET_POINTS = 512  # at which the target shares of a range are averaged
# Of a preview: the shortest of the shipped configurations, so that small domains have samples;
# shares do not depend on it.
SEQUENCE_LENGTH = 256
_NUM_PARTS = 48  # of the course, for a picture of it


@dataclass(frozen=True)
class Phase:
    """One phase of a mixture."""

    weights: Mapping[str, float]  # relative, of each domain; 0 for one that is left out
    num_samples: int | None = None  # length (samples); None: to the end of training, if the last
    # step: the weights hold from the first sample. linear, cosine: they are reached at the end of
    # the phase, starting from those of the phase before
    change: Change = "step"


class _Stage(NamedTuple):
    """A run of equal blocks."""

    start: int  # global number of its first sample
    base: tuple[int, ...]  # earlier samples of each domain
    slots: tuple[int, ...]  # slots of each domain in a block


class Mixture:
    """Order of samples over several domains.

    Args:
        num_samples: samples in each domain; an exhausted one begins again.
        phases: at least one; the last goes on after its end with the weights reached.
        temperature: shares are weights to the power of 1 / temperature, so that above 1 small
            domains are seen more often.
    Attributes:
        domains: names, sorted; a source number is an index into them.
        digest: 12 hex digits that identify the order; equal for equal shares and lengths.
    Raises:
        DataError: if a domain is unknown, or the weights or lengths are not usable.
    """

    def __init__(
        self, num_samples: Mapping[str, int], phases: Sequence[Phase], *, temperature: float = 1.0
    ) -> None:
        self.domains = tuple(sorted(num_samples))
        self.num_samples = num_samples
        _check(self.domains, phases)
        self.phases = tuple(phases)
        self._shares: list[NDArray[np.float64]] = []
        for number, phase in enumerate(phases):
            # Scaled to at most 1 first, so that no power overflows.
            largest = max(phase.weights.values())
            weights = [phase.weights.get(name, 0.0) / largest for name in self.domains]
            powers = [math.pow(weight, 1 / temperature) for weight in weights]
            self._shares.append(np.array([power / math.fsum(powers) for power in powers]))
            for name, share in zip(self.domains, self._shares[-1], strict=True):
                what = f"data.mixture: phases[{number}]: domain {name} has a share of {share:.2g}"
                if share > 0 and num_samples[name] == 0:
                    raise DataError(
                        f"{what}, but too few tokens for one sample. Leave it out, or lower "
                        "training.sequence_length."
                    )
                if 0 < share < 1 / _BLOCK_SLOTS:
                    raise DataError(
                        f"{what}; the smallest is {1 / _BLOCK_SLOTS}. Raise its weight or the "
                        "temperature, or leave it out."
                    )
        self._stages: list[_Stage] = []
        start = 0
        base = (0,) * len(self.domains)
        for place, phase in enumerate(self.phases):
            for slots, length in self._parts(place, phase.num_samples):
                self._stages.append(_Stage(start, base, slots))
                if length is not None:
                    start += length
                    base = tuple(self.counts(start).tolist())  # the stage just added reaches there
        if self.phases[-1].num_samples is not None:  # its last shares hold to the end of training
            slots = _whole_slots(self._shares[-1] * _BLOCK_SLOTS)
            self._stages.append(_Stage(start, base, slots))
        self._starts = np.array([stage.start for stage in self._stages], dtype=np.int64)
        order = [self.domains, [num_samples[name] for name in self.domains], self._stages]
        # Of the layout, not of the configuration: equal orders may be written differently.
        self.digest = hashlib.sha256(json.dumps(order).encode()).hexdigest()[:12]

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source of each global sample number, 0 or more, and number of earlier samples from it.

        The first is an index into `domains`, the second counts on over the source's epochs; both
        have the shape of `numbers`.
        """
        sources = np.empty_like(numbers)
        cursors = np.empty_like(numbers)
        places = np.searchsorted(self._starts, numbers, side="right") - 1
        for place in np.unique(places).tolist():
            # All numbers of a stage at once: a batch seldom spans more than one.
            stage = self._stages[place]
            in_stage = places == place
            table = _fill_block(stage.slots)
            blocks, slots = np.divmod(numbers[in_stage] - stage.start, len(table.sources))
            block_sources = table.sources[slots]
            earlier = np.array(stage.base) + blocks[:, None] * np.array(stage.slots)
            earlier_of_source = earlier[np.arange(len(block_sources)), block_sources]
            sources[in_stage] = block_sources
            cursors[in_stage] = earlier_of_source + table.ranks[slots]
        return sources, cursors

    def counts(self, number: int) -> NDArray[np.int64]:
        """Samples of each domain before global sample `number`, [domains]."""
        stage = self._stages[bisect_right(self._stages, number, key=attrgetter("start")) - 1]
        blocks, rest = divmod(number - stage.start, sum(stage.slots))
        counts = np.array(stage.base) + blocks * np.array(stage.slots)
        if rest:
            counts += np.bincount(_fill_block(stage.slots).sources[:rest], minlength=len(counts))
        return counts

    def target_shares(self, number: int) -> NDArray[np.float64]:
        """Target share of each domain at global sample `number`, [domains]."""
        start = 0
        for place, phase in enumerate(self.phases):
            length = phase.num_samples
            if length is None or number < start + length:
                # At the middle of the sample, so that neither end of the phase is favoured.
                done = 1.0 if length is None else (number + 0.5 - start) / length
                return self._shares_within(place, done)
            start += length
        return self._shares[-1]

    def _shares_within(self, place: int, done: float) -> NDArray[np.float64]:
        """Shares in a phase after the part `done` of it, 0 to 1."""
        change = self.phases[place].change
        if change == "step":
            return self._shares[place]
        reached = done if change == "linear" else (1 - math.cos(math.pi * done)) / 2
        return (1 - reached) * self._shares[place - 1] + reached * self._shares[place]

    def _parts(self, place: int, length: int | None) -> list[tuple[tuple[int, ...], int | None]]:
        """Slots of a block and number of samples of each stage of a phase."""
        if self.phases[place].change == "step" or length is None:
            return [(_whole_slots(self._shares[place] * _BLOCK_SLOTS), length)]
        fitting = (size for size in _CHANGE_BLOCK_SLOTS if length >= _CHANGE_STEPS * size)
        size = next(fitting, _CHANGE_BLOCK_SLOTS[-1])
        num_steps = max(1, min(_CHANGE_STEPS, length // size))
        # Whole blocks, so that no step begins in the middle of one; the last takes the rest.
        ends = [step * length // num_steps // size * size for step in range(1, num_steps)]
        parts: list[tuple[tuple[int, ...], int | None]] = []
        owed = np.zeros(len(self.domains))
        for begin, end in zip([0, *ends], [*ends, length], strict=True):
            shares = self._shares_within(place, (begin + end) / 2 / length)
            # Rounding errors of earlier steps are made up for in the next.
            blocks = max(1, (end - begin) // size)
            target = np.maximum(0, shares * size + owed / blocks)
            slots = _whole_slots(target * size / target.sum())
            owed += (shares * size - np.array(slots)) * blocks
            parts.append((slots, end - begin))
        return parts


class _Table(NamedTuple):
    """A filled block: the source of each slot, and the number of earlier slots of that source."""

    sources: NDArray[np.int64]
    ranks: NDArray[np.int64]


@lru_cache(maxsize=256)
def _fill_block(slots: tuple[int, ...]) -> _Table:
    """Fills a block with `slots` of each source, none of them a whole slot or more off its share.

    The j-th of n slots of a source is released when its share has reached j, and due when it has
    reached j + 1; of the released ones, the earliest due is next. That no slot is ever late is the
    theorem on proportionate schedules of one processor.
    """
    size = sum(slots)
    sources = np.empty(size, dtype=np.int64)
    ranks = np.empty(size, dtype=np.int64)
    # Two heaps: by time of release, and of those released by deadline.
    waiting = [(0, source) for source, share in enumerate(slots) if share]
    ready: list[tuple[int, int]] = []
    counts = [0] * len(slots)
    for slot in range(size):
        while waiting and waiting[0][0] <= slot:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(counts[source] + 1) * size // slots[source]), source))
        due, source = heapq.heappop(ready)
        assert due > slot, f"slot {slot} of {slots} is late"
        sources[slot] = source
        ranks[slot] = counts[source]
        counts[source] += 1
        if counts[source] < slots[source]:
            heapq.heappush(waiting, (counts[source] * size // slots[source], source))
    return _Table(sources, ranks)


def _whole_slots(values: NDArray[np.float64]) -> tuple[int, ...]:
    """Rounds `values` to whole numbers with the same sum, by largest remainder."""
    floors = np.floor(values + 1e-9).astype(int)
    rests = values - floors
    remaining = round(float(values.sum())) - int(floors.sum())
    # Rounded: the last bits of a power or cosine, which machines disagree on, decide nothing.
    floors[np.argsort(-rests.round(9), kind="stable")[:remaining]] += 1
    return tuple(floors.tolist())


def _check(domains: Sequence[str], phases: Sequence[Phase]) -> None:
    """Refuses phases that cannot be laid out, all problems in one message."""
    problems = [] if phases else ["phases: give at least one."]
    for number, phase in enumerate(phases):
        where = f"phases[{number}]"
        last = number == len(phases) - 1
        unknown = sorted(set(phase.weights) - set(domains))
        if unknown:
            problems.append(
                f"{where}.weights: no domain {', '.join(unknown)} in this data set. "
                f"Known: {', '.join(domains)}."
            )
        values = list(phase.weights.values())
        if not all(0 <= value < math.inf for value in values) or not any(values):
            problems.append(f"{where}.weights: give weights of 0 or more, one of them above 0.")
        if phase.num_samples is None and not last:
            problems.append(f"{where}: only the last phase may be without a length.")
        if phase.num_samples is not None and phase.num_samples < 1:
            problems.append(f"{where}: {phase.num_samples} samples; a phase has at least one.")
        if phase.change != "step" and (number == 0 or phase.num_samples is None):
            problems.append(
                f"{where}.change = {phase.change}: needs a phase before it and a length of its own."
            )
    if problems:
        raise DataError("data.mixture: " + "\ndata.mixture: ".join(problems))


def draw_sources(mixture: Mixture, start: int, stop: int) -> dict[str, Any]:
    """Shares of all `domains` `asked` for (mean) and `drawn` in global samples start to stop - 1.

    Gives `start`, `stop` and, by name of the domain, both shares and the `samples` drawn.
    """
    points = np.linspace(start, stop, 2 * _TARGET_POINTS + 1)[1::2]  # midpoints of equal parts
    targets = np.mean([mixture.target_shares(int(point)) for point in points], axis=0)
    samples = mixture.counts(stop) - mixture.counts(start)
    domains = {
        name: {
            "asked": float(targets[place]),
            "drawn": float(samples[place] / (stop - start)),
            "samples": int(samples[place]),
        }
        for place, name in enumerate(mixture.domains)
    }
    return {"start": start, "stop": stop, "domains": domains}


class MixedDataset(SplitDataset):
    """Samples of several domains, each cut by itself, numbered one domain after the other."""

    def __init__(
        self, folder: Path, split: str, sequence_length: int, mixture: MixtureConfig
    ) -> None:
        super().__init__(folder, split, sequence_length, by_domain=True)
        tokens = domain_tokens(self.manifest, split)
        self._plan = plan_mixture(mixture, tokens, sequence_length)
        phases = len(self._plan.phases)
        domains = ", ".join(self._plan.domains)
        self.mixture = f"{self._plan.digest} ({phases} phases over {domains})"

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

    def drawn(self, start: int, stop: int) -> dict[str, int]:
        """Samples of each domain in global samples start .. stop - 1, in the order of the names."""
        counts = self._plan.counts(stop) - self._plan.counts(start)
        return dict(zip(self._plan.domains, counts.tolist(), strict=True))


def plan_mixture(config: MixtureConfig, tokens: Mapping[str, int], sequence_length: int) -> Mixture:
    """Lays out the mixture of a configuration for domains of so many tokens each."""
    # 0 if a domain is shorter than one sample
    num_samples = {name: max(0, count - 1) // sequence_length for name, count in tokens.items()}
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


def check_mixture(config: Config, manifest: Manifest) -> None:
    """Checks the mixture that a run would follow, its own or that of the data set, before it runs.

    Args:
        config: `data.mixture` and `training.sequence_length` are read.
        manifest: of the data set.
    Raises:
        DataError: if a domain is unknown, has no whole sample of that length or too small a share,
            or a phase has an unusable length; with every problem of the phases in one message.
    """
    mixture = config.data.mixture or built_mixture(manifest)
    if mixture is not None:
        tokens = domain_tokens(manifest, "train")
        plan_mixture(mixture, tokens, config.training.sequence_length)


def mixture_course(
    manifest: Manifest, config: MixtureConfig, *, sequence_length: int = SEQUENCE_LENGTH
) -> dict[str, Any]:
    """Shares asked for and drawn, phase by phase and over the whole course.

    A last phase without a length is taken to be as long as there are samples.

    Returns:
        `sequence_length`; `samples`, length of the course (count); `available`, samples in each
        domain; `whole`, `phases` and `parts`: shares as `draw_sources` returns them, phases with
        their `change` and `has_end`, a length of their own. Or `problem`, the reason why the
        mixture cannot be drawn.
    """
    try:
        mixture = plan_mixture(config, domain_tokens(manifest, "train"), sequence_length)
    except DataError as error:
        return {"sequence_length": sequence_length, "problem": str(error)}

    total = sum(mixture.num_samples.values())
    ends = list(accumulate(phase.num_samples or total for phase in mixture.phases))
    phases = [
        {"change": phase.change, "has_end": phase.num_samples is not None}
        | draw_sources(mixture, start, stop)
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
        "available": mixture.num_samples,
        "whole": {"start": 0, "stop": ends[-1], "domains": whole},
        "phases": phases,
        "parts": [
            draw_sources(mixture, start, stop) for start, stop in pairwise(bounds) if start < stop
        ],
    }
