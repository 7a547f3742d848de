"""Stage A, pretraining: batches in, loss and statistics out.

A accumulation steps, B micro batch, T time, L MoE layers, E experts, W data ranks.
"""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.data.loader import Loader
from cdrmix.data.mixed import MixedDataset
from cdrmix.data.recipe import built_mixture
from cdrmix.data.remote_folder import local_folder
from cdrmix.data.sample import ensure_sample
from cdrmix.data.shards import (
    Manifest,
    check_vocab,
    manifest_digest,
    read_manifest,
    verify_shards,
)
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer
from cdrmix.errors import DataError
from cdrmix.log import get_logger
from cdrmix.models.backbone import Output, TokenEmbedding
from cdrmix.objectives.router import router_losses
from cdrmix.parallel.head import next_token_nats
from cdrmix.parallel.statistics import mean_over_ranks
from cdrmix.parallel.topology import Topology
from cdrmix.planning.plan import Plan

logger = get_logger(__name__)


class Corpus(NamedTuple):
    """The token shards of a run, opened and verified.

    Attributes:
        manifest: of the data set.
        train: samples to train on.
        validation: samples held out.
        tokenizer: of the data set.
        folder: its place on this host.
    """

    manifest: Manifest
    train: TokenDataset | MixedDataset
    validation: TokenDataset
    tokenizer: Tokenizer
    folder: Path


class RouterMeasures(NamedTuple):
    """What the router did, detached and over all data ranks.

    Attributes:
        per_token: router statistics per token, [L, 2E + 3].
        load_balance: load-balance loss, scalar.
        z: z-loss, scalar.
    """

    per_token: Tensor
    load_balance: Tensor
    z: Tensor

    @classmethod
    def mean(cls, measured: list[RouterMeasures]) -> RouterMeasures | None:
        """Mean over micro-steps; None where nothing was measured."""
        if not measured:
            return None
        return cls(*(torch.stack(values).mean(0) for values in zip(*measured, strict=True)))


class MicroStep(NamedTuple):
    """What one micro-step gives.

    Attributes:
        loss: what backward starts from, scalar.
        nats: summed cross-entropy of this rank's tokens, weighted, scalar, detached.
        router: what the router did, or None for a dense model.
    """

    loss: Tensor
    nats: Tensor
    router: RouterMeasures | None


def open_corpus(config: Config) -> Corpus:
    """Open the data of a run, building the sample corpus first where it is asked for; collective.

    Raises:
        DataError: on every rank, if a shard is missing, truncated or altered, the tokenizer does
            not fit the model, or ranks have different data sets.
    """
    model, sequence_length = config.model, config.training.sequence_length
    sample: Path | None = None
    if config.data.path == "sample":
        sample = Path(runtime.first_rank_does(lambda: str(ensure_sample(model.vocab_size))))

    def open_folder() -> Corpus:
        path = sample or local_folder(config.data, sequence_length)
        manifest = read_manifest(path)
        check_vocab(manifest, model.vocab_size)
        if runtime.rank() == 0:
            _warn_of_recipe(config.data.recipe, manifest.source.get("recipe"), str(path))
        verify_shards(
            path,
            manifest,
            part=runtime.rank(),
            parts=runtime.world_size(),
            mode=config.data.verify,
        )
        return Corpus(
            manifest,
            _training_set(config, path),
            TokenDataset(path, "validation", sequence_length),
            load_tokenizer(path),
            path,
        )

    corpus = runtime.together(open_folder)
    check_same("data sets", "manifest", manifest_digest(corpus.manifest))
    check_same("tokenizers", "tokenizer", corpus.manifest.tokenizer.sha256)
    return corpus


def check_same(things: str, name: str, digest: str) -> None:
    """Refuse to train where ranks have different inputs; collective.

    Args:
        things: kind of input, for people.
        name: of its digest.
        digest: of this rank's.
    Raises:
        DataError: on every rank, with the hosts of each.
    """
    hosts: dict[str, list[str]] = {}
    for rank, (host, theirs) in enumerate(
        runtime.all_gather_object((socket.gethostname(), digest))
    ):
        hosts.setdefault(theirs, []).append(f"rank {rank} on {host}")
    if len(hosts) == 1:
        return
    listed = "\n".join(
        f"  {name} {theirs[:12]}: {', '.join(ranks[:8])}"
        + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        for theirs, ranks in hosts.items()
    )
    raise DataError(
        f"ranks have different {things}:\n{listed}\nEvery host must have the same. Try a folder "
        "that all hosts share, or copy it again to the hosts where it differs"
    )


