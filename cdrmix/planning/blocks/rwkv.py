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
    Moved,
    PerToken,
    SequenceForm,
    Setting,
    is_v_first_made,
    rebuilt_norm,
)
from cdrmix.planning.layout import Layout
from cdrmix.planning.parameter import Parameter

# Tokens between the states that the C++ recurrence stores: TILE in models/wkv7_cpu.cpp.
CPP_TILE_TOKENS = 32
# bytes per token and feature that fla's backward recomputes (fla/ops/generalized_delta_rule/dplr:
# four scaled inputs and their gradients, cumulated decays in float32, states of chunks of 64)
_FLA_WORKSPACE = 32

# Bytes per token and feature that fla's kernels move forward and backward, the recomputation of
# their forward pass included: assumed. Their tensors, read once by each of the eight kernels, are
# 318; as many bytes as take the published 62 ms of 8 x 4,096 tokens of 4,096 features on an H100
# (github.com/johanwind/wind_rwkv, March 2025) are 1,400. Later versions are about twice as fast.
_FLA_MOVED = (200, 600)
_FLA_KERNELS = (6, 12)
# Of the chunked form, products included, which are small and wait for memory: bytes for a head of
# 0 features and for each more; and kernels for 1,024 tokens of a sample. Counted.
_CHUNKED_MOVED = ((310, 1.47), (695, 4.4))
_CHUNKED_KERNELS = (514, 1_107)
_CHUNKED_TOKENS = 1_024
# Streams that six mixes read and write forward and backward as one kernel.
_FUSED_MIXES = (7, 8)
# Streams of time mixing between its products, op left out, forward and backward: with the Triton
# kernels (sums of what two of them give a tensor included), and as torch 2.13's inductor schedules
# them; each where v_first is mixed in, and what is less where it is made. And elements for each
# feature of the low ranks, whose tanh and sigmoid are operators of their own. Counted in bf16 by
# tools/benchmark/count_bytes.py and block_bytes.py; tests/parity/test_moved_bytes.py counts again.
_TRITON_TIME_MIX, _LESS_IN_TRITON = (25, 52), (4, 10)
_COMPILED_TIME_MIX, _LESS_COMPILED = (50, 98), (7, 5)
_OF_LOW_RANKS = (2, 2)
_WIDE_IN_FLOAT32 = (1.0, 2.5)
# Kernels of time mixing, products included and op left out; and how many fewer make v_first.
_TRITON_KERNELS, _FEWER_IN_TRITON = (19, 42), (3, 8)
_COMPILED_KERNELS, _FEWER_COMPILED = (38, 51), (4, 5)


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
        if setting.runs_own:  # k, decay, iclr; y, gate, output
            return PerToken(whole, per_head + size * 6 * width + _saved_by_op(setting, form))
        if setting.is_compiled:
            # as torch 2.13 cuts the graph: the shift in place of x; decay, iclr, gate, key, r k,
            # y + bonus and what is made of them
            per_head = size * (9 if makes_v_first else 10) * width
            return PerToken(whole, per_head + _saved_by_op(setting, form))
        whole += size * width  # the shift of x
        # k, kk, k * k_a, iclr - 1, iclr; y, r * k, y + bonus, gate, their product
        per_head += size * 10 * width
        per_head += 4 * 2 * width  # sigmoid of the decay and k * k_k, float32
        per_head += 4 * 2 * heads + size * 3 * heads  # two norms of k; mean, deviation of y, bonus
        return PerToken(whole, per_head + _saved_by_op(setting, form))

    def kept(self, setting: Setting, layer: int, form: SequenceForm) -> PerToken:
        """Counts results of large products, of the recurrence and of the low ranks: the mixes, the
        inputs of the recurrence and the gated output are made again."""
        model = setting.model
        size = setting.element_bytes
        width = model.hidden_size
        ranks = model.low_rank_sizes()
        hidden_ranks = ranks.decay + ranks.iclr + ranks.gate
        if is_v_first_made(model, layer):
            hidden_ranks += ranks.value
        op = _saved_by_op(setting, form)
        is_copied = setting.wkv == "cpp" and size < FLOAT32_BYTES  # the op reads float32
        if form == "heads" or is_copied:  # what is read by the op is a copy
            op -= 3 * size * width  # r, k and v beside it
            op -= 4 * width if form != "heads" else 0  # of float32 there is no copy
        else:  # r, k, v, a, b and lw; of values with zeros behind them v alone
            op -= 5 * size * width + 4 * width
        return PerToken(size * hidden_ranks, size * 4 * width + op)  # r, k and v entering, y

    def rebuilt(self, setting: Setting, layer: int, form: SequenceForm) -> tuple[PerToken, ...]:
        """The six mixes behind the norm, or what the gated output is made of."""
        model = setting.model
        size = setting.element_bytes
        width = model.hidden_size
        # output and gate; lw, k, a, b, decay, iclr; v, and its share of v_first
        gated: float = (10 if is_v_first_made(model, layer) else 8) * size * width
        mixes = rebuilt_norm(setting) + PerToken(6 * size * width)
        if not setting.runs_own:
            # and what PyTorch saves between them: kk, k * k_a, iclr - 1; y normed, r * k; lw, the
            # sigmoid of the decay and k * k_k in float32; as of `saved`, of heads
            gated += (4 * size + 3 * FLOAT32_BYTES - size) * width
            gated += (2 * FLOAT32_BYTES + 3 * size) * model.num_heads
            mixes += PerToken(size * width)  # the shift of x
        return mixes, PerToken(0, gated)

    def saved_per_sample(self, setting: Setting, layout: Layout, form: SequenceForm) -> float:
        """States that are combined over sequence ranks: those that the op begins from, those
        entering each rank, the stacked ones, and the gathered ones where they are read."""
        if form != "state":
            return 0.0
        model = setting.model
        sequence = layout.degrees.sequence
        state = 4 * model.head_dim * model.hidden_size
        gathered = 2 * sequence * state if sequence > 2 else 0  # of two ranks, the first adds to 0
        stacked = sequence * state
        if setting.element_bytes < 4:  # the op reads the state in the type of the activations
            stacked = setting.element_bytes * model.head_dim * model.hidden_size
        begun = 2 * state  # [V + K, K]
        states = begun + (sequence - 1) * state + stacked + gathered
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

    def moved(self, setting: Setting, layer: int, form: SequenceForm) -> Moved:
        """Pointwise maths between the products, operator by operator, and the op."""
        model = setting.model
        size, width = setting.element_bytes, model.hidden_size
        makes_v_first = not is_v_first_made(model, layer)
        if setting.runs_cpp:
            return _moved_fused(setting, makes_v_first) + moved_by_op(setting)
        if setting.is_compiled or setting.runs_own:
            return _moved_counted(setting, makes_v_first) + moved_by_op(setting)
        # elements of D: all, and those of token shift and mixes, which each tensor rank has in full
        forward, backward = (81, 257) if size < FLOAT32_BYTES else (64, 219)
        if makes_v_first:
            forward, backward = forward - 8, backward - 24
        ranks = model.low_rank_sizes()
        low_rank = ranks.decay + ranks.gate
        heads = model.num_heads
        return moved_by_op(setting) + Moved(
            PerToken(
                size * 13 * width, size * ((forward - 13) * width + 10 * heads + 2 * low_rank)
            ),
            PerToken(
                size * 87 * width, size * ((backward - 87) * width + 22 * heads + 3 * low_rank)
            ),
            45,
            120,
        )

    def moved_by_shift(self, setting: Setting) -> Moved:
        """Shift of the tokens before the feed-forward."""
        size, width = setting.element_bytes, setting.model.hidden_size
        if setting.is_compiled or setting.runs_own:
            # compiled, the gradients of two products are summed by a kernel of its own
            is_summed = setting.is_compiled and setting.model.ffn_activation == "swiglu"
            backward = size * (6 if is_summed else 3) * width
            kernels = 3 if setting.runs_triton else 1  # and the mix's gradient, summed
            return Moved(PerToken(size * 2 * width), PerToken(backward), 1, kernels)
        return Moved(PerToken(size * 8 * width), PerToken(size * 21 * width), 4, 10)

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


