"""The plastic adapter of one linear layer.

For a token with features p = normalize(A x) and q = normalize(B^T y0), where y0 = W x:

    y = y0 + alpha g B (H p)          H: fast weights of this sequence, zero at its start
    H' = rule(H, q, e, m)             e: trace of the p before, m = sigmoid(w_m . x + b)

A, B, g, w_m, b and the trace's decay are parameters, learned slowly; H is state.
"""

# B sequences, T time, I inputs and O outputs of the layer, r rank

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.reasoning import AdapterConfig
from cdrmix.models.initialize import normal_
from cdrmix.objectives.correlation import correlation_loss
from cdrmix.reasoning.fast_weights import (
    FastWeights,
    Rule,
    Writes,
    limited,
    scan_chunks,
    traces,
)

# alpha * g is 2 at alpha = .2: a recalled pattern of length 1 then weighs as much as the layer's
# own output, and the binding task is learned in hundreds of steps instead of thousands.
_INITIAL_GAIN = 10.0
# Largest ||alpha g B H p|| / ||W x|| of a token. A bound on H alone that would keep to this for
# every p, ||alpha g B H|| <= .5 ||W||, keeps the binding task from being learned at all.
LARGEST_RELATIVE_CHANGE = 0.5
_TINY = 1e-12  # keeps a length of zero from being divided by


class Guards(NamedTuple):
    """How often the guards stepped in, and how large things grew; scalars over layers and rows.

    Attributes:
        limited_writes: tokens whose write was lowered to `LARGEST_WRITE`.
        skipped_writes: tokens whose features were not finite; they store nothing.
        limited_changes: tokens whose change was scaled down to `LARGEST_RELATIVE_CHANGE`.
        largest_weight: of the magnitudes of H after the last token.
    """

    limited_writes: Tensor
    skipped_writes: Tensor
    limited_changes: Tensor
    largest_weight: Tensor


class Adapted(NamedTuple):
    """What an adapter makes of a layer's output."""

    y: Tensor
    after: FastWeights
    correlation: Tensor | None = None
    guards: Guards | None = None


