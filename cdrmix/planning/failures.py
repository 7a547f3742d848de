"""Failures that a planned run may expect: rates, times of saves and restarts, and what they cost.

What a configuration or an earlier run does not tell is assumed, and named as such.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.cost import time_text
from cdrmix.planning.goodput import (
    Goodput,
    HostTier,
    Times,
    best_interval,
    daly,
    expected,
    restarts_outweigh_from,
    young,
)
from cdrmix.planning.layout import Degrees
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.plan import Plan
from cdrmix.planning.text_page import size_text


@dataclass(frozen=True)
class Rate:
    """Published failures of such devices."""

    per_device_hour: float
    source: str


# "The Llama 3 Herd of Models" (2024), section 3.3.4: unexpected interruptions.
_LLAMA_3 = Rate(419 / (54 * 24 * 16_384), "Llama 3: 419 in 54 days on 16,384 H100")
# Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA
# 2025: 6.50 a 1,000 node-days in RSC-1 (2.34 in RSC-2), which projects 1.8 hours for 16,384 GPUs.
_RSC_1 = Rate(6.5 / (1_000 * 24 * 8), "Meta's RSC-1: 6.5 in 1,000 days of a node of 8 A100")
# J. Dean at Google I/O 2008: the first year of a cluster. Of a host, not of a rank there.
_HOSTS = Rate(1_000 / (1_800 * 8_766), "Google: 1,000 a year in a cluster of 1,800 hosts")
_RATES = {"a100-80": _RSC_1, "h100-80": _LLAMA_3, "h200-141": _LLAMA_3}
# Assumptions, by device. Copies of a rank's share to host memory (bytes per second, of a device);
# writes to the run directory (of a host, and of all): files of one local disk on CPUs, as measured
# in docs/benchmarks.md; start-up without reading the checkpoint (seconds), on CPUs as measured.
_COPY = {"cuda": 10e9, "cpu": 2e9}
_WRITE_OF_HOST = {"cuda": 1e9, "cpu": 0.4e9}
_WRITE_OF_ALL = 100e9
_START_UP = {"cuda": 300.0, "cpu": 8.0}
# Of a save in the background whose copy ends beside a step: 4 to 8 ms on CPUs, in
# docs/benchmarks.md; fragments of a large model are more.
_LEAST_STALL = 0.05
_LOCAL_DISK = 1e9  # writes of a host to its own disk (bytes per second)
_PAUSE = 2.0  # of `cdrmix launch` before it starts a lost run again
# Advice is given where it brings at least this share of the time.
_WORTH_TELLING = 0.001
# Goodput below which a run would take a thousand times its time.
_NO_PROGRESS = 0.001
# Expected failures of a run below which it hardly needs a save but the last.
_HARDLY_ANY = 0.01


@dataclass(frozen=True)
class Measured:
    """Times of an earlier run; None where it had none."""

    stall_seconds: float | None
    write_bytes_per_second: float | None
    restart_seconds: float | None


def measured_times(run_dir: Path) -> Measured:
    """Reads the times of saves and starts of a run. Raises PlanError if it has no account."""
    path = run_dir / "wall_time.json"
    try:
        account = json.loads(path.read_text(encoding="utf-8"))
        parts, starts = account["parts"], account["starts"]
        saves = account.get("saves") or {"count": 0}
        restart = None
        if starts > 1:
            restart = parts["down"] / (starts - 1) + parts["start_up"] / starts
        if not saves["count"]:
            return Measured(None, None, restart)
        stall = parts["checkpoint_stall"] / saves["count"]
        return Measured(stall or None, saves["bytes"] / saves["seconds"] or None, restart)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise PlanError(
            f"--measured {run_dir}: {path.name} cannot be read ({why}). Give the directory "
            "of a run that has trained, or leave the flag out"
        ) from error


@dataclass(frozen=True)
class Expectation:
    """Failures of a planned run, and what they cost it."""

    times: Times
    sources: dict[str, str]  # of the rate and of each time, in words
    checkpoint_bytes: int
    devices: int
    step_seconds: float
    run_seconds: float  # without failures and saves
    interval_seconds: float  # work between saves, as configured
    interval_text: str  # as configured, in words
    best_seconds: float
    # devices from which restarts cost more than saves and lost work; None: there are none
    restarts_outweigh_from: int | None
    is_range: bool  # the run chooses the interval within bounds

    @property
    def shares(self) -> Goodput:
        """Shares of the time at the configured interval."""
        return expected(self.times, self.interval_seconds)

    @property
    def best(self) -> Goodput:
        """Shares of the time at the best interval."""
        return expected(self.times, self.best_seconds)

    @property
    def wall_seconds(self) -> float:
        """Time of the run with saves and failures."""
        return self.run_seconds / self.shares.productive

    @property
    def num_failures(self) -> float:
        """Failures to expect in that time, those during starts too."""
        return self.wall_seconds * self.times.failures_per_second

    @property
    def advice(self) -> str | None:
        """Settings of the best interval, where it is worth the words."""
        gain = self.best.productive - self.shares.productive
        if self.is_range or self.num_failures < _HARDLY_ANY or gain < _WORTH_TELLING:
            return None
        minutes = float(f"{self.best_seconds / 60:.2g}")
        setting = f"checkpoint.every_minutes = {minutes:g}"
        if self.best_seconds > self.interval_seconds:
            setting += " and checkpoint.every_steps = null"
        return setting

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for `cdrmix plan --json`."""
        per_day = 86_400
        return {
            "failures_per_device_hour": 3_600 * self.times.failures_per_second / self.devices,
            "mean_seconds_between_failures": 1 / self.times.failures_per_second,
            "failures_in_the_run": self.num_failures,
            "stall_seconds": self.times.stall_seconds,
            "write_seconds": self.times.write_seconds,
            "restart_seconds": self.times.restart_seconds,
            "checkpoint_bytes": self.checkpoint_bytes,
            "sources": self.sources,
            "interval_seconds": self.interval_seconds,
            "shares": asdict(self.shares),
            "days": self.wall_seconds / per_day,
            "best_interval_seconds": self.best_seconds,
            "best_shares": asdict(self.best),
            "best_days": self.run_seconds / self.best.productive / per_day,
            "young_seconds": young(self.times),
            "daly_seconds": daly(self.times),
            "restarts_outweigh_from_devices": self.restarts_outweigh_from,
            "advice": self.advice,
        }