def time_mix_moved_fused(width: int, *, makes_v_first: bool = False) -> tuple[int, int]:
    """Elements per token that lie between the products, moved forward and backward, where one
    kernel between two of them reads and writes them; the op is left out.

    Forward: six mixes of one tensor; from k, v, v_first and three low-rank paths the six inputs of
    the op; from y, r, k, v and gate the output. Backward each reads these and the gradients that
    enter, and writes those that leave.
    """
    fewer = 3 if makes_v_first else 0  # v_first, its share, and the blend
    return (_FUSED_MIXES[0] + 18 - fewer) * width, (_FUSED_MIXES[1] + 26 - fewer) * width


def _moved_fused(setting: Setting, makes_v_first: bool) -> Moved:
    """Pointwise maths as fused kernels; each tensor rank has the mixes in full."""
    size, width = setting.element_bytes, setting.model.hidden_size
    forward, backward = time_mix_moved_fused(width, makes_v_first=makes_v_first)
    mixes, back = (size * each * width for each in _FUSED_MIXES)
    return Moved(
        PerToken(mixes, size * forward - mixes), PerToken(back, size * backward - back), 11, 24
    )


def _moved_counted(setting: Setting, makes_v_first: bool) -> Moved:
    """Pointwise maths in the Triton kernels or in those of torch.compile, as counted.

    Each tensor rank has the mixes in full; blocks that are cut are not compiled.
    """
    size, width = setting.element_bytes, setting.model.hidden_size
    in_triton = setting.runs_own
    streams = _TRITON_TIME_MIX if in_triton else _COMPILED_TIME_MIX
    less = _LESS_IN_TRITON if in_triton else _LESS_COMPILED
    kernels = _TRITON_KERNELS if in_triton else _COMPILED_KERNELS
    fewer = _FEWER_IN_TRITON if in_triton else _FEWER_COMPILED
    ranks = setting.model.low_rank_sizes()
    low_rank = ranks.decay + ranks.gate

    def part(backward: int) -> PerToken:
        all_streams: float = streams[backward] - (less[backward] if makes_v_first else 0)
        if size == FLOAT32_BYTES:
            # the log decay and sums of tiles are float32 in any type, two streams of bf16 for one
            all_streams -= _WIDE_IN_FLOAT32[backward]
        mixes = _FUSED_MIXES[backward]
        split = (all_streams - mixes) * width + _OF_LOW_RANKS[backward] * low_rank
        return PerToken(size * mixes * width, size * split)

    numbers = [kernels[n] - (fewer[n] if makes_v_first else 0) for n in (0, 1)]
    return Moved(part(0), part(1), *numbers)


def moved_by_op(setting: Setting) -> Moved:
    """Memory traffic of the WKV-7 op by its implementation, its inputs and output included."""
    width = setting.model.hidden_size
    forward: float
    backward: float
    forward, backward = _FLA_MOVED
    kernels = _FLA_KERNELS
    if setting.wkv == "cpp":  # inputs, y, S a and the states once in each pass, and gradients
        states = FLOAT32_BYTES * setting.model.head_dim / CPP_TILE_TOKENS
        forward, backward = (8 * FLOAT32_BYTES + states, 15 * FLOAT32_BYTES + states)
        kernels = (1, 1)
    elif setting.wkv == "chunked":
        head_dim = setting.model.head_dim
        forward, backward = (least + each * head_dim for least, each in _CHUNKED_MOVED)
        groups = -(-setting.sequence_length // _CHUNKED_TOKENS)
        kernels = (groups * _CHUNKED_KERNELS[0], groups * _CHUNKED_KERNELS[1])
    return Moved(PerToken(0, forward * width), PerToken(0, backward * width), *kernels)


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
