"""Loss of a model on held-out text, and the routing of its tokens."""

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
from cdrmix.models.backbone import LanguageModel
from cdrmix.models.moe import num_statistics
from cdrmix.objectives.language_model import sum_weights
from cdrmix.objectives.router import router_monitors
from cdrmix.parallel.topology import ALONE, Topology
from cdrmix.parallel.zero3 import next_token_nats

# Fixed, so that evaluations of different runs read the same samples.
_ROW_ORDER_KEY = (0,)
# One vector for all sums of a batch, so that a single all-reduce adds them: nats, predicted tokens
# and tokens read come first, then the router statistics.
_NUM_TOKEN_SUMS = 3


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
        """Returns the fields as in metrics.json."""
        return asdict(self)

    def table(self) -> str:
        """Returns the fields as lines of text for a person."""
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
    """Returns the numbers of the samples of an evaluation of at most `max_tokens`; at least one.

    The same samples each time, spread over the whole split so that they cover every domain.
    """
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
    """Measures the loss over held-out samples, spread over the data ranks.

    Equal in any layout, except for the overflow of experts where tensor ranks share the tokens of
    one capacity.

    Args:
        model: the backbone; its mode is restored at the end. Evaluation is dropless.
        max_tokens: most tokens read, all ranks together.
        batch_size: samples per forward pass.
        segment_documents: keep the documents of a sample apart, as in training.
        topology: of this rank; sequence ranks read whole samples of their own.
    Returns:
        The same result on every rank.
    Raises:
        DataError: on every rank, if a shard is missing or truncated for any of them.
    """
    # Called in the middle of a training run, too.
    was_training = model.training
    model.eval()
    samples = held_out_rows(dataset, max_tokens)
    batches = np.array_split(samples, -(-len(samples) // batch_size))
    num_ranks = topology.degrees.data
    boundary_id = dataset.manifest.eos_id if segment_documents else None
    # float64: float32 would lose tokens beyond 2^24.
    totals = torch.zeros(_NUM_TOKEN_SUMS, dtype=torch.float64, device=model.device)
    if (moe := model.config.moe) is not None:
        routing = totals.new_zeros(model.config.num_layers * num_statistics(moe))
        totals = torch.cat([totals, routing])
    # Every rank runs the same number of passes, since the experts of a layer may live on other
    # ranks. A rank without a batch of its own runs the first one, at weight 0.
    for turn in range(-(-len(batches) // num_ranks)):
        place = turn * num_ranks + topology.data_rank
        is_counted = place < len(batches)
        rows = runtime.together(partial(dataset.rows, batches[place if is_counted else 0]))
        sums = _batch_sums(model, rows, boundary_id, has_head=topology.is_last_stage)
        if sums is not None:
            sums *= float(is_counted)
            # Tensor ranks hold the same tokens, but each has counted its share of the routing.
            sums[:_NUM_TOKEN_SUMS] *= float(topology.counts_tokens)
            totals += sums
    model.train(was_training)
    return _summarise(model.config, dataset, runtime.all_reduce_sum(totals))


def _batch_sums(
    model: LanguageModel, rows: np.ndarray, boundary_id: int | None, *, has_head: bool
) -> Tensor | None:
    """Runs rows [n, T+1]; returns [nats, predicted tokens, tokens read, router statistics...].

    Args:
        boundary_id: token that ends a document, to keep documents apart; None: one context.
        has_head: this rank has the last pipeline stage; other stages return None.
    """
    targets = rows[:, 1:]
    segment_ids = None
    if boundary_id is not None:
        targets, documents = split_documents(rows, boundary_id)
        segment_ids = torch.from_numpy(documents).to(model.device)
    output = model(torch.from_numpy(rows[:, :-1]).to(model.device), segment_ids=segment_ids)
    labels = torch.from_numpy(targets).to(model.device)
    if not has_head:
        return None
    # Also for a batch that does not count: all data ranks together may gather the head.
    nats = next_token_nats(model.embedding, output.hidden, labels)
    sums = [nats.reshape(1), nats.new_tensor([int(sum_weights(labels)), labels.numel()])]
    if output.router_statistics is not None:
        sums.append(output.router_statistics.reshape(-1))
    return torch.cat(sums).double()


def _summarise(config: ModelConfig, dataset: TokenDataset, totals: Tensor) -> Evaluation:
    tokens = int(totals[1])
    loss = float(totals[0]) / tokens
    layers = []
    if (moe := config.moe) is not None:
        per_token = (totals[_NUM_TOKEN_SUMS:] / totals[2]).view(config.num_layers, -1).cpu()
        monitors = router_monitors(per_token, num_experts=moe.num_experts, top_k=moe.top_k)
        columns = (monitors.utilisation, monitors.overflow_fraction, monitors.entropy_bits)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        layers = [LayerRouting(number, *values) for number, values in enumerate(rows)]
    return Evaluation(
        loss=loss,
        # exp(709.8) is the largest float64; the loss of a diverged model is beyond it.
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=loss / math.log(2) / dataset.bytes_per_token,
        tokens=tokens,
        layers=layers,
    )
