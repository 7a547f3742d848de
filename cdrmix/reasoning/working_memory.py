"""Working memory, and the encoder of episodic memory's keys and queries.

Working memory is a few slots that summarise a window for the windows after it. Every `stride`
tokens each slot attends to the tokens that match its query, and a gate decides how much of the slot
they replace. Later tokens read the slots by attention, and the result is added to their embeddings.
The projection back is zero at first, so that a backbone with a fresh working memory computes the
same numbers as without.
"""

# B sequences, T tokens, D hidden, N slots, S width of a slot or of a key

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
    """Projections of hidden states to keys of segments and queries for them, unit vectors."""

    def __init__(self, hidden_size: int, key_size: int) -> None:
        super().__init__()
        self.to_key = nn.Linear(hidden_size, key_size, bias=False)
        self.to_query = nn.Linear(hidden_size, key_size, bias=False)

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Sets the initial values from the seed."""
        for part in ("to_key", "to_query"):
            weight = getattr(self, part).weight
            normal_(weight, weight.shape[1] ** -0.5, seed=seed, name=f"retrieval.{part}")

    def key(self, hidden: Tensor) -> Tensor:
        """Makes the key of a segment from its hidden states, [B, T, D] -> [B, S], float32."""
        return F.normalize(self.to_key(hidden.mean(1)).float(), dim=-1)

    def query(self, hidden: Tensor) -> Tensor:
        """Makes a query from one (pooled) hidden state, [B, D] -> [B, S], float32."""
        return F.normalize(self.to_query(hidden).float(), dim=-1)


@torch.no_grad()
def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Returns the sha256 of named weights in any order; keys are valid for one digest only."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda pair: pair[0]):
        # float32, so that a model saved in bf16 and the same one in memory agree
        values = tensor.detach().float().cpu().contiguous()
        digest.update(f"{name} {tuple(values.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


NUM_SLOTS = 8
# Scales the slots' scores, so that each attends to a few tokens and not to the mean of a stride.
_SHARPNESS = 4.0


class WorkingMemory(nn.Module):
    """Slots that share the `summary_dim` features of a configuration."""

    def __init__(self, hidden_size: int, config: MemoryConfig) -> None:
        super().__init__()
        width = config.summary_dim // NUM_SLOTS  # the schema allows multiples only
        self.stride = config.kv_summary_stride
        self.slots = nn.Parameter(torch.empty(NUM_SLOTS, width))  # initial content, and query
        self.key = nn.Linear(hidden_size, width, bias=False)
        self.value = nn.Linear(hidden_size, width, bias=False)
        self.gate = nn.Linear(2 * width, width)
        self.query = nn.Linear(hidden_size, width, bias=False)
        self.up = nn.Linear(width, hidden_size, bias=False)

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Sets the initial values from the seed; before training, a read gives zero."""
        normal_(self.slots, 1.0, seed=seed, name="working_memory.slots")
        for part in ("key", "value", "query", "gate"):
            layer = getattr(self, part)
            scale = layer.weight.shape[1] ** -0.5
            normal_(layer.weight, scale, seed=seed, name=f"working_memory.{part}")
        self.gate.bias.zero_()
        self.up.weight.zero_()

    def start(self, batch_size: int) -> Tensor:
        """Returns the slots before the first token, [B, N, S]."""
        return self.slots.float().expand(batch_size, *self.slots.shape)

    def write(self, memory: Tensor, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Folds tokens into the slots, which are float32 before and after, [B, N, S].

        Args:
            memory: slots before.
            hidden: hidden states of the tokens, [B, T, D]; the last stride may be shorter.
            mask: True for text, [B, T]; padding gets no attention, and a stride without text
                changes nothing.
        """
        keys = self.key(hidden).float()
        values = self.value(hidden).float()  # [B, T, S]
        fit = _SHARPNESS * keys @ self.slots.float().transpose(0, 1)  # [B, T, N]
        fit = fit / self.slots.shape[1] ** 0.5
        if mask is not None:
            # not -inf: the softmax over a stride of padding alone would not be a number
            fit = fit.masked_fill(~mask.unsqueeze(2), torch.finfo(fit.dtype).min)
        for start in range(0, hidden.shape[1], self.stride):
            stride = slice(start, start + self.stride)
            weights = torch.softmax(fit[:, stride], dim=1)
            content = weights.transpose(1, 2) @ values[:, stride]  # [B, N, S]
            gate_input = torch.cat([content, memory], dim=-1).to(self.gate.weight.dtype)
            # float32, as slots are carried over a whole text and change by little at a time
            gate = torch.sigmoid(self.gate(gate_input).float())
            if mask is not None:
                gate = gate * mask[:, stride].any(1).view(-1, 1, 1)
            memory = torch.lerp(memory, torch.tanh(content), gate)
        return memory

    def read(self, memory: Tensor, x: Tensor) -> Tensor:
        """Reads the slots for each token, [B, T, D] -> [B, T, D]."""
        query = self.query(x).float()  # [B, T, S]
        scores = query @ memory.transpose(1, 2) / memory.shape[2] ** 0.5  # [B, T, N]
        return self.up((torch.softmax(scores, dim=-1) @ memory).to(x.dtype))

    @contextlib.contextmanager
    def reading(self, backbone: Backbone, memory: Tensor | None) -> Iterator[None]:
        """Adds a read of the slots to the backbone's embeddings while this lasts; None: none."""
        if memory is None:
            yield
            return
        with backbone.embedding_norm.register_forward_hook(
            lambda _, __, x: x + self.read(memory, x)
        ):
            yield
