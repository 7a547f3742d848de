"""What a built folder's mixture asks for against what a run draws, before there is a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from cdrmix.config.data import MixtureConfig
from cdrmix.data.mixed import domain_samples, plan_mixture
from cdrmix.data.mixture import Mixture, draw
from cdrmix.data.shards import Manifest
from cdrmix.errors import DataError

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
    return {"start": start, "stop": stop, "domains": draw(mixture, start, stop)}


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