class PlasticAdapter(nn.Module):
    """The slow parameters of one adapted layer.

    Args:
        in_features: I.
        out_features: O.
        config: rank, scale, decay and clamp.
        rule: hebb, delta or oja.
    """

    def __init__(
        self, in_features: int, out_features: int, config: AdapterConfig, rule: Rule
    ) -> None:
        super().__init__()
        self.config, self.rule = config, rule
        self.down = nn.Parameter(torch.empty(config.rank, in_features))  # A
        self.up = nn.Parameter(torch.empty(out_features, config.rank))  # B
        # single numbers are vectors of one: DeepSpeed broadcasts no other (0.19.8, engine.py)
        self.gain = nn.Parameter(torch.empty(1))  # g
        self.modulator = nn.Parameter(torch.empty(in_features))
        self.modulator_bias = nn.Parameter(torch.empty(1))
        self.trace_decay = nn.Parameter(torch.empty(1))  # before its sigmoid

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str) -> None:
        """Random factors; a modulator of 1/2 and a trace that halves twice, for every token."""
        normal_(self.down, self.down.shape[1] ** -0.5, seed=seed, name=f"{name}.down")
        normal_(self.up, self.config.rank**-0.5, seed=seed, name=f"{name}.up")
        self.gain.fill_(_INITIAL_GAIN)
        for parameter in (self.modulator, self.modulator_bias, self.trace_decay):
            parameter.zero_()

    def forward(
        self,
        x: Tensor,
        y0: Tensor,
        before: FastWeights,
        *,
        start: int,
        writes: bool,
        with_correlation: bool,
        mask: Tensor | None = None,
    ) -> Adapted:
        """The layer's output with what is remembered, and the fast weights after the last token.

        Args:
            x: input of the layer, [B, T, I].
            y0: its output, [B, T, O].
            before: fast weights before the first token.
            start: tokens of the episode before x.
            writes: False reads the fast weights and leaves them as they are.
            with_correlation: also give the local objective.
            mask: which tokens are text, [B, T]; the others are filling and store nothing.
        """
        if not writes:
            return Adapted(self._recalled(x, y0, before.weights), before)
        pre = F.normalize(F.linear(x, self.down).float(), dim=-1)  # p, [B, T, r]
        post = F.normalize((y0 @ self.up).float(), dim=-1)  # q, [B, T, r]
        strength = torch.sigmoid((x @ self.modulator + self.modulator_bias).float())  # m, [B, T]
        finite = (pre.sum(-1) + post.sum(-1) + strength).isfinite()
        stores = finite if mask is None else finite & mask
        pre, post = (torch.where(stores.unsqueeze(-1), part, 0) for part in (pre, post))
        trace = traces(pre, before.trace, 0.5 * torch.sigmoid(self.trace_decay.float()))
        wanted = torch.where(stores, strength, 0)
        stored = Writes(post, trace[:, :-1], limited(wanted, post, trace[:, :-1]))
        lookups = [pre, stored.trace] if with_correlation else [pre]
        read, weights = scan_chunks(
            before.weights,
            torch.stack(lookups, dim=2),
            stored,
            rule=self.rule,
            decay=self.config.decay,
            start=start,
            border=self._clamped,
        )
        correlation = None
        if with_correlation:
            correlation = correlation_loss(
                stored.post,
                stored.strength,
                read[:, :, 1],
                weights,
                decay=self.config.decay,
                decorrelation_weight=self.config.decorrelation_weight,
            )
        after = FastWeights(weights, trace[:, -1])
        y, limited_changes = self._changed(y0, read[:, :, 0])
        guards = Guards(
            limited_writes=(stored.strength < wanted).sum(),
            skipped_writes=(~finite).sum(),
            limited_changes=limited_changes,
            largest_weight=weights.detach().abs().max(),
        )
        return Adapted(y, after, correlation, guards)

    def _clamped(self, weights: Tensor) -> Tensor:
        clamp = self.config.clamp
        return clamp * torch.tanh(weights / clamp)

    def _recalled(self, x: Tensor, y0: Tensor, weights: Tensor) -> Tensor:
        """`_changed` in as few operations as can be, which is what a single token costs."""
        features = F.linear(x, self.down).float()  # p, not normalised
        recalled = torch.bmm(features, weights.transpose(1, 2)).to(y0.dtype)
        change = F.linear(recalled, self.up)
        size, own, length = (
            torch.linalg.vector_norm(part, dim=-1, keepdim=True, dtype=torch.float32)
            for part in (change, y0, features)
        )
        largest = LARGEST_RELATIVE_CHANGE * own / (size + _TINY)
        scale = torch.clamp(self.gain * self.config.alpha / (length + _TINY), -largest, largest)
        return torch.addcmul(y0, change, scale.to(y0.dtype))

    def _changed(self, y0: Tensor, recalled: Tensor) -> tuple[Tensor, Tensor]:
        """y0 + alpha g B (H p), [B, T, O], and the number of tokens at which it was bounded."""
        change = self.config.alpha * self.gain * self.up  # [O, r]
        spread = change.transpose(0, 1).float() @ change.float()
        # ||change recalled||^2 in r dimensions instead of O
        size = ((recalled @ spread) * recalled).sum(-1).clamp(min=1e-12).sqrt()  # [B, T]
        own = torch.linalg.vector_norm(y0, dim=-1, dtype=torch.float32)
        scale = (LARGEST_RELATIVE_CHANGE * own / size).clamp(max=1)
        bounded = (recalled * scale.unsqueeze(-1)).to(y0.dtype)
        return y0 + F.linear(bounded, change.to(y0.dtype)), (scale < 1).sum()
