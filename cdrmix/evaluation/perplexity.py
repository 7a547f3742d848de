"""Loss of a model on held-out text, by domain, and the routing of its tokens."""

# n samples, T sequence length (tokens), G domains

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from cdrmix.data.document import KINDS
from cdrmix.data.loader import label_kinds, split_documents
from cdrmix.data.token_dataset import Permutation, TokenDataset
from cdrmix.models.backbone import LanguageModel
from cdrmix.models.moe import rows_of
from cdrmix.objectives.depth import depth_monitors
from cdrmix.objectives.language_model import IGNORED_LABEL, LabelWeights, sum_weights
from cdrmix.objectives.router import router_monitors, tokens_routed
from cdrmix.parallel.topology import ALONE, Topology
from cdrmix.parallel.zero3 import next_token_losses, next_token_nats
from cdrmix.planning.blocks.routers import (
    RouterPart,
    num_statistics,
    router_places,
    routers_in,
)
from cdrmix.planning.depth import DEPTH_STATISTICS

# Fixed, so that evaluations of different runs read the same samples.
_ROW_ORDER_KEY = (0,)
# One vector for all sums of a batch, so that a single all-reduce adds them: nats, predicted tokens
# and tokens read come first; then, where there are several domains, or kinds of tokens are told
# apart, the nats of each of them and the predicted tokens of each; then the router statistics.
_NUM_WHOLE_SUMS = 3


@dataclass(frozen=True)
class LayerRouting:
    """Routing of one MoE layer, or Routing Mamba mixer, over the held-out tokens.

    Attributes:
        layer: its number in the model, from 0; of a Hugging Face model, among its MoE layers.
        utilisation: share of assignments per expert, summing to 1.
        overflow_fraction: share of assignments beyond the capacity factor; 0 of a mixer.
        routing_entropy_bits: entropy of the utilisation.
    """

    layer: int
    utilisation: list[float]
    overflow_fraction: float
    routing_entropy_bits: float


@dataclass(frozen=True)
class BlockDepth:
    """Tokens that a routed block of Mixture of Depths took of the held-out ones.

    Attributes:
        layer: of the model, from 0 at the input.
        fraction: share of the tokens.
        position_correlation: of being taken with the place in the row.
    """

    layer: int
    fraction: float
    position_correlation: float


@dataclass(frozen=True)
class DomainLoss:
    """Loss over the predicted tokens of one domain (nats per token), and their number."""

    domain: str
    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True)
