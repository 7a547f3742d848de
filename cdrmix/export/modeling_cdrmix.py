"""A CDRmix model for transformers: RWKV-7 and Transformer blocks, dense or with experts.

Copied as it is into each exported folder, so it needs torch and transformers alone, and is one file
however long: whoever gets the folder reads the model in one place. Parameters have the names of
CDRmix checkpoints behind `model.`. In the letters of the RWKV-7 paper:

    S_t = S_{t-1} diag(exp lw_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T,   y_t = S_t r_t

Documents are not packed here: a row of a batch is one text, padded on either side.
"""

# B batch, T time, S time with what is cached, D hidden, H heads, G key/value heads,
# K head dim, E experts, k experts per token, N tokens, C tokens of a chunk, V vocabulary

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

# relative, as transformers loads the two files of a folder from a package of its own
from .configuration_cdrmix import CDRMixConfig

DECAY_BOUND = math.exp(-0.5)  # of -lw, which is exp(-0.5) * sigmoid(.)
CHUNK_TOKENS = 16  # e^-g stays below e^10 within one, so that float32 keeps its precision
MIXES = ("r", "w", "k", "v", "a", "g")


class RWKVCacheLayer(DynamicLayer):
    """State of an RWKV block after all earlier tokens, of one size however many they were.

    `states` are the last inputs of time mix and feed-forward, [B, D], and the recurrent state,
    [B, H, K, K], float32. The keys and values of other layers stay empty.
    """

    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0  # tokens read, padding included
        self.states: dict[str, Tensor] = {}

    def get_seq_length(self) -> int:
        """Tokens read."""
        return self.length

    def reset(self) -> None:
        """Forgets all tokens."""
        self.length = 0
        self.states = {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the rows of the beams that go on."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self.states = {key: x.repeat_interleave(repeats, 0) for key, x in self.states.items()}

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows."""
        self.states = {key: x[indices.to(x.device)] for key, x in self.states.items()}

    def crop(self, tokens_to_remove: int) -> None:
        """Refuses to go back: a state does not hold the ones before it."""
        if tokens_to_remove:
            raise ValueError("the state of an RWKV block cannot be taken back by some tokens")


def with_rwkv_layers(cache: Cache, config: CDRMixConfig) -> Cache:
    """Gives an empty cache the layers of this model, in place; one in use stays as it is.

    So the cache that `generate`, or a user, makes with plain classes serves, and is filled.
    """
    layers: Any = cache.layers
    if any(isinstance(layer, RWKVCacheLayer) for layer in layers):
        return cache
    needs_ours = "rwkv" in config.layer_kinds
    in_use = needs_ours and any(layer.is_initialized for layer in layers)
    if not isinstance(cache, DynamicCache) or in_use:
        raise ValueError(
            "past_key_values: give an empty DynamicCache(), or the one of an earlier call; this "
            f"{type(cache).__name__} has no place for the states of this model"
        )
    if not needs_ours:
        return cache
    cache.layers = [
        RWKVCacheLayer() if kind == "rwkv" else DynamicLayer() for kind in config.layer_kinds
    ]
    return cache


def shift_tokens(x: Tensor, last: Tensor | None, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each position's predecessor, [B, T, D], and the last token; padding is passed over.

    `last` is the token before x, [B, D], None for zero; `real` is False at padding, [B, T].
    """
    first = torch.zeros_like(x[:, 0]) if last is None else last.to(x.dtype)
    if real is None:
        return torch.cat([first.unsqueeze(1), x[:, :-1]], dim=1), x[:, -1].clone()
    extended = torch.cat([first.unsqueeze(1), x], dim=1)  # [B, T + 1, D]
    places = torch.arange(1, x.shape[1] + 1, device=x.device) * real
    latest = F.pad(places.cummax(1).values, (1, 0))  # of the last token before each, [B, T + 1]
    rows = torch.arange(len(x), device=x.device)
    previous = extended[rows.unsqueeze(1), latest[:, :-1]]
    return previous, extended[rows, latest[:, -1]]


def mix_shifted(x: Tensor, previous: Tensor, mu: Tensor) -> Tensor:
    """x + (previous - x) * mu for each row of mu, [M, D], to [M, B, T, D]."""
    return torch.addcmul(x, previous - x, mu[:, None, None])


def wkv_loop(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Runs the recurrence token by token: r, lw, k, v, a, b of [B, T, H, K], state [B, H, K, K]."""
    r, lw, k, v, a, b = inputs
    w = lw.exp()
    y = []
    for t in range(r.shape[1]):
        replaced = (state @ a[:, t, :, :, None]) @ b[:, t, :, None]  # [B, H, V, K]
        state = state * w[:, t, :, None] + replaced + v[:, t, :, :, None] @ k[:, t, :, None]
        y.append((state @ r[:, t, :, :, None])[..., 0])
    return torch.stack(y, 1), state


def wkv_chunked(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Runs the recurrence in matrix products over chunks; arguments and results of `wkv_loop`.

    With g the running sum of lw in a chunk, g' = g - lw and Z = S^T the state that enters it:

        U = (I - A_ab)^-1 (A_ak V + (a e^g') Z)      O = A_rb U + A_rk V + (r e^g) Z
        A_xy = (x e^g') (y e^-g)^T below the diagonal; for r with e^g, and the diagonal too
        Z' = e^(g_C) Z + (b e^(g_C - g))^T U + (k e^(g_C - g))^T V
    """
    length = inputs[0].shape[1]
    missing = -length % CHUNK_TOKENS
    chunks = [  # zeros leave the state as it is
        F.pad(x, (0, 0, 0, 0, 0, missing)).transpose(1, 2).unflatten(2, (-1, CHUNK_TOKENS))
        for x in inputs
    ]  # [B, H, n, C, K]
    r, lw, k, v, a, b = chunks
    g = lw.cumsum(-2)
    a, r = a * (g - lw).exp(), r * g.exp()
    b, k = b * (-g).exp(), k * (-g).exp()
    carry = g[..., -1, :, None].exp()  # [B, H, n, K, 1]
    identity = torch.eye(CHUNK_TOKENS, dtype=r.dtype, device=r.device)
    inverse = torch.linalg.solve_triangular(
        identity - (a @ b.mT).tril(-1), identity.expand(*r.shape[:3], -1, -1), upper=False
    )
    from_values = (a @ k.mT).tril(-1) @ v
    seen = (r @ k.mT).tril() @ v
    replaced = (r @ b.mT).tril()
    z = state.mT
    y = []
    for i in range(r.shape[2]):
        u = inverse[:, :, i] @ (from_values[:, :, i] + a[:, :, i] @ z)
        y.append(seen[:, :, i] + replaced[:, :, i] @ u + r[:, :, i] @ z)
        z = carry[:, :, i] * (z + b[:, :, i].mT @ u + k[:, :, i].mT @ v[:, :, i])
    return torch.cat(y, 2).transpose(1, 2)[:, :length], z.mT


class TimeMix(nn.Module):
    """RWKV-7 time mixing of one block; the first one of all makes v_first."""

    decay_bias: Tensor  # [D], as are all mu and biases
    decay_down: Tensor  # [D, R], as are all downs
    decay_up: Tensor  # [R, D], as are all ups
    iclr_bias: Tensor
    iclr_down: Tensor
    iclr_up: Tensor
    value_bias: Tensor
    value_down: Tensor
    value_up: Tensor
    gate_down: Tensor
    gate_up: Tensor

    def __init__(self, config: CDRMixConfig, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.head_dim = config.head_dim
        self.recurrence = config.recurrence
        self.creates_v_first = "rwkv" not in config.layer_kinds[:layer]
        for mix in MIXES:
            self.register_parameter(f"mu_{mix}", nn.Parameter(torch.empty(hidden)))
        self.receptance = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        for path in ("decay", "iclr", "value", "gate"):
            if path == "value" and self.creates_v_first:
                continue
            rank = getattr(config, f"{path}_rank")
            if path != "gate":
                self.register_parameter(f"{path}_bias", nn.Parameter(torch.empty(hidden)))
            self.register_parameter(f"{path}_down", nn.Parameter(torch.empty(hidden, rank)))
            self.register_parameter(f"{path}_up", nn.Parameter(torch.empty(rank, hidden)))
        self.k_k = nn.Parameter(torch.empty(hidden))
        self.k_a = nn.Parameter(torch.empty(hidden))
        self.r_k = nn.Parameter(torch.empty(hidden))
        eps = self.head_dim * config.group_norm_eps
        self.group_norm = nn.GroupNorm(config.num_attention_heads, hidden, eps=eps)

    def forward(
        self,
        x: Tensor,
        v_first: Tensor | None,
        real: Tensor | None,
        cache: RWKVCacheLayer | None,
    ) -> tuple[Tensor, Tensor]:
        """Mixes x, [B, T, D], along time; gives the output [B, T, D] and v_first [B, T, D]."""
        states = cache.states if cache is not None else {}
        previous, last = shift_tokens(x, states.get("time_shift"), real)
        mu = torch.stack([getattr(self, f"mu_{mix}") for mix in MIXES])
        x_r, x_w, x_k, x_v, x_a, x_g = mix_shifted(x, previous, mu).unbind(0)

        r = self.receptance(x_r)
        k = self.key(x_k)
        v = self.value(x_v)
        lw = self.decay_bias + torch.tanh(x_w @ self.decay_down) @ self.decay_up
        lw = torch.sigmoid(lw.float()) * -DECAY_BOUND
        iclr = torch.sigmoid(self.iclr_bias + x_a @ self.iclr_down @ self.iclr_up)
        gate = torch.sigmoid(x_g @ self.gate_down) @ self.gate_up
        if v_first is None:
            v_first = v
        else:
            amount = torch.sigmoid(self.value_bias + x_v @ self.value_down @ self.value_up)
            v = v.lerp(v_first, amount.to(v.dtype))  # autocast gives them different types
        # in float32: the eps is zero in float16, and a key of zeros would become not a number
        kk = F.normalize(self._heads(k * self.k_k).float(), dim=-1, eps=1e-12).to(k.dtype)
        k = k.addcmul(k * self.k_a, iclr - 1)

        r, lw, k, v, iclr = (self._heads(t) for t in (r, lw, k, v, iclr))
        y, wkv = self._recur((r, lw, k, v, -kk, kk * iclr), states.get("wkv"), real)
        if cache is not None:
            cache.states |= {"time_shift": last, "wkv": wkv}
        norm = self.group_norm
        flat = y.flatten(0, 1).flatten(1)  # [B * T, D]
        normed = F.group_norm(flat, norm.num_groups, norm.weight, norm.bias, norm.eps)
        bonus = (r * k * self._heads(self.r_k)).sum(-1, keepdim=True)  # [B, T, H, 1]
        y = torch.addcmul(normed.view_as(v), bonus, v).flatten(2)
        return self.output(y * gate), v_first

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def _recur(
        self, inputs: tuple[Tensor, ...], state: Tensor | None, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Runs the recurrence in float32, whatever the model's type; padding holds the state."""
        r, lw, k, v, a, b = (x.float() for x in inputs)
        if real is not None:
            lw, k, b = (x.masked_fill(~real[:, :, None, None], 0) for x in (lw, k, b))
        if state is None:
            state = r.new_zeros(r.shape[0], r.shape[2], self.head_dim, self.head_dim)
        in_chunks = self.recurrence == "chunked" or (
            self.recurrence == "auto" and r.shape[1] >= CHUNK_TOKENS
        )
        with torch.autocast(r.device.type, enabled=False):
            form = wkv_chunked if in_chunks else wkv_loop
            y, state = form((r, lw, k, v, a, b), state)
        return y.to(inputs[3].dtype), state


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions of one block."""

    def __init__(self, config: CDRMixConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden = config.hidden_size
        kv_size = config.num_key_value_heads * self.head_dim
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, kv_size, bias=False)
        self.value = nn.Linear(hidden, kv_size, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
        layer: int,
    ) -> Tensor:
        """Attends from x, [B, T, D]; `mask` is [T, S] or [B, 1, T, S], None for plain causal."""
        cos, sin = rotary  # [B or 1, 1, T, K]
        query, keys, values = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )  # [B, H, T, K], [B, G, T, K]
        rotated = []
        for part in (query, keys):
            first, second = part.chunk(2, dim=-1)  # pairs are (i, i + K/2)
            rotated.append(part * cos + torch.cat([-second, first], dim=-1) * sin)
        query, keys = rotated
        if cache is not None:
            keys, values = cache.update(keys, values, layer)
        mixed = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and query.shape[2] > 1,
            enable_gqa=keys.shape[1] != query.shape[1],
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


class ChannelShift(nn.Module):
    """Token shift before the feed-forward of an RWKV block."""

    def __init__(self, config: CDRMixConfig) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x: Tensor, real: Tensor | None, cache: RWKVCacheLayer | None) -> Tensor:
        """Shifts x, [B, T, D], by mu."""
        last = cache.states.get("channel_shift") if cache is not None else None
        previous, last = shift_tokens(x, last, real)
        if cache is not None:
            cache.states["channel_shift"] = last
        return mix_shifted(x, previous, self.mu.unsqueeze(0))[0]


class FeedForward(nn.Module):
    """Two matrices with squared ReLU."""

    def __init__(self, config: CDRMixConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes [B, T, D] -> [B, T, D]."""
        return self.down(torch.relu(self.up(x)).square())


class Router(nn.Module):
    """Scores of experts in float32."""

    def __init__(self, config: CDRMixConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token of [N, D], [N, k], and their weights, which sum to 1."""
        logits = F.linear(x.float(), self.weight.float())  # [N, E]
        probabilities = torch.exp(logits - torch.logsumexp(logits, dim=-1, keepdim=True))
        top, experts = probabilities.topk(self.top_k, dim=-1)
        return experts, top / top.sum(-1, keepdim=True)


class Experts(nn.Module):
    """Two matrices with squared ReLU for each expert."""

    def __init__(self, config: CDRMixConfig) -> None:
        super().__init__()
        sizes = (config.num_experts, config.moe_intermediate_size, config.hidden_size)
        self.up = nn.Parameter(torch.empty(sizes))
        self.down = nn.Parameter(torch.empty(sizes[0], sizes[2], sizes[1]))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Applies each expert to its rows of [M, D], which lie in the order of experts."""
        parts = zip(rows.split(counts), self.up, self.down, strict=True)
        done = [
            torch.relu(part @ up.mT).square() @ down.mT for part, up, down in parts if len(part)
        ]
        return torch.cat(done)


class MoEFeedForward(nn.Module):
    """Sends each token to its experts; nothing is dropped, as in training's evaluation."""

    def __init__(self, config: CDRMixConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        """Computes [B, T, D] -> [B, T, D]."""
        tokens = x.reshape(-1, x.shape[-1])  # [N, D]
        experts, weights = self.router(tokens)
        flat = experts.t().reshape(-1)  # first choices first, [k * N]
        order = flat.sort(stable=True).indices
        counts = flat.bincount(minlength=self.num_experts).tolist()
        rows = self.experts(tokens[order % len(tokens)], counts)
        chosen = torch.empty_like(rows)
        chosen[order] = rows
        scales = weights.to(rows.dtype)
        choices = chosen.view(experts.shape[1], *tokens.shape)
        total = choices[0] * scales[:, :1]
        for choice in range(1, len(choices)):
            total = torch.addcmul(total, choices[choice], scales[:, choice : choice + 1])
        return total.view_as(x)


class CDRMixBlock(nn.Module):
    """Mixer, then feed-forward, each behind a norm and with a residual."""

    def __init__(self, config: CDRMixConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.is_rwkv = config.layer_kinds[layer] == "rwkv"
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = TimeMix(config, layer) if self.is_rwkv else Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.ffn_shift = ChannelShift(config) if self.is_rwkv else None
        self.ffn = MoEFeedForward(config) if config.num_experts else FeedForward(config)

    def forward(
        self,
        x: Tensor,
        v_first: Tensor | None,
        real: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        past_key_values: Cache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the block on the residual stream, [B, T, D]; gives that and v_first."""
        normed = self.mixer_norm(x)
        cache: Any = None
        if self.is_rwkv:
            cache = past_key_values.layers[self.layer] if past_key_values is not None else None
            mixed, v_first = self.mixer(normed, v_first, real, cache)
        else:
            mixed = self.mixer(normed, rotary, mask, past_key_values, self.layer)
        x = x + mixed
        normed = self.ffn_norm(x)
        if self.ffn_shift is not None:
            normed = self.ffn_shift(normed, real, cache)
        if cache is not None:
            cache.length += x.shape[1]
        return x + self.ffn(normed), v_first


class CDRMixPreTrainedModel(PreTrainedModel):
    """Settings of transformers that all models here share."""

    config: CDRMixConfig
    config_class = CDRMixConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    _no_split_modules = ["CDRMixBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    # What predicts further tokens is in the weights, and of no use here.
    _keys_to_ignore_on_load_unexpected = [r"(^|\.)mtp\."]  # noqa: RUF012
    _is_stateful = True  # a state cannot go back, which assisted decoding would need

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Sets plain values for a model made from its configuration; CDRmix trains from others."""
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, Router | Experts):
            for parameter in module.parameters():
                init.normal_(parameter, std=std)
        elif isinstance(module, ChannelShift):
            init.constant_(module.mu, 0.5)
        elif isinstance(module, TimeMix):
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("_up"):
                    init.normal_(parameter, std=std)
                elif name.endswith(("_down", "_bias", "r_k")):
                    init.zeros_(parameter)
                else:
                    init.constant_(parameter, 0.5 if name.startswith("mu_") else 1.0)


class CDRMixModel(CDRMixPreTrainedModel):
    """Embedding and blocks; gives the normalised hidden states of the last one."""

    def __init__(self, config: CDRMixConfig) -> None:
        super().__init__(config)
        config.check_model()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.blocks = nn.ModuleList(
            CDRMixBlock(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Computes hidden states [B, T, D] of tokens, after those of `past_key_values`.

        Args:
            input_ids: tokens, [B, T]; or `inputs_embeds`, [B, T, D].
            attention_mask: 0 at padding, which changes nothing for other tokens, else 1, [B, S]:
                of cached tokens too.
            position_ids: rotary positions, [B, T]; by default tokens are counted without padding.
            use_cache: keep what is needed to go on; by default not while training.
        Raises:
            ValueError: if the mask is of another size, or the cache of another kind.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0
        if past_key_values is not None:
            past_key_values = with_rwkv_layers(past_key_values, self.config)
            past = past_key_values.get_seq_length()
        real = _mask_of_tokens(attention_mask, x, past)
        rotary, mask = self._attention_inputs(x, real, position_ids, past)
        real_here = None if real is None else real[:, past:]
        x = self.embedding_norm(x)
        v_first = None
        all_hidden = []
        for block in self.blocks:
            all_hidden.append(x)
            x, v_first = block(x, v_first, real_here, rotary, mask, past_key_values)
        x = self.final_norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*all_hidden, x) if output_hidden_states else None,
        )

    def _attention_inputs(
        self, x: Tensor, real: Tensor | None, position_ids: Tensor | None, past: int
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        """Rotary cosines and sines, [B or 1, 1, T, K], and the mask, for Transformer blocks."""
        if "transformer" not in self.config.layer_kinds:
            return None, None
        places = torch.arange(past, past + x.shape[1], device=x.device)  # in the cache
        if position_ids is None:
            position_ids = places.unsqueeze(0)
            if real is not None:
                position_ids = (real.cumsum(1) - 1).clamp(min=0)[:, past:]
        head_dim = self.config.head_dim
        exponents = torch.arange(0, head_dim, 2, device=x.device, dtype=torch.float32)
        frequencies = self.config.rope_theta ** (-exponents / head_dim)  # [K/2]
        angles = (position_ids.float()[..., None] * frequencies).repeat(1, 1, 2).unsqueeze(1)
        rotary = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if real is None and (past == 0 or x.shape[1] == 1):
            return rotary, None  # the fast kernels need none
        keys = torch.arange(past + x.shape[1], device=x.device)
        mask = keys <= places.unsqueeze(1)  # [T, S]
        if real is not None:
            # padding sees itself: a row without any key would be not a number on some devices
            own = keys == places.unsqueeze(1)
            mask = (mask & real[:, None, None]) | own  # [B, 1, T, S]
        return rotary, mask


def _mask_of_tokens(attention_mask: Tensor | None, x: Tensor, past: int) -> Tensor | None:
    """True where no padding is, [B, S]; None where there is none at all."""
    if attention_mask is None:
        return None
    if attention_mask.shape != (len(x), past + x.shape[1]):
        raise ValueError(
            f"attention_mask must be [{len(x)}, {past + x.shape[1]}], all tokens so far; given "
            f"{list(attention_mask.shape)}"
        )
    real = attention_mask.to(x.device) != 0
    return None if bool(real.all()) else real


class CDRMixForCausalLM(CDRMixPreTrainedModel, GenerationMixin):
    """Language model: the blocks, and the embedding as head."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: CDRMixConfig) -> None:
        super().__init__(config)
        self.model = CDRMixModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Scores next tokens, [B, T, V]; arguments as of `CDRMixModel.forward`.

        Args:
            labels: tokens, [B, T], -100 where they do not count; they are shifted here.
            logits_to_keep: how many of the last positions to score, or which; 0 for all.
        """
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=kwargs.pop("output_hidden_states", None),
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )
