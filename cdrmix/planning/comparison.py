"""Compares the best plan of a run on a cluster with its runners-up, for `cdrmix plan`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning import rules, zero
from cdrmix.planning.cluster import GIB, PRESETS, Cluster
from cdrmix.planning.cost import Cost, time_text
from cdrmix.planning.fine_tuning import with_adapters
from cdrmix.planning.layout import Degrees
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import all_plans, combination_of, explained, shortfall
from cdrmix.planning.rule import UNAVAILABLE
from cdrmix.planning.search import search
from cdrmix.planning.step_time import MEMORY_SHARE
from cdrmix.planning.text_page import Page, flops_text, size_text

RUNNERS_UP = 4
# Numbers of times that nodes are doubled in search of a cluster that fits.
_DOUBLINGS = range(6)
_USUAL_DEVICES = 8  # of a node


@dataclass(frozen=True)
class Comparison:
    """Best plan of a run on a cluster, and its alternatives."""

    config: Config
    cluster: Cluster
    plan: Plan  # plan to run with, or the nearest one if none fits
    runners_up: tuple[Plan, ...]  # other plans that this version can run, best first
    later: tuple[Plan, ...]  # best plans that this version cannot run
    num_layouts: int  # number of legal layouts compared
    profile: str | None  # as given; None: chosen
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
        sizes = ("name", "nodes", "gpus_per_node", "memory_gib", "host_memory_gib")
        stage_b = {}
        if self.plan.stage_b is not None:
            stage_b["stage_b"] = {
                "degrees": asdict(self.plan.stage_b.degrees),
                "memory_per_rank_bytes": self.plan.stage_b.memory.to_json(),
                "fits": self.plan.stage_b.fits,
                "step_seconds": self.plan.stage_b.step_seconds,
                "policy_step_seconds": self.plan.stage_b.policy_step_seconds,
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
        profile=profile,
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
        advices = [each for each in compared.changes if each.startswith("would ")]
        # what is known to be enough before what takes less, stable otherwise
        advices.sort(key=lambda each: not each.startswith("would fit"))
        # All ways for a Hugging Face model: its user has not chosen its size.
        advice = "; or it ".join(advices if config.model.kind == "hf" else advices[:1])
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
    if adapters := with_adapters(compared.config, cluster, compared.profile):
        yield adapters
    most = zero.most_recomputed(compared.config.model)
    least: dict[str, Any] = {"micro_batch_size": training.fixed_micro_batch_size or 1}
    if "activation_checkpointing" not in training.model_fields_set:
        least["activation_checkpointing"] = most
    # only the smallest layouts: a tenth of the time of a whole search
    lean = compared.config.model_copy(update={"training": training.model_copy(update=least)})
    if (fewer := _with_fewer_ranks(lean, cluster)) is not None:
        ranks = f"{fewer.gpus_per_node} rank{'s' * (fewer.gpus_per_node > 1)}"
        yield (
            f"would fit with {ranks} a host (--nproc {fewer.gpus_per_node}), which have "
            f"{fewer.memory_gib:.1f} GiB each"
        )
        return
    yield from _smaller_settings(compared, most)
    memory, _ = plan.estimates()
    if memory.checkpoint and not memory.fits_host(cluster, share=compared.config.resources.share):
        yield "would take less of a host with checkpoint.background = false"
    has_wider = False
    for wider in _wider_clusters(cluster):
        if any(each.fits and not each.missing for each in search(lean, wider)):
            best = search(compared.config, wider)[0]
            is_alike = wider.gpus_per_node == cluster.gpus_per_node
            kind = "such nodes" if is_alike else f"nodes of {wider.gpus_per_node} such devices"
            yield f"would fit on {wider.nodes:,} {kind}: {best.describe()}"
            has_wider = True
            break
    needs = []
    if memory.of_device(cluster) > compared.config.resources.share * cluster.memory_bytes:
        devices = "1 device" if cluster.world_size == 1 else f"{cluster.world_size:,} devices"
        device_gib = math.ceil(memory.of_device(cluster) / compared.config.resources.share / GIB)
        if has_wider and device_gib > max(preset.memory_gib for preset in PRESETS.values()):
            return  # no such device is made
        needs.append(f"on {devices} of {device_gib:,} GiB")
    if not memory.fits_host(cluster, share=compared.config.resources.share):
        on_host = memory.on_host * cluster.gpus_per_node
        host_gib = math.ceil(on_host / compared.config.resources.share / GIB)
        needs.append(f"with {host_gib:,} GiB a host")
    yield f"would fit {', '.join(needs)}"


def _smaller_settings(compared: Comparison, most: str) -> Iterator[str]:
    """Settings in place of given ones that were found to take less; what is not given, the search
    has tried."""
    training = compared.config.training
    changes: list[tuple[str, Any]] = []
    given = "activation_checkpointing" in training.model_fields_set
    if given and not compared.plan.recomputes_blocks:
        changes.append(("activation_checkpointing", most))
    if training.fixed_micro_batch_size is not None and training.fixed_micro_batch_size > 1:
        changes.append(("micro_batch_size", 1))
    size = compared.plan.estimates()[0].of_device(compared.cluster)
    for key, value in changes:
        changed = training.model_copy(update={key: value})
        config = compared.config.model_copy(update={"training": changed})
        # one that fits comes first, and else the smallest
        found = [each for each in search(config, compared.cluster) if not each.missing][:1]
        if found and found[0].fits:
            yield f"would fit with training.{key} = {value}"
        elif found and found[0].estimates()[0].of_device(compared.cluster) < size:
            yield f"would take less with training.{key} = {value}"


def _with_fewer_ranks(lean: Config, cluster: Cluster) -> Cluster | None:
    """The most ranks on processors, which share a host's memory, with which it fits; None: none.

    Halves of the given number are tried, and powers of two, which divide most batches.
    """
    if cluster.device != "cpu":
        return None
    doublings = range(cluster.gpus_per_node.bit_length())
    numbers = {size for n in doublings for size in (cluster.gpus_per_node >> n, 1 << n)}
    for ranks in sorted(numbers - {cluster.gpus_per_node}, reverse=True):
        share = cluster.memory_gib * cluster.gpus_per_node / ranks
        fewer = replace(cluster, gpus_per_node=ranks, memory_gib=share)
        if any(each.fits and not each.missing for each in search(lean, fewer)):
            return fewer
    return None


def _wider_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Larger clusters: first of more such nodes, then of nodes with more devices."""
    sizes = [(cluster.nodes * 2**doubling, cluster.gpus_per_node) for doubling in _DOUBLINGS]
    if cluster.gpus_per_node < _USUAL_DEVICES:
        sizes += [(2**doubling, _USUAL_DEVICES) for doubling in _DOUBLINGS]
    for nodes, devices in sizes:
        if nodes * devices > cluster.world_size:
            yield replace(cluster, nodes=nodes, gpus_per_node=devices)


