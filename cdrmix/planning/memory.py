"""Bytes per rank by part: weights, gradients, optimizer, activations, buffers.

Weights, gradients and optimizer states are those that DeepSpeed 0.19.8 allocates, read off
runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py; tests/parity/test_memory.py finds them
equal to the byte:

* each parameter group is one flat buffer, padded to twice the number of ranks that partition it;
* masters, mean and square, or Muon's momentum, are float32 and partitioned, also where weights
  are float32 already; so is the average of the weights (optimizers/average.py), where one is kept;
* bf16 with float32 accumulation under ZeRO-1 uses BF16_Optimizer: float32 gradients of all
  parameters on every rank, into which those of the backward pass go one by one;
* under ZeRO-2 it has a float32 partition; without a separate accumulation type it stores every
  gradient that its partition overlaps, whole.

ZeRO-3 and offloading are read off runtime/zero/stage3.py and partitioned_param_coordinator.py.
tests/parity/test_stage_memory.py compares pipeline stages with a run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Literal

from cdrmix.config.schema import Config
from cdrmix.planning.activations import SavedActivations
from cdrmix.planning.blocks.block_type import WKVForm
from cdrmix.planning.blocks.feed_forward import feed_forward_workspace, linears
from cdrmix.planning.cluster import GIB, Memory
from cdrmix.planning.counts import further_parameters, parameters
from cdrmix.planning.folder_activations import FolderActivations
from cdrmix.planning.folder_model import folder_model
from cdrmix.planning.layout import GROUPS, Degrees, Group, Layout
from cdrmix.planning.muon import (
    ROUND_ELEMENTS,
    WORKING_BYTES,
    matrices_of,
    neuron_bytes,
    takes_muon,
)
from cdrmix.planning.plugins import optimizer_of, terms_of
from cdrmix.planning.stages import boundary_values

# Bytes of a chunk of logits, and of one logit in it: as in objectives/language_model.py.
LOGITS_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
LOGIT_BYTES = 8
# Allowances, not measured on a GPU yet: blocks that the caching allocator cannot reuse, as a share
# of what is allocated and freed in each step, and CUDA context and communicators outside torch.
FRAGMENTED_SHARE = 0.05
CONTEXT_BYTES = GIB
# DeepSpeed's defaults for ZeRO-3 (elements), which no shipped profile changes.
PERSISTENT_ELEMENTS = 100_000  # parameters up to this size stay whole between steps
REUSE_DISTANCE = 1_000_000_000  # a parameter read again within this many stays gathered
PREFETCH_ELEMENTS = 50_000_000
SUB_GROUP_ELEMENTS = 1_000_000_000


class MemoryModel:
    """Memory estimates for one configuration; results that no layout changes are cached.

    `wkv` is the form of the WKV-7 op; by default that of a machine with all kernels installed.
    """

    def __init__(
        self, config: Config, device: Literal["cuda", "cpu"], *, wkv: WKVForm | None = None
    ) -> None:
        self.config = config
        self.model = config.model
        self.device = device
        self.activations: SavedActivations | FolderActivations
        if config.model.kind == "hf":
            self.activations = FolderActivations(config, device)
        else:
            self.activations = SavedActivations(config, device, wkv)
        self.stages = self.activations.stages
        self.element_bytes = self.activations.element_bytes
        self._is_bf16 = config.training.precision == "bf16"
        # group, elements, True if they are split over ranks: in the order of the model
        self._parameters: list[tuple[Group, int, bool]] = []
        self._frozen: list[int] = []  # elements of each parameter beside the adapters
        self._of_user = optimizer_of(config.optimizer)
        self._terms = [term for _, term in terms_of(config.objectives)]
        self._of_muon: dict[Group, int] = {}  # elements of the largest matrix
        experts = Counter[int | None]()  # elements by layer
        # elements of the largest parameter, as a search looks at thousands of layouts
        self._largest_of = Counter[tuple[Group, bool]]()
        # elements by group, whole or split; by block, or by name outside the blocks
        self._parts: dict[int | str, Counter[tuple[Group, bool]]] = defaultdict(Counter)
        # elements of each layer's mixer, whole or split
        self._mixers: dict[int, Counter[bool]] = defaultdict(Counter)
        for parameter in parameters(config.model):
            if parameter.part == "experts":
                experts[parameter.layer] += parameter.num_elements
            if not parameter.is_trained:
                self._frozen.append(parameter.num_elements)
                continue
            # as `optimizers/adamw.py` groups them, or `optimizers/groups.py`
            is_muon = takes_muon(parameter, config.optimizer)
            is_matrix = is_muon if config.optimizer.kind == "muon" else len(parameter.shape) > 1
            group: Group = "matrices" if is_matrix else "vectors"
            if parameter.part == "experts" and config.model.has_deepspeed_experts:
                group = "experts"
            if is_muon:
                _, rows, columns = matrices_of(parameter)
                self._of_muon[group] = max(rows * columns, self._of_muon.get(group, 0))
            is_split = parameter.cut is not None
            self._parameters.append((group, parameter.num_elements, is_split))
            largest = max(parameter.num_elements, self._largest_of[group, is_split])
            self._largest_of[group, is_split] = largest
            key = parameter.name if parameter.layer is None else parameter.layer
            self._parts[key][group, is_split] += parameter.num_elements
            if parameter.layer is not None and ".mixer." in parameter.name:
                self._mixers[parameter.layer][is_split] += parameter.num_elements
        # those of a layer are one module, whose parameters ZeRO-3 gathers at once
        self._packed_experts = max(experts.values(), default=0)
        self._elements_of = cache(self._sum_of_parts)
        self._held_of = cache(self._held)
        self._crossing = cache(self._values_crossing)
        self._gradients_of = cache(self._block_gradients)
        self._workspace_of = cache(self._workspace)

    def estimate(
        self, layout: Layout, *, has_copy: bool | None = None, has_memory_tier: bool = True
    ) -> Memory:
        """Bytes on the fullest rank.

        The first and last stage hold the embedding, earlier stages hold more micro-batches, and the
        first of those with most blocks holds the most weights: one of them is the fullest. The copy
        of a checkpoint counts if `has_copy`; None: unless checkpoint.background is false. So do the
        checkpoints of checkpoint.tiers.memory if `has_memory_tier`.
        """
        sizes = [len(stage) for stage in self.stages(layout.degrees.pipeline)]
        stages = {0, min(1, len(sizes) - 1), sizes.index(max(sizes)), len(sizes) - 1}
        memories = (
            self.on_stage(layout, stage, has_copy=has_copy, has_memory_tier=has_memory_tier)
            for stage in sorted(stages)
        )
        return max(memories, key=lambda memory: memory.total)

    def on_stage(
        self,
        layout: Layout,
        stage: int,
        *,
        has_copy: bool | None = None,
        has_memory_tier: bool = True,
    ) -> Memory:
        """Bytes on a rank of one pipeline stage; the others as in `estimate`."""
        degrees = layout.degrees
        states = self._states(layout, stage)
        activations = self.activations.on_stage(layout, stage)
        if stage == degrees.pipeline - 1:
            activations += self._of_terms(layout)
        buffers = self._buffers(layout, stage, activations)
        steps = layout.gradient_accumulation_steps
        if layout.zero_stage == 2 and not self._is_bf16 and steps > 1:
            # DeepSpeed collects a micro-step's gradients before it adds them to the earlier ones
            buffers["gradients_of_a_micro_step"] = states.gradients
        memory = replace(states, activations=activations, buffers=buffers)
        if has_copy is None:
            has_copy = self.config.checkpoint.background is not False
        copies, kept = self._checkpoints_in_memory(has_copy, has_memory_tier)
        if not copies and not kept:
            return memory
        if layout.zero_stage == 3:
            shares = [(g, -(-elements // degrees.data)) for g, elements, _ in self._parameters]
        else:
            held = self.held(degrees, stage)
            shares = [(group, -(-n // degrees.optimizer_ranks(group))) for group, n in held.items()]
        copied = sum(self._state_bytes(group, n, partitions=0) for group, n in shares)
        if self.device == "cuda":
            return replace(memory, checkpoint=copies * copied, memory_tier=kept * copied)
        parts = {"checkpoint_copy": copies * copied, "memory_tier": kept * copied}
        return replace(memory, buffers=buffers | {k: size for k, size in parts.items() if size})

    def _checkpoints_in_memory(self, has_copy: bool, has_memory_tier: bool) -> tuple[int, int]:
        """Copies to write checkpoints from, and checkpoints in the memory tier (counts)."""
        tiers = self.config.checkpoint.tiers
        if tiers is None or (tiers.memory is None and tiers.local is None):
            return int(has_copy), 0
        # The run directory may still be written when a host's tiers have their next save, and the
        # newest checkpoint is whole before an older one goes.
        kept = 1 + tiers.memory.keep if tiers.memory is not None and has_memory_tier else 0
        return 2 * has_copy, kept

    def _of_terms(self, layout: Layout) -> int:
        """Bytes that a user's terms of the loss keep of a micro-batch."""
        size = self.element_bytes
        each = (term.saved_bytes_per_token(self.model, size) for term in self._terms)
        return int(sum(each) * self.activations.tokens(layout))

    def held(self, degrees: Degrees, stage: int) -> dict[Group, int]:
        """Elements of each group on a rank of a stage; the tied embedding is on both ends."""
        return self._held_of(degrees, stage)

    def _held(self, degrees: Degrees, stage: int) -> dict[Group, int]:
        elements = self._elements_of(degrees.pipeline, stage)
        held: dict[Group, int] = {}
        for group in GROUPS:
            split = -(-elements[group, True] // degrees.split_ranks(group))
            held[group] = elements[group, False] + split
        return {group: number for group, number in held.items() if number}

    def _sum_of_parts(self, pipeline: int, stage: int) -> Counter[tuple[Group, bool]]:
        if self.model.kind == "hf":  # whole on every rank
            return sum(self._parts.values(), Counter())
        keys: list[int | str] = list(self.stages(pipeline)[stage])
        if stage in (0, pipeline - 1):
            keys.append("embedding.weight")
        if stage == 0:
            keys.append("embedding_norm.weight")
        if stage == pipeline - 1:
            keys.append("final_norm.weight")
            keys += [parameter.name for parameter in further_parameters(self.model)]
        return sum((self._parts[key] for key in keys), Counter())

    def _sizes(self, degrees: Degrees, group: Group) -> list[int]:
        """Elements of each parameter of a group on a rank, in the order of the model."""
        ranks = degrees.split_ranks(group)
        return [
            -(-elements // ranks) if is_split else elements
            for of, elements, is_split in self._parameters
            if of == group
        ]

    def _largest(self, degrees: Degrees) -> int:
        """Elements of the largest parameter on a rank."""
        return max(
            -(-elements // degrees.split_ranks(group)) if is_split else elements
            for (group, is_split), elements in self._largest_of.items()
        )

    def _all_sizes(self) -> list[int]:
        """Elements of each parameter of the model, trained or frozen."""
        return [*(elements for _, elements, _ in self._parameters), *self._frozen]

    def _states(self, layout: Layout, stage: int) -> Memory:
        """Bytes of weights, gradients and optimizer."""
        if layout.zero_stage == 3:
            return self._zero3_states(layout)
        degrees = layout.degrees
        size = self.element_bytes
        held = self.held(degrees, stage)
        ranks = {group: degrees.optimizer_ranks(group) for group in held}
        # DeepSpeed pads a flat buffer to a multiple of two elements for each rank
        padded = {g: -(-n // (2 * ranks[g])) * 2 * ranks[g] for g, n in held.items()}
        parts = {group: n // ranks[group] for group, n in padded.items()}
        shared = sum(parts.values())
        optimizer = sum(self._state_bytes(g, n, partitions=1) for g, n in parts.items())
        optimizer += neuron_bytes(self.config, degrees, has_experts="experts" in held)
        weights = size * (sum(padded.values()) + sum(self._frozen))
        if layout.zero_stage == 1 and self._is_bf16:
            gradients = 4 * sum(padded.values())
        elif layout.zero_stage == 1:
            gradients = size * sum(held.values())
        elif self._is_bf16:
            gradients = 4 * shared
        else:
            gradients = size * self._overlapped(degrees, parts)
        if not layout.offloads_optimizer:
            return Memory(weights, gradients, optimizer)
        accumulated = 0
        if not self._is_bf16:  # bf16 sums in a float32 partition on the device
            gradients = 0
            if layout.gradient_accumulation_steps > 1:
                accumulated = self._overlapped(degrees, parts)
        host = optimizer + 4 * shared  # with float32 gradients
        # transfer buffers: updated weights, and one gradient
        host += size * (shared + self._largest(degrees) + accumulated)
        return Memory(weights, gradients, optimizer=0, host=host)

    def _state_bytes(self, group: Group, elements: int, *, partitions: int) -> int:
        """Bytes of masters and optimizer state of so many elements in flat partitions.

        float32 master and momentum of Muon; master, mean and square of AdamW, which counts its
        steps in a tensor of each partition; master and what an optimizer of a user's declares; and
        the average of the masters where one is kept.
        """
        average = 0 if self.config.training.ema_decay is None else 4 * elements
        if group in self._of_muon:
            return 8 * elements + average
        if self._of_user is not None:
            return 4 * elements + average + self._of_user.state_bytes(elements, partitions)
        return 12 * elements + average + 4 * partitions

    def _zero3_states(self, layout: Layout) -> Memory:
        """Bytes of weights, gradients and optimizer under ZeRO-3.

        Each parameter is partitioned by itself and padded to a multiple of the ranks. Small ones
        stay whole besides their partitions.
        """
        data = layout.degrees.data
        size = self.element_bytes
        frozen = sum(-(-elements // data) for elements in self._frozen)
        whole = sum(elements for elements in self._frozen if elements <= PERSISTENT_ELEMENTS)
        shared = optimizer = 0
        for group in GROUPS:
            # stepped one by one, each with a step count; closed as soon as large enough
            sub_groups = of_group = filled = 0
            for elements in self._sizes(Degrees(), group):
                partition = -(-elements // data)
                of_group += partition
                whole += elements if elements <= PERSISTENT_ELEMENTS else 0
                filled += partition
                if filled >= SUB_GROUP_ELEMENTS:
                    sub_groups += 1
                    filled = 0
            sub_groups += filled > 0
            shared += of_group
            optimizer += self._state_bytes(group, of_group, partitions=sub_groups)
        # the partition of a single rank is whole already
        weights = size * (shared + frozen + (whole if data > 1 else 0))
        gradients = (4 if self._is_bf16 else size) * shared
        has_experts = "experts" in self.held(layout.degrees, 0)
        optimizer += neuron_bytes(self.config, layout.degrees, has_experts=has_experts)
        host = 0
        if layout.offloads_optimizer:
            # float32 gradients for the optimizer, besides the accumulated ones
            host = gradients + 4 * shared + optimizer
            gradients = optimizer = 0
        if layout.offloads_parameters:
            host += size * (shared + frozen)
            # a single CPU rank offloads to the memory that it is in: nothing is copied
            weights = size * whole if data > 1 or self.device == "cuda" else 0
        return Memory(weights, gradients, optimizer, host=host)

    def gathered_by_zero3(self, *, recompute: bool) -> tuple[int, int]:
        """Elements that ZeRO-3 gathers on a rank in each micro-step, and in each step besides.

        A block's parameter is gathered for the forward pass, and again for the backward pass unless
        both uses are within the reuse distance: in between, the layers above are read twice, with
        recomputation three times. The embedding is read first and as the head, in the backward pass
        as the head and last; the two uses as the head follow each other. Small parameters stay
        whole, and are gathered once a step.
        """
        sizes = self._all_sizes()
        persistent = sum(n for n in sizes if n <= PERSISTENT_ELEMENTS)
        # an embedding beside a head of its own is read as another layer is
        is_tied = self.model.kind == "rwkx" or folder_model(self.model).is_tied
        embedding = self.model.vocab_size * self.model.hidden_size if is_tied else 0
        if embedding <= PERSISTENT_ELEMENTS:
            embedding = 0
        blocks = sum(sizes) - persistent - embedding
        reused = min(blocks, max(0, REUSE_DISTANCE // (3 if recompute else 2) - embedding))
        again = 2 * embedding if blocks >= REUSE_DISTANCE else 0
        return blocks + (blocks - reused) + embedding + again, persistent

    def _overlapped(self, degrees: Degrees, parts: dict[Group, int]) -> int:
        """Elements of all parameters that the fullest rank's partitions overlap.

        DeepSpeed flattens a group in the order of the model; both ranks at a partition boundary
        store the whole gradient of the parameter that lies across it.
        """
        # ends of each parameter in the flat buffer of its group
        ends = {group: list(accumulate(self._sizes(degrees, group))) for group in parts}
        # Partitions differ in the parameters that they cut. Which those are changes only where a
        # partition is the first to begin, or to end, behind the end of a parameter: of the ranks
        # between two such, thousands in a large cluster, one is looked at.
        ranks = {0}
        for group, size in parts.items():
            split = degrees.split_ranks(group)
            for limit in ends[group]:
                ranks |= {limit // size * split, -(-limit // size) * split}
        most = 0
        for rank in sorted(rank for rank in ranks if rank < degrees.stage_ranks):
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
        degrees = layout.degrees
        tokens = self.activations.tokens(layout)
        values = self._crossing(degrees.pipeline, degrees.tensor)
        return [self.element_bytes * tokens * each for each in values]

    def _values_crossing(self, pipeline: int, tensor: int) -> list[int]:
        """Values per token that cross each boundary; see `boundary_values`."""
        return boundary_values(self.model, self.stages(pipeline), tensor)

    def _buffers(self, layout: Layout, stage: int, activations: int) -> dict[str, int]:
        """Bytes that are allocated and freed within a step, by kind."""
        degrees = layout.degrees
        size = self.element_bytes
        tokens = self.activations.tokens(layout)
        buffers = {
            "gradient_buckets": self._buckets(layout, stage, activations),
            "workspace": self._workspace_of(layout.passes, stage),
        }
        if self._of_muon:
            buffers["newton_schulz"] = self._newton_schulz(layout, stage, activations)
        if stage == degrees.pipeline - 1:
            # in the backward pass the scaled gradient of the head, when the logits are gone
            buffers["logits"] = self.chunk_of_logits(tokens, degrees)
            if self.model.lora is None:
                matrix = self.model.vocab_size // degrees.tensor * self.model.hidden_size
                buffers["logits"] = max(buffers["logits"], size * matrix)
            if self.model.mtp is not None:  # what the head scores for all tokens ahead, stacked
                stream = size * self.model.hidden_size
                buffers["further_tokens"] = self.model.mtp.num_tokens * stream * tokens
        mask = self.activations.segment_mask(layout)
        if mask:  # booleans first, compared and cut to the lower triangle, a byte each
            buffers["segment_mask"] = 2 * mask // size
        moe = self.model.moe
        if degrees.expert > 1:
            assert moe is not None, "rules refuse expert parallelism of a dense model"
            assert isinstance(self.activations, SavedActivations), "and of Hugging Face models"
            # rows sent and received, and a layer's surplus if a rank's experts are in demand
            rows = moe.top_k * self.activations.spans(layout)[1] / degrees.tensor
            surplus = (moe.capacity_factor - 1) * self.activations.routed_row()
            per_row = 3 * self.model.hidden_size * size * moe.capacity_factor + surplus
            buffers["all_to_all"] = int(rows * per_row)
        if degrees.sequence > 1:  # the largest message of a mixer, sent and received
            assert isinstance(self.activations, SavedActivations), "rules refuse it of other models"
            largest = self.activations.largest_exchange(layout)
            buffers["sequence_exchange"] = 2 * largest // degrees.tensor
        if layout.zero_stage == 3:
            # the last layers of the forward pass stay gathered: the backward pass reads them soon
            sizes = self._all_sizes()
            largest = max(*sizes, self._packed_experts)
            most = REUSE_DISTANCE // 2 + PREFETCH_ELEMENTS + largest
            total = sum(elements for elements in sizes if elements > PERSISTENT_ELEMENTS)
            buffers["gathered_weights"] = size * min(total, most)
        elif layout.offloads_optimizer:  # one gradient in transfer to the host
            buffers["offloaded_gradient"] = size * self._largest(degrees)
        if degrees.pipeline > 1:  # for each micro-batch in flight, and for the one being sent
            before, after = self.boundaries(layout)[stage : stage + 2]
            in_flight = self.activations.in_flight(layout, stage)
            buffers["pipeline"] = (in_flight + 1) * (before + after)
        return buffers | self.allowances(activations + sum(buffers.values()))

    def allowances(self, moving: int) -> dict[str, int]:
        """Bytes that a GPU takes beside the `moving` ones, allocated and freed in each step."""
        if self.device == "cpu":
            return {}
        return {"fragmentation": int(FRAGMENTED_SHARE * moving), "context": CONTEXT_BYTES}

    def reduced_bytes(self, layout: Layout) -> int:
        """Bytes of an element of gradients while they are reduced."""
        return layout.reduced_bytes or self.element_bytes

    def _buckets(self, layout: Layout, stage: int, activations: int) -> int:
        """Bytes of DeepSpeed's gradient reduction, beyond the activations that are free by then."""
        size = self.reduced_bytes(layout)
        bucket = layout.bucket_elements
        held = self.held(layout.degrees, stage)
        ranks = {group: layout.degrees.optimizer_ranks(group) for group in held}
        if layout.zero_stage == 1 and self._is_bf16:
            # each group is cast in one piece after the last backward pass
            return max(0, size * max(held.values()) - activations)
        # allocated at the first gradient of a backward pass, while most activations are there
        total = size * bucket
        if layout.zero_stage == 2 and layout.overlaps_reduction:
            total *= 2  # one is filled while the other is reduced
        if layout.zero_stage >= 2 and max(ranks.values()) > 1:
            total += size * min(bucket, sum(held.values()))  # slices for one rank, flattened
        if not self._is_bf16:  # the step flattens a group's partition in float32
            largest = max(n // ranks[group] for group, n in held.items())
            # the pipeline engine allocates another bucket after the last backward pass
            again = size * bucket if layout.degrees.pipeline > 1 else 0
            total += max(0, 4 * largest + again - activations)
        return total

    def _newton_schulz(self, layout: Layout, stage: int, activations: int) -> int:
        """Bytes of a round of Newton-Schulz, beyond the activations that are free by then.

        An estimate: a round has a rank's share of a group, up to a limit, and a matrix at least.
        """
        degrees = layout.degrees
        held = self.held(degrees, stage)
        shares = {group: -(-n // degrees.optimizer_ranks(group)) for group, n in held.items()}
        elements = 0
        for group, matrix in self._of_muon.items():
            parts = 1 if group == "experts" else degrees.tensor  # of a matrix
            share = min(ROUND_ELEMENTS, shares.get(group, 0))
            elements = max(elements, share, matrix // parts)
        free = activations
        if not self._is_bf16:  # as `_buckets` counts them
            free -= 4 * max(shares.values())
        return max(0, WORKING_BYTES[self.device] * elements - max(0, free))

    def _workspace(self, layout: Layout, stage: int) -> int:
        """Bytes of temporary gradients: of one block's activations and its largest parameters."""
        if isinstance(self.activations, FolderActivations):
            return self.activations.workspace(layout) + self._largest_block()
        degrees = layout.degrees
        tokens = self.activations.tokens(layout)
        _, span = self.activations.spans(layout)
        setting = self.activations.setting
        feed_forward = feed_forward_workspace(setting)
        mixer = max(kind.workspace(setting) for kind in set(self.activations.types))
        # with sequence ranks, a mixer is recomputed over all tokens of the rank
        mixed = span if degrees.sequence == 1 else tokens
        passing = max(feed_forward * span, mixer * mixed) // degrees.tensor
        return passing + self.block_gradients(layout, stage)

    def block_gradients(self, layout: Layout, stage: int) -> int:
        """Bytes of the gradients of a block's largest parameters: of its feed-forward, or of its
        mixer, such as the experts of Routing Mamba. A frozen block has none."""
        degrees = layout.degrees
        return self._gradients_of(degrees.pipeline, degrees.tensor, degrees.expert, stage)

    def _block_gradients(self, pipeline: int, tensor: int, expert: int, stage: int) -> int:
        model = self.model
        dense = len(linears(model)) * model.hidden_size * model.ffn_hidden_size
        is_last = stage == pipeline - 1
        largest = dense if is_last and model.mtp is not None and model.mtp.has_blocks else 0
        for layer in self.stages(pipeline)[stage]:
            experts = -(-self._parts[layer]["experts", True] // expert)
            whole, split = (self._mixers[layer][is_split] for is_split in (False, True))
            largest = max(largest, experts or dense, whole + split // tensor)
        return self.element_bytes * largest

    def _largest_block(self) -> int:
        """Bytes of the gradients of the block with most trained parameters."""
        blocks = (sum(of.values()) for key, of in self._parts.items() if isinstance(key, int))
        return self.element_bytes * max(blocks, default=0)

    def chunk_of_logits(self, tokens: int, degrees: Degrees) -> int:
        """Bytes of the logits that exist at a time, with their softmax and gradient.

        They are of all `tokens`, or of as many as the budget of the device allows.
        """
        of_position = LOGIT_BYTES * (self.model.vocab_size // degrees.tensor)
        return of_position * min(tokens, max(1, LOGITS_BYTES[self.device] // of_position))
