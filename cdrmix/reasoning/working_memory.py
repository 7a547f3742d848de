"""Projections of hidden states to the keys and queries of episodic memory.

Working memory: a few slots that summarise what a window held, for the windows after it.

Every `stride` tokens each slot looks at the tokens that its query fits, and a gate decides how much
of the slot gives way. Later tokens read the slots by attention; what they read is added to their
embeddings. The projection back is zero at first: a backbone with a fresh working memory gives the
same numbers as without.
"""

# B rows, T time, D hidden, S key dimensions

# B sequences, T time, D hidden, N slots, S width of a slot, n strides of c tokens

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.reasoning import MemoryConfig
from cdrmix.models.backbone import Backbone
from cdrmix.models.initialize import normal_


class RetrievalEncoder(nn.Module):
    """Keys of segments and queries for them, unit vectors of one space.

    Args:
        hidden_size: D, of the backbone.
        key_size: S.
    """

    def __init__(self, hidden_size: int, key_size: int) -> None:
        super().__init__()
        self.to_key = nn.Linear(hidden_size, key_size, bias=False)
        self.to_query = nn.Linear(hidden_size, key_size, bias=False)

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Set the initial values from the seed."""
        for part in ("to_key", "to_query"):
            weight = getattr(self, part).weight
            normal_(weight, weight.shape[1] ** -0.5, seed=seed, name=f"retrieval.{part}")

    def key(self, hidden: Tensor) -> Tensor:
        """Key of a segment from its hidden states, [B, T, D] -> [B, S], float32."""
        return F.normalize(self.to_key(hidden.mean(1)).float(), dim=-1)

    def query(self, hidden: Tensor) -> Tensor:
        """Query from the hidden state of one token, [B, D] -> [B, S], float32."""
        return F.normalize(self.to_query(hidden).float(), dim=-1)


@torch.no_grad()
def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 of named weights, hex, in any order: keys of other weights mean nothing to these."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda pair: pair[0]):
        values = tensor.detach().float().cpu().contiguous()
        found.update(f"{name} {tuple(values.shape)}".encode())
        found.update(values.numpy().tobytes())
    return found.hexdigest()


NUM_SLOTS = 8
# Slots start apart, and look for one thing rather than at the mean of a stride.
_SHARPNESS = 4.0


class WorkingMemory(nn.Module):
    """Slots that share `summary_dim` features.

    Args:
        hidden_size: D, of the backbone.
        config: `summary_dim`, `kv_summary_stride`.
    """

    def __init__(self, hidden_size: int, config: MemoryConfig) -> None:
        super().__init__()
        width = config.summary_dim // NUM_SLOTS  # the schema takes multiples alone
        self.stride = config.kv_summary_stride
        self.slots = nn.Parameter(torch.empty(NUM_SLOTS, width))  # initial content, and query
        self.key = nn.Linear(hidden_size, width, bias=False)
        self.value = nn.Linear(hidden_size, width, bias=False)
        self.gate = nn.Linear(2 * width, width)
        self.query = nn.Linear(hidden_size, width, bias=False)
        self.up = nn.Linear(width, hidden_size, bias=False)

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Set the initial values from the seed; nothing is read before training."""
        normal_(self.slots, 1.0, seed=seed, name="working_memory.slots")
        for part in ("key", "value", "query", "gate"):
            layer = getattr(self, part)
            scale = layer.weight.shape[1] ** -0.5
            normal_(layer.weight, scale, seed=seed, name=f"working_memory.{part}")
        self.gate.bias.zero_()
        self.up.weight.zero_()

    def start(self, batch_size: int) -> Tensor:
        """Slots of sequences of which nothing was read yet, [B, N, S]."""
        return self.slots.float().expand(batch_size, *self.slots.shape)

    def write(self, memory: Tensor, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Fold tokens into the slots.

        Args:
            memory: slots before, [B, N, S], float32.
            hidden: hidden states of the tokens, [B, T, D]; a last stride may be shorter.
            mask: which tokens are text, [B, T]; the others are not looked at, and a stride without
                text changes nothing.
        Returns:
            Slots after, [B, N, S], float32.
        """
        keys = self.key(hidden).float()
        values = self.value(hidden).float()  # [B, T, S]
        fit = _SHARPNESS * keys @ self.slots.float().transpose(0, 1)  # [B, T, N]
        fit = fit / self.slots.shape[1] ** 0.5
        if mask is not None:
            fit = fit.masked_fill(~mask.unsqueeze(2), torch.finfo(fit.dtype).min)
        for start in range(0, hidden.shape[1], self.stride):
            stride = slice(start, start + self.stride)
            weights = torch.softmax(fit[:, stride], dim=1)
            seen = weights.transpose(1, 2) @ values[:, stride]  # [B, N, S]
            gate_input = torch.cat([seen, memory], dim=-1).to(self.gate.weight.dtype)
            gate = torch.sigmoid(self.gate(gate_input).float())
            if mask is not None:
                gate = gate * mask[:, stride].any(1).view(-1, 1, 1)
            memory = torch.lerp(memory, torch.tanh(seen), gate)
        return memory

    def read(self, memory: Tensor, x: Tensor) -> Tensor:
        """What the slots hold for each token, [B, T, D] -> [B, T, D]; zero at first."""
        query = self.query(x).float()  # [B, T, S]
        scores = query @ memory.transpose(1, 2) / memory.shape[2] ** 0.5  # [B, T, N]
        return self.up((torch.softmax(scores, dim=-1) @ memory).to(x.dtype))

    @contextlib.contextmanager
    def reading(self, backbone: Backbone, memory: Tensor) -> Iterator[None]:
        """While this lasts, what the backbone reads includes what the slots hold for it."""

        def add(_: nn.Module, __: tuple[Tensor, ...], x: Tensor) -> Tensor:
            return x + self.read(memory, x)

        handle = backbone.embedding_norm.register_forward_hook(add)
        try:
            yield
        finally:
            handle.remove()