def _assumptions(cluster: Cluster) -> str:
    """Says on which figures the estimates of a cluster rest."""
    claim = ""
    if "published" in cluster.efficiency_source:  # as tests/unit/test_public_runs.py holds
        claim = (
            " Of published runs that nothing is fitted on, the median is met within 15 % and all "
            "within 35 % (docs/benchmarks.md)."
        )
    return (
        "States are DeepSpeed's to the byte and activations within 1 % on CPU; buffers and GPUs "
        "are not measured yet. Times are FLOPs, bytes and launches, counted. Products reach "
        f"{cluster.efficiency:.0%} of the peak ({cluster.efficiency_source}), all other kernels "
        f"{MEMORY_SHARE:.0%} of the memory's bandwidth, and nothing overlaps.{claim}"
    )


def plan_text(
    compared: Comparison,
    *,
    explain: bool = False,
    facts: Iterable[tuple[str, str]] = (),
    stream: TextIO | None = None,
) -> str:
    """Formats a comparison as a page; `explain` adds buffers, traffic and assumptions, and `facts`
    are further labels and texts behind times and speed.

    The page has width and colours of the terminal that `stream` is; else no line is wrapped.
    """
    plan = compared.plan
    page = Page(stream)
    fits = {True: page.styled("fits", "ok"), False: page.styled("does NOT fit", "fail")}
    verdict = UNAVAILABLE if plan.fits and not compared.fits else fits[compared.fits]
    if plan.stage_b is not None:
        verdict = f"Stage A {verdict}, Stage B {fits[compared.stage_b_fits]}"
    page.add(f"{compared.config.name} on {compared.cluster}: {verdict}", hang=4)
    page.add()
    page.add(f"  {plan.describe()}", hang=4)
    page.add()
    for line in _memory_lines(compared, explain=explain):
        page.add(line)
    page.add()
    for label, text in (*_facts(compared, explain=explain), *facts):
        page.add(f"  {label:11} {text}", hang=14)
    sections = [("why", plan.reasons), ("what would have to change", compared.changes)]
    if compared.fits:  # else they say the same as the reasons
        sections.insert(1, ("warnings", plan.warnings))
    for title, lines in sections:
        if lines:
            page.add_title(title)
            for line in lines:
                page.add(f"  - {line}", hang=4)
    for title, plans in (("runners-up", compared.runners_up), (UNAVAILABLE, compared.later)):
        if plans:
            order, in_order = _for_reading(plans, compared.cluster)
            page.add_title(f"{title}, {order}")
            page.add_table(_table(in_order, compared.cluster, page), right=(0, 1))
    if explain:
        page.add()
        page.add(
            f"{compared.num_layouts:,} legal layouts compared. {_assumptions(compared.cluster)}"
        )
    return str(page)


