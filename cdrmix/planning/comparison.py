"""The best plan of a run on a cluster beside its runners-up, as `cdrmix plan` shows them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning import rules
from cdrmix.planning.cluster import GIB, Cluster
from cdrmix.planning.layout import Degrees
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import all_plans, combination_of, explained, memory_reason
from cdrmix.planning.rules import UNAVAILABLE
from cdrmix.planning.search import search
from cdrmix.planning.stage_b_memory import stage_b_layout

RUNNERS_UP = 4
# How many times the nodes may be doubled in looking for a cluster that would do.
_DOUBLINGS = 5


@dataclass(frozen=True)
class Comparison:
    """All plans of a run on a cluster, compared.

    Attributes:
        config: of the run.
        cluster: where it would run.
        plan: the one to run with, or the nearest to one if nothing fits.
        runners_up: other plans that this version carries out, best first.
        later: the best plans that it cannot carry out yet.
        num_layouts: legal layouts that were compared (count).
        changes: what would have to change, one line each; empty where the plan fits.
    """

    config: Config
    cluster: Cluster
    plan: Plan
    runners_up: tuple[Plan, ...]
    later: tuple[Plan, ...]
    num_layouts: int
    changes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """True if this version can run Stage A within the usable memory."""
        return self.plan.fits and not self.plan.missing

    @property
    def stage_b_fits(self) -> bool:
        """True if Stage B, where there is one, stays within the usable memory too."""
        return self.plan.stage_b is None or self.plan.stage_b.fits

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `cdrmix plan --json` prints them."""
        cluster = self.cluster
        stage_b = {}
        if self.plan.stage_b is not None:
            stage_b["stage_b"] = {
                "degrees": asdict(self.plan.stage_b.degrees),
                "memory_per_rank_bytes": self.plan.stage_b.memory.to_json(),
                "fits": self.plan.stage_b.fits,
            }
        return {
            "name": self.config.name,
            "cluster": {
                "name": cluster.name,
                "nodes": cluster.nodes,
                "gpus_per_node": cluster.gpus_per_node,
                "memory_gib": cluster.memory_gib,
            },
            **self.plan.estimates_to_json(),
            **stage_b,
            "reasons": [*self.plan.reasons, *self.changes],
            "runners_up": [plan.estimates_to_json() for plan in self.runners_up],
            "not_available_yet": [plan.estimates_to_json() for plan in self.later],
            "layouts_compared": self.num_layouts,
        }


def compare(config: Config, cluster: Cluster) -> Comparison:
    """Plans a run on a cluster in all legal ways; what the configuration gives is kept.

    Raises:
        PlanError: if what the configuration gives cannot be laid out on the cluster, naming
            everything that is wrong with the nearest legal plan.
    """
    plans = all_plans(config, cluster)
    best = plans[0]
    others = plans[1:]
    available = [plan for plan in others if not plan.missing]
    later = [plan for plan in others if plan.missing]
    later.sort(key=lambda plan: not plan.fits)  # stable: the best that fit come first
    if best.missing:
        reasons = (*unavailable(best, config, cluster), memory_reason(best, config, cluster))
        stage_b = stage_b_layout(config, cluster, zero_stage=best.zero_stage)
        plan = replace(best, reasons=reasons, stage_b=stage_b)
    else:
        plan = explained(best, config, cluster)
    compared = Comparison(
        config=config,
        cluster=cluster,
        plan=plan,
        runners_up=_unlike(available)[:RUNNERS_UP],
        later=_unlike(later)[:RUNNERS_UP],
        num_layouts=len(plans),
        changes=(),
    )
    return compared if compared.fits else replace(compared, changes=tuple(_changes(compared)))


def unavailable(plan: Plan, config: Config, cluster: Cluster) -> list[str]:
    """Messages about what this version lacks for a plan; none if it can run it."""
    try:
        rules.check(combination_of(plan, config, cluster))
    except PlanError as error:
        return str(error).splitlines()
    return []


def _unlike(plans: list[Plan]) -> tuple[Plan, ...]:
    """The first plan of each profile and set of degrees."""
    first: dict[tuple[str, Degrees], Plan] = {}
    for plan in plans:
        first.setdefault((plan.profile, plan.degrees), plan)
    return tuple(first.values())


def _changes(compared: Comparison) -> Iterator[str]:
    """Changes that would let this version run it, and what will fit later."""
    plan = compared.plan
    training = compared.config.training
    cluster = compared.cluster
    if plan.fits:  # what this version lacks for it is among the reasons, with what to try
        return
    fitting = next((other for other in compared.later if other.fits), None)
    if fitting is not None:
        needed = " and ".join(fitting.missing)
        (memory, cost) = fitting.estimates()
        yield (
            f"fits with {fitting.describe()}: {memory.total / GIB:.1f} GiB a device, "
            f"{cost.tokens_per_second:,.0f} tokens per second; {needed}: {UNAVAILABLE}"
        )
    if not plan.activation_checkpointing:
        yield "would take less with training.activation_checkpointing = true"
    if training.micro_batch_size is not None and training.micro_batch_size > 1:
        yield "would take less with training.micro_batch_size = 1"
    memory, _ = plan.estimates()
    if memory.checkpoint and not memory.fits_host(cluster, share=training.memory_share):
        yield "would take less of a host with checkpoint.background = false"
    more = _on_more_nodes(compared)
    if more is not None:
        nodes, wider = more
        yield f"would fit on {nodes} such nodes: {wider.describe()}"
    needed_gib, host_gib = (
        math.ceil(size / training.memory_share / GIB)
        for size in (memory.total, memory.on_host * cluster.gpus_per_node)
    )
    hosts = (
        ""
        if memory.fits_host(cluster, share=training.memory_share)
        else f", with {host_gib} GiB a host"
    )
    yield f"would fit on {cluster.world_size} devices of {needed_gib} GiB{hosts}"


