"""Bytes of activations that autograd saves in a Hugging Face model, per token and per rank.

The figures follow the modules of transformers 5.23 operation by operation, as they run under its
sdpa attention and grouped_mm experts; a tensor that two operations save is counted once.
tests/parity/test_folder_memory.py compares them with torch's saved-tensor hooks. A block is stored
or recomputed whole. What only the
gradient of a frozen weight would read is left out.

Letters: D hidden, Q width of all query heads, F inner width, E experts, N state of Mamba-2.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec
from typing import Literal

from cdrmix.config.schema import Config
from cdrmix.planning.adapters import targets_of
from cdrmix.planning.counts import parameters, params_by_part
from cdrmix.planning.folder_model import FolderModel, Half, Mamba, folder_model
from cdrmix.planning.layout import ELEMENT_BYTES, Layout
from cdrmix.planning.stages import stage_layers

_FLOAT32 = 4
_INDEX = 8
# Of each row that is sent to an expert: its place before and after sorting, and its token, int64.
_ROW_INDICES = 3 * _INDEX


class FolderActivations:
    """Activation memory of one configuration of a Hugging Face model."""

    def __init__(self, config: Config, device: Literal["cuda", "cpu"]) -> None:
        self.model = config.model
        self.training = config.training
        self.device = device
        self.element_bytes = ELEMENT_BYTES[config.training.precision]
        self.found: FolderModel = folder_model(config.model)
        self._is_frozen = config.model.lora is not None
        self._segments_documents = config.data.segment_documents
        length = self.training.sequence_length
        self.stages = cache(partial(stage_layers, self.model, length))
        is_half = config.training.precision != "fp32"
        on_gpu = device == "cuda"
        # The kernels that a run on this machine would find.
        self._has_flash = on_gpu and is_half and find_spec("flash_attn") is not None
        kernels = ("mamba_ssm", "causal_conv1d")
        self._has_mamba_kernels = on_gpu and all(find_spec(name) for name in kernels)
        self._adapted = self._adapted_bytes()
        self._blocks = [sum(map(self._half, halves)) for halves in self.found.layers]

    def tokens(self, layout: Layout) -> int:
        """Tokens of a rank's micro-batch."""
        return layout.micro_batch_size * self.training.sequence_length

    def spans(self, layout: Layout) -> tuple[int, int]:
        """Number of spans in which a sample is recomputed, and their tokens: one of all."""
        return 1, self.tokens(layout)

    def in_flight(self, layout: Layout, stage: int) -> int:
        """Micro-batches whose activations are held at a time."""
        return 1

    def on_stage(self, layout: Layout, stage: int) -> int:
        """Bytes of a micro-batch in the blocks and around them."""
        stream = self.element_bytes * self.model.hidden_size
        tokens = self.tokens(layout)
        blocks = [self._of_block(layer, layout) for layer in range(len(self._blocks))]
        if layout.recomputes_blocks:
            # In float32 the norm of a block reads its input, which is counted already.
            twice = stream * tokens if self.element_bytes == _FLOAT32 else 0
            total = self.between_blocks(layout) + max(blocks) - twice
        else:
            total = sum(blocks)
        return int(total) + self.outside(layout)

    def of_forward(self, layout: Layout, stage: int) -> int:
        """Most bytes of a micro-batch in a forward pass without gradients, as of
        `SavedActivations.of_forward`."""
        blocks = [self._of_block(layer, layout) for layer in range(len(self._blocks))]
        around = 2 * self.element_bytes * self.model.hidden_size * self.tokens(layout)
        return int(max(blocks)) + around

    def saved_per_token(self, layer: int) -> float:
        """Bytes per token that a block saves, both halves with their norms."""
        return self._blocks[layer]

    def between_blocks(self, layout: Layout) -> int:
        """Bytes of a micro-batch that stay of blocks that are recomputed: their inputs, and the
        statistics of their routing."""
        stream = self.element_bytes * self.model.hidden_size
        of_routers = sum("moe" in halves for halves in self.found.layers) * self._statistics()
        return (len(self._blocks) * stream + of_routers) * self.tokens(layout)

    def outside(self, layout: Layout) -> int:
        """Bytes of a micro-batch outside the blocks: token ids, angles, last norm, and the loss,
        which forms the gradients of head and hidden states in its forward pass."""
        width = self.model.hidden_size
        stream = self.element_bytes * width
        total = (self._norm() + stream) * self.tokens(layout) + self.angles(layout)
        if not self._is_frozen:  # of a frozen embedding and head nothing is needed
            total += _INDEX * self.tokens(layout) + _FLOAT32 * self.model.vocab_size * width
        return int(total)

    def segment_mask(self, layout: Layout) -> int:
        """Bytes of the mask that separates the documents of a sample in one attention layer: [B, 1,
        T, T] in the type of the activations; FlashAttention needs none."""
        pairs = layout.micro_batch_size * self.training.sequence_length**2
        return self.element_bytes * pairs if self._is_masked else 0

    def workspace(self, layout: Layout) -> int:
        """Bytes of gradients that pass in the backward pass of the largest half of a block."""
        halves = {half for halves in self.found.layers for half in halves}
        passing = max(map(self._passing, halves)) * self.tokens(layout)
        # of experts with adapters, whose sum with them has a gradient of its own
        return int(passing) + (self._merged_experts() if "moe" in halves else 0)

    @property
    def _is_masked(self) -> bool:
        """True if attention reads a mask of documents."""
        return self._segments_documents and not self._has_flash

    def angles(self, layout: Layout) -> int:
        """Bytes of cosine and sine of all positions, which the layers share."""
        if self.found.family == "nemotron_h":  # has no rotary positions
            return 0
        rows = layout.micro_batch_size if self._segments_documents else 1
        positions = rows * self.training.sequence_length
        return 2 * self.element_bytes * self.model.head_dim * positions

    def _of_block(self, layer: int, layout: Layout) -> float:
        """Bytes of a micro-batch in one block."""
        total = self._blocks[layer] * self.tokens(layout)
        halves = self.found.layers[layer]
        if "attention" in halves:
            total += self.segment_mask(layout)
        if "mamba" in halves and not self._has_mamba_kernels:
            total += self._chunk_states() * layout.micro_batch_size
        if self._is_frozen:
            if layer == 0:  # nothing before the first adapter has a gradient
                total -= self._norm() * self.tokens(layout)
            if "moe" in halves:
                total += self._merged_experts()
        return total

    def _half(self, half: Half) -> float:
        """Bytes per token of one half of a block, with its norm and its input."""
        given = self._norm() + self.element_bytes * self.model.hidden_size
        if half == "attention":
            return given + self._attention() + self._adapted["attention"]
        if half == "mamba":
            return given + self._mamba() + self._adapted["mamba"]
        if half == "mlp":
            inner = self.model.ffn_hidden_size
            return given + self._feed_forward(inner) + self._adapted["mlp"]
        if self._is_frozen and not self.found.shared_inner:  # only the router reads the input
            given = self._norm()
        return given + self._experts() + self._adapted["moe"]

    def _norm(self) -> float:
        """Bytes per token of an RMSNorm: input and a number in float32, and the normed value."""
        width = self.model.hidden_size
        normed = _FLOAT32 if self.found.family == "nemotron_h" else self.element_bytes
        return _FLOAT32 * (width + 1) + (0 if self._is_frozen else normed * width)

    def _attention(self) -> float:
        size, query = self.element_bytes, self.found.query_width
        heads, kv_heads = self.model.num_heads, self.model.num_kv_heads
        # with a mask, sdpa reads keys and values repeated for each query head; of one head they
        # are views
        kv = query if self._is_masked and kv_heads > 1 else self.found.kv_width
        total = size * (2 * query + 2 * kv) + _FLOAT32 * heads
        if self.found.has_normed_heads:
            normed = _FLOAT32 + (0 if self._is_frozen else size)
            total += normed * (query + self.found.kv_width) + _FLOAT32 * (heads + kv_heads)
        return total

    def _feed_forward(self, inner: int) -> float:
        # gate, its activation, up, their product; without a gate: activation and its square
        return self.element_bytes * inner * (4 if self.found.is_gated else 2)

    def _experts(self) -> float:
        moe = self.model.moe
        assert moe is not None, "a model without experts has no such layer"
        size, width = self.element_bytes, self.found.latent or self.model.hidden_size
        # of a row: input, inner activations, output, weight, indices
        row = 2 * size * width + self._feed_forward(self.found.expert_inner)
        row += _FLOAT32 + _ROW_INDICES
        total = moe.top_k * (row + _FLOAT32 + _INDEX)
        total += _FLOAT32 * (moe.num_experts + 1) + self._statistics()
        if self.found.shared_inner:
            total += self._feed_forward(self.found.shared_inner)
        if self.found.latent:
            total += size * width
        if self.found.family == "nemotron_h":
            total += moe.top_k * _INDEX + _INDEX + moe.num_experts
            if size != _FLOAT32 and not self._is_frozen:
                total += _FLOAT32 * self.model.hidden_size  # the router reads a copy
        return total

    def _statistics(self) -> int:
        """Bytes per token of the losses of a router, scores and probabilities; 0 without one."""
        if self.model.moe is None:
            return 0
        return _FLOAT32 * (2 * self.model.moe.num_experts + 1)

    def _mamba(self) -> float:
        """Bytes per token of a Mamba-2 mixer, by transformers' own code or by its kernels."""
        sizes = self._mamba_sizes()
        size, inner, heads = self.element_bytes, sizes.inner, sizes.num_heads
        saved = size * (inner + sizes.convolved + heads)  # output of the input projection
        saved += _FLOAT32 * sizes.num_groups  # of the gated norm
        if self._has_mamba_kernels:  # which recompute the rest
            return saved + size * inner
        is_single = size == _FLOAT32
        # Output of the convolution before its activation, and after it in float32: of the inputs
        # alone, unless it is float32 already.
        saved += size * sizes.convolved
        wide = sizes.convolved if is_single else inner
        # Output, gate and its activation, what is normed; the gate is a copy unless it is float32.
        wide += 3 * inner if is_single else 4 * inner
        # Y off the diagonal, and two copies of the input times its step, for Y and for states.
        wide += 3 * inner
        if not self._is_frozen:  # inputs of D, the norm's weight, A, the output projection
            wide += 2 * inner + (0 if is_single else heads)
            saved += size * inner
        # Decays within a chunk, scores, their product; C twice, B twice, and B with its decay.
        chunked: float = 3 * heads * sizes.chunk + 5 * heads * sizes.state_size
        chunked += inner * sizes.state_size / sizes.chunk
        # Steps before and after two functions, and in float32; decays from and to a chunk's ends.
        return saved + 2 * size * heads + _FLOAT32 * (3 * heads + wide + chunked)

    def _chunk_states(self) -> float:
        """Bytes of a sample in a Mamba-2 mixer that do not grow with its tokens alone: the states
        of all chunks and one more, and the decay between each two of them."""
        sizes = self._mamba_sizes()
        chunks = -(-self.training.sequence_length // sizes.chunk) + 1
        decays = sizes.num_heads * chunks**2
        return _FLOAT32 * (sizes.inner * sizes.state_size * chunks + decays)

    def _mamba_sizes(self) -> Mamba:
        assert self.found.mamba is not None, "only Nemotron-H has Mamba mixers"
        return self.found.mamba

    def _passing(self, half: Half) -> float:
        """Bytes per token of the gradients of a half of a block while they pass."""
        size, width = self.element_bytes, self.model.hidden_size
        if half == "attention":
            return size * (width + 3 * self.found.query_width + 2 * self.found.kv_width)
        if half == "mamba":
            return self._mamba() / 2
        if half == "mlp":
            return self._feed_forward(self.model.ffn_hidden_size)
        assert self.model.moe is not None, "a model without experts has no such layer"
        row = 2 * size * width + self._feed_forward(self.found.expert_inner)
        return self.model.moe.top_k * row

    def _merged_experts(self) -> int:
        """Bytes of the experts of a layer with their adapters added, which peft makes anew."""
        lora = self.model.lora
        if lora is None or not targets_of(self.model, lora).parameters:
            return 0
        layers = sum("moe" in halves for halves in self.found.layers)
        return self.element_bytes * params_by_part(self.model)["experts"] // layers

    def _adapted_bytes(self) -> dict[Half, float]:
        """Bytes per token of what lies between the factors of the adapters of each half."""
        found: dict[Half, float] = {"attention": 0.0, "mamba": 0.0, "mlp": 0.0, "moe": 0.0}
        if self.model.lora is None:
            return found
        of_layer: dict[tuple[int, Half], float] = {}
        for parameter in parameters(self.model):
            if not parameter.name.endswith("lora_A.weight") or parameter.layer is None:
                continue
            if ".experts." in parameter.name:  # their adapters are applied to weights
                continue
            half = self._half_of(parameter.name, parameter.layer)
            key = parameter.layer, half
            rank = parameter.shape[0]
            of_layer[key] = of_layer.get(key, 0.0) + self.element_bytes * rank
        for (_, half), size in of_layer.items():
            found[half] = max(found[half], size)
        return found

    def _half_of(self, name: str, layer: int) -> Half:
        """Half of a block that a parameter belongs to."""
        halves = self.found.layers[layer]
        if len(halves) == 1:
            return halves[0]
        return halves[0] if ".self_attn." in name else halves[1]