def expectation(
    config: Config, cluster: Cluster, plan: Plan, measured: Measured | None = None
) -> Expectation:
    """Failures that a plan may expect on a cluster, with times of `measured` where keys give
    none."""
    _, cost = plan.estimates()
    step = cost.step_seconds
    run_seconds = config.training.num_steps * step
    num_bytes, of_rank = _checkpoint_bytes(config, plan)
    times, sources = _times(
        config, cluster, plan, measured or Measured(None, None, None), (num_bytes, of_rank)
    )
    bounds = _range_seconds(config, step)
    least, most = (min(max(step, each), run_seconds) for each in bounds or (step, run_seconds))
    best = best_interval(times, least=least, most=most)
    best = min(run_seconds, step * max(1, round(best / step)))
    interval, text = (best, "chosen by the run") if bounds else _configured(config, step)
    interval = min(interval, run_seconds)
    if expected(times, best).productive < _NO_PROGRESS:
        raise PlanError(
            f"a failure comes every {time_text(1 / times.failures_per_second)}, a restart takes "
            f"{time_text(times.restart_seconds)} and a save {time_text(times.write_seconds)}: such "
            "a run gets nowhere. Try fewer devices, or the true failures.per_device_hour (or "
            "--failure-rate) and failures.restart_seconds"
        )
    return Expectation(
        times=times,
        sources=sources,
        checkpoint_bytes=num_bytes,
        devices=cluster.world_size,
        step_seconds=step,
        run_seconds=run_seconds,
        interval_seconds=interval,
        interval_text=text,
        best_seconds=best,
        restarts_outweigh_from=restarts_outweigh_from(
            times, devices=cluster.world_size, least=step, most=run_seconds
        ),
        is_range=bounds is not None,
    )


