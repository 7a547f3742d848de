"""RWKV-7 with LayerNorms, as programs other than this one compute it, in plain torch.

Written from the published equations, token by token, with the names that flash-linear-attention
gives to tensors. Nothing of the package is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F


def logits_of(
    tensors: Mapping[str, Tensor],
    tokens: list[int],
    *,
    head_dim: int,
    norm_eps: float,
    group_norm_eps: float,
) -> Tensor:
    """Scores of the next token after each of `tokens`, [T, V]."""
    weights = {name: tensor.float() for name, tensor in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, norm_eps)

    def before(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x[:1]), x[:-1]])

    x = weights["model.embeddings.weight"][tokens]  # [T, D]
    x = norm(x, "model.layers.0.pre_norm")
    v_first = None
    layer = 0
    while f"model.layers.{layer}.attn_norm.weight" in weights:
        name = f"model.layers.{layer}"
        inner = {
            key.removeprefix(f"{name}.attn."): value
            for key, value in weights.items()
            if key.startswith(f"{name}.attn.")
        }
        normed = norm(x, f"{name}.attn_norm")
        mixed, v_first = time_mix(inner, normed, before(normed), v_first, head_dim, group_norm_eps)
        x = x + mixed
        normed = norm(x, f"{name}.ffn_norm")
        shifted = normed + (before(normed) - normed) * weights[f"{name}.ffn.x_k"]
        key = torch.relu(shifted @ weights[f"{name}.ffn.key.weight"].T) ** 2
        x = x + key @ weights[f"{name}.ffn.value.weight"].T
        layer += 1
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


def time_mix(
    p: Mapping[str, Tensor],
    x: Tensor,
    previous: Tensor,
    v_first: Tensor | None,
    head_dim: int,
    group_norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """One time mix over [T, D]; gives its output and v_first."""
    mixed = {m: x + (previous - x) * p[f"x_{m}"].reshape(-1) for m in "rwkvag"}

    def low_rank(letter: str, activation=lambda h: h) -> Tensor:
        hidden = activation(mixed[letter] @ p[f"{letter}_lora.lora.0.weight"].T)
        out = hidden @ p[f"{letter}_lora.lora.2.weight"].T
        return out + p.get(f"{letter}_lora.lora.2.bias", torch.zeros(()))

    def heads(tensor: Tensor) -> Tensor:
        return tensor.reshape(len(x), -1, head_dim)

    r = mixed["r"] @ p["r_proj.weight"].T
    k = mixed["k"] @ p["k_proj.weight"].T
    v = mixed["v"] @ p["v_proj.weight"].T
    w = torch.exp(-math.exp(-0.5) * torch.sigmoid(low_rank("w", torch.tanh)))
    a = torch.sigmoid(low_rank("a"))
    gate = low_rank("g", torch.sigmoid)
    if v_first is None:
        v_first = v
    else:
        v = v + (v_first - v) * torch.sigmoid(low_rank("v"))
    kk = F.normalize(heads(k * p["k_k"]), dim=-1)
    k = k * (1 + (a - 1) * p["k_a"])
    r, k, v, w, a = (heads(each) for each in (r, k, v, w, a))
    state = torch.zeros(r.shape[1], head_dim, head_dim)  # [H, V, K]
    out = []
    for t in range(len(x)):
        removed = torch.einsum("hvk,hk->hv", state, -kk[t])
        state = state * w[t].unsqueeze(1) + torch.einsum("hv,hk->hvk", removed, kk[t] * a[t])
        state = state + torch.einsum("hv,hk->hvk", v[t], k[t])
        out.append(torch.einsum("hvk,hk->hv", state, r[t]))
    y = torch.stack(out).flatten(1)
    weight, bias = p["g_norm.weight"], p["g_norm.bias"]
    y = F.group_norm(y, r.shape[1], weight, bias, group_norm_eps)
    bonus = (r * k * p["r_k"].reshape(-1, head_dim)).sum(-1, keepdim=True) * v
    return (y + bonus.flatten(1)) * gate @ p["o_proj.weight"].T, v_first
