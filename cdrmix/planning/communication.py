"""Payloads that a rank passes to collectives in a step, and their times.

Bytes are payloads; times are those of ring algorithms and of all-to-alls on the links that the
members of a group have between them. Payloads are held to what CPU ranks exchange
(tests/distributed/test_communication.py). What of these times passes under computation is told by
`planning/cost.py`.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from cdrmix.planning.activations import SavedActivations
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.counts import parameters, trained_params
from cdrmix.planning.depth import share_of_tokens
from cdrmix.planning.layout import Degrees, Group, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.muon import muon_matrices
from cdrmix.planning.step_time import exchange_seconds, ring_bandwidth

# A rank's device stands still while the host reads how many rows each rank will send, once a layer
# and forward pass: 30 to 60 us, assumed.
WAIT_SECONDS = 5e-5

# Communication of a rank in one step by purpose: payload (bytes), time (seconds).
Exchanged = dict[str, tuple[int, float]]


class Communication:
    """Exchanges of one configuration on one cluster."""

    def __init__(self, memory: MemoryModel, cluster: Cluster) -> None:
        self.memory = memory
        self.cluster = cluster
        self.model = memory.config.model
        self.activations = memory.activations
        self.size = memory.element_bytes
        self.trained_params = trained_params(self.model)
        self.muon_elements = muon_matrices(memory.config)[1]
        # share of the tokens that meet the experts of each layer; those of a Hugging Face model are
        # on every rank
        spread = self.model.kind == "rwkx"
        self._shares = [
            spread and self.model.has_experts(layer) * share_of_tokens(self.model, layer)
            for layer in range(self.model.num_layers)
        ]
        self.partial_gradients = [0] * self.model.num_layers  # elements by layer
        for p in parameters(self.model):
            if p.layer is not None and p.is_partial:
                self.partial_gradients[p.layer] += p.num_elements
        self._passed = cache(self.per_micro_step)
        self._fullest = cache(self._held_by_fullest)

    def of_step(self, layout: Layout) -> tuple[Exchanged, float, float]:
        """Exchanges of a step, with the seconds of a micro-step and of what comes once a step.

        Gradients and weights count once a step, though ZeRO-2 and ZeRO-3 exchange them in each
        micro-step: a pipeline's bubble repeats none of them.
        """
        steps = layout.gradient_accumulation_steps
        passed = self._passed(layout.passes)
        once = self.gradients_and_weights(layout)
        each = sum(seconds for _, seconds in passed.values()) / steps
        return passed | once, each, sum(seconds for _, seconds in once.values())

    def _link(self, distance: int) -> float:
        """Bandwidth from a rank to the one `distance` ranks further on."""
        inside = distance < self.cluster.gpus_per_node
        return self.cluster.intra_bandwidth if inside else self.cluster.inter_bandwidth

    def per_micro_step(self, layout: Layout) -> Exchanged:
        """Communication of blocks and stages in all micro-steps of a step."""
        degrees = layout.degrees
        steps = layout.gradient_accumulation_steps
        again = 1 if layout.recomputes_blocks else 0
        stream = self.activations.tokens(layout) * self.model.hidden_size * self.size
        traffic: Exchanged = {}

        def add(kind: str, payload: float, seconds: float) -> None:
            traffic[kind] = (int(payload * steps), seconds * steps)

        def ring(kind: str, payload: float, ranks: int, *, stride: int = 1, times: int = 1) -> None:
            moved = times * (1 - 1 / ranks) * payload
            add(kind, payload, moved / ring_bandwidth(self.cluster, ranks, stride=stride))

        tensor = degrees.tensor
        expert = degrees.expert
        sequence = degrees.sequence
        if expert > 1:  # there and back, forward and backward
            stages = self.memory.stages(degrees.pipeline)
            rows = max(self.routed_bytes(layout, layers) for layers in stages)
            payload = (4 + 2 * again) * rows
            seconds = exchange_seconds(payload, self.cluster, expert)
            layers = max(sum(self._shares[layer] > 0 for layer in stage) for stage in stages)
            seconds += (1 + again) * layers * WAIT_SECONDS
            add("expert_all_to_all", payload, seconds)
        if tensor > 1:
            reduced, gathered = self._between_tensor_ranks(layout, stream)
            # a ring all-reduce is a reduce-scatter and an all-gather: the payload moves twice
            ring("tensor_all_reduce", reduced, tensor, times=2)
            ring("tensor_all_gather", gathered, tensor)
        if sequence > 1:
            tokens_for_heads, halos, states = self._between_sequence_ranks(layout)
            payload = (2 + again) * tokens_for_heads + halos
            seconds = exchange_seconds(payload, self.cluster, sequence, stride=tensor)
            add("sequence_all_to_all", payload, seconds)
            if states:
                gathered_states = (1 + again) * states
                ring("sequence_states_gathered", gathered_states, sequence, stride=tensor)
                ring("sequence_states_reduced", states, sequence, stride=tensor)
        if degrees.pipeline > 1:
            # forward to the next stage, and as many bytes of gradients to the one before
            payload = max(map(sum, pairwise(self.memory.boundaries(layout))))
            add("pipeline_send", payload, payload / self._link(degrees.stage_ranks))
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
        of_experts = sum(map(self.share_to_experts, layers))
        dense = shares - of_experts
        partial = self.size * sum(self.partial_gradients[layer] for layer in layers)
        # log total and label's score of each position, float32
        scores = 8 * self.activations.tokens(layout) * layout.degrees.tensor
        summed = (mixers + 2 * dense + ends) * stream + partial
        return int(summed), int(2 * of_experts * stream + scores)

    def share_to_experts(self, layer: int) -> float:
        """Share of the tokens that meet the experts of a layer; 0 where it has none."""
        return self._shares[layer]

    def routed_bytes(self, layout: Layout, layers: range) -> float:
        """Bytes of a rank's rows for the experts of some layers, in one direction."""
        assert self.model.moe is not None, "rules refuse expert parallelism of a dense model"
        stream = self.activations.tokens(layout) * self.model.hidden_size * self.size
        shares = sum(self._shares[layers.start : layers.stop])
        return shares * self.model.moe.top_k * stream / layout.degrees.tensor

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

    def gradients_and_weights(self, layout: Layout) -> Exchanged:
        """Communication of gradients and weights.

        DeepSpeed 0.19.8 all-reduces gradients in the type of the weights, or in the one of
        `communication_data_type`, under ZeRO-1 once a step, under ZeRO-2 in each micro-step;
        updated weights are gathered once. Under ZeRO-3 each micro-step gathers the weights and
        reduce-scatters the gradients; parameters that stay whole are gathered once a step.
        """
        degrees = layout.degrees
        of_gradient = self.memory.reduced_bytes(layout)
        if layout.zero_stage == 3:
            if degrees.data == 1:
                return {}
            steps = layout.gradient_accumulation_steps
            recompute = layout.recomputes_blocks
            each_micro_step, once = self.memory.gathered_by_zero3(recompute=recompute)
            payloads = {
                "gradients_reduce_scatter": steps * of_gradient * self.trained_params,
                "weights_all_gather": self.size * (steps * each_micro_step + once),
            }
            if self.muon_elements:  # in float32 to the ranks that orthogonalise them, and back
                payloads["muon_all_to_all"] = 8 * self.muon_elements // degrees.data
            share = (1 - 1 / degrees.data) / ring_bandwidth(self.cluster, degrees.data)
            return {kind: (payload, payload * share) for kind, payload in payloads.items()}
        reductions = 1 if layout.zero_stage == 1 else layout.gradient_accumulation_steps
        reduced = gathered = reducing = gathering = 0.0
        for group, elements in self.held_by_fullest(degrees).items():
            ranks = degrees.optimizer_ranks(group)
            if ranks == 1:
                continue
            # members of a group are a group of model or expert ranks apart
            stride = degrees.stage_ranks // ranks
            bandwidth = ring_bandwidth(self.cluster, ranks, stride=stride)
            moved = elements * (1 - 1 / ranks) / bandwidth
            reduced += reductions * of_gradient * elements
            reducing += reductions * 2 * of_gradient * moved
            gathered += self.size * elements
            gathering += self.size * moved
        traffic = {
            "gradients_all_reduce": (int(reduced), reducing),
            "weights_all_gather": (int(gathered), gathering),
        }
        if degrees.pipeline > 1:
            # first and last stage sum the tied embedding's gradients, in float32, and after the
            # step the last one receives the first one's weights
            elements = self.model.vocab_size * self.model.hidden_size // degrees.tensor
            bandwidth = self._link((degrees.pipeline - 1) * degrees.stage_ranks)
            summed = 4 * elements
            sent = self.size * elements
            traffic["embedding_all_reduce"] = (summed, summed / bandwidth)
            traffic["embedding_broadcast"] = (sent, sent / bandwidth)
        return traffic

    def held_by_fullest(self, degrees: Degrees) -> dict[Group, int]:
        """Elements of each group on the stage with most: the first, the last, or one with most
        blocks."""
        return self._fullest(degrees)

    def _held_by_fullest(self, degrees: Degrees) -> dict[Group, int]:
        sizes = [len(stage) for stage in self.memory.stages(degrees.pipeline)]
        stages = sorted({0, sizes.index(max(sizes)), len(sizes) - 1})
        return max((self.memory.held(degrees, s) for s in stages), key=lambda h: sum(h.values()))