def _rate(config: Config, cluster: Cluster) -> tuple[float, str]:
    """Failures of a device in an hour, and where the figure comes from."""
    given = config.failures.per_device_hour
    if given is not None:
        return given, "failures.per_device_hour"
    if cluster.device == "cpu":
        return _HOSTS.per_device_hour / cluster.gpus_per_node, _HOSTS.source
    # The name of a preset with another memory tells the preset.
    rate = next((rate for name, rate in _RATES.items() if name in cluster.name), None)
    if rate is None:
        return _LLAMA_3.per_device_hour, f"assumed as of H100s, {_LLAMA_3.source}"
    return rate.per_device_hour, rate.source


def _checkpoint_bytes(config: Config, plan: Plan) -> tuple[int, int]:
    """Bytes of a checkpoint, and of the fullest rank's share of it."""
    checkpoint = config.checkpoint.model_copy(update={"tiers": None})
    # The copy of a GPU's state is told by itself, and is as large on CPUs.
    model = MemoryModel(config.model_copy(update={"checkpoint": checkpoint}), "cuda")
    one_rank = replace(plan, degrees=Degrees())
    whole, share = (model.estimate(each, has_copy=True) for each in (one_rank, plan))
    return whole.checkpoint, share.checkpoint


def _times(
    config: Config, cluster: Cluster, plan: Plan, measured: Measured, sizes: tuple[int, int]
) -> tuple[Times, dict[str, str]]:
    """Rate and times of a run with the source of each; `sizes` are bytes of a checkpoint, and of a
    rank's share."""
    keys = config.failures
    num_bytes, of_rank = sizes
    _, cost = plan.estimates()
    rate, of_rate = _rate(config, cluster)
    bandwidth = min(_WRITE_OF_ALL, _WRITE_OF_HOST[cluster.device] * cluster.nodes)
    bandwidth, of_bandwidth = _known(keys, measured, "write_bytes_per_second", bandwidth)
    copy = of_rank / _COPY[cluster.device]
    writing = num_bytes / bandwidth
    stall = copy + writing
    if plan.saves_in_background:
        stall = _LEAST_STALL + max(0.0, copy - cost.step_seconds)
    stall, of_stall = _known(keys, measured, "stall_seconds", stall)
    notice = config.supervision.deadline_seconds
    restart = notice + _PAUSE + _START_UP[cluster.device] + num_bytes / bandwidth
    restart, of_restart = _known(keys, measured, "restart_seconds", restart)
    write = max(stall, copy + writing)
    times = Times(
        failures_per_second=rate * cluster.world_size / 3_600,
        stall_seconds=stall,
        write_seconds=write,
        restart_seconds=restart,
        tiers=tuple(_host_tiers(config, plan, max(stall, copy), of_rank * cluster.gpus_per_node)),
    )
    sources = {
        "rate": of_rate,
        "stall": of_stall,
        "write": f"{size_text(bandwidth)} per second to the run directory, {of_bandwidth}",
        "restart": of_restart,
    }
    return times, sources


def _known(keys: Any, measured: Measured, name: str, assumed: float) -> tuple[float, str]:
    """Returns a time or bandwidth by its key, else as measured, else as assumed."""
    if (given := getattr(keys, name)) is not None:
        return given, f"failures.{name}"
    if (of_run := getattr(measured, name)) is not None:
        return of_run, "measured"
    return assumed, "assumed"


