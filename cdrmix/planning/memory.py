"""Bytes per rank by part: weights, gradients, optimizer, activations, buffers.

States are what DeepSpeed 0.19.8 allocates, read off its sources (runtime/zero/stage_1_and_2.py and
runtime/bf16_optimizer.py) and equal to the byte in tests/parity/test_memory.py:

* each parameter group is one flat buffer, padded to twice the ranks that share it;
* masters, mean and square are float32 and shared out, also where weights are float32 already;
* bf16 with float32 accumulation under ZeRO-1 is its BF16_Optimizer: float32 gradients of
  everything on every rank, beside the bf16 ones that the backward pass leaves;
* under ZeRO-2 it keeps a float32 partition; without a separate type of accumulation it keeps every
  gradient that its partition touches, whole.

ZeRO-3 and offloading are in `zero`. What stages of a pipeline hold is held against a run in
tests/parity/test_stage_memory.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from cdrmix.config.schema import Config
from cdrmix.planning import activations, zero
from cdrmix.planning.activations import KeptActivations, Numerics, WKVForm
from cdrmix.planning.cluster import GIB, Memory
from cdrmix.planning.counts import Parameter, parameters
from cdrmix.planning.layout import (
    Degrees,
    Layout,
    attention_bytes,
    border_values,
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


Group = Literal["matrices", "vectors", "experts"]
GROUPS: tuple[Group, ...] = ("matrices", "vectors", "experts")


@dataclass(frozen=True)
class _Elements:
    """Parameters of some layers in one optimizer group: as they are, and split over heads."""

    whole: int = 0
    split: int = 0

    def __add__(self, other: _Elements) -> _Elements:
        return _Elements(self.whole + other.whole, self.split + other.split)

    def on(self, tensor: int) -> int:
        return self.whole + -(-self.split // tensor)


_Groups = dict[Group, _Elements]


class CutParameters(NamedTuple):
    """Elements of a dense model under ZeRO-3.

    Attributes:
        total: of all parameters.
        blocks: of those in blocks that are gathered for each reading.
        embedding: of the embedding, if it is; else 0.
        persistent: of those that are kept whole.
    """

    total: int
    blocks: int
    embedding: int
    persistent: int


class MemoryModel:
    """Estimates for one configuration; what does not depend on the layout is computed once.

    Args:
        config: of the run.
        device: "cuda" or "cpu".
        wkv: form of the WKV-7 op; by default as on a machine where all forms are there.
    """

    def __init__(
        self, config: Config, device: Literal["cuda", "cpu"], *, wkv: WKVForm | None = None
    ) -> None:
        model = config.model
        self.config = config
        self.model = model
        self.precision = config.training.precision
        self.numerics = Numerics.of(self.precision, device, wkv)
        self._layers: list[_Groups] = [_no_elements() for _ in range(model.num_layers)]
        self._tied, self._first, self._final = (_no_elements() for _ in range(3))
        for parameter in parameters(model):
            self._groups_of(parameter)[_group(parameter)] += _elements(parameter)
        self._stages: dict[int, list[range]] = {}
        self._held: dict[tuple[int, int], _Groups] = {}
        self.kept = KeptActivations(config, self.numerics, self.stages)

    def _groups_of(self, parameter: Parameter) -> _Groups:
        if parameter.layer is not None:
            return self._layers[parameter.layer]
        ends = {"embedding_norm.weight": self._first, "final_norm.weight": self._final}
        return ends.get(parameter.name, self._tied)

    # --- what a rank holds ----------------------------------------------------------------------

    def stages(self, pipeline: int) -> list[range]:
        """Blocks of each pipeline stage, as `parallel/pipeline.py` builds them."""
        if pipeline not in self._stages:
            length = self.config.training.sequence_length
            self._stages[pipeline] = stage_layers(self.model, length, pipeline)
        return self._stages[pipeline]

    def estimate(self, layout: Layout, *, has_copy: bool | None = None) -> Memory:
        """Bytes on the fullest rank; `has_copy`: of a checkpoint, by default if that may be made.

        Of the stages the first and last hold the embedding, earlier ones keep more micro-batches,
        and the first of those with most blocks holds the most weights: one of them is fullest.
        """
        sizes = [len(stage) for stage in self.stages(layout.degrees.pipeline)]
        stages = {0, min(1, len(sizes) - 1), sizes.index(max(sizes)), len(sizes) - 1}
        found = (self.on_stage(layout, stage, has_copy=has_copy) for stage in sorted(stages))
        return max(found, key=_total)

    def on_stage(self, layout: Layout, stage: int, *, has_copy: bool | None = None) -> Memory:
        """Bytes on a rank of one pipeline stage; `has_copy` as of `estimate`."""
        states = self._states(layout, stage)
        kept = self.kept.on_stage(layout, stage)
        buffers = self._buffers(layout, stage, kept)
        steps = layout.gradient_accumulation_steps
        if layout.zero_stage == 2 and self.precision != "bf16" and steps > 1:
            # DeepSpeed collects a micro-step's gradients before it adds them to those before
            buffers["gradients_of_a_micro_step"] = states.gradients
        memory = Memory(
            states.weights, states.gradients, states.optimizer, kept, buffers, states.host
        )
        if has_copy is None:
            has_copy = self.config.checkpoint.background is not False
        if not has_copy:
            return memory
        copied = self._saved(layout, stage)
        if self.numerics.device == "cuda":
            return replace(memory, checkpoint=copied)
        return replace(memory, buffers=buffers | {"checkpoint_copy": copied})

    def _saved(self, layout: Layout, stage: int) -> int:
        """Bytes of a rank's share of a checkpoint: float32 masters and both moments."""
        degrees = layout.degrees
        if layout.zero_stage == 3:
            return 12 * sum(-(-elements.on(1) // degrees.data) for _, elements in self._listed)
        held = self.held(degrees, stage)
        return 12 * sum(-(-n // sharing(degrees, group)) for group, n in held.items())

    def held(self, degrees: Degrees, stage: int) -> dict[Group, int]:
        """Elements of each group on a rank of a stage; the tied embedding is on both ends."""
        groups = self._held.get((degrees.pipeline, stage))
        if groups is None:
            here = [self._layers[layer] for layer in self.stages(degrees.pipeline)[stage]]
            if stage in (0, degrees.pipeline - 1):
                here.append(self._tied)
            if stage == 0:
                here.append(self._first)
            if stage == degrees.pipeline - 1:
                here.append(self._final)
            groups = {g: sum((part[g] for part in here), _Elements()) for g in GROUPS}
            self._held[degrees.pipeline, stage] = groups
        held = {group: total.on(_spread(degrees, group)) for group, total in groups.items()}
        return {group: elements for group, elements in held.items() if elements}

    def _states(self, layout: Layout, stage: int) -> zero.States:
        """Bytes of weights, gradients and optimizer."""
        if layout.zero_stage == 3:
            return self._zero3_states(layout)
        degrees = layout.degrees
        size = self.numerics.element_bytes
        held = self.held(degrees, stage)
        padded = {g: _padded(n, sharing(degrees, g)) for g, n in held.items()}
        parts = {g: n // sharing(degrees, g) for g, n in padded.items()}
        shared = sum(parts.values())
        optimizer = 12 * shared + 4 * len(parts)  # AdamW counts its steps in a tensor
        weights = size * sum(padded.values())
        if layout.zero_stage == 1:
            gradients = size * sum(held.values())
            if self.precision == "bf16":
                gradients += 4 * sum(padded.values())
        elif self.precision == "bf16":
            gradients = 4 * shared
        else:
            gradients = size * self._touched(degrees, parts)
        states = zero.States(weights, gradients, optimizer)
        if not layout.offloads_optimizer:
            return states
        accumulated = 0
        if self.precision != "bf16":  # where a float32 partition on the device sums them
            states = replace(states, gradients=0)
            if layout.gradient_accumulation_steps > 1:
                accumulated = self._touched(degrees, parts)
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
            [elements.on(1) for group, elements in self._listed if group == wanted]
            for wanted in GROUPS
        ]
        states = zero.zero3_states(
            groups,
            data=data,
            element_bytes=size,
            gradient_bytes=4 if self.precision == "bf16" else size,
        )
        # a host of one rank is its device too, if that is a CPU: nothing is copied
        apart = data > 1 or self.numerics.device == "cuda"
        return zero.zero3_offloaded(
            states,
            shared=sum(-(-n // data) for group in groups for n in group),
            whole=zero.persistent(groups) if apart else 0,
            element_bytes=size,
            optimizer=layout.offloads_optimizer,
            parameters=layout.offloads_parameters,
        )

    def cut_by_zero3(self) -> CutParameters:
        """Elements that ZeRO-3 gathers for each reading, and those that it keeps whole."""
        sizes = [elements.on(1) for _, elements in self._listed]
        tied = self._tied["matrices"].on(1)
        embedding = tied if tied > zero.PERSISTENT_ELEMENTS else 0
        kept = zero.persistent([sizes])
        return CutParameters(sum(sizes), sum(sizes) - kept - embedding, embedding, kept)

    def _largest(self, degrees: Degrees) -> int:
        """Elements of the largest parameter that a rank holds."""
        return max(elements.on(_spread(degrees, group)) for group, elements in self._listed)

    def _touched(self, degrees: Degrees, parts: dict[Group, int]) -> int:
        """Elements of all parameters that the fullest rank's partitions overlap.

        DeepSpeed flattens a group in the order of the model, and of a parameter on the border
        between two ranks both keep the whole gradient.
        """
        ends = {group: self._ends(group, degrees) for group in parts}
        most = 0
        for rank in range(degrees.stage_ranks):
            touched = 0
            for group, size in parts.items():
                place = rank // (degrees.expert if group == "experts" else degrees.tensor)
                touched += _overlapped(ends[group], place * size, (place + 1) * size)
            most = max(most, touched)
        return most

    def _ends(self, group: Group, degrees: Degrees) -> list[int]:
        """End of each parameter of a group in its flat buffer."""
        spread = _spread(degrees, group)
        return list(accumulate(e.on(spread) for g, e in self._listed if g == group))

    @cached_property
    def _listed(self) -> list[tuple[Group, _Elements]]:
        return [(_group(p), _elements(p)) for p in parameters(self.model)]

    # --- what a micro-step takes ----------------------------------------------------------------

    def borders(self, layout: Layout) -> list[int]:
        """Bytes of a micro-batch that cross the border before each stage, and after the last."""
        degrees = layout.degrees
        size = self.numerics.element_bytes
        stages = self.stages(degrees.pipeline)
        tokens = self.kept.tokens(layout)
        values = border_values(self.model, stages, degrees)
        return [size * tokens * each for each in values]

    def _buffers(self, layout: Layout, stage: int, kept: int) -> dict[str, int]:
        """Bytes that come and go within a step, by kind."""
        degrees = layout.degrees
        size = self.numerics.element_bytes
        tokens = self.kept.tokens(layout)
        buffers = {
            "gradient_buckets": self._buckets(layout, stage, kept),
            "workspace": self._workspace(layout, stage),
        }
        if stage == degrees.pipeline - 1:
            buffers["logits"] = self._logits(degrees, tokens)
        mask = self.kept.segment_mask(layout)
        if mask:  # first as truth values, compared and cut to the lower triangle, a byte each
            buffers["segment_mask"] = 2 * mask // size
        if degrees.expert > 1:
            buffers["all_to_all"] = self._all_to_all(degrees, self.kept.span_tokens(layout))
        if degrees.sequence > 1:
            buffers["sequence_exchange"] = self._sequence_exchange(layout)
        if layout.zero_stage == 3:
            elements = [e.on(1) for _, e in self._listed if e.on(1) > zero.PERSISTENT_ELEMENTS]
            whole = zero.gathered(sum(elements), largest=self._largest(degrees))
            buffers["gathered_weights"] = size * whole
        elif layout.offloads_optimizer:  # a gradient on its way to the host
            buffers["offloaded_gradient"] = size * self._largest(degrees)
        if degrees.pipeline > 1:  # of each micro-batch in flight, and those that are being sent
            before, after = self.borders(layout)[stage : stage + 2]
            buffers["pipeline"] = (self.kept.in_flight(layout, stage) + 1) * (before + after)
        if self.numerics.device == "cuda":
            moving = kept + sum(buffers.values())
            buffers["fragmentation"] = int(FRAGMENTED_SHARE * moving)
            buffers["context"] = CONTEXT_BYTES
        return buffers

    def _buckets(self, layout: Layout, stage: int, kept: int) -> int:
        """DeepSpeed's reduction of gradients, beyond the activations that are free by then."""
        size = self.numerics.element_bytes
        bucket = layout.bucket_elements
        held = self.held(layout.degrees, stage)
        shared = {g: sharing(layout.degrees, g) for g in held}
        if layout.zero_stage == 1 and self.precision == "bf16":
            # each group is cast to bf16 in one piece after the last backward pass
            return max(0, 2 * max(held.values()) - kept)
        # allocated at the first gradient of a backward pass, while most activations are there
        total = size * bucket
        if layout.zero_stage >= 2 and max(shared.values()) > 1:
            total += size * min(bucket, sum(held.values()))  # slices for one rank, flattened
        if self.precision != "bf16":  # the step flattens a group's partition in float32
            largest = max(n // shared[g] for g, n in held.items())
            # the pipeline engine asks for another bucket, too, after the last backward pass
            again = size * bucket if layout.degrees.pipeline > 1 else 0
            total += max(0, 4 * largest + again - kept)
        return total

    def _workspace(self, layout: Layout, stage: int) -> int:
        """Gradients of one block's activations and of its largest parameters, on their way."""
        degrees = layout.degrees
        size = self.numerics.element_bytes
        tokens = self.kept.tokens(layout)
        span = self.kept.span_tokens(layout)
        model = self.model
        inner = model.ffn_hidden_size
        if model.moe is not None:
            inner = model.moe.top_k * model.moe.expert_hidden_size
        feed_forward = 2 * inner * size
        mixer = 12 * model.hidden_size * size  # six mixes, and what enters the mixer
        if self.numerics.wkv == "fla" and "rwkv" in model.layer_kinds():
            mixer += _FLA_WORKSPACE * model.hidden_size
        # where a sequence is spread, its mixers are recomputed over all tokens of the rank
        mixed = span if self.kept.sequence_form(degrees) == "whole" else tokens
        passing = max(feed_forward * span, mixer * mixed) // degrees.tensor
        return passing + self.block_gradients(layout, stage)

    def block_gradients(self, layout: Layout, stage: int) -> int:
        """Bytes of the gradients of a block's largest parameters; no part of a frozen one's."""
        degrees = layout.degrees
        model = self.model
        layer = self._layers[self.stages(degrees.pipeline)[stage][0]]
        dense = 2 * model.hidden_size * model.ffn_hidden_size
        return self.numerics.element_bytes * (layer["experts"].on(degrees.expert) or dense)

    def _logits(self, degrees: Degrees, tokens: int) -> int:
        """A chunk of logits and its exponential in float32, and the head's gradient of a chunk."""
        vocab = self.model.vocab_size // degrees.tensor
        return 8 * min(LOGIT_POSITIONS, tokens) * vocab + self.head_gradient(degrees)

    def head_gradient(self, degrees: Degrees) -> int:
        """Bytes of a chunk's gradient of the head; no part of a frozen one's."""
        size = self.numerics.element_bytes
        matrix = self.model.vocab_size // degrees.tensor * self.model.hidden_size
        return matrix * (4 if size == 4 else 4 + size)

    def _sequence_exchange(self, layout: Layout) -> int:
        """The larger message of both mixers, sent and received."""
        degrees = layout.degrees
        tokens = self.kept.tokens(layout)
        size = self.numerics.element_bytes
        largest = attention_bytes(self.model, tokens, size)
        if self.kept.sequence_form(degrees) == "heads":
            largest = max(largest, recurrence_bytes(self.model, tokens, size))
        else:
            samples = layout.micro_batch_size
            largest = max(largest, state_bytes(self.model, samples, degrees.sequence))
        return 2 * largest // degrees.tensor

    def _all_to_all(self, degrees: Degrees, tokens: int) -> int:
        """Rows leaving and arriving, and a layer's surplus if a rank's experts are in demand."""
        moe = self.model.moe
        size = self.numerics.element_bytes
        assert moe is not None, "rules refuse expert parallelism of a dense model"
        rows = moe.top_k * tokens / degrees.tensor
        surplus = (moe.capacity_factor - 1) * activations.routed_row(self.model, self.numerics)
        return int(rows * (3 * self.model.hidden_size * size * moe.capacity_factor + surplus))


def _spread(degrees: Degrees, group: Group) -> int:
    """Ranks over which a group's parameters themselves are spread."""
    return degrees.expert if group == "experts" else degrees.tensor


def sharing(degrees: Degrees, group: Group) -> int:
    """Ranks that share out a group's gradients and optimizer."""
    if group == "experts":
        return degrees.stage_ranks // degrees.expert
    return degrees.data


def _total(memory: Memory) -> int:
    return memory.total


def _no_elements() -> _Groups:
    return {group: _Elements() for group in GROUPS}


def _group(parameter: Parameter) -> Group:
    """Optimizer group, as `engines/optim.py` makes them."""
    if parameter.part == "experts":
        return "experts"
    return "matrices" if len(parameter.shape) > 1 else "vectors"


# Read by every tensor rank whole: what is not of heads, inner features or vocabulary rows.
_REPLICATED = ("_norm.weight", "mixer.mu_", "_down", "ffn_shift.mu", "router.weight")


def _elements(parameter: Parameter) -> _Elements:
    replicated = any(part in parameter.name for part in _REPLICATED)
    if replicated and "group_norm" not in parameter.name:
        return _Elements(whole=parameter.num_elements)
    return _Elements(split=parameter.num_elements)


def _padded(elements: int, ranks: int) -> int:
    """Length of DeepSpeed's flat buffer: a multiple of two elements for each rank."""
    return -(-elements // (2 * ranks)) * 2 * ranks


def _overlapped(ends: list[int], start: int, stop: int) -> int:
    """Elements of the parameters that [start, stop) of a flat buffer overlaps."""
    total = ends[-1]
    if start >= total:
        return 0
    first = bisect_right(ends, start)
    last = bisect_left(ends, min(stop, total))
    return ends[last] - (ends[first - 1] if first else 0)