class ObjectiveLoss:
    """Loss over the predicted tokens of one objective (nats per token), and their number."""

    objective: str  # or `fim_middle`, the part of `fim` that is filled in
    loss: float
    tokens: int


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        loss: nats per predicted token.
        bits_per_byte: loss in bits over the mean bytes per token; comparable across tokenizers.
        tokens: predicted tokens.
        layers: routing per MoE layer; empty for a dense model.
        depth: of each routed block; empty without Mixture of Depths.
        domains: loss of each domain of which a token was predicted, sorted by name; empty for a
            data set of one domain. Their mean by tokens is `loss`.
        mixers: routing per Routing Mamba mixer; empty without any.
        objectives: loss of each objective of which a token was predicted; empty if they were not
            asked for, or all is text.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    layers: list[LayerRouting]
    domains: list[DomainLoss] = field(default_factory=list)
    objectives: list[ObjectiveLoss] = field(default_factory=list)
    depth: list[BlockDepth] = field(default_factory=list)
    mixers: list[LayerRouting] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as in metrics.json; `domains` and `objectives` only where there are
        several, `depth` with Mixture of Depths, `mixers` where some have experts."""
        fields = asdict(self)
        for name in ("domains", "objectives", "depth", "mixers"):
            if not fields[name]:
                del fields[name]
        return fields

    def table(self) -> str:
        """Returns the fields as lines of text for a person."""
        lines = [
            f"loss        {self.loss:.4f} nats per token over {self.tokens:,} tokens",
            f"perplexity  {self.perplexity:.2f}",
            f"bits/byte   {self.bits_per_byte:.4f}",
        ]
        if self.domains:
            width = max(len("domain"), *(len(each.domain) for each in self.domains))
            lines += ["", f"{'domain':{width}}  {'loss':>8}  {'perplexity':>12}  {'tokens':>14}"]
        for each in self.domains:
            lines.append(
                f"{each.domain:{width}}  {each.loss:8.4f}  {each.perplexity:12.2f}"
                f"  {each.tokens:14,}"
            )
        if self.objectives:
            lines += ["", f"{'objective':10}  {'loss':>8}  {'tokens':>14}"]
        for part in self.objectives:
            lines.append(f"{part.objective:10}  {part.loss:8.4f}  {part.tokens:14,}")
        for kind, routed in (("layer", self.layers), ("mixer", self.mixers)):
            if routed:
                lines += ["", f"{kind}  entropy bits  overflow  use of each expert"]
            for routing in routed:
                shares = "  ".join(f"{share:6.1%}" for share in routing.utilisation)
                lines.append(
                    f"{routing.layer:5}  {routing.routing_entropy_bits:12.3f}"
                    f"  {routing.overflow_fraction:8.2%}  {shares}"
                )
        if self.depth:
            lines += ["", "block  tokens taken  correlation with place"]
        for block in self.depth:
            lines.append(
                f"{block.layer:5}  {block.fraction:12.1%}  {block.position_correlation:22.3f}"
            )
        return "\n".join(lines)


class Apart(NamedTuple):
    """An evaluation, and its sums of each sample and each batch, equal on every rank.

    Attributes:
        nats, tokens: of each sample, and the tokens predicted there, float64, [N].
        routing: statistics of the routers of each batch, float64, [batches, R * S].
        read: tokens of each batch, float64, [batches].
    """

    whole: Evaluation
    nats: np.ndarray
    tokens: np.ndarray
    routing: Tensor
    read: Tensor


def held_out_rows(dataset: TokenDataset, max_tokens: int) -> np.ndarray:
    """Returns the numbers of the samples of an evaluation of at most `max_tokens`; at least one.

    The same samples each time, spread over the whole split so that they cover every domain.
    """
    count = max(1, min(dataset.num_samples, max_tokens // dataset.sequence_length))
    return Permutation(dataset.num_samples, _ROW_ORDER_KEY)(np.arange(count, dtype=np.int64))


def evaluate(
    model: LanguageModel,
    dataset: TokenDataset,
    *,
    max_tokens: int,
    batch_size: int,
    segment_documents: bool = False,
    fim_ids: tuple[int, ...] | None = None,
    topology: Topology = ALONE,
) -> Evaluation:
    """Measures the loss over held-out samples, spread over the data ranks.

    Equal in any layout, except for the overflow of experts where tensor ranks share the tokens of
    one capacity.

    Args:
        model: its mode is restored at the end. Evaluation is dropless.
        max_tokens: most tokens read, all ranks together.
        batch_size: samples per forward pass.
        segment_documents: keep the documents of a sample apart, as in training.
        fim_ids: tell the loss of each objective too, as `Loader` tells kinds; None: do not.
        topology: of this rank; sequence ranks read whole samples of their own.
    Returns:
        The same result on every rank, by domain too where the split has several.
    Raises:
        DataError: on every rank, if a shard is missing or truncated for any of them.
    """
    groups = _groups(dataset, fim_ids)
    walk = _Walk(max_tokens, batch_size, segment_documents, fim_ids, groups)
    totals, _ = _walked(model, dataset, walk, topology)
    return _summarise(model.config, dataset, groups, totals)


def evaluate_apart(
    model: LanguageModel,
    dataset: TokenDataset,
    *,
    max_tokens: int,
    batch_size: int,
    segment_documents: bool = False,
    fim_ids: tuple[int, ...] | None = None,
    topology: Topology = ALONE,
) -> Apart:
    """Measures as `evaluate`, and tells what each sample and each batch adds to it."""
    groups = _groups(dataset, fim_ids)._replace(samples=batch_size)
    walk = _Walk(max_tokens, batch_size, segment_documents, fim_ids, groups)
    totals, batches = _walked(model, dataset, walk, topology)
    whole, parts = _NUM_WHOLE_SUMS, sum(groups)
    ends = (whole + parts, whole + 2 * parts)
    nats, tokens = (batches[:, end - batch_size : end].flatten() for end in ends)
    routing = batches[:, ends[1] :]
    routing = routing[:, : model.num_routers * num_statistics(model.config)]
    is_there = tokens > 0  # batches may have a sample less
    return Apart(
        _summarise(model.config, dataset, groups, totals),
        nats[is_there].cpu().numpy(),
        tokens[is_there].cpu().numpy(),
        routing,
        batches[:, whole - 1],
    )


class _Groups(NamedTuple):
    """Numbers of domains, of kinds and of samples of a batch whose sums are taken apart; 0 where
    they are not."""

    domains: int
    kinds: int
    samples: int = 0


class _Walk(NamedTuple):
    """Samples to read, and how; see `evaluate`."""

    max_tokens: int
    batch_size: int
    segment_documents: bool
    fim_ids: tuple[int, ...] | None
    groups: _Groups


@torch.no_grad()
def _walked(
    model: LanguageModel, dataset: TokenDataset, walk: _Walk, topology: Topology
) -> tuple[Tensor, Tensor]:
    """Sums of `_batch_sums` over all batches, and those of each batch, [batches, sums]; these only
    where samples are taken apart."""
    # Called in the middle of a training run, too.
    was_training = model.training
    model.eval()
    samples = held_out_rows(dataset, walk.max_tokens)
    batches = np.array_split(samples, -(-len(samples) // walk.batch_size))
    num_ranks = topology.degrees.data
    boundary_id = dataset.manifest.eos_id if walk.segment_documents else None
    groups = walk.groups
    num_sums = _NUM_WHOLE_SUMS + 2 * sum(groups)
    # float64: float32 would lose tokens beyond 2^24.
    totals = torch.zeros(num_sums, dtype=torch.float64, device=model.device)
    routing = totals.new_zeros(model.num_routers * num_statistics(model.config))
    num_routed = len(model.config.routed_layers())
    depth = totals.new_zeros(num_routed * len(DEPTH_STATISTICS))
    totals = torch.cat([totals, routing, depth])
    apart = totals.new_zeros(len(batches) if groups.samples else 0, len(totals))
    # Every rank runs the same number of passes, since the experts of a layer may live on other
    # ranks. A rank without a batch of its own runs the first one, at weight 0.
    for turn in range(-(-len(batches) // num_ranks)):
        place = turn * num_ranks + topology.data_rank
        is_counted = place < len(batches)
        place = place if is_counted else 0
        rows, parts = runtime.together(
            partial(_read, dataset, batches[place], groups, walk.fim_ids)
        )
        sums = _batch_sums(
            model,
            rows,
            boundary_id,
            parts,
            is_parted=groups.domains + groups.kinds > 0,
            has_head=topology.is_last_stage,
        )
        if sums is not None:
            sums *= float(is_counted)
            # Tensor ranks hold the same tokens, but each has counted its share of the routing.
            sums[:num_sums] *= float(topology.counts_tokens)
            totals += sums
            if groups.samples:
                apart[place] += sums
    model.train(was_training)
    if groups.samples:
        runtime.all_reduce_sum(apart)
    return runtime.all_reduce_sum(totals), apart


def _groups(dataset: TokenDataset, fim_ids: tuple[int, ...] | None) -> _Groups:
    num_domains = len(dataset.domains)
    # Of one domain, the sums of the whole are its own.
    return _Groups(num_domains if num_domains > 1 else 0, 0 if fim_ids is None else len(KINDS))


def _read(
    dataset: TokenDataset, batch: np.ndarray, groups: _Groups, fim_ids: tuple[int, ...] | None
) -> tuple[np.ndarray, list[Tensor]]:
    """Rows of samples, [n, T+1], and of each group the member of each label, one-hot [n, T, G]."""
    rows = dataset.rows(batch)
    parts = []
    if groups.domains:
        domains = torch.from_numpy(dataset.label_domains(batch))
        parts.append(F.one_hot(domains, groups.domains))
    if fim_ids is not None:
        kinds = label_kinds(rows, dataset.roles(batch), dataset.manifest.eos_id, fim_ids)
        parts.append(F.one_hot(torch.from_numpy(kinds).long(), groups.kinds))
    if groups.samples:
        each = F.one_hot(torch.arange(len(rows)), groups.samples)
        parts.append(each.unsqueeze(1).expand(-1, rows.shape[1] - 1, -1))
    return rows, parts


def _batch_sums(
    model: LanguageModel,
    rows: np.ndarray,
    boundary_id: int | None,
    parts: list[Tensor],
    *,
    is_parted: bool,
    has_head: bool,
) -> Tensor | None:
    """Runs rows [n, T+1]; returns one vector of sums, float64, as `_NUM_WHOLE_SUMS` describes it.

    Args:
        boundary_id: token that ends a document, to keep documents apart; None: one context.
        parts: as of `_read`.
        is_parted: the first of them is of domains or kinds, whose sum is the whole.
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
    counts = [int(sum_weights(labels)), labels.numel()]
    # Also for a batch that does not count: all data ranks together may gather the head.
    if not parts:
        nats = next_token_nats(model.embedding, output.hidden, labels)
        sums = [nats.reshape(1), nats.new_tensor(counts)]
    else:
        members = torch.cat(parts, dim=-1).to(model.device)
        weights = LabelWeights(sums=members.float())
        losses = next_token_losses(model.embedding, output.hidden, labels, weights)
        nats = losses.nats.double()
        valid = (members * (labels != IGNORED_LABEL).unsqueeze(-1)).sum((0, 1))
        # The whole is the sum of its parts to the last bits, which a sum in float32 is not. Samples
        # are no parts that are told: with them alone it is as without.
        whole = nats[: parts[0].shape[-1]].sum() if is_parted else losses.loss.double()
        sums = [whole.reshape(1), nats.new_tensor(counts), nats, valid]
    if output.router_statistics is not None:
        sums.append(output.router_statistics.reshape(-1))
    if output.depth_statistics is not None:
        sums.append(output.depth_statistics.reshape(-1))
    return torch.cat([values.double() for values in sums])