def _host_tiers(config: Config, plan: Plan, copied: float, num_bytes: int) -> Iterator[HostTier]:
    """Tiers of hosts, which have `num_bytes` of a checkpoint on each, after `copied` seconds."""
    tiers = config.checkpoint.tiers
    if tiers is None:
        return
    _, cost = plan.estimates()
    stay, back = config.failures.hosts_stay_share, config.failures.hosts_return_share
    kinds = ((tiers.memory, stay, 0.0), (tiers.local, stay + back, num_bytes / _LOCAL_DISK))
    for tier, share, writing in kinds:
        if tier is None or (tier is tiers.memory and not plan.has_memory_tier):
            continue
        every = math.inf if tier.every_steps is None else tier.every_steps * cost.step_seconds
        yield HostTier(every, copied + writing, share)


def _configured(config: Config, step: float) -> tuple[float, str]:
    """Seconds of work between saves as configured, with words; infinite without any."""
    steps, minutes = config.checkpoint.every_steps, config.checkpoint.every_minutes
    ways = []
    if isinstance(steps, int):
        ways.append((steps * step, f"{steps:,} step{'s' * (steps != 1)}"))
    if isinstance(minutes, float):
        # before the first step that begins so late
        ways.append((step * math.ceil(60 * minutes / step), f"{minutes:g} minutes"))
    return min(ways, default=(math.inf, "none but the last"))


def _range_seconds(config: Config, step: float) -> tuple[float, float] | None:
    """Bounds in seconds within which the run chooses its interval; None where it is fixed."""
    checkpoint = config.checkpoint
    if checkpoint.auto_range is None:
        return None
    least, most = checkpoint.auto_range
    unit = step if checkpoint.every_steps == "auto" else 60
    return least * unit, most * unit


def failure_facts(told: Expectation, *, explain: bool) -> Iterator[tuple[str, str]]:
    """Labels and texts of the lines of `cdrmix plan`."""
    times = told.times
    between = time_text(1 / times.failures_per_second)
    of_device = time_text(told.devices / times.failures_per_second)
    rate = f"a device fails once in {of_device} ({told.sources['rate']})"
    if told.num_failures < _HARDLY_ANY:
        yield "failures", f"hardly any: one in {between}, {rate}"
        return
    yield "failures", f"one in {between}, {_number(told.num_failures)} in the run: {rate}"
    shares, wall = told.shares, told.wall_seconds
    days = f"{time_text(wall)} in all, of which {time_text(wall - told.run_seconds)} are lost"
    lost = f"{days} to failures and saves ({_losses(shares)})"
    yield "goodput", f"{_percent(shares.productive)}: {lost}"
    every = f"every {time_text(told.interval_seconds)} ({told.interval_text})"
    if told.advice:
        gained = f"{_percent(told.best.productive)} with one every {time_text(told.best_seconds)}"
        every += f"; {gained}: try {told.advice}"
    yield "saving", every
    if (scale := told.restarts_outweigh_from) is not None:
        yield "restarts", f"cost more than saves and work done again from {scale:,} devices on"
    if explain:
        size, stall = size_text(told.checkpoint_bytes), time_text(times.stall_seconds)
        whole = time_text(times.write_seconds)
        sources = told.sources
        saved = f"{size}, training waits {stall} ({sources['stall']})"
        yield "a save", f"{saved}, whole after {whole} ({sources['write']})"
        yield "a restart", f"{time_text(times.restart_seconds)} ({sources['restart']})"


def _losses(shares: Goodput) -> str:
    losses = {"restarts": shares.restarts, "work done again": shares.lost, "saves": shares.saves}
    by_size = sorted(losses.items(), key=lambda loss: -loss[1])
    return ", ".join(f"{name} {_percent(share)}" for name, share in by_size)


def _percent(share: float) -> str:
    """Three digits, and more where a goodput is near to all of the time."""
    percent = 100 * share
    if 0 < percent < 0.01:
        return "under 0.01 %"
    if percent < 10:
        return f"{percent:.2g} %"
    return f"{percent:.1f} %" if percent < 99.9 else f"{percent:.3f} %"


def _number(count: float) -> str:
    return f"{count:,.0f}" if count >= 9.5 else f"{count:.2g}"
