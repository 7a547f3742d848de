"""Trial of mixers that a user writes, before a run begins.

A mixer that sees later tokens trains to a loss that means nothing, and one that hands on no state
trains well and writes nonsense: neither stops a run.
"""

# B batch, T time, D hidden

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdrmix.config.model import ModelConfig
from cdrmix.config.plugin import is_plugin
from cdrmix.errors import ConfigError
from cdrmix.models.block import make_mixer
from cdrmix.models.initialize import normal_
from cdrmix.models.mixer import Mixer
from cdrmix.planning.blocks.block_type import is_v_first_made

_TOKENS = 9
_CUT = 5  # of them, before the cut
_STD = 0.1  # in place of initial values of zero, behind which nothing shows
_TOLERANCE = 1e-4  # of the largest output; orders of sums differ


@torch.no_grad()
def try_mixers(model: ModelConfig, *, segments_documents: bool) -> None:
    """Runs each block type of a user's on a few random tokens, in float32 on the host.

    Raises:
        ConfigError: if one fails, sees later tokens, or goes on from its state, or over the end of
            a document where these are kept apart, otherwise than it should.
    """
    kinds = model.mixers or ()
    for name in filter(is_plugin, dict.fromkeys(kinds)):
        layer = kinds.index(name)
        with torch.device("cpu"):
            mixer = make_mixer(model, layer).float().eval()
        mixer.initialize(seed=0, name=f"blocks.{layer}.mixer", std=model.init_std)
        for part, parameter in mixer.named_parameters():
            if not parameter.any():
                normal_(parameter, _STD, seed=0, name=part)
        try:
            why = _fault(_Trial(mixer, model, layer), segments_documents=segments_documents)
        except Exception as error:  # any that code of a user's may raise
            why = f"fails in a trial: {type(error).__name__}: {error}"
        if why is not None:
            raise ConfigError(f"model.mixers: {name}: its module {why}")


class _Trial:
    """A mixer with random tokens."""

    def __init__(self, mixer: Mixer, model: ModelConfig, layer: int) -> None:
        source = torch.Generator().manual_seed(0)
        self._mixer = mixer
        self.x = torch.randn(2, _TOKENS, model.hidden_size, generator=source)  # [B, T, D]
        self._v_first = self.x.flip(1) if is_v_first_made(model, layer) else None

    def run(
        self, x: Tensor, tokens: slice, state: Any = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Output and state of some of the tokens of `x`."""
        v_first = None if self._v_first is None else self._v_first[:, tokens]
        out, _, after, _ = self._mixer.mix(x[:, tokens], v_first, state, segment_ids)
        return out, after


def _fault(trial: _Trial, *, segments_documents: bool) -> str | None:
    """Fault of a mixer, in words; None: none shows."""
    whole, first, rest = slice(None), slice(_CUT), slice(_CUT, None)
    expected, _ = trial.run(trial.x, whole)
    if expected.shape != trial.x.shape or not expected.isfinite().all():
        return f"gives {tuple(expected.shape)} of {tuple(trial.x.shape)}, or what is not finite"
    other = trial.x.clone()
    other[:, rest] = 1.0
    if not _are_alike(trial.run(other, whole)[0][:, first], expected[:, first], expected):
        return "sees later tokens: what it gives for a token changes with those behind it"
    _, state = trial.run(trial.x, first)
    if not _are_alike(trial.run(trial.x, rest, state)[0], expected[:, rest], expected):
        return (
            "does not go on from the state that it returns as if all tokens were there at once, so "
            "that it would write nonsense"
        )
    if not segments_documents:
        return None
    ids = (torch.arange(_TOKENS) >= _CUT).long().expand(2, -1)
    # The first document as alone, the second as with nothing before it.
    parted, _ = trial.run(trial.x, whole, segment_ids=ids)
    alone = torch.cat([trial.run(trial.x, part)[0] for part in (first, rest)], dim=1)
    if not _are_alike(parted, alone, expected):
        return "mixes documents that data.segment_documents keeps apart"
    return None


def _are_alike(one: Tensor, other: Tensor, scale: Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * scale.abs().max())