@cache  # Stage B opens the corpus again
def _warn_of_recipe(recipe: str | None, built_by: str | None, folder: str) -> None:
    """Warn where a data set was built by another recipe than the model's.

    Args:
        built_by: None for folders that do not say, such as the sample corpus.
    """
    if recipe is not None and built_by is not None and built_by != recipe:
        logger.warning(
            "warning: %s was built by the recipe '%s', and data.recipe = '%s' is made for this "
            "model. Build that one with `cdrmix data build`, or set data.recipe=null.",
            folder,
            built_by,
            recipe,
        )


def _training_set(config: Config, path: Path) -> TokenDataset | MixedDataset:
    """The shards in the order of the run's mixture, else of the one that they were built with."""
    mixture = config.data.mixture or built_mixture(read_manifest(path))
    sequence_length = config.training.sequence_length
    if mixture is None:
        return TokenDataset(path, "train", sequence_length)
    return MixedDataset(path, "train", sequence_length, mixture)


def make_loader(
    config: Config, choice: Plan, topology: Topology, train: TokenDataset | MixedDataset
) -> Loader:
    """This rank's samples in the run's global order, whole also where it trains on some tokens."""
    return Loader(
        train,
        global_batch_size=config.training.global_batch_size,
        micro_batch_size=choice.micro_batch_size,
        data_rank=topology.sample_rank,
        data_size=choice.degrees.sample_ranks,
        seed=config.training.seed,
        shuffle=config.data.order != "sequential",
        window_samples=config.data.window_samples if config.data.order == "windowed" else None,
        segment_documents=config.data.segment_documents,
        token_weights=config.data.token_weights,
        prefetch=config.data.prefetch_batches,
    )


def micro_step(
    engine: Any,
    config: Config,
    topology: Topology,
    input_ids: Tensor,
    labels: Tensor,
    *,
    nats_scale: float,
    segment_ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> MicroStep:
    """Forward pass and loss of one micro-batch.

    Args:
        engine: DeepSpeed engine around the backbone.
        config: loss weights.
        topology: of this rank.
        input_ids: [B, T].
        labels: [B, T]; -100 is ignored.
        nats_scale: see `loss`.
        segment_ids: document of each token, [B, T]; None: a sample is one document.
        weights: of the labels, [B, T], float32; None: 1.
    """
    output: Output = engine(input_ids, segment_ids=segment_ids)
    embedding = engine.module.embedding
    return loss(output, embedding, labels, config, topology, nats_scale=nats_scale, weights=weights)


def loss(
    output: Output,
    embedding: TokenEmbedding,
    labels: Tensor,
    config: Config,
    topology: Topology,
    *,
    nats_scale: float,
    weights: Tensor | None = None,
) -> MicroStep:
    """Loss of one micro-batch from what the backbone gave.

    Args:
        output: hidden states of every position, router statistics of all layers.
        embedding: of this rank; tied with the head.
        labels: [B, T]; -100 is ignored.
        config: loss weights.
        topology: of this rank.
        nats_scale: factor on the summed cross-entropy: W * A / valid tokens of the global batch,
            or their weight. DeepSpeed divides by A and averages over W; what is left is the mean
            over all tokens.
        weights: of the labels, [B, T], float32; None: 1.
    """
    nats = next_token_nats(embedding, output.hidden, labels, weights)
    loss = nats * nats_scale
    moe, statistics = config.model.moe, output.router_statistics
    if moe is None or statistics is None:
        return MicroStep(_all_or_nothing(loss), nats.detach(), None)
    per_token = mean_over_ranks(statistics, topology) / labels.numel()
    losses = router_losses(per_token, num_experts=moe.num_experts, top_k=moe.top_k)
    loss = loss + moe.load_balance_weight * losses.load_balance + moe.z_loss_weight * losses.z
    measured = RouterMeasures(per_token.detach(), losses.load_balance.detach(), losses.z.detach())
    return MicroStep(_all_or_nothing(loss), nats.detach(), measured)


def _all_or_nothing(loss: Tensor) -> Tensor:
    """The same loss, whose gradients are not finite where it is not.

    DeepSpeed skips a step by its gradients. Those of an infinite loss can be finite: softmax minus
    target, where the target's logit is minus infinity.
    """
    return loss * (1 + 0 * loss.detach())
