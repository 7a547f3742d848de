"""Goodput that a run may expect under failures, and the interval of saves that costs least.

Failures are a Poisson process: they come at a constant rate, also while a run starts again, which
then begins its start anew. After one the run goes on from the newest checkpoint that is whole and
that the failure has left. A life, from a start to the next failure, is a renewal:

* it credits the work of each interval whose save was whole in time, so lost work is all that came
  after, and what is done again can be lost again;
* starts take (exp(rate restart) - 1) / rate seconds a life on average.

With saves in the foreground this is the complete cost function of Daly, "A higher order estimate of
the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006). A
save in the background stalls for less than it takes to be whole, and the next one waits for it.
Work is measured in seconds of training without saves. The tests compare with a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

# Devices up to which a scale is looked for.
_MOST_DEVICES = 10**8
_GOLDEN = (math.sqrt(5) - 1) / 2
_SEARCH_STEPS = 60  # of a search by golden section: its bounds come closer by a factor of 3e12


@dataclass(frozen=True)
class HostTier:
    """Checkpoints that hosts keep, besides those of the run directory."""

    interval_seconds: float  # work between saves; infinite: those of the run directory alone
    write_seconds: float  # from the begin of a save until it counts
    left_share: float  # of failures, those that leave it as it was


@dataclass(frozen=True)
class Times:
    """Rate of failures of a run, and what saves and restarts take."""

    failures_per_second: float  # of the whole run, all devices
    stall_seconds: float  # for which training waits at a save, to any tier
    write_seconds: float  # from the begin of a save to the run directory until it counts, >= stall
    restart_seconds: float  # from a failure to the first step of the next start
    tiers: tuple[HostTier, ...] = ()


@dataclass(frozen=True)
class Goodput:
    """Shares of the wall time of a long run; they sum to 1."""

    productive: float  # steps that the final weights contain
    saves: float  # training waits for a save
    lost: float  # work that a failure has undone
    restarts: float  # from each failure to the next first step


def expected(times: Times, interval: float) -> Goodput:
    """Expected shares with `interval` seconds of work between saves to the run directory.

    With tiers of hosts it is an approximation, a little below 1 % of what failures cost: a life
    begins with its state in every tier, which the run directory has only once a save is over.
    """
    rate = times.failures_per_second
    finest = min([interval, *(tier.interval_seconds for tier in times.tiers)])
    # Seconds until the next save begins, of work and of the saves in between: each stalls.
    stalled = 1 + times.stall_seconds / finest
    period = max(interval * stalled, times.write_seconds)
    stretched = period / interval
    ways = [(times.write_seconds, period, interval, 1.0)]
    for tier in times.tiers:
        own = min(tier.interval_seconds, interval)
        ways.append((tier.write_seconds, own * stretched, own, tier.left_share))
    credits = []  # seconds of work that a life adds, and the share of failures that leave the tier
    for write_seconds, between, work, share in ways:
        first = work * stalled - times.stall_seconds + max(write_seconds, times.stall_seconds)
        num_saves = math.exp(-rate * first) / -math.expm1(-rate * between)
        credits.append((num_saves * work, share))
    alive = math.exp(-rate * times.restart_seconds)  # of the time, beyond starts
    productive = alive * rate * _credited(credits)
    in_steps = alive / stretched
    return Goodput(productive, alive - in_steps, max(0.0, in_steps - productive), 1 - alive)


def _credited(credits: list[tuple[float, float]]) -> float:
    """Mean over failures of what the best tier that each has left credits.

    Tiers that survive more failures contain those that survive fewer: the shares are nested.
    """
    credited = covered = 0.0
    for work, share in sorted(credits, reverse=True):
        credited += work * max(0.0, share - covered)
        covered = max(covered, share)
    return credited


def best_interval(times: Times, *, least: float, most: float) -> float:
    """Seconds of work between saves to the run directory, within bounds, that cost least."""
    return _lowest(lambda interval: -expected(times, interval).productive, least, most)


def young(times: Times) -> float:
    """Best interval by Young, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17 (1974), for saves in the foreground."""
    return math.sqrt(2 * times.stall_seconds / times.failures_per_second)


def daly(times: Times) -> float:
    """Best interval by Daly's higher order estimate (2006), for saves in the foreground."""
    mean = 1 / times.failures_per_second
    if times.stall_seconds >= 2 * mean:
        return mean
    root = math.sqrt(times.stall_seconds / (2 * mean))
    return young(times) * (1 + root / 3 + root**2 / 9) - times.stall_seconds


def restarts_outweigh_from(times: Times, *, devices: int, least: float, most: float) -> int | None:
    """Number of devices from which restarts cost more than saves and lost work together, each at
    its best interval and with all other times as they are; None if there is none.

    Lost work grows as restarts do once a save takes longer to be whole than a restart.
    """

    def excess(number: float) -> float:
        scaled = replace(times, failures_per_second=times.failures_per_second * number / devices)
        shares = expected(scaled, best_interval(scaled, least=least, most=most))
        return shares.restarts - shares.saves - shares.lost

    few = 1.0
    # Beyond a failure in each restart and save a run hardly gets on, whatever causes it.
    hardly = devices / (times.failures_per_second * (times.restart_seconds + times.write_seconds))
    many = min(float(_MOST_DEVICES), hardly)
    if excess(many) <= 0:
        return None
    while many - few > 0.01 * few and many > 1:
        middle = math.sqrt(few * many)
        few, many = (few, middle) if excess(middle) > 0 else (middle, many)
    return math.ceil(many)


def _lowest(function: Callable[[float], float], least: float, most: float) -> float:
    """Returns where `function` of one valley is lowest between two positive numbers."""
    low, high = math.log(least), math.log(max(least, most))
    for _ in range(_SEARCH_STEPS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (
            (low, right) if function(math.exp(left)) < function(math.exp(right)) else (left, high)
        )
    return math.exp((low + high) / 2)