def _summarise(
    config: ModelConfig, dataset: TokenDataset, groups: _Groups, totals: Tensor
) -> Evaluation:
    tokens = int(totals[1])
    loss = float(totals[0]) / tokens
    num_parts = sum(groups)
    nats, counts, parts = totals[_NUM_WHOLE_SUMS:].tensor_split((num_parts, 2 * num_parts))
    known = list(zip(nats.tolist(), counts.tolist(), strict=True))
    domains = []
    for domain, (of_domain, count) in zip(dataset.domains, known[: groups.domains], strict=False):
        if count:
            each = of_domain / count
            domains.append(DomainLoss(domain, each, perplexity_of(each), int(count)))
    depth = []
    if routed := config.routed_layers():
        parts, statistics = parts.tensor_split([len(parts) - len(routed) * len(DEPTH_STATISTICS)])
        found = depth_monitors(statistics.view(len(routed), -1))
        shares, correlations = found.fraction.tolist(), found.position_correlation.tolist()
        depth = [BlockDepth(*each) for each in zip(routed, shares, correlations, strict=True)]
    routing = routing_of(config, parts, num_tokens=totals[2])
    return Evaluation(
        loss=loss,
        perplexity=perplexity_of(loss),
        bits_per_byte=loss / math.log(2) / dataset.bytes_per_token,
        tokens=tokens,
        layers=routing["ffn"],
        domains=domains,
        objectives=_objectives(known[groups.domains :][: groups.kinds]),
        depth=depth,
        mixers=routing["mixer"],
    )


