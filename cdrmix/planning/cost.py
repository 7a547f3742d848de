"""Time of a step: FLOPs, communication between ranks, pipeline bubble.

The estimate orders layouts; with the three assumed numbers below it does not predict tokens per
second. Bytes are the payloads that a rank passes to collectives, times those of ring algorithms.
Nothing overlaps: the shipped DeepSpeed profiles do not enable it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cdrmix.planning.activations import ELEMENT_BYTES
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.counts import count, forward_flops_by_layer, head_flops, parameters
from cdrmix.planning.layout import (
    Degrees,
    Group,
    Layout,
    attention_bytes,
    recurrence_bytes,
    state_bytes,
)
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.zero import gathered_in_a_micro_step

# Share of the peak that a block's kernels reach while they run: assumed for GPUs, where nothing has
# been measured yet; tools/benchmark/step.py finds about this on a CPU core.
KERNEL_EFFICIENCY = 0.5
# Fixed time of a block in a micro-step, which makes a larger micro-batch faster. CUDA: about a
# hundred kernels launched forward and twice as many backward, assumed. CPU: one core takes 582 ms
# for cdrmix-core-tiny's eight samples one by one and 410 ms at once (median of 6).
LAUNCH_SECONDS_PER_BLOCK = {"cuda": 1.5e-3, "cpu": 6e-3}
# DeepSpeed's Adam on the host, transfers over PCIe included, for all ranks of a node: assumed.
HOST_PARAMS_PER_SECOND = 1e9
# Parameters that tensor ranks have whole but apply to their part: gradients are summed over them.
_PARTIAL_GRADIENTS = (".mixer.mu_", "_down", ".router.weight")


@dataclass(frozen=True)
class Traffic:
    """Communication of a rank in one step for one purpose: payload (bytes), time (seconds)."""

    payload: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """One optimizer step.

    Attributes:
        flops: of the model per step, all ranks, no recomputation.
        compute_seconds: of the busiest stage over all micro-steps, recomputation included.
        traffic: by purpose, of the busiest rank.
        bubble: share of the step in which a pipeline stage is idle.
        step_seconds: of the whole step.
        tokens_per_second: all ranks.
        mfu: model FLOPs over the peak of all devices.
        scaling_efficiency: speed over that of the same devices without communication and bubble.
        days: of the whole run.
    """

    flops: int
    compute_seconds: float
    traffic: dict[str, Traffic]
    bubble: float
    step_seconds: float
    tokens_per_second: float
    mfu: float
    scaling_efficiency: float
    days: float

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "flops_per_step": self.flops,
            "compute_seconds": self.compute_seconds,
            "communication_bytes": {kind: t.payload for kind, t in self.traffic.items()},
            "communication_seconds": {kind: t.seconds for kind, t in self.traffic.items()},
            "pipeline_bubble": self.bubble,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "scaling_efficiency": self.scaling_efficiency,
            "days": self.days,
        }


class CostModel:
    """Time estimates for one configuration on one cluster.

    Args:
        memory: memory model of the configuration, which lists the parameters of each stage.
        cluster: devices and links.
    """

    def __init__(self, memory: MemoryModel, cluster: Cluster) -> None:
        config = memory.config
        self.memory = memory
        self.activations = memory.activations
        self.cluster = cluster
        self.model = config.model
        self.training = config.training
        self.size = ELEMENT_BYTES[self.training.precision]
        length = self.training.sequence_length
        self.layer_flops = forward_flops_by_layer(self.model, length)
        self.flops_per_token = count(self.model, length).train_flops_per_token
        self.peak = cluster.peak_flops[self.training.precision]
        self.partial_gradients = [0] * self.model.num_layers  # elements by layer
        for p in parameters(self.model):
            if p.layer is not None and any(part in p.name for part in _PARTIAL_GRADIENTS):
                self.partial_gradients[p.layer] += p.num_elements

    def estimate(self, layout: Layout) -> Cost:
        """Time of one step."""
        steps = layout.gradient_accumulation_steps
        degrees = layout.degrees
        pipeline = degrees.pipeline
        # Seconds of a micro-step on the busiest stage, which the others wait for.
        stages = self.memory.stages(pipeline)
        forward = [sum(self.layer_flops[layer] for layer in stage) for stage in stages]
        if self.activations.sequence_form(degrees) == "state":
            # a token and RWKV layer: the op over K values more, and the entering state added to y
            state_flops = 10 * self.model.hidden_size * self.model.head_dim
            for stage in range(pipeline):
                forward[stage] += self._rwkv_layers(degrees, stage) * state_flops
        forward[-1] += head_flops(self.model)
        # in units of a forward pass: one forward, two backward, one recomputed
        passes = 4 if layout.activation_checkpointing else 3
        flops = passes * max(forward) * self.activations.tokens(layout) / degrees.tensor
        launches = max(map(len, stages)) * LAUNCH_SECONDS_PER_BLOCK[self.cluster.device]
        launches *= self.activations.spans(layout)[0]
        compute = flops / (self.peak * KERNEL_EFFICIENCY) + launches * passes / 3
        traffic = self._per_micro_step(layout)
        passing = sum(t.seconds for t in traffic.values()) / steps
        traffic |= (
            self._zero3_traffic(layout)
            if layout.zero_stage == 3
            else self._gradients_and_weights(layout)
        )
        once = sum(t.seconds for t in traffic.values()) - passing * steps
        if layout.offloads_optimizer:
            parameters = sum(self._held_by_fullest(degrees).values())
            shared = parameters / degrees.data
            once += shared * self.cluster.gpus_per_node / HOST_PARAMS_PER_SECOND
        # the last stage starts after pipeline - 1 micro-steps of the others
        seconds = (compute + passing) * (steps + pipeline - 1) + once
        tokens = self.training.tokens_per_step
        rate = tokens / seconds
        return Cost(
            flops=self.flops_per_token * tokens,
            compute_seconds=compute * steps,
            traffic=traffic,
            bubble=(pipeline - 1) / (steps + pipeline - 1),
            step_seconds=seconds,
            tokens_per_second=rate,
            mfu=rate * self.flops_per_token / (self.cluster.world_size * self.peak),
            scaling_efficiency=compute * steps / seconds,
            days=self.training.num_steps * seconds / 86_400,
        )

    def _bandwidth(self, ranks: int) -> float:
        """Bandwidth of a group whose members are within `ranks` consecutive ranks."""
        inside = ranks <= self.cluster.gpus_per_node
        return self.cluster.intra_bandwidth if inside else self.cluster.inter_bandwidth

    def _per_micro_step(self, layout: Layout) -> dict[str, Traffic]:
        """Communication of blocks and stages in all micro-steps of a step."""
        degrees = layout.degrees
        steps = layout.gradient_accumulation_steps
        layers = max(map(len, self.memory.stages(degrees.pipeline)))
        again = 1 if layout.activation_checkpointing else 0
        stream = self.activations.tokens(layout) * self.model.hidden_size * self.size
        traffic: dict[str, Traffic] = {}

        def add(kind: str, payload: float, *, moved: float, ranks: int) -> None:
            total = payload * steps
            traffic[kind] = Traffic(int(total), total * moved / self._bandwidth(ranks))

        tensor = degrees.tensor
        expert = degrees.expert
        sequence = degrees.sequence
        if expert > 1:  # there and back, forward and backward
            assert self.model.moe is not None, "rules refuse expert parallelism of a dense model"
            rows = stream * self.model.moe.top_k / tensor
            payload = layers * (4 + 2 * again) * rows
            add("expert_all_to_all", payload, moved=1 - 1 / expert, ranks=expert)
        if tensor > 1:
            reduced, gathered = self._between_tensor_ranks(layout, stream)
            # a ring all-reduce is a reduce-scatter and an all-gather: the payload moves twice
            add("tensor_all_reduce", reduced, moved=2 * (1 - 1 / tensor), ranks=tensor)
            add("tensor_all_gather", gathered, moved=1 - 1 / tensor, ranks=tensor)
        if sequence > 1:
            moved = 1 - 1 / sequence
            ranks = tensor * sequence
            tokens_for_heads, halos, states = self._between_sequence_ranks(layout)
            payload = (2 + again) * tokens_for_heads + halos
            add("sequence_all_to_all", payload, moved=moved, ranks=ranks)
            if states:
                add("sequence_states_gathered", (1 + again) * states, moved=moved, ranks=ranks)
                add("sequence_states_reduced", states, moved=moved, ranks=ranks)
        if degrees.pipeline > 1:
            # forward to the next stage, and as many bytes of gradients to the one before
            payload = max(map(sum, pairwise(self.memory.boundaries(layout))))
            add("pipeline_send", payload, moved=1, ranks=degrees.stage_ranks + 1)
        return traffic

    def _between_tensor_ranks(self, layout: Layout, stream: int) -> tuple[int, int]:
        """Bytes of a micro-step that are summed, and gathered; `stream` is one residual stream.

        The outputs of a mixer and of a dense feed-forward are summed forward, the gradients of
        their inputs backward; of experts both are gathered from the ranks' parts. Recomputation of
        a block stops before its last collective, whose result the backward pass does not read.
        """
        stages = self.memory.stages(layout.degrees.pipeline)
        layers = max(stages, key=len)
        ends = 2 if len(stages) == 1 else 1  # of embedding lookup and head, those on one stage
        mixers = len(layers) * (3 if layout.activation_checkpointing else 2)
        feed_forwards = len(layers) * 2
        partial = self.size * sum(self.partial_gradients[layer] for layer in layers)
        # log total and label's score of each position, float32
        scores = 8 * self.activations.tokens(layout) * layout.degrees.tensor
        if self.model.moe is None:
            return (mixers + feed_forwards + ends) * stream + partial, scores
        return (mixers + ends) * stream + partial, feed_forwards * stream + scores

    def _rwkv_layers(self, degrees: Degrees, stage: int) -> int:
        kinds = self.activations.kinds_on(degrees.pipeline, stage)
        return sum(number for block, number in kinds.items() if block.kind == "rwkv")

    def _between_sequence_ranks(self, layout: Layout) -> tuple[float, float, float]:
        """Bytes of the busiest stage in a micro-step: exchange of tokens for heads in a forward
        pass, last tokens of the rank before (for shifts) in all passes, gathered states."""
        degrees = layout.degrees
        tokens = self.activations.tokens(layout)
        samples = layout.micro_batch_size
        form = self.activations.sequence_form(degrees)
        most = (0.0, 0.0, 0.0)
        passes = 6 if layout.activation_checkpointing else 4
        for stage, layers in enumerate(self.memory.stages(degrees.pipeline)):
            rwkv = self._rwkv_layers(degrees, stage)
            heads = (len(layers) - rwkv) * attention_bytes(self.model, tokens, self.size)
            states = 0
            if form == "heads":
                heads += rwkv * recurrence_bytes(self.model, tokens, self.size)
            else:
                states = rwkv * state_bytes(self.model, samples, degrees.sequence)
            halos = rwkv * passes * samples * self.model.hidden_size * self.size
            most = max(most, (heads / degrees.tensor, halos, states / degrees.tensor), key=sum)
        return most

    def _gradients_and_weights(self, layout: Layout) -> dict[str, Traffic]:
        """Communication of gradients and weights under ZeRO-1 and ZeRO-2.

        DeepSpeed 0.19.8 all-reduces gradients in the type of the weights, under ZeRO-1 once a step,
        under ZeRO-2 in each micro-step; updated weights are gathered once.
        """
        degrees = layout.degrees
        reductions = 1 if layout.zero_stage == 1 else layout.gradient_accumulation_steps
        reduced = gathered = reducing = gathering = 0.0
        bandwidth = self._bandwidth(degrees.stage_ranks)
        for group, elements in self._held_by_fullest(degrees).items():
            ranks = degrees.optimizer_ranks(group)
            if ranks == 1:
                continue
            moved = self.size * elements * (1 - 1 / ranks) / bandwidth
            reduced += reductions * self.size * elements
            reducing += reductions * 2 * moved
            gathered += self.size * elements
            gathering += moved
        traffic = {
            "gradients_all_reduce": Traffic(int(reduced), reducing),
            "weights_all_gather": Traffic(int(gathered), gathering),
        }
        if degrees.pipeline > 1:
            # first and last stage sum the tied embedding's gradients, in float32, and after the
            # step the last one receives the first one's weights
            elements = self.model.vocab_size * self.model.hidden_size // degrees.tensor
            bandwidth = self._bandwidth(degrees.world_size)
            for kind, payload in (
                ("embedding_all_reduce", 4 * elements),
                ("embedding_broadcast", self.size * elements),
            ):
                traffic[kind] = Traffic(payload, payload / bandwidth)
        return traffic

    def _held_by_fullest(self, degrees: Degrees) -> dict[Group, int]:
        """Elements of each group on the stage with most: the first, the last, or one with most
        blocks."""
        sizes = [len(stage) for stage in self.memory.stages(degrees.pipeline)]
        stages = sorted({0, sizes.index(max(sizes)), len(sizes) - 1})
        return max((self.memory.held(degrees, s) for s in stages), key=lambda h: sum(h.values()))

    def _zero3_traffic(self, layout: Layout) -> dict[str, Traffic]:
        """Communication of gradients and weights under ZeRO-3.

        Each micro-step gathers the weights and reduce-scatters the gradients; parameters that stay
        whole are gathered once a step.
        """
        data = layout.degrees.data
        steps = layout.gradient_accumulation_steps
        if data == 1:
            return {}
        cut = self.memory.cut_by_zero3()
        gathered = gathered_in_a_micro_step(
            cut.blocks, embedding=cut.embedding, recompute=layout.activation_checkpointing
        )
        payloads = {
            "gradients_reduce_scatter": steps * self.size * cut.total,
            "weights_all_gather": self.size * (steps * gathered + cut.persistent),
        }
        share = (1 - 1 / data) / self._bandwidth(data)
        return {kind: Traffic(payload, payload * share) for kind, payload in payloads.items()}
