"""Mamba and Routing Mamba as block types, under the names `mamba` and `routing_mamba`.

Letters: D hidden, I inner features, N states of a feature, R rank of the time step, K taps of the
convolution, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.model import ModelConfig
from cdrmix.config.model_parts import MambaConfig, RoutingMambaConfig
from cdrmix.planning.blocks.block_type import (
    FLOAT32_BYTES,
    BlockType,
    Moved,
    PerToken,
    SequenceForm,
    Setting,
    rebuilt_norm,
)
from cdrmix.planning.layout import Layout
from cdrmix.planning.parameter import Parameter

# Tokens between the states that the chunked scan saves: CHUNK_TOKENS in models/selective_scan.py.
SCAN_CHUNK_TOKENS = 16


def mamba_sizes(model: ModelConfig) -> MambaConfig:
    """Sizes of the Mamba mixers of a model that has some."""
    assert model.mamba is not None, "filled in where there are such layers"
    return model.mamba


class MambaBlock(BlockType):
    """Mamba-1: a convolution and a selective scan, between two projections in and one out.

    Activations are those of the chunked scan. mamba-ssm's kernels save two tensors of I more and no
    states: in 16 bits and with 16 states the same number of bytes.
    """

    module = "cdrmix.models.mamba:Mamba"
    carries_state = True
    refused_axes = {
        "tensor": "its projections to time steps and states read all inner features, which tensor "
        "ranks would have to exchange",
        "sequence": "the states of its scan are not handed from one sequence rank to the next",
    }

    def parameters(self, model: ModelConfig, layer: int) -> Iterator[Parameter]:
        """Parameters in the order of the module: vectors, then matrices of D x I, then others.

        Convolution and rates are stored flat, as vectors, because optimizers go by the shape.
        """
        sizes = mamba_sizes(model)
        inner = sizes.expand * model.hidden_size
        rank = sizes.rank(model.hidden_size)
        vectors = {
            "conv_weight": inner * sizes.conv_size,
            "conv_bias": inner,
            "dt_bias": inner,
            "a_log": inner * sizes.state_size,
            "d": inner,
        }
        for name, size in vectors.items():
            yield Parameter(f"mixer.{name}", (size,), "mamba")
        yield from self._projections(model)
        selected = rank + 2 * sizes.state_size
        yield Parameter("mixer.x_proj.weight", (selected, inner), "mamba")
        yield Parameter("mixer.dt_proj.weight", (inner, rank), "low_rank")

    def _projections(self, model: ModelConfig) -> Iterator[Parameter]:
        """Projections into and out of the inner features, in the order of the module."""
        width, inner = model.hidden_size, mamba_sizes(model).expand * model.hidden_size
        yield Parameter("mixer.input.weight", (inner, width), "mamba")
        yield Parameter("mixer.gate.weight", (inner, width), "mamba")
        yield Parameter("mixer.output.weight", (width, inner), "mamba")

    def mixing_flops(self, model: ModelConfig, sequence_length: int) -> int:
        """2 K I of the convolution and 6 I N of the scan: for each state of a feature a product for
        its decay, one for what enters, two operations for the update, two for what is read.
        Exponentials are not counted."""
        sizes = mamba_sizes(model)
        of_feature = 2 * sizes.conv_size + 6 * sizes.state_size
        return of_feature * sizes.expand * model.hidden_size

    def saved(self, setting: Setting, layer: int, form: SequenceForm) -> PerToken:
        """Input, output of the scan, and what `_saved_inside` counts."""
        model = setting.model
        inner = mamba_sizes(model).expand * model.hidden_size
        ends = setting.element_bytes * (model.hidden_size + inner)
        return PerToken(ends + self._saved_inside(setting))

    def kept(self, setting: Setting, layer: int, form: SequenceForm) -> PerToken:
        """All but the input and the convolved features."""
        inner = mamba_sizes(setting.model).expand * setting.model.hidden_size
        most = super().kept(setting, layer, form)
        return PerToken(most.whole - setting.element_bytes * inner, most.split)

    def rebuilt(self, setting: Setting, layer: int, form: SequenceForm) -> tuple[PerToken, ...]:
        """The convolved features, or the input."""
        inner = mamba_sizes(setting.model).expand * setting.model.hidden_size
        return rebuilt_norm(setting), PerToken(setting.element_bytes * inner)

    def _saved_inside(self, setting: Setting) -> float:
        """Bytes of what enters, the convolved, the time step and the gate, I each, of R + 2 N
        selected features, and of one set of states for each chunk, in float32."""
        model = setting.model
        sizes = mamba_sizes(model)
        inner = sizes.expand * model.hidden_size
        selected = sizes.rank(model.hidden_size) + 2 * sizes.state_size
        chunks = -(-setting.sequence_length // SCAN_CHUNK_TOKENS)
        states = FLOAT32_BYTES * sizes.state_size * inner * chunks / setting.sequence_length
        return setting.element_bytes * (4 * inner + selected) + states

    def saved_per_sample(self, setting: Setting, layout: Layout, form: SequenceForm) -> float:
        """Rates and their exponentials, float32, once a micro-batch."""
        sizes = mamba_sizes(setting.model)
        rates = sizes.expand * setting.model.hidden_size * sizes.state_size
        return 2 * FLOAT32_BYTES * rates

    def span_state(self, setting: Setting) -> PerToken:
        """Last K - 1 inputs of the convolution, and N states of a feature in float32."""
        sizes = mamba_sizes(setting.model)
        window = (sizes.conv_size - 1) * setting.element_bytes
        of_feature = window + FLOAT32_BYTES * sizes.state_size
        return PerToken(of_feature * sizes.expand * setting.model.hidden_size)

    def moved(self, setting: Setting, layer: int, form: SequenceForm) -> Moved:
        """Convolution, splits and casts operator by operator, and the scan as one kernel."""
        size, width = setting.element_bytes, setting.model.hidden_size
        forward, backward = self._moved_inside(setting)
        kernels = (25, 57) if size < FLOAT32_BYTES else (14, 46)
        if setting.is_compiled:
            kernels = (9, 19)
        return Moved(PerToken(size * forward), PerToken(size * (backward + 3 * width)), *kernels)

    def _moved_inside(self, setting: Setting) -> tuple[float, float]:
        """Elements per token of the inner features that are moved, forward and backward."""
        sizes = mamba_sizes(setting.model)
        inner = sizes.expand * setting.model.hidden_size
        if setting.is_compiled:  # as torch 2.13's inductor schedules it, with 16 states
            return 10.5 * inner, 46 * inner
        # the convolution sums its taps in float32
        forward, backward = (53, 145) if setting.element_bytes < FLOAT32_BYTES else (22, 76)
        return forward * inner + 4 * sizes.state_size, backward * inner + 10 * sizes.state_size

    def workspace(self, setting: Setting) -> int:
        """Gradients of the four tensors that the scan reads, of its output and of the convolved."""
        model = setting.model
        return 6 * mamba_sizes(model).expand * model.hidden_size * setting.element_bytes


class RoutingMambaBlock(MambaBlock):
    """Mamba with experts for its projections into and out of the inner features.

    Each rank holds all experts and applies them to its tokens, so they are ordinary parameters and
    no expert group of DeepSpeed's knows them.
    """

    module = "cdrmix.models.mamba:RoutingMamba"

    def router_sizes(self, model: ModelConfig) -> RoutingMambaConfig:
        """Sizes of the router of a mixer."""
        assert model.routing_mamba is not None, "filled in where there are such layers"
        return model.routing_mamba

    def _projections(self, model: ModelConfig) -> Iterator[Parameter]:
        width, inner = model.hidden_size, mamba_sizes(model).expand * model.hidden_size
        experts = self.router_sizes(model).num_experts
        yield Parameter("mixer.inputs", (experts, inner, width), "mamba_experts")
        yield Parameter("mixer.gates", (experts, inner, width), "mamba_experts")
        yield Parameter("mixer.outputs", (experts, width, inner), "mamba_experts")
        yield Parameter("mixer.router.weight", (experts, width), "router")

    def saved(self, setting: Setting, layer: int, form: SequenceForm) -> PerToken:
        """Tokens sorted by expert before both projections and behind the last one; and the
        router's: input, float32 logits and probabilities, and indices."""
        model = setting.model
        sizes = self.router_sizes(model)
        width = model.hidden_size
        inner = mamba_sizes(model).expand * width
        rows = setting.element_bytes * sizes.top_k * (2 * width + inner)
        router = setting.element_bytes * width + 8 * sizes.num_experts + 4 + 36 * sizes.top_k
        return PerToken(rows + router + self._saved_inside(setting))

    def moved(self, setting: Setting, layer: int, form: SequenceForm) -> Moved:
        """As of Mamba; and router, sorting and sums of choices around three grouped products."""
        size, width = setting.element_bytes, setting.model.hidden_size
        chosen = self.router_sizes(setting.model).top_k
        inner = mamba_sizes(setting.model).expand * width
        forward, backward = self._moved_inside(setting)
        if setting.is_compiled:
            forward += (6 * chosen + 7) * width
            backward += (9 * chosen + 10) * width
            return Moved(PerToken(size * forward), PerToken(size * backward), 32, 30)
        if setting.runs_triton:
            forward += (3 * chosen + 1) * width + (12 * chosen - 6) * inner
            backward += (4 * chosen + 10) * width + 6 * chosen * inner
        else:
            forward += (7 * chosen + 2) * width + (12 * chosen - 6) * inner
            backward += (15 * chosen + 4) * width + (9 * chosen - 3) * inner
        return Moved(PerToken(size * forward), PerToken(size * backward), 70, 90)

    def kept(self, setting: Setting, layer: int, form: SequenceForm) -> PerToken:
        """Counts results of the scan in place of its rows by expert, and no rows of the input."""
        model = setting.model
        sizes = self.router_sizes(model)
        inner = mamba_sizes(model).expand * model.hidden_size
        rows = setting.element_bytes * sizes.top_k * (model.hidden_size + inner)
        less = rows + setting.element_bytes * model.hidden_size  # and the input of the router
        return PerToken(self.saved(setting, layer, form).whole - less)

    def rebuilt(self, setting: Setting, layer: int, form: SequenceForm) -> tuple[PerToken, ...]:
        """Rows by expert of what the scan gives, or of the input."""
        model = setting.model
        sizes = self.router_sizes(model)
        inner = mamba_sizes(model).expand * model.hidden_size
        size = setting.element_bytes
        entering = rebuilt_norm(setting) + PerToken(size * sizes.top_k * model.hidden_size)
        return entering, PerToken(size * sizes.top_k * inner)
