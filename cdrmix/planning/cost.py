"""Time of a step: FLOPs, communication between ranks, pipeline bubble.

The estimate orders layouts; with the three assumed numbers below it does not predict tokens per
second. Bytes are the payloads that a rank passes to collectives, times those of ring algorithms.
Nothing overlaps: the shipped DeepSpeed profiles do not enable it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from cdrmix.planning.activations import SavedActivations
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.counts import (
    attended_tokens,
    count,
    flops_above_layers,
    forward_flops_by_layer,
    parameters,
    trained_params,
)
from cdrmix.planning.depth import share_of_tokens
from cdrmix.planning.layout import Degrees, Group, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.muon import muon_matrices, newton_schulz_flops_per_step
from cdrmix.planning.plugins import terms_of

# Share of the peak that a block's kernels reach while they run: assumed for GPUs, where nothing has
# been measured yet; tools/benchmark/step.py finds about this on a CPU core.
KERNEL_EFFICIENCY = 0.5
# Fixed time of a block in a micro-step, which makes a larger micro-batch faster. CUDA: about a
# hundred kernels launched forward and twice as many backward, assumed. CPU: one core takes 582 ms
# for cdrmix-core-tiny's eight samples one by one and 410 ms at once (median of 6).
LAUNCH_SECONDS_PER_BLOCK = {"cuda": 1.5e-3, "cpu": 6e-3}
# DeepSpeed's Adam on the host, transfers over PCIe included, for all ranks of a node: assumed.
HOST_PARAMS_PER_SECOND = 1e9


# Communication of a rank in one step by purpose: payload (bytes), time (seconds).
_Traffic = dict[str, tuple[int, float]]


@dataclass(frozen=True)
class Cost:
    """One optimizer step; as a dict, the plain values of `cdrmix plan --json`."""

    flops_per_step: int  # of the model, all ranks, no recomputation
    newton_schulz_flops_per_step: int  # of Muon, all ranks; 0 without
    newton_schulz_ratio: float  # of those to the FLOPs of the model
    compute_seconds: float  # of the busiest stage over all micro-steps, recomputation included
    communication_bytes: dict[str, int]  # payload by purpose, of the busiest rank
    communication_seconds: dict[str, float]  # time by purpose, of the busiest rank
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
        length = attended_tokens(config)
        self.layer_flops = forward_flops_by_layer(self.model, length)
        self.counts = count(self.model, length)
        self.trained_params = trained_params(self.model)
        self.flops_above = flops_above_layers(self.model, length)
        forward = sum(self.layer_flops) + self.flops_above
        # of a forward and a backward pass in forward passes: 3, and less where matrices are frozen
        self.passes = self.counts.train_flops_per_token / forward
        self.flops_above += sum(
            int(term.flops_per_token(self.model)) for _, term in terms_of(config.objectives)
        )
        self.muon_elements = muon_matrices(config)[1]
        self.newton_schulz = newton_schulz_flops_per_step(config)
        self.peak = cluster.peak_flops[self.training.precision]
        self.partial_gradients = [0] * self.model.num_layers  # elements by layer
        for p in parameters(self.model):
            if p.layer is not None and p.is_partial:
                self.partial_gradients[p.layer] += p.num_elements

    def estimate(self, layout: Layout) -> Cost:
        """Time of one step."""
        steps = layout.gradient_accumulation_steps
        degrees = layout.degrees
        pipeline = degrees.pipeline
        # Seconds of a micro-step on the busiest stage, which the others wait for.
        stages = self.memory.stages(pipeline)
        forward = [sum(self.layer_flops[layer] for layer in stage) for stage in stages]
        if degrees.sequence > 1:
            for stage, layers in enumerate(stages):
                forward[stage] += self._flops_of_passed_states(layers, degrees)
        forward[-1] += self.flops_above
        passes = self.passes + (1 if layout.recomputes_blocks else 0)
        flops = passes * max(forward) * self.activations.tokens(layout) / degrees.tensor
        launches = max(map(len, stages)) * LAUNCH_SECONDS_PER_BLOCK[self.cluster.device]
        launches *= self.activations.spans(layout)[0]
        compute = flops / (self.peak * KERNEL_EFFICIENCY) + launches * passes / 3
        traffic = self._per_micro_step(layout)
        passing = sum(seconds for _, seconds in traffic.values()) / steps
        traffic |= self._gradients_and_weights(layout)
        once = sum(seconds for _, seconds in traffic.values()) - passing * steps
        if layout.offloads_optimizer:
            shared = sum(self._held_by_fullest(degrees).values()) / degrees.data
            once += shared * self.cluster.gpus_per_node / HOST_PARAMS_PER_SECOND
        # of Muon's matrices each is orthogonalised on one rank, and they are shared out evenly
        ranks = self.cluster.world_size
        once += self.newton_schulz / (ranks * self.peak * KERNEL_EFFICIENCY)
        # the last stage starts after pipeline - 1 micro-steps of the others
        seconds = (compute + passing) * (steps + pipeline - 1) + once
        tokens = self.training.tokens_per_step
        rate = tokens / seconds
        return Cost(
            flops_per_step=self.counts.train_flops_per_token * tokens,
            newton_schulz_flops_per_step=self.newton_schulz,
            newton_schulz_ratio=self.newton_schulz / (self.counts.train_flops_per_token * tokens),
            compute_seconds=compute * steps,
            communication_bytes={kind: payload for kind, (payload, _) in traffic.items()},
            communication_seconds={kind: taken for kind, (_, taken) in traffic.items()},
            pipeline_bubble=(pipeline - 1) / (steps + pipeline - 1),
            step_seconds=seconds,
            tokens_per_second=rate,
            mfu=rate * self.counts.train_flops_per_token / (self.cluster.world_size * self.peak),
            scaling_efficiency=compute * steps / seconds,
            days=self.training.num_steps * seconds / 86_400,
        )

    def _bandwidth(self, ranks: int) -> float:
        """Bandwidth of a group whose members are within `ranks` consecutive ranks."""
        inside = ranks <= self.cluster.gpus_per_node
        return self.cluster.intra_bandwidth if inside else self.cluster.inter_bandwidth

    def _per_micro_step(self, layout: Layout) -> _Traffic:
        """Communication of blocks and stages in all micro-steps of a step."""
        degrees = layout.degrees
        steps = layout.gradient_accumulation_steps
        again = 1 if layout.recomputes_blocks else 0
        stream = self.activations.tokens(layout) * self.model.hidden_size * self.size
        traffic: _Traffic = {}

        def add(kind: str, payload: float, *, moved: float, ranks: int) -> None:
            total = payload * steps
            traffic[kind] = (int(total), total * moved / self._bandwidth(ranks))

        tensor = degrees.tensor
        expert = degrees.expert
        sequence = degrees.sequence
        if expert > 1:  # there and back, forward and backward
            assert self.model.moe is not None, "rules refuse expert parallelism of a dense model"
            rows = stream * self.model.moe.top_k / tensor
            stages = self.memory.stages(degrees.pipeline)
            layers = max(sum(map(self._share_to_experts, stage)) for stage in stages)
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
        shares = sum(share_of_tokens(self.model, layer) for layer in layers)
        ends = 2 if len(stages) == 1 else 1  # of embedding lookup and head, those on one stage
        mixers = shares * (3 if layout.recomputes_blocks else 2)
        of_experts = sum(map(self._share_to_experts, layers))
        dense = shares - of_experts
        partial = self.size * sum(self.partial_gradients[layer] for layer in layers)
        # log total and label's score of each position, float32
        scores = 8 * self.activations.tokens(layout) * layout.degrees.tensor
        summed = (mixers + 2 * dense + ends) * stream + partial
        return int(summed), int(2 * of_experts * stream + scores)

    def _share_to_experts(self, layer: int) -> float:
        """Share of the tokens that meet the experts of a layer; 0 where it has none."""
        return self.model.has_experts(layer) * share_of_tokens(self.model, layer)

    def _flops_of_passed_states(self, layers: range, degrees: Degrees) -> int:
        """Forward FLOPs per token of a stage by which states cross sequence ranks."""
        activations = self._saved()
        return sum(
            activations.types[layer].state_form_flops(self.model)
            for layer in layers
            if activations.sequence_form(layer, degrees) == "state"
        )

    def _saved(self) -> SavedActivations:
        assert isinstance(self.activations, SavedActivations), "rules refuse Hugging Face models"
        return self.activations

    def _between_sequence_ranks(self, layout: Layout) -> tuple[float, float, float]:
        """Bytes of the busiest stage in a micro-step: exchange of tokens for heads in a forward
        pass, last tokens of the rank before (for shifts) in all passes, gathered states."""
        degrees = layout.degrees
        activations = self._saved()
        tokens = activations.tokens(layout)
        samples = layout.micro_batch_size
        most = (0.0, 0.0, 0.0)
        passes = 3 if layout.recomputes_blocks else 2
        for layers in self.memory.stages(degrees.pipeline):
            heads = halos = states = 0
            for layer in layers:
                kind = activations.types[layer]
                if activations.sequence_form(layer, degrees) == "state":
                    states += kind.states_bytes(self.model, samples, degrees.sequence) or 0
                else:
                    heads += kind.heads_bytes(self.model, tokens, self.size) or 0
                halos += passes * samples * kind.halo_values(self.model) * self.size
            most = max(most, (heads / degrees.tensor, halos, states / degrees.tensor), key=sum)
        return most

    def _gradients_and_weights(self, layout: Layout) -> _Traffic:
        """Communication of gradients and weights.

        DeepSpeed 0.19.8 all-reduces gradients in the type of the weights, under ZeRO-1 once a step,
        under ZeRO-2 in each micro-step; updated weights are gathered once. Under ZeRO-3 each
        micro-step gathers the weights and reduce-scatters the gradients; parameters that stay whole
        are gathered once a step.
        """
        degrees = layout.degrees
        if layout.zero_stage == 3:
            if degrees.data == 1:
                return {}
            steps = layout.gradient_accumulation_steps
            recompute = layout.recomputes_blocks
            each_micro_step, once = self.memory.gathered_by_zero3(recompute=recompute)
            payloads = {
                "gradients_reduce_scatter": steps * self.size * self.trained_params,
                "weights_all_gather": self.size * (steps * each_micro_step + once),
            }
            if self.muon_elements:  # in float32 to the ranks that orthogonalise them, and back
                payloads["muon_all_to_all"] = 8 * self.muon_elements // degrees.data
            share = (1 - 1 / degrees.data) / self._bandwidth(degrees.data)
            return {kind: (payload, payload * share) for kind, payload in payloads.items()}
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
            "gradients_all_reduce": (int(reduced), reducing),
            "weights_all_gather": (int(gathered), gathering),
        }
        if degrees.pipeline > 1:
            # first and last stage sum the tied embedding's gradients, in float32, and after the
            # step the last one receives the first one's weights
            elements = self.model.vocab_size * self.model.hidden_size // degrees.tensor
            bandwidth = self._bandwidth(degrees.world_size)
            summed = 4 * elements
            sent = self.size * elements
            traffic["embedding_all_reduce"] = (summed, summed / bandwidth)
            traffic["embedding_broadcast"] = (sent, sent / bandwidth)
        return traffic

    def _held_by_fullest(self, degrees: Degrees) -> dict[Group, int]:
        """Elements of each group on the stage with most: the first, the last, or one with most
        blocks."""
        sizes = [len(stage) for stage in self.memory.stages(degrees.pipeline)]
        stages = sorted({0, sizes.index(max(sizes)), len(sizes) - 1})
        return max((self.memory.held(degrees, s) for s in stages), key=lambda h: sum(h.values()))
