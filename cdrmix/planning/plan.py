"""Cluster + configuration -> plan: layout, memory, time, reasons, and what else was considered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning.cluster import GIB, Cluster
from cdrmix.planning.profile import carried_out, laid_out, memory_reason
from cdrmix.planning.rank_memory import USABLE_SHARE
from cdrmix.planning.rules import UNAVAILABLE
from cdrmix.planning.search import Candidate, candidates
from cdrmix.planning.stage_b_memory import StageBLayout, stage_b_layout

RUNNERS_UP = 4
# How many times the nodes may be doubled in looking for a cluster that would do.
_DOUBLINGS = 5


@dataclass(frozen=True)
class Plan:
    """How a run is laid out on a cluster.

    Attributes:
        config: of the run.
        cluster: where it would run.
        pick: the layout to run with, or the nearest to one if nothing fits.
        runners_up: other layouts that this version carries out, best first.
        later: the best layouts that it cannot carry out yet.
        layouts: how many legal layouts were compared.
        reasons: why the pick, one line each.
        changes: what would have to change, one line each; empty where the plan fits.
        stage_b: how Stage B is laid out; None where there is none.
    """

    config: Config
    cluster: Cluster
    pick: Candidate
    runners_up: list[Candidate]
    later: list[Candidate]
    layouts: int
    reasons: list[str]
    changes: list[str]
    stage_b: StageBLayout | None = None

    @property
    def fits(self) -> bool:
        """Whether this version can run it within 90 % of the memory; of Stage B, see `stage_b`."""
        return self.pick.fits and not self.pick.missing

    @property
    def stage_b_fits(self) -> bool:
        """Whether Stage B, where there is one, stays within 90 % of the memory too."""
        return self.stage_b is None or self.stage_b.memory.fits(self.cluster)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        cluster = self.cluster
        return {
            "name": self.config.name,
            "cluster": {
                "name": cluster.name,
                "nodes": cluster.nodes,
                "gpus_per_node": cluster.gpus_per_node,
                "memory_gib": cluster.memory_gib,
            },
            **self.pick.to_json(),
            **self._stage_b_to_json(),
            "reasons": [*self.reasons, *self.changes],
            "runners_up": [candidate.to_json() for candidate in self.runners_up],
            "not_available_yet": [candidate.to_json() for candidate in self.later],
            "layouts_compared": self.layouts,
        }

    def _stage_b_to_json(self) -> dict[str, Any]:
        if self.stage_b is None:
            return {}
        memory = self.stage_b.memory
        degrees, fits = asdict(self.stage_b.degrees), memory.fits(self.cluster)
        told = {"degrees": degrees, "memory_per_rank_bytes": memory.to_json(), "fits": fits}
        return {"stage_b": told}


def plan(config: Config, cluster: Cluster) -> Plan:
    """Lay a run out on a cluster; what the configuration gives is kept.

    Raises:
        PlanError: if what the configuration gives cannot be laid out on the cluster, naming
            everything that is wrong with the nearest legal choice.
    """
    found = laid_out(config, cluster)
    pick = found[0]
    available = [candidate for candidate in found[1:] if not candidate.missing]
    later = [candidate for candidate in found if candidate.missing and candidate is not pick]
    later.sort(key=lambda candidate: not candidate.fits)  # stable: the best that fit come first
    if pick.missing:
        reasons = [*unavailable(pick, config, cluster), memory_reason(pick, cluster)]
    else:
        reasons = carried_out(pick, config, cluster).reasons
    made = Plan(
        config=config,
        cluster=cluster,
        pick=pick,
        runners_up=_unlike(available)[:RUNNERS_UP],
        later=_unlike(later)[:RUNNERS_UP],
        layouts=len(found),
        reasons=reasons,
        changes=[],
        stage_b=stage_b_layout(config, cluster, zero_stage=pick.arrangement.zero_stage),
    )
    return made if made.fits else replace(made, changes=list(_changes(made)))


def unavailable(pick: Candidate, config: Config, cluster: Cluster) -> list[str]:
    """What this version lacks for a layout, one message each; none if it can run it."""
    try:
        carried_out(pick, config, cluster)
    except PlanError as error:
        return str(error).splitlines()
    return []


def _unlike(found: list[Candidate]) -> list[Candidate]:
    """The first candidate of each profile and set of degrees."""
    first: dict[Any, Candidate] = {}
    for candidate in found:
        first.setdefault((candidate.profile, candidate.arrangement.degrees), candidate)
    return list(first.values())


def _changes(made: Plan) -> Iterator[str]:
    """What would have to change for this version to run it, and what will fit later."""
    pick, training, cluster = made.pick, made.config.training, made.cluster
    if pick.fits:  # what this version lacks for it is among the reasons, with what to try
        return
    fitting = next((candidate for candidate in made.later if candidate.fits), None)
    if fitting is not None:
        needed = " and ".join(fitting.missing)
        yield (
            f"fits with {fitting.describe()}: {fitting.memory.total / GIB:.1f} GiB a device, "
            f"{fitting.cost.tokens_per_second:,.0f} tokens per second; {needed}: {UNAVAILABLE}"
        )
    if not pick.arrangement.activation_checkpointing:
        yield "would take less with training.activation_checkpointing = true"
    if training.micro_batch_size is not None and training.micro_batch_size > 1:
        yield "would take less with training.micro_batch_size = 1"
    if pick.memory.checkpoint and not pick.memory.fits_host(cluster):
        yield "would take less of a host with checkpoint.background = false"
    more = _on_more_nodes(made)
    if more is not None:
        nodes, candidate = more
        yield f"would fit on {nodes} such nodes: {candidate.describe()}"
    needed_gib, host_gib = (
        math.ceil(size / USABLE_SHARE / GIB)
        for size in (pick.memory.total, pick.memory.on_host * cluster.gpus_per_node)
    )
    hosts = "" if pick.memory.fits_host(cluster) else f", with {host_gib} GiB a host"
    yield f"would fit on {cluster.world_size} devices of {needed_gib} GiB{hosts}"


def _on_more_nodes(made: Plan) -> tuple[int, Candidate] | None:
    """The fewest nodes, by doubling, on which a layout fits, and the best there; None if the batch
    does not reach that far."""
    training = made.config.training
    least: dict[str, Any] = {"micro_batch_size": training.micro_batch_size or 1}
    if "activation_checkpointing" not in training.model_fields_set:
        least["activation_checkpointing"] = True
    # what takes least is found in a tenth of the time
    lean = made.config.model_copy(update={"training": training.model_copy(update=least)})
    for times in (2**doubling for doubling in range(1, _DOUBLINGS + 1)):
        wider = replace(made.cluster, nodes=made.cluster.nodes * times)
        if any(each.fits and not each.missing for each in candidates(lean, wider)):
            return wider.nodes, candidates(made.config, wider)[0]
    return None


# --- for people -----------------------------------------------------------------------------------


def as_text(made: Plan, *, explain: bool = False) -> str:
    """The plan as a page; `explain` adds every buffer, what is exchanged, and what was assumed."""
    pick = made.pick
    lines = [f"{made.config.name} on {made.cluster}: {_verdict(made)}", "", f"  {pick.describe()}"]
    lines += ["", *_memory_lines(made, explain=explain), "", *_time_lines(made, explain=explain)]
    lines += ["", "why", *(f"  - {reason}" for reason in made.reasons)]
    if made.changes:
        lines += ["", "what would have to change", *(f"  - {change}" for change in made.changes)]
    lines += _others("runners-up", made.runners_up)
    lines += _others(UNAVAILABLE, made.later)
    if explain:
        lines += ["", f"{made.layouts} legal layouts compared. {_ASSUMPTIONS}"]
    return "\n".join(lines)


def _verdict(made: Plan) -> str:
    fits = {True: "fits", False: "does NOT fit"}
    stage_a = UNAVAILABLE if made.pick.fits and not made.fits else fits[made.fits]
    if made.stage_b is None:
        return stage_a
    return f"Stage A {stage_a}, Stage B {fits[made.stage_b_fits]}"


_ASSUMPTIONS = (
    "States are DeepSpeed's to the byte and activations within 1 % on CPU; buffers and GPUs are "
    "not measured yet. Times assume half of the peak in the kernels, 1.5 ms of launches a block, "
    "and nothing overlapped: good for comparing layouts, no promise."
)


def _memory_lines(made: Plan, *, explain: bool) -> list[str]:
    memory, there = made.pick.memory, made.cluster.memory_bytes
    parts = dict(memory.described()) if explain else memory.to_json()
    parts["total"] = memory.total
    title = "per rank" if made.stage_b is None else "per rank in Stage A"
    lines = [f"  {title:26}     GiB"]
    lines += [f"  {part:26} {size / GIB:7.2f}" for part, size in parts.items()]
    lines.append(f"  {'may be filled':26} {USABLE_SHARE * there / GIB:7.2f}")
    if memory.on_host:
        lines.append(f"  {'on the host':26} {memory.on_host / GIB:7.2f}")
    return lines


def _time_lines(made: Plan, *, explain: bool) -> list[str]:
    cost, training = made.pick.cost, made.config.training
    lines = [
        f"  a step      {cost.step_seconds:.3g} s, {cost.flops:.3g} FLOPs, "
        f"{training.tokens_per_step:,} tokens",
        f"  speed       {cost.tokens_per_second:,.0f} tokens per second, MFU {cost.mfu:.1%}, "
        f"scaling efficiency {cost.scaling_efficiency:.0%}",
        f"  {'Stage A' if made.stage_b else 'the run':11} {training.num_steps:,} steps, "
        f"{cost.days:,.1f} days",
        f"  waiting     {cost.bubble:.1%} pipeline bubble",
    ]
    if made.stage_b is not None and made.config.stage_b is not None:
        steps = made.config.stage_b.training.num_steps
        lines.append(f"  Stage B     {steps:,} steps, which are not timed")
    if explain:
        lines += [
            f"  exchanged   {traffic.payload / GIB:8.2f} GiB a step, {traffic.seconds:.3g} s: "
            f"{kind.replace('_', ' ')}"
            for kind, traffic in cost.traffic.items()
        ]
    return lines


def _others(title: str, found: list[Candidate]) -> list[str]:
    if not found:
        return []
    width = max(len(title) - 2, *(len(candidate.describe()) for candidate in found))
    lines = ["", f"{title:{width + 2}}     GiB  tokens/s"]
    for candidate in found:
        note = "" if candidate.fits else "  does not fit"
        lines.append(
            f"  {candidate.describe():{width}} {candidate.memory.total / GIB:7.1f} "
            f"{candidate.cost.tokens_per_second:9,.0f}{note}"
        )
    return lines