def _memory_lines(compared: Comparison, *, explain: bool) -> Iterator[str]:
    """Memory of a rank by part, in GiB."""
    memory, _ = compared.plan.estimates()
    parts = memory.to_json()
    if explain:
        del parts["buffers"], parts["total"]
        parts |= {f"buffers: {kind.replace('_', ' ')}": n for kind, n in memory.buffers.items()}
    usable = compared.config.resources.share * compared.cluster.memory_bytes
    parts |= {"total": memory.total, "may be filled": usable}
    on_host = {"checkpoint copy": memory.checkpoint, "offloaded": memory.host}
    parts |= {f"on the host: {what}": size for what, size in on_host.items() if size}
    title = "per rank" if compared.plan.stage_b is None else "per rank in Stage A"
    yield f"  {title:28}       GiB"
    for part, size in parts.items():
        yield f"  {part:28} {size / GIB:9,.2f}"


def _for_reading(plans: Sequence[Plan], cluster: Cluster) -> tuple[str, list[Plan]]:
    """Orders plans by a column of their table, and says by which.

    The order of the search goes by rules of which a row shows nothing, such as what is usual.
    """
    fast = sorted(
        (plan for plan in plans if plan.fits),
        key=lambda plan: plan.estimates()[1].tokens_per_second,
        reverse=True,
    )
    small = sorted(
        (plan for plan in plans if not plan.fits),
        key=lambda plan: plan.estimates()[0].of_device(cluster),
    )
    orders = ["the fastest first"] * bool(fast) + ["the smallest first"] * bool(small)
    return ", then those that do not fit, ".join(orders), fast + small


def _table(plans: Sequence[Plan], cluster: Cluster, page: Page) -> Iterator[tuple[str, str, str]]:
    """Rows of other plans: numbers first, as the layouts are of very different lengths."""
    yield "    GiB", "tokens/s", "layout"
    for plan in plans:
        memory, cost = plan.estimates()
        note = "" if plan.fits else f", {page.styled('does not fit', 'fail')}"
        speed = f"{cost.tokens_per_second:,.0f}"
        yield f"{memory.of_device(cluster) / GIB:,.1f}", speed, f"{plan.describe()}{note}"


def _parts_text(cost: Cost) -> str:
    """Times of a step by what they go into; launches are hidden unless they take longer."""
    parts = {
        "matrix products": cost.product_seconds,
        "other kernels": cost.memory_seconds,
        "sum of gradients": cost.accumulation_seconds,
        "optimizer": cost.optimizer_seconds,
        "communication": sum(cost.communication_seconds.values()),
    }
    told = ", ".join(f"{time_text(seconds)} {name}" for name, seconds in parts.items())
    if cost.hidden_seconds:
        told += f", of which {time_text(cost.hidden_seconds)} pass under the backward pass"
    return f"{told}; launching takes the host {time_text(cost.launch_seconds)}"


def _facts(compared: Comparison, *, explain: bool) -> Iterator[tuple[str, str]]:
    """Labels and texts of times, speed, traffic and hosts."""
    _, cost = compared.plan.estimates()
    training = compared.config.training
    cluster = compared.cluster
    yield (
        "a step",
        (
            f"{time_text(cost.step_seconds)}, {flops_text(cost.flops_per_step)}, "
            f"{training.tokens_per_step:,} tokens"
        ),
    )
    yield (
        "speed",
        (
            f"{cost.tokens_per_second:,.0f} tokens per second, MFU {100 * cost.mfu:.1f} %, "
            f"scaling efficiency {100 * cost.scaling_efficiency:.0f} %"
        ),
    )
    if cost.newton_schulz_flops_per_step:
        flops = flops_text(cost.newton_schulz_flops_per_step)
        yield "muon", f"{flops} of Newton-Schulz a step, {cost.newton_schulz_ratio:.2g} of training"
    run_time = time_text(86_400 * cost.days)
    name = "the run" if compared.plan.stage_b is None else "Stage A"
    yield name, f"{training.num_steps:,} steps, {run_time}"
    if compared.plan.stage_b is not None and compared.config.stage_b is not None:
        phases = compared.config.stage_b.training
        layout, of_policy = compared.plan.stage_b, phases.policy_steps
        others = phases.num_steps - of_policy
        seconds = others * layout.step_seconds + of_policy * layout.policy_step_seconds
        each, of_each = time_text(layout.step_seconds), time_text(layout.policy_step_seconds)
        told = f"{others:,} steps of {each} and {of_policy:,} of the policy of {of_each}"
        yield "Stage B", f"{told}, all at most: {time_text(seconds)}"
    if explain:
        yield "its parts", _parts_text(cost)
    if cost.pipeline_bubble:
        yield "waiting", f"{100 * cost.pipeline_bubble:.1f} % of a step, the pipeline's bubble"
    if cluster.device == "cuda":  # on CPUs, the ranks' memory is the host's
        yield "a host", f"{cluster.host_memory_gib:,g} GiB, {cluster.host_memory_source}"
    if explain:
        for kind, payload in cost.communication_bytes.items():
            if payload:
                took = time_text(cost.communication_seconds[kind])
                yield "exchanged", f"{size_text(payload)} a step, {took}: {kind.replace('_', ' ')}"
