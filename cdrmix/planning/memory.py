"""Bytes per rank by part: weights, gradients, optimizer, activations, buffers.

Weights, gradients and optimizer states are those that DeepSpeed 0.19.8 allocates, read off
runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py; tests/parity/test_memory.py finds them
equal to the byte:

* each parameter group is one flat buffer, padded to twice the number of ranks that partition it;
* masters, mean and square are float32 and partitioned, also where weights are float32 already;
* bf16 with float32 accumulation under ZeRO-1 uses BF16_Optimizer: float32 gradients of all
  parameters on every rank, besides the bf16 ones of the backward pass;
* under ZeRO-2 it has a float32 partition; without a separate accumulation type it stores every
  gradient that its partition overlaps, whole.

ZeRO-3 and offloading are in `zero`. tests/parity/test_stage_memory.py compares pipeline stages with
a run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from cdrmix.config.schema import Config
from cdrmix.planning import zero
from cdrmix.planning.activations import Numerics, SavedActivations, WKVForm, routed_row
from cdrmix.planning.cluster import GIB, Memory
from cdrmix.planning.counts import parameters
from cdrmix.planning.layout import (
    GROUPS,
    Degrees,
    Group,
    Layout,
    attention_bytes,
    boundary_values,
    recurrence_bytes,
    stage_layers,
    state_bytes,
)

# Positions whose logits exist at a time: _CHUNK_POSITIONS in objectives/language_model.py.
LOGIT_POSITIONS = 1024
# Allowances, not measured on a GPU yet: blocks that the caching allocator cannot reuse, as a share
# of what is allocated and freed in each step, and CUDA context and communicators outside torch.
FRAGMENTED_SHARE = 0.05
CONTEXT_BYTES = GIB
# bytes per token and feature that fla's backward recomputes (fla/ops/generalized_delta_rule/dplr:
# four scaled inputs and their gradients, cumulated decays in float32, states of chunks of 64)
_FLA_WORKSPACE = 32
# Parameters that every tensor rank has whole: not of heads, inner features or vocabulary rows.
_REPLICATED = ("_norm.weight", "mixer.mu_", "_down", "ffn_shift.mu", "router.weight")


@dataclass(frozen=True)
class _Elements:
    """Parameters of some layers in one optimizer group: replicated, and split over ranks."""

    whole: int = 0
    split: int = 0

    def __add__(self, other: _Elements) -> _Elements:
        return _Elements(self.whole + other.whole, self.split + other.split)

    def on(self, ranks: int) -> int:
        return self.whole + -(-self.split // ranks)


_Groups = dict[Group, _Elements]


class CutParameters(NamedTuple):
    """Elements of a dense model under ZeRO-3.

    Attributes:
        total: of all parameters.
        blocks: of the block parameters that are gathered for each use.
        embedding: of the embedding if it is gathered, else 0.
        persistent: of the parameters that stay whole on every rank.
    """

    total: int
    blocks: int
    embedding: int
    persistent: int


class MemoryModel:
    """Memory estimates for one configuration; results that no layout changes are cached.

    Args:
        config: of the run.
        device: "cuda" or "cpu".
        wkv: form of the WKV-7 op; by default that of a machine with all kernels installed.
    """

    def __init__(
        self, config: Config, device: Literal["cuda", "cpu"], *, wkv: WKVForm | None = None
    ) -> None:
        model = config.model
        self.config = config
        self.model = model
        self.precision = config.training.precision
        self.numerics = Numerics.of(self.precision, device, wkv)
        self._parameters: list[tuple[Group, _Elements]] = []
        # by block, or by name outside the blocks
        self._parts: dict[int | str, _Groups] = {}
        for parameter in parameters(model):
            # as `engines/optim.py` groups them
            group: Group = "matrices" if len(parameter.shape) > 1 else "vectors"
            if parameter.part == "experts":
                group = "experts"
            replicated = any(part in parameter.name for part in _REPLICATED)
            if replicated and "group_norm" not in parameter.name:
                elements = _Elements(whole=parameter.num_elements)
            else:
                elements = _Elements(split=parameter.num_elements)
            self._parameters.append((group, elements))
            key = parameter.name if parameter.layer is None else parameter.layer
            part = self._parts.setdefault(key, {})
            part[group] = part.get(group, _Elements()) + elements
        self._stages: dict[int, list[range]] = {}
        self._held: dict[tuple[int, int], _Groups] = {}
        self.activations = SavedActivations(config, self.numerics, self.stages)

    def stages(self, pipeline: int) -> list[range]:
        """Blocks of each pipeline stage, as `parallel/pipeline.py` builds them."""
        if pipeline not in self._stages:
            length = self.config.training.sequence_length
            self._stages[pipeline] = stage_layers(self.model, length, pipeline)
        return self._stages[pipeline]

    def estimate(self, layout: Layout, *, has_copy: bool | None = None) -> Memory:
        """Bytes on the fullest rank.

        The first and last stage hold the embedding, earlier stages hold more micro-batches, and the
        first of those with most blocks holds the most weights: one of them is the fullest.

        Args:
            layout: of the run.
            has_copy: True if the copy of a checkpoint counts; None: unless background is false.
        """
        sizes = [len(stage) for stage in self.stages(layout.degrees.pipeline)]
        stages = {0, min(1, len(sizes) - 1), sizes.index(max(sizes)), len(sizes) - 1}
        memories = (self.on_stage(layout, stage, has_copy=has_copy) for stage in sorted(stages))
        return max(memories, key=lambda memory: memory.total)

    def on_stage(self, layout: Layout, stage: int, *, has_copy: bool | None = None) -> Memory:
        """Bytes on a rank of one pipeline stage; `has_copy` as in `estimate`."""
        states = (
            self._zero3_states(layout) if layout.zero_stage == 3 else self._states(layout, stage)
        )
        activations = self.activations.on_stage(layout, stage)
        buffers = self._buffers(layout, stage, activations)
        steps = layout.gradient_accumulation_steps
        if layout.zero_stage == 2 and self.precision != "bf16" and steps > 1:
            # DeepSpeed collects a micro-step's gradients before it adds them to the earlier ones
            buffers["gradients_of_a_micro_step"] = states.gradients
        memory = Memory(
            states.weights, states.gradients, states.optimizer, activations, buffers, states.host
        )
        if has_copy is None:
            has_copy = self.config.checkpoint.background is not False
        if not has_copy:
            return memory
        # float32 masters and both moments
        degrees = layout.degrees
        if layout.zero_stage == 3:
            shares = [-(-elements.on(1) // degrees.data) for _, elements in self._parameters]
        else:
            held = self.held(degrees, stage)
            shares = [-(-n // degrees.optimizer_ranks(group)) for group, n in held.items()]
        copied = 12 * sum(shares)
        if self.numerics.device == "cuda":
            return replace(memory, checkpoint=copied)
        return replace(memory, buffers=buffers | {"checkpoint_copy": copied})

    def held(self, degrees: Degrees, stage: int) -> dict[Group, int]:
        """Elements of each group on a rank of a stage; the tied embedding is on both ends."""
        groups = self._held.get((degrees.pipeline, stage))
        if groups is None:
            parts = [self._parts[layer] for layer in self.stages(degrees.pipeline)[stage]]
            if stage in (0, degrees.pipeline - 1):
                parts.append(self._parts["embedding.weight"])
            if stage == 0:
                parts.append(self._parts["embedding_norm.weight"])
            if stage == degrees.pipeline - 1:
                parts.append(self._parts["final_norm.weight"])
            groups = {
                group: sum((part.get(group, _Elements()) for part in parts), _Elements())
                for group in GROUPS
            }
            self._held[degrees.pipeline, stage] = groups
        held = {group: total.on(degrees.split_ranks(group)) for group, total in groups.items()}
        return {group: elements for group, elements in held.items() if elements}

    def _states(self, layout: Layout, stage: int) -> zero.States:
        """Bytes of weights, gradients and optimizer under ZeRO-1 and ZeRO-2."""
        degrees = layout.degrees
        size = self.numerics.element_bytes
        held = self.held(degrees, stage)
        ranks = {group: degrees.optimizer_ranks(group) for group in held}
        # DeepSpeed pads a flat buffer to a multiple of two elements for each rank
        padded = {g: -(-n // (2 * ranks[g])) * 2 * ranks[g] for g, n in held.items()}
        parts = {group: n // ranks[group] for group, n in padded.items()}
        shared = sum(parts.values())
        # float32 master, mean and square of each element
        optimizer = 12 * shared + 4 * len(parts)  # AdamW counts its steps in a tensor
        weights = size * sum(padded.values())
        if layout.zero_stage == 1:
            gradients = size * sum(held.values())
            if self.precision == "bf16":
                gradients += 4 * sum(padded.values())
        elif self.precision == "bf16":
            gradients = 4 * shared
        else:
            gradients = size * self._overlapped(degrees, parts)
        states = zero.States(weights, gradients, optimizer)
        if not layout.offloads_optimizer:
            return states
        accumulated = 0
        if self.precision != "bf16":  # bf16 sums in a float32 partition on the device
            states = replace(states, gradients=0)
            if layout.gradient_accumulation_steps > 1:
                accumulated = self._overlapped(degrees, parts)
        return zero.offloaded(
            states,
            shared=shared,
            largest=self._largest(degrees),
            accumulated=accumulated,
            element_bytes=size,
        )

    def _zero3_states(self, layout: Layout) -> zero.States:
        data = layout.degrees.data
        size = self.numerics.element_bytes
        groups = [
            [elements.on(1) for group, elements in self._parameters if group == wanted]
            for wanted in GROUPS
        ]
        states = zero.zero3_states(
            groups,
            data=data,
            element_bytes=size,
            gradient_bytes=4 if self.precision == "bf16" else size,
        )
        # a single CPU rank offloads to the memory that it is in: nothing is copied
        is_copied = data > 1 or self.numerics.device == "cuda"
        return zero.zero3_offloaded(
            states,
            shared=sum(-(-n // data) for group in groups for n in group),
            whole=zero.persistent(groups) if is_copied else 0,
            element_bytes=size,
            optimizer=layout.offloads_optimizer,
            parameters=layout.offloads_parameters,
        )

    def cut_by_zero3(self) -> CutParameters:
        """Elements that ZeRO-3 gathers for each use, and those that stay whole."""
        sizes = [elements.on(1) for _, elements in self._parameters]
        tied = self._parts["embedding.weight"]["matrices"].on(1)
        embedding = tied if tied > zero.PERSISTENT_ELEMENTS else 0
        whole = zero.persistent([sizes])
        return CutParameters(sum(sizes), sum(sizes) - whole - embedding, embedding, whole)

    def _largest(self, degrees: Degrees) -> int:
        """Elements of the largest parameter on a rank."""
        return max(e.on(degrees.split_ranks(group)) for group, e in self._parameters)

    def _overlapped(self, degrees: Degrees, parts: dict[Group, int]) -> int:
        """Elements of all parameters that the fullest rank's partitions overlap.

        DeepSpeed flattens a group in the order of the model; both ranks at a partition boundary
        store the whole gradient of the parameter that lies across it.
        """
        ends = {}  # of each parameter in the flat buffer of its group
        for group in parts:
            ranks = degrees.split_ranks(group)
            ends[group] = list(accumulate(e.on(ranks) for g, e in self._parameters if g == group))
        most = 0
        # partitions differ in the parameters that they cut, so each rank is looked at
        for rank in range(degrees.stage_ranks):
            overlapped = 0
            for group, size in parts.items():
                limits = ends[group]
                start = rank // degrees.split_ranks(group) * size
                if start < limits[-1]:
                    first = bisect_right(limits, start)
                    last = bisect_left(limits, min(start + size, limits[-1]))
                    overlapped += limits[last] - (limits[first - 1] if first else 0)
            most = max(most, overlapped)
        return most

    def boundaries(self, layout: Layout) -> list[int]:
        """Bytes of a micro-batch that cross the boundary before each stage, and after the last."""
        stages = self.stages(layout.degrees.pipeline)
        tokens = self.activations.tokens(layout)
        values = boundary_values(self.model, stages, layout.degrees)
        return [self.numerics.element_bytes * tokens * each for each in values]

    def _buffers(self, layout: Layout, stage: int, activations: int) -> dict[str, int]:
        """Bytes that are allocated and freed within a step, by kind."""
        degrees = layout.degrees
        size = self.numerics.element_bytes
        tokens = self.activations.tokens(layout)
        buffers = {
            "gradient_buckets": self._buckets(layout, stage, activations),
            "workspace": self._workspace(layout, stage),
        }
        if stage == degrees.pipeline - 1:
            # a chunk of logits and its exponential in float32, and the head's gradient of a chunk
            vocab = self.model.vocab_size // degrees.tensor
            chunk = 8 * min(LOGIT_POSITIONS, tokens) * vocab
            buffers["logits"] = chunk + self.head_gradient(degrees)
        mask = self.activations.segment_mask(layout)
        if mask:  # booleans first, compared and cut to the lower triangle, a byte each
            buffers["segment_mask"] = 2 * mask // size
        moe = self.model.moe
        if degrees.expert > 1:
            assert moe is not None, "rules refuse expert parallelism of a dense model"
            # rows sent and received, and a layer's surplus if a rank's experts are in demand
            rows = moe.top_k * self.activations.spans(layout)[1] / degrees.tensor
            surplus = (moe.capacity_factor - 1) * routed_row(self.model, self.numerics)
            per_row = 3 * self.model.hidden_size * size * moe.capacity_factor + surplus
            buffers["all_to_all"] = int(rows * per_row)
        if degrees.sequence > 1:  # the larger message of both mixers, sent and received
            largest = attention_bytes(self.model, tokens, size)
            if self.activations.sequence_form(degrees) == "heads":
                recurrence = recurrence_bytes(self.model, tokens, size)
            else:
                recurrence = state_bytes(self.model, layout.micro_batch_size, degrees.sequence)
            buffers["sequence_exchange"] = 2 * max(largest, recurrence) // degrees.tensor
        if layout.zero_stage == 3:
            sizes = [elements.on(1) for _, elements in self._parameters]
            total = sum(n for n in sizes if n > zero.PERSISTENT_ELEMENTS)
            whole = zero.gathered(total, largest=self._largest(degrees))
            buffers["gathered_weights"] = size * whole
        elif layout.offloads_optimizer:  # one gradient in transfer to the host
            buffers["offloaded_gradient"] = size * self._largest(degrees)
        if degrees.pipeline > 1:  # for each micro-batch in flight, and for the one being sent
            before, after = self.boundaries(layout)[stage : stage + 2]
            in_flight = self.activations.in_flight(layout, stage)
            buffers["pipeline"] = (in_flight + 1) * (before + after)
        if self.numerics.device == "cuda":
            moving = activations + sum(buffers.values())
            buffers["fragmentation"] = int(FRAGMENTED_SHARE * moving)
            buffers["context"] = CONTEXT_BYTES
        return buffers

    def _buckets(self, layout: Layout, stage: int, activations: int) -> int:
        """Bytes of DeepSpeed's gradient reduction, beyond the activations that are free by then."""
        size = self.numerics.element_bytes
        bucket = layout.bucket_elements
        held = self.held(layout.degrees, stage)
        ranks = {group: layout.degrees.optimizer_ranks(group) for group in held}
        if layout.zero_stage == 1 and self.precision == "bf16":
            # each group is cast to bf16 in one piece after the last backward pass
            return max(0, 2 * max(held.values()) - activations)
        # allocated at the first gradient of a backward pass, while most activations are there
        total = size * bucket
        if layout.zero_stage >= 2 and max(ranks.values()) > 1:
            total += size * min(bucket, sum(held.values()))  # slices for one rank, flattened
        if self.precision != "bf16":  # the step flattens a group's partition in float32
            largest = max(n // ranks[group] for group, n in held.items())
            # the pipeline engine allocates another bucket after the last backward pass
            again = size * bucket if layout.degrees.pipeline > 1 else 0
            total += max(0, 4 * largest + again - activations)
        return total

    def _workspace(self, layout: Layout, stage: int) -> int:
        """Bytes of temporary gradients: of one block's activations and its largest parameters."""
        degrees = layout.degrees
        size = self.numerics.element_bytes
        tokens = self.activations.tokens(layout)
        _, span = self.activations.spans(layout)
        model = self.model
        inner = model.ffn_hidden_size
        if model.moe is not None:
            inner = model.moe.top_k * model.moe.expert_hidden_size
        feed_forward = 2 * inner * size
        mixer = 12 * model.hidden_size * size  # six mixes, and the mixer's input
        if self.numerics.wkv == "fla" and "rwkv" in model.layer_kinds():
            mixer += _FLA_WORKSPACE * model.hidden_size
        # with sequence ranks, a mixer is recomputed over all tokens of the rank
        mixed = span if self.activations.sequence_form(degrees) == "whole" else tokens
        passing = max(feed_forward * span, mixer * mixed) // degrees.tensor
        return passing + self.block_gradients(layout, stage)

    def block_gradients(self, layout: Layout, stage: int) -> int:
        """Bytes of the gradients of a block's largest parameters; a frozen block has none."""
        degrees = layout.degrees
        model = self.model
        layer = self._parts[self.stages(degrees.pipeline)[stage][0]]
        dense = 2 * model.hidden_size * model.ffn_hidden_size
        experts = layer.get("experts", _Elements()).on(degrees.expert)
        return self.numerics.element_bytes * (experts or dense)

    def head_gradient(self, degrees: Degrees) -> int:
        """Bytes of the head's gradient of one chunk of logits; a frozen head has none."""
        size = self.numerics.element_bytes
        matrix = self.model.vocab_size // degrees.tensor * self.model.hidden_size
        return matrix * (4 if size == 4 else 4 + size)