def _on_more_nodes(compared: Comparison) -> tuple[int, Plan] | None:
    """The fewest nodes, by doubling, on which a layout fits, and the best there; None if the batch
    does not reach that far."""
    training = compared.config.training
    least: dict[str, Any] = {"micro_batch_size": training.micro_batch_size or 1}
    if "activation_checkpointing" not in training.model_fields_set:
        least["activation_checkpointing"] = True
    # what takes least is found in a tenth of the time
    lean = compared.config.model_copy(update={"training": training.model_copy(update=least)})
    for times in (2**doubling for doubling in range(1, _DOUBLINGS + 1)):
        wider = replace(compared.cluster, nodes=compared.cluster.nodes * times)
        if any(each.fits and not each.missing for each in search(lean, wider)):
            return wider.nodes, search(compared.config, wider)[0]
    return None


# --- for people -----------------------------------------------------------------------------------


def plan_text(compared: Comparison, *, explain: bool = False) -> str:
    """The plan as a page; `explain` adds every buffer, what is exchanged, and what was assumed."""
    plan = compared.plan
    lines = [
        f"{compared.config.name} on {compared.cluster}: {_verdict(compared)}",
        "",
        f"  {plan.describe()}",
    ]
    lines += [
        "",
        *_memory_lines(compared, explain=explain),
        "",
        *_time_lines(compared, explain=explain),
    ]
    lines += ["", "why", *(f"  - {reason}" for reason in plan.reasons)]
    if compared.changes:
        lines += [
            "",
            "what would have to change",
            *(f"  - {change}" for change in compared.changes),
        ]
    lines += _others("runners-up", compared.runners_up)
    lines += _others(UNAVAILABLE, compared.later)
    if explain:
        lines += ["", f"{compared.num_layouts} legal layouts compared. {_ASSUMPTIONS}"]
    return "\n".join(lines)


def _verdict(compared: Comparison) -> str:
    fits = {True: "fits", False: "does NOT fit"}
    stage_a = UNAVAILABLE if compared.plan.fits and not compared.fits else fits[compared.fits]
    if compared.plan.stage_b is None:
        return stage_a
    return f"Stage A {stage_a}, Stage B {fits[compared.stage_b_fits]}"


_ASSUMPTIONS = (
    "States are DeepSpeed's to the byte and activations within 1 % on CPU; buffers and GPUs are "
    "not measured yet. Times assume half of the peak in the kernels, 1.5 ms of launches a block, "
    "and nothing overlapped: good for comparing layouts, no promise."
)


def _memory_lines(compared: Comparison, *, explain: bool) -> list[str]:
    (memory, _) = compared.plan.estimates()
    there = compared.cluster.memory_bytes
    parts = dict(memory.described()) if explain else memory.to_json()
    parts["total"] = memory.total
    title = "per rank" if compared.plan.stage_b is None else "per rank in Stage A"
    lines = [f"  {title:26}     GiB"]
    lines += [f"  {part:26} {size / GIB:7.2f}" for part, size in parts.items()]
    lines.append(
        f"  {'may be filled':26} {compared.config.training.memory_share * there / GIB:7.2f}"
    )
    if memory.on_host:
        lines.append(f"  {'on the host':26} {memory.on_host / GIB:7.2f}")
    return lines


def _time_lines(compared: Comparison, *, explain: bool) -> list[str]:
    (_, cost) = compared.plan.estimates()
    training = compared.config.training
    lines = [
        f"  a step      {cost.step_seconds:.3g} s, {cost.flops:.3g} FLOPs, "
        f"{training.tokens_per_step:,} tokens",
        f"  speed       {cost.tokens_per_second:,.0f} tokens per second, MFU {cost.mfu:.1%}, "
        f"scaling efficiency {cost.scaling_efficiency:.0%}",
        f"  {'Stage A' if compared.plan.stage_b else 'the run':11} {training.num_steps:,} steps, "
        f"{cost.days:,.1f} days",
        f"  waiting     {cost.bubble:.1%} pipeline bubble",
    ]
    if compared.plan.stage_b is not None and compared.config.stage_b is not None:
        steps = compared.config.stage_b.training.num_steps
        lines.append(f"  Stage B     {steps:,} steps, which are not timed")
    if explain:
        lines += [
            f"  exchanged   {traffic.payload / GIB:8.2f} GiB a step, {traffic.seconds:.3g} s: "
            f"{kind.replace('_', ' ')}"
            for kind, traffic in cost.traffic.items()
        ]
    return lines


def _others(title: str, plans: tuple[Plan, ...]) -> list[str]:
    if not plans:
        return []
    width = max(len(title) - 2, *(len(plan.describe()) for plan in plans))
    lines = ["", f"{title:{width + 2}}     GiB  tokens/s"]
    for plan in plans:
        memory, cost = plan.estimates()
        note = "" if plan.fits else "  does not fit"
        lines.append(
            f"  {plan.describe():{width}} {memory.total / GIB:7.1f} "
            f"{cost.tokens_per_second:9,.0f}{note}"
        )
    return lines
