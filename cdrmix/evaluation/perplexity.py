"""Loss of held-out text, and how the router treats it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from cdrmix.data.loader import split_documents
from cdrmix.data.token_dataset import Permutation, TokenDataset
from cdrmix.models.backbone import LanguageModel, Output, TokenEmbedding
from cdrmix.models.moe import num_statistics
from cdrmix.objectives.language_model import count_valid
from cdrmix.objectives.router import router_monitors
from cdrmix.parallel.topology import ALONE, Topology
from cdrmix.parallel.zero3 import next_token_nats

_ROW_ORDER_KEY = (0,)
_NUM_TOKEN_SUMS = 3  # before the router statistics in the sums of a batch


@dataclass(frozen=True)
class LayerRouting:
    """Routing of one MoE layer over the held-out tokens.

    Attributes:
        layer: index among the MoE layers.
        utilisation: share of assignments per expert, summing to 1.
        overflow_fraction: share of assignments beyond the capacity factor.
        routing_entropy_bits: entropy of the utilisation.
    """

    layer: int
    utilisation: list[float]
    overflow_fraction: float
    routing_entropy_bits: float


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        loss: nats per predicted token.
        perplexity: exp(loss).
        bits_per_byte: loss in bits over the mean bytes per token; comparable across tokenizers.
        tokens: predicted tokens.
        layers: routing per MoE layer; empty for a dense model.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    layers: list[LayerRouting]

    def as_json(self) -> dict[str, Any]:
        """The fields as metrics.json holds them."""
        return asdict(self)

    def table(self) -> str:
        """The fields as lines for a person."""
        lines = [
            f"loss        {self.loss:.4f} nats per token over {self.tokens:,} tokens",
            f"perplexity  {self.perplexity:.2f}",
            f"bits/byte   {self.bits_per_byte:.4f}",
        ]
        if self.layers:
            lines += ["", "layer  entropy bits  overflow  use of each expert"]
        for routing in self.layers:
            shares = "  ".join(f"{share:6.1%}" for share in routing.utilisation)
            lines.append(
                f"{routing.layer:5}  {routing.routing_entropy_bits:12.3f}"
                f"  {routing.overflow_fraction:8.2%}  {shares}"
            )
        return "\n".join(lines)


def held_out_rows(dataset: TokenDataset, max_tokens: int) -> np.ndarray:
    """Samples that an evaluation of at most `max_tokens` reads: the same ones each time, spread
    over the whole split so that every domain is met; at least one."""
    count = max(1, min(dataset.num_samples, max_tokens // dataset.sequence_length))
    return Permutation(dataset.num_samples, _ROW_ORDER_KEY)(np.arange(count, dtype=np.int64))


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    dataset: TokenDataset,
    *,
    max_tokens: int,
    batch_size: int,
    segment_documents: bool = False,
    topology: Topology = ALONE,
) -> Evaluation:
    """Loss over held-out samples, spread over the data ranks; equal in any layout, but for the
    overflow of experts where tensor ranks share the tokens that a capacity is of.

    Args:
        model: the backbone; left in the mode it was in. Evaluation is dropless.
        dataset: the held-out split.
        max_tokens: most tokens read, all ranks together.
        batch_size: samples per forward pass.
        segment_documents: keep the documents of a sample apart, as in training.
        topology: of this rank; sequence ranks read whole samples of their own.
    Returns:
        The same result on every rank.
    Raises:
        DataError: on every rank, if a shard is missing or truncated for any of them.
    """
    was_training = model.training
    model.eval()
    batches = np.array_split(
        rows := held_out_rows(dataset, max_tokens), -(-len(rows) // batch_size)
    )
    world = topology.degrees.data
    rank = topology.data_rank
    border_id = dataset.manifest.eos_id if segment_documents else None
    totals = torch.zeros(_NUM_TOKEN_SUMS, dtype=torch.float64, device=model.device)
    if (moe := model.config.moe) is not None:
        routing = totals.new_zeros(model.config.num_layers * num_statistics(moe))
        totals = torch.cat([totals, routing])
    # every rank runs the same number of passes, because experts may live on another one
    for turn in range(-(-len(batches) // world)):
        place = turn * world + rank
        there = place < len(batches)
        rows = runtime.together(partial(dataset.rows, batches[place if there else 0]))
        output, labels = _pass(model, rows, border_id=border_id)
        if topology.is_last_stage:  # all of it: the head may be gathered by all data ranks
            sums = _batch_sums(output, labels, model.embedding) * float(there)
            # tensor ranks hold the same tokens, and each its share of what the router counted
            sums[:_NUM_TOKEN_SUMS] *= float(topology.counts_tokens)
            totals += sums
    model.train(was_training)
    return _summarise(model.config, dataset, runtime.all_reduce_sum(totals))


def _pass(
    model: LanguageModel, rows: np.ndarray, *, border_id: int | None
) -> tuple[Output, Tensor]:
    """What the model gives for rows [n, T+1], and their labels [n, T].

    Args:
        border_id: the token that ends a document, to keep documents apart; None: they are not.
    """
    targets = rows[:, 1:]
    segment_ids = None
    if border_id is not None:
        targets, documents = split_documents(rows, border_id)
        segment_ids = torch.from_numpy(documents).to(model.device)
    output = model(torch.from_numpy(rows[:, :-1]).to(model.device), segment_ids=segment_ids)
    return output, torch.from_numpy(targets).to(model.device)


def _batch_sums(output: Output, labels: Tensor, embedding: TokenEmbedding) -> Tensor:
    """[nats, predicted tokens, tokens read, router statistics...] of a pass, float64."""
    nats = next_token_nats(embedding, output.hidden, labels)
    sums = [nats.reshape(1), nats.new_tensor([int(count_valid(labels)), labels.numel()])]
    if output.router_statistics is not None:
        sums.append(output.router_statistics.reshape(-1))
    return torch.cat(sums).double()


def _summarise(config: ModelConfig, dataset: TokenDataset, totals: Tensor) -> Evaluation:
    tokens = int(totals[1])
    loss = float(totals[0]) / tokens
    layers = []
    moe = config.moe
    if moe is not None:
        per_token = (totals[_NUM_TOKEN_SUMS:] / totals[2]).view(config.num_layers, -1).cpu()
        monitors = router_monitors(per_token, num_experts=moe.num_experts, top_k=moe.top_k)
        layers = [
            LayerRouting(
                layer=i,
                utilisation=monitors.utilisation[i].tolist(),
                overflow_fraction=float(monitors.overflow_fraction[i]),
                routing_entropy_bits=float(monitors.entropy_bits[i]),
            )
            for i in range(len(per_token))
        ]
    return Evaluation(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=loss / math.log(2) / dataset.bytes_per_token,
        tokens=tokens,
        layers=layers,
    )
