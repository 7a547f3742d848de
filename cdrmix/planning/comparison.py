"""Compares the best plan of a run on a cluster with its runners-up, for `cdrmix plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning import rules
from cdrmix.planning.cluster import GIB, Cluster
from cdrmix.planning.cost import time_text
from cdrmix.planning.layout import Degrees
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import all_plans, combination_of, explained, shortfall
from cdrmix.planning.rules import UNAVAILABLE
from cdrmix.planning.search import search

RUNNERS_UP = 4
# Largest number of times that the nodes are doubled in search of a cluster that fits.
_DOUBLINGS = 5


@dataclass(frozen=True)
class Comparison:
    """Best plan of a run on a cluster, and its alternatives."""

    config: Config
    cluster: Cluster
    plan: Plan  # plan to run with, or the nearest one if none fits
    runners_up: tuple[Plan, ...]  # other plans that this version can run, best first
    later: tuple[Plan, ...]  # best plans that this version cannot run
    num_layouts: int  # number of legal layouts compared
    # changes that would make the plan fit, one line each; empty if it fits
    changes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """True if this version can run Stage A within the usable memory."""
        return self.plan.fits and not self.plan.missing

    @property
    def stage_b_fits(self) -> bool:
        """True if Stage B fits the usable memory, or the run has none."""
        return self.plan.stage_b is None or self.plan.stage_b.fits

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for `cdrmix plan --json`."""
        sizes = ("name", "nodes", "gpus_per_node", "memory_gib")
        stage_b = {}
        if self.plan.stage_b is not None:
            stage_b["stage_b"] = {
                "degrees": asdict(self.plan.stage_b.degrees),
                "memory_per_rank_bytes": self.plan.stage_b.memory.to_json(),
                "fits": self.plan.stage_b.fits,
            }
        return {
            "name": self.config.name,
            "cluster": {size: getattr(self.cluster, size) for size in sizes},
            **self.plan.estimates_to_json(),
            **stage_b,
            "reasons": [*self.plan.reasons, *self.changes],
            "runners_up": [plan.estimates_to_json() for plan in self.runners_up],
            "not_available_yet": [plan.estimates_to_json() for plan in self.later],
            "layouts_compared": self.num_layouts,
        }


def compare(config: Config, cluster: Cluster, *, profile: str | None = None) -> Comparison:
    """Compares all legal plans of a run on a cluster; raises PlanError if there is none.

    `profile` is the name of a shipped DeepSpeed profile or the path of a JSON file; None: chosen.
    """
    best, *others = all_plans(config, cluster, profile)
    # the first alternatives, one of each profile and set of degrees, by their being unavailable
    alternatives: dict[bool, dict[tuple[str, Degrees], Plan]] = {False: {}, True: {}}
    # stable: of the unavailable ones the best that fit come first
    for plan in sorted(others, key=lambda plan: bool(plan.missing) and not plan.fits):
        of_kind = alternatives[bool(plan.missing)]
        of_kind.setdefault((plan.profile, plan.degrees), plan)
    compared = Comparison(
        config=config,
        cluster=cluster,
        plan=explained(best, config, cluster, profile, others=others),
        runners_up=tuple(alternatives[False].values())[:RUNNERS_UP],
        later=tuple(alternatives[True].values())[:RUNNERS_UP],
        num_layouts=1 + len(others),
        changes=(),
    )
    return compared if compared.fits else replace(compared, changes=tuple(_changes(compared)))


def check_fits(compared: Comparison) -> None:
    """Raises PlanError if the run cannot start on the cluster, or would be out of memory there.

    The message says what is missing for Stage A, or else for Stage B, and the next thing to try.
    """
    config, cluster, plan = compared.config, compared.cluster, compared.plan
    if plan.missing:
        raise PlanError(f"{config.name}: " + "\n".join(unavailable(plan, config, cluster)))
    if not compared.fits:
        # a layout that this version lacks comes first there, and cannot be tried
        advice = next(each for each in compared.changes if each.startswith("would "))
        raise PlanError(
            f"{config.name}: no layout fits {cluster}: the smallest takes "
            f"{shortfall(plan, config, cluster)}. What to try: it {advice}"
        )
    if not compared.stage_b_fits:
        assert plan.stage_b is not None, "without Stage B it fits"
        from cdrmix.planning.stage_b import stage_b_reason

        told = stage_b_reason(config, cluster, plan.stage_b).removeprefix("Stage B: ")
        raise PlanError(f"{config.name}: Stage A fits, Stage B does not: {told}")


def unavailable(plan: Plan, config: Config, cluster: Cluster) -> list[str]:
    """Messages about the features that this version lacks for a plan."""
    return rules.broken(combination_of(plan, config, cluster))


