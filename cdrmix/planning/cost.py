"""Time of a step: products, memory traffic, launches, communication, pipeline bubble.

Each part follows from a count: FLOPs of the model (`counts`), bytes that kernels beside products
move (`moved`), bytes of gradients and optimizer (`state_traffic`), payloads of collectives
(`communication`). `step_time` turns them into seconds. Of communication the reduction of gradients
overlaps computation, where DeepSpeed does it under the backward pass (`overlap_comm`); the weights
that ZeRO-3 fetches ahead are not credited.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from cdrmix.planning.activations import SavedActivations
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.communication import Communication, Exchanged
from cdrmix.planning.counts import (
    attended_tokens,
    count,
    flops_above_layers,
    forward_flops_by_layer,
    parameters,
)
from cdrmix.planning.layout import Degrees, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.moved import MovedBytes
from cdrmix.planning.muon import newton_schulz_flops_per_step
from cdrmix.planning.plugins import terms_of
from cdrmix.planning.state_traffic import accumulation_bytes, optimizer_bytes
from cdrmix.planning.step_time import (
    LAUNCH_SECONDS,
    Work,
    hidden_seconds,
    memory_seconds,
    pipeline_seconds,
    product_seconds,
    seconds_of,
)

# DeepSpeed's Adam on the host, transfers over PCIe included, for all ranks of a node: assumed.
HOST_PARAMS_PER_SECOND = 1e9
# Times that expert parallelism reads or writes the routed rows on the device beside the exchange,
# in each pass: they are put in the order of the experts, and back.
_SORTED_ROWS = 4
# Kernels that add a parameter's gradient to its sum.
_KERNELS_OF_SUM = 1


@dataclass(frozen=True)
class Cost:
    """One optimizer step; as a dict, the plain values of `cdrmix plan --json`."""

    flops_per_step: int  # of the model, all ranks, no recomputation
    newton_schulz_flops_per_step: int  # of Muon, all ranks; 0 without
    newton_schulz_ratio: float  # of those to the FLOPs of the model
    compute_seconds: float  # of the busiest stage over all micro-steps, recomputation included
    # of it: matrix products, what other kernels move, and DeepSpeed's sum of gradients
    product_seconds: float
    memory_seconds: float
    accumulation_seconds: float
    # in which the host starts the kernels of these micro-steps: on GPUs hidden if it is shorter
    launch_seconds: float
    optimizer_seconds: float  # end of a step: norm, clipping, update
    communication_bytes: dict[str, int]  # payload by purpose, of the busiest rank
    communication_seconds: dict[str, float]  # time by purpose, of the busiest rank
    hidden_seconds: float  # of these, the part that passes under the backward pass
    pipeline_bubble: float  # share of the step in which a pipeline stage is idle
    step_seconds: float  # of the whole step
    tokens_per_second: float  # all ranks
    mfu: float  # model FLOPs over the peak of all devices
    # speed over that of the same devices without communication and bubble
    scaling_efficiency: float
    days: float  # of the whole run


# Units of a time in text, longest first (seconds); a year is the mean of the Julian calendar.
_TIME_UNITS = (("years", 31_557_600), ("days", 86_400), ("hours", 3_600), ("minutes", 60))


def time_text(seconds: float) -> str:
    """Formats a time in the longest unit of which it has two: 18 ms, 35 s, 67 minutes, 61 years.

    Two digits are shown, or all before the point: an estimate has no more.
    """
    for name, size in _TIME_UNITS:
        if seconds >= 2 * size:
            return f"{_two_digits(seconds / size)} {name}"
    if seconds == 0 or seconds >= 0.995:
        return f"{_two_digits(seconds)} s"
    return f"{_two_digits(1_000 * seconds)} ms"


def _two_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"


class CostModel:
    """Time estimates for the configuration of a memory model on one cluster."""

    def __init__(self, memory: MemoryModel, cluster: Cluster) -> None:
        config = memory.config
        self.memory = memory
        self.activations = memory.activations
        self.cluster = cluster
        self.model = config.model
        self.training = config.training
        self.size = memory.element_bytes
        self.communication = Communication(memory, cluster)
        self.moved = MovedBytes(memory.activations)
        length = attended_tokens(config)
        self.layer_flops = forward_flops_by_layer(self.model, length)
        self.counts = count(self.model, length)
        self.flops_above = flops_above_layers(self.model, length)
        forward = sum(self.layer_flops) + self.flops_above
        # of a forward and a backward pass in forward passes: 3, and less where matrices are frozen
        self.passes = self.counts.train_flops_per_token / forward
        self.flops_above += sum(
            int(term.flops_per_token(self.model)) for _, term in terms_of(config.objectives)
        )
        self.newton_schulz = newton_schulz_flops_per_step(config)
        self.peak = cluster.peak_flops[self.training.precision]
        self.num_tensors = sum(p.is_trained for p in parameters(self.model))
        self._passes_of = cache(self._passes_of_stage)
        self._busiest = cache(self._work_of_busiest_stage)
        self._reached = [0, *accumulate(self.layer_flops)]  # FLOPs of the layers before each

    def estimate(self, layout: Layout) -> Cost:
        """Time of one step."""
        steps = layout.gradient_accumulation_steps
        pipeline = layout.degrees.pipeline
        cluster = self.cluster
        work, summing = self._of_busiest_stage(layout)
        compute = seconds_of(work + summing, cluster, self.peak)
        exchanged, passing, once = self.communication.of_step(layout)
        hidden = self._hidden_seconds(layout, exchanged)
        optimizer = self._optimizer_seconds(layout)
        seconds = pipeline_seconds(compute + passing, micro_steps=steps, stages=pipeline)
        seconds += once - hidden + optimizer
        tokens = self.training.tokens_per_step
        rate = tokens / seconds
        flops = self.counts.train_flops_per_token
        return Cost(
            flops_per_step=flops * tokens,
            newton_schulz_flops_per_step=self.newton_schulz,
            newton_schulz_ratio=self.newton_schulz / (flops * tokens),
            compute_seconds=compute * steps,
            product_seconds=product_seconds(work.flops, cluster, self.peak) * steps,
            memory_seconds=memory_seconds(work.moved_bytes, cluster) * steps,
            accumulation_seconds=memory_seconds(summing.moved_bytes, cluster) * steps,
            launch_seconds=(work + summing).launches * LAUNCH_SECONDS[cluster.device] * steps,
            optimizer_seconds=optimizer,
            communication_bytes={kind: payload for kind, (payload, _) in exchanged.items()},
            communication_seconds={kind: taken for kind, (_, taken) in exchanged.items()},
            hidden_seconds=hidden,
            pipeline_bubble=(pipeline - 1) / (steps + pipeline - 1),
            step_seconds=seconds,
            tokens_per_second=rate,
            mfu=rate * flops / (cluster.world_size * self.peak),
            scaling_efficiency=(compute * steps + optimizer) / seconds,
            days=self.training.num_steps * seconds / 86_400,
        )

    def _of_busiest_stage(self, layout: Layout) -> tuple[Work, Work]:
        """Work of a micro-step on the stage that the others wait for, and the sum of gradients."""
        degrees = layout.degrees
        work = self._busiest(layout.passes)
        held = self.communication.held_by_fullest(degrees)
        summed = accumulation_bytes(layout, held, element_bytes=self.size)
        launches = _KERNELS_OF_SUM * self.num_tensors / degrees.pipeline
        return work, Work(0, summed, launches)

    def _work_of_busiest_stage(self, layout: Layout) -> Work:
        works = []
        for layers in self.memory.stages(layout.degrees.pipeline):
            is_last = layers.stop == self.model.num_layers
            forward, backward = self._passes_of(layout, layers, is_last)
            works.append(forward + backward)
        return max(works, key=lambda each: seconds_of(each, self.cluster, self.peak))

    def _hidden_seconds(self, layout: Layout, exchanged: Exchanged) -> float:
        """Time of a step's exchange of gradients that passes under backward passes.

        DeepSpeed reduces a bucket on a stream of its own while the next one is filled, and the last
        one behind the backward pass (runtime/zero/stage_1_and_2.py: average_tensor). The blocks'
        own exchanges take the same links, so that it passes under computation alone.
        """
        kinds = ("gradients_all_reduce", "gradients_reduce_scatter")
        reducing = sum(exchanged[kind][1] for kind in kinds if kind in exchanged)
        if not layout.overlaps_reduction or not reducing:
            return 0.0
        steps = layout.gradient_accumulation_steps
        layers = range(self.model.num_layers)  # no pipeline reduces below ZeRO-1
        _, backward = self._passes_of(layout.passes, layers, True)
        beside = seconds_of(backward, self.cluster, self.peak)
        held = sum(self.communication.held_by_fullest(layout.degrees).values())
        last = min(1.0, layout.bucket_elements / held)
        return steps * hidden_seconds(reducing / steps, beside, last=last)

    def _passes_of_stage(self, layout: Layout, layers: range, is_last: bool) -> tuple[Work, Work]:
        """Work of a micro-step on a stage forward and backward, without the sum of gradients.

        Recomputation runs forward passes of blocks once more, all of them or what is no product.
        The loss forms its gradients in the forward pass.
        """
        degrees = layout.degrees
        tokens = self.activations.tokens(layout)
        again = 1 if layout.recomputes else 0
        flops = self._reached[layers.stop] - self._reached[layers.start]
        if degrees.sequence > 1:
            flops += self._flops_of_passed_states(layers, degrees)
        repeated = self.passes - 1 + (1 if layout.recomputes_blocks else 0)
        kernels = self.moved.of_layers(layers, degrees)
        spans = self.activations.spans(layout)[0]
        forward = Work(
            flops * tokens / degrees.tensor, tokens * kernels.forward_bytes, spans * kernels.forward
        )
        backward = Work(
            repeated * flops * tokens / degrees.tensor,
            tokens * (again * kernels.forward_bytes + kernels.backward_bytes),
            spans * (again * kernels.forward + kernels.backward),
        )
        if is_last:
            above = self.passes * self.flops_above * tokens / degrees.tensor
            forward += Work(above, *self.moved.outside(degrees, tokens))
        if degrees.expert > 1:
            rows = _SORTED_ROWS * self.communication.routed_bytes(layout, layers)
            forward, backward = (
                forward + Work(0, rows, 0),
                backward + Work(0, (1 + again) * rows, 0),
            )
        return forward, backward

    def _flops_of_passed_states(self, layers: range, degrees: Degrees) -> int:
        """Forward FLOPs per token of a stage by which states cross sequence ranks."""
        activations = self.activations
        assert isinstance(activations, SavedActivations), "rules refuse Hugging Face models"
        return sum(
            activations.types[layer].state_form_flops(self.model)
            for layer in layers
            if activations.sequence_form(layer, degrees) == "state"
        )

    def _optimizer_seconds(self, layout: Layout) -> float:
        """Time of the end of a step: norm, clipping, update, and Muon's orthogonalisation."""
        degrees = layout.degrees
        held = self.communication.held_by_fullest(degrees)
        clips = self.training.gradient_clipping > 0
        moved = optimizer_bytes(layout, held, element_bytes=self.size, clips=clips)
        seconds = memory_seconds(moved, self.cluster)
        if layout.offloads_optimizer:
            shared = sum(held.values()) / degrees.data
            seconds += shared * self.cluster.gpus_per_node / HOST_PARAMS_PER_SECOND
        # of Muon's matrices each is orthogonalised on one rank, and they are shared out evenly
        each = self.newton_schulz / self.cluster.world_size
        return seconds + product_seconds(each, self.cluster, self.peak)