def _objectives(sums: list[tuple[float, float]]) -> list[ObjectiveLoss]:
    """Losses of objectives from nats and tokens of each of `KINDS`; none where all is text."""
    of_kinds = dict(zip(KINDS, sums, strict=False))
    if not any(count for kind, (_, count) in of_kinds.items() if kind != "text"):
        return []
    middles = of_kinds["fim_middle"]
    of_kinds["fim"] = (of_kinds["fim"][0] + middles[0], of_kinds["fim"][1] + middles[1])
    return [
        ObjectiveLoss(kind, nats / count, int(count))
        for kind, (nats, count) in of_kinds.items()
        if count
    ]


def routing_of(
    config: ModelConfig, statistics: Tensor, *, num_tokens: Tensor
) -> dict[RouterPart, list[LayerRouting]]:
    """Routing of MoE layers (`ffn`) and of mixers with experts, from sums over `num_tokens` tokens
    of their statistics, [R * S]."""
    sums = statistics.view(-1, num_statistics(config))
    found: dict[RouterPart, list[LayerRouting]] = {"ffn": [], "mixer": []}
    if len(sums) and routers_in(config, "ffn") is not None:
        found["ffn"] = _layer_routing(sums, config, "ffn", num_tokens=num_tokens)
    if routers_in(config, "mixer") is not None:
        found["mixer"] = _layer_routing(sums, config, "mixer", num_tokens=num_tokens)
    return found


def _layer_routing(
    sums: Tensor, config: ModelConfig, part: RouterPart, *, num_tokens: Tensor
) -> list[LayerRouting]:
    """Routing of each layer that has a router in one half of its block."""
    sizes = routers_in(config, part)
    assert sizes is not None, "the model has such routers"
    rows = rows_of(sums, config, part)
    read = num_tokens
    if config.mod is not None:  # over the tokens that reach the router of a layer
        read = tokens_routed(rows, num_experts=sizes.num_experts, top_k=sizes.top_k)
    per_token = (rows / read).cpu()
    monitors = router_monitors(per_token, num_experts=sizes.num_experts, top_k=sizes.top_k)
    columns = (monitors.utilisation, monitors.overflow_fraction, monitors.entropy_bits)
    values = list(zip(*(column.tolist() for column in columns), strict=True))
    layers: Sequence[int] = range(len(values))  # of a Hugging Face model they are numbered
    if config.kind == "rwkx":
        layers = [place.layer for place in router_places(config) if place.part == part]
    return [LayerRouting(layer, *each) for layer, each in zip(layers, values, strict=True)]


def perplexity_of(loss: float) -> float:
    """Perplexity of a loss in nats per token."""
    # exp(709.8) is the largest float64; the loss of a diverged model is beyond it.
    return math.exp(min(loss, 700.0))