def _changes(compared: Comparison) -> Iterator[str]:
    """Changes that would make the plan fit, and a plan that fits but that this version lacks."""
    plan = compared.plan
    training = compared.config.training
    cluster = compared.cluster
    if plan.fits:  # the reasons name the features that this version lacks, with advice
        return
    fitting = next((other for other in compared.later if other.fits), None)
    if fitting is not None:
        needed = " and ".join(fitting.missing)
        memory, cost = fitting.estimates()
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
    least: dict[str, Any] = {"micro_batch_size": training.micro_batch_size or 1}
    if "activation_checkpointing" not in training.model_fields_set:
        least["activation_checkpointing"] = True
    # only the smallest layouts: a tenth of the time of a whole search
    lean = compared.config.model_copy(update={"training": training.model_copy(update=least)})
    for doubling in range(1, _DOUBLINGS + 1):
        wider = replace(cluster, nodes=cluster.nodes * 2**doubling)
        if any(each.fits and not each.missing for each in search(lean, wider)):
            best = search(compared.config, wider)[0]
            yield f"would fit on {wider.nodes} such nodes: {best.describe()}"
            break
    device_gib = math.ceil(memory.total / training.memory_share / GIB)
    hosts = ""
    if not memory.fits_host(cluster, share=training.memory_share):
        on_host = memory.on_host * cluster.gpus_per_node
        hosts = f", with {math.ceil(on_host / training.memory_share / GIB)} GiB a host"
    yield f"would fit on {cluster.world_size} devices of {device_gib} GiB{hosts}"


_ASSUMPTIONS = (
    "States are DeepSpeed's to the byte and activations within 1 % on CPU; buffers and GPUs are "
    "not measured yet. Times assume half of the peak in the kernels, 1.5 ms of launches a block, "
    "and nothing overlapped: good for comparing layouts, no promise."
)


def plan_text(compared: Comparison, *, explain: bool = False) -> str:
    """Formats a comparison as a page; `explain` adds buffers, traffic and assumptions."""
    plan = compared.plan
    fits = {True: "fits", False: "does NOT fit"}
    verdict = UNAVAILABLE if plan.fits and not compared.fits else fits[compared.fits]
    if plan.stage_b is not None:
        verdict = f"Stage A {verdict}, Stage B {fits[compared.stage_b_fits]}"
    memory, _ = plan.estimates()
    usable = compared.config.training.memory_share * compared.cluster.memory_bytes
    parts = memory.to_json()
    if explain:
        del parts["buffers"], parts["total"]
        parts |= {f"buffers: {kind.replace('_', ' ')}": n for kind, n in memory.buffers.items()}
    parts |= {"total": memory.total, "may be filled": usable}
    if memory.on_host:
        parts["on the host"] = memory.on_host
    title = "per rank" if plan.stage_b is None else "per rank in Stage A"
    lines = [
        f"{compared.config.name} on {compared.cluster}: {verdict}",
        "",
        f"  {plan.describe()}",
        "",
        f"  {title:26}     GiB",
        *(f"  {part:26} {size / GIB:7.2f}" for part, size in parts.items()),
        "",
        *_time_lines(compared, explain=explain),
        "",
        "why",
        *(f"  - {reason}" for reason in plan.reasons),
    ]
    if compared.changes:
        changes = (f"  - {change}" for change in compared.changes)
        lines += ["", "what would have to change", *changes]
    for title, plans in (("runners-up", compared.runners_up), (UNAVAILABLE, compared.later)):
        if not plans:
            continue
        width = max(len(title) - 2, *(len(plan.describe()) for plan in plans))
        lines += ["", f"{title:{width + 2}}     GiB  tokens/s"]
        for plan in plans:
            memory, cost = plan.estimates()
            note = "" if plan.fits else "  does not fit"
            lines.append(
                f"  {plan.describe():{width}} {memory.total / GIB:7.1f} "
                f"{cost.tokens_per_second:9,.0f}{note}"
            )
    if explain:
        lines += ["", f"{compared.num_layouts} legal layouts compared. {_ASSUMPTIONS}"]
    return "\n".join(lines)


def _time_lines(compared: Comparison, *, explain: bool) -> list[str]:
    _, cost = compared.plan.estimates()
    training = compared.config.training
    lines = [
        f"  a step      {time_text(cost.step_seconds)}, {cost.flops_per_step:.3g} FLOPs, "
        f"{training.tokens_per_step:,} tokens",
        f"  speed       {cost.tokens_per_second:,.0f} tokens per second, MFU {cost.mfu:.1%}, "
        f"scaling efficiency {cost.scaling_efficiency:.0%}",
        f"  {'Stage A' if compared.plan.stage_b else 'the run':11} {training.num_steps:,} steps, "
        f"{time_text(86_400 * cost.days)}",
        f"  waiting     {cost.pipeline_bubble:.1%} pipeline bubble",
    ]
    if compared.plan.stage_b is not None and compared.config.stage_b is not None:
        steps = compared.config.stage_b.training.num_steps
        lines.append(f"  Stage B     {steps:,} steps, which are not timed")
    if explain:
        lines += [
            f"  exchanged   {payload / GIB:8.2f} GiB a step, "
            f"{time_text(cost.communication_seconds[kind])}: {kind.replace('_', ' ')}"
            for kind, payload in cost.communication_bytes.items()
        ]
    return lines
