"""RWKV-7 as a block type, under the name `rwkv`: time mixing, and a shift before the feed-forward.

Sequence ranks exchange data for the recurrence in one of two forms:

heads   r, lw, k, v, a, b there and y back, in their own types (lw is float32)
state   each rank runs its own tokens and computes their contribution to the state and the map that
        they apply to the entering one: [V + K, K] a head, float32, gathered by all ranks; the
        recurrence runs over V + K values a head instead of V
"""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.model import ModelConfig
from cdrmix.planning.blocks.block_type import (
    FLOAT32_BYTES,
    BlockType,
    PerToken,
    SequenceForm,
    Setting,
    is_v_first_made,
)
from cdrmix.planning.layout import Layout
from cdrmix.planning.parameter import Parameter

# Tokens between the states that the C++ recurrence stores: TILE in models/wkv7_cpu.cpp.
CPP_TILE_TOKENS = 32
# bytes per token and feature that fla's backward recomputes (fla/ops/generalized_delta_rule/dplr:
# four scaled inputs and their gradients, cumulated decays in float32, states of chunks of 64)
_FLA_WORKSPACE = 32


class RWKVBlock(BlockType):
    """RWKV-7 time mixing; the first block of all makes v_first."""

    module = "cdrmix.models.rwkv7:TimeMix"
    shifts_channels = True
    passes_v_first = True
    carries_state = True
    adapted = ("receptance", "key", "value")

    def parameters(self, model: ModelConfig, layer: int) -> Iterator[Parameter]:
        """Mixes, low-rank paths, vectors over heads, four matrices and the group norm."""
        width = model.hidden_size
        ranks = model.low_rank_sizes()
        for name in ("mu_r", "mu_w", "mu_k", "mu_v", "mu_a", "mu_g"):
            yield Parameter(f"mixer.{name}", (width,), "time_mix", is_partial=True)
        low_rank = {"decay": ranks.decay, "iclr": ranks.iclr, "value": ranks.value}
        if not is_v_first_made(model, layer):  # no path that mixes v_first in
            del low_rank["value"]
        for name, rank in {**low_rank, "gate": ranks.gate}.items():
            if name != "gate":
                yield Parameter(f"mixer.{name}_bias", (width,), "low_rank", cut=0)
            yield Parameter(f"mixer.{name}_down", (width, rank), "low_rank", is_partial=True)
            yield Parameter(f"mixer.{name}_up", (rank, width), "low_rank", cut=1)
        for name in ("k_k", "k_a", "r_k"):
            yield Parameter(f"mixer.{name}", (width,), "time_mix", cut=0)
        for name in ("receptance", "key", "value"):
            yield Parameter(f"mixer.{name}.weight", (width, width), "time_mix", cut=0)
        yield Parameter("mixer.output.weight", (width, width), "time_mix", cut=1)
        # one group is one head, so a cut leaves each group's mean and variance as they were
        for name in ("weight", "bias"):
            yield Parameter(f"mixer.group_norm.{name}", (width,), "norms", cut=0)

    def mixing_flops(self, model: ModelConfig, sequence_length: int) -> int:
        """9 D N for the recurrence with heads of N, independent of the kernel: for each element of
        a state a product for its decay, two operations each for what is replaced, for putting that
        back, for the new value and for what is read."""
        return 9 * model.hidden_size * model.head_dim

    def saved(self, setting: Setting, layer: int, form: SequenceForm) -> PerToken:
        """Inputs of the projections, and what the op and its surroundings save of each head."""
        model = setting.model
        size = setting.element_bytes
        width = model.hidden_size
        heads = model.num_heads
        ranks = model.low_rank_sizes()
        makes_v_first = not is_v_first_made(model, layer)
        hidden_ranks = ranks.decay + ranks.iclr + ranks.gate + (0 if makes_v_first else ranks.value)
        # x, and the six mixes that the projections read
        whole = size * (7 * width + hidden_ranks)
        # v before the mix, and its share of v_first
        per_head = 0 if makes_v_first else size * 2 * width
        if setting.fuses_pointwise:  # k, decay, iclr; y, gate, output
            return PerToken(whole, per_head + size * 6 * width + _saved_by_op(setting, form))
        whole += size * width  # the shift of x
        # k, kk, k * k_a, iclr - 1, iclr; y, r * k, y + bonus, gate, their product
        per_head += size * 10 * width
        per_head += 4 * 2 * width  # sigmoid of the decay and k * k_k, float32
        per_head += 4 * 2 * heads + size * 3 * heads  # two norms of k; mean, deviation of y, bonus
        return PerToken(whole, per_head + _saved_by_op(setting, form))

    def saved_per_sample(self, setting: Setting, layout: Layout, form: SequenceForm) -> float:
        """States that are combined over sequence ranks: those entering each rank, the stacked ones,
        and the gathered ones where they are read."""
        if form != "state":
            return 0.0
        model = setting.model
        sequence = layout.degrees.sequence
        state = 4 * model.head_dim * model.hidden_size
        gathered = 2 * sequence * state if sequence > 2 else 0  # of two ranks, the first adds to 0
        stacked = sequence * state
        if setting.element_bytes < 4:  # the op reads the state in the type of the activations
            stacked = setting.element_bytes * model.head_dim * model.hidden_size
        states = (sequence - 1) * state + stacked + gathered
        return states * layout.micro_batch_size / layout.degrees.tensor

    def span_state(self, setting: Setting) -> PerToken:
        """The recurrent state in float32 and the last input of both halves."""
        model = setting.model
        last = 2 * setting.element_bytes * model.hidden_size
        return PerToken(last, 4 * model.head_dim * model.hidden_size)

    def workspace(self, setting: Setting) -> int:
        """Six mixes and the mixer's input, and what fla's kernel recomputes."""
        recomputed = _FLA_WORKSPACE * setting.model.hidden_size if setting.wkv == "fla" else 0
        return super().workspace(setting) + recomputed

    def heads_bytes(self, model: ModelConfig, tokens: int, element_bytes: int) -> int:
        """Six tensors in the type of the activations and the decay in float32."""
        return tokens * model.hidden_size * (6 * element_bytes + FLOAT32_BYTES)

    def states_bytes(self, model: ModelConfig, samples: int, sequence: int) -> int:
        """Contribution and map of every rank's tokens."""
        return sequence * samples * 2 * model.head_dim * model.hidden_size * FLOAT32_BYTES

    def state_form_flops(self, model: ModelConfig) -> int:
        """The op over K values more, and the entering state added to y."""
        return 11 * model.hidden_size * model.head_dim

    def halo_values(self, model: ModelConfig) -> int:
        """The token before the first one, for both shifts."""
        return 2 * model.hidden_size


def _saved_by_op(setting: Setting, form: SequenceForm) -> float:
    """Bytes per token of the WKV-7 op: its inputs, and the states that its implementation saves."""
    model = setting.model
    size = setting.element_bytes
    width = model.hidden_size
    values = 2 if form == "state" else 1  # V + K values a head in place of V
    # r, k and v are saved for the bonus as well: number of them that the op reads in a copy
    apart = {"whole": 0, "heads": 3, "state": 1}[form]
    passing = size * width if form == "state" else 0  # receptance, to apply the entering state
    wkv: float = (4 + values + apart) * size * width + 4 * width + passing
    if setting.wkv == "cpp":  # all in float32: six inputs, S a, one state for each tile
        apart = 3 if size < 4 else apart
        states = 4 * values * width * model.head_dim / CPP_TILE_TOKENS
        wkv = (5 + 2 * values) * 4 * width + states + apart * size * width + passing
    elif setting.wkv != "fla":  # which recomputes the rest
        wkv += 2 * 4 * values * width  # states around blocks: at most 2 V floats a token
    return wkv
