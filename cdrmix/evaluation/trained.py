"""Loads a trained run as one plain model, for text and evaluation in one process.

A checkpoint may be of an untrusted author: no URL in its configuration is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from cdrmix import runtime
from cdrmix.checkpoint import plain_module
from cdrmix.checkpoint.base_model import base_of_adapters
from cdrmix.checkpoint.checkpoint_file import CheckpointFile, Weights
from cdrmix.checkpoint.fragments import is_stage_b
from cdrmix.checkpoint.trained_run import (
    config_of,
    local_data,
    newest_checkpoint,
    tokenizer_of,
)
from cdrmix.config.load import SAMPLE
from cdrmix.config.schema import Config, DataConfig
from cdrmix.data.document import fim_ids
from cdrmix.data.remote import remote_files
from cdrmix.data.remote_folder import local_folder
from cdrmix.data.shards import read_manifest, verify_shards
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer
from cdrmix.errors import DataError, StateError
from cdrmix.evaluation.perplexity import Evaluation, evaluate
from cdrmix.hf.model import HuggingFaceModel
from cdrmix.log import get_logger
from cdrmix.models.backbone import Backbone
from cdrmix.models.generate import generate
from cdrmix.models.speculate import speculate
from cdrmix.parallel.apply import frozen_in, logical_name_in

logger = get_logger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """Model, resolved configuration and tokenizer of one checkpoint.

    Attributes:
        model: the whole model, float32, evaluation mode.
        tokenizer_digest: sha256 of the tokenizer's file, hex.
        checkpoint: folder of the checkpoint, verified.
        step: optimizer steps of the training.
    """

    config: Config
    model: Backbone | HuggingFaceModel
    tokenizer: Tokenizer
    tokenizer_digest: str
    checkpoint: Path
    step: int


def load_trained(
    source: Path, *, base: Path | None = None, weights: Weights = "trained"
) -> TrainedModel:
    """Loads the newest checkpoint under `source` that verifies, saved in any layout.

    Args:
        source: a run directory or a checkpoint.
        base: folder of the base of its adapters; None: where the run has read it.
        weights: `trained`, or `ema` for the average of what was trained.
    Raises:
        StateError: if there is none, it holds no model or no average that is asked for, or its
            tokenizer is missing or wrong, or the base of its adapters is not there, or `base` is
            given for a run without adapters.
    """
    newest = newest_checkpoint(source)
    with CheckpointFile(newest.path, weights=weights) as reader:
        config = config_of(reader, base=base)
        folder, digest = tokenizer_of(newest.path, reader.state, config)
        tokenizer = load_tokenizer(folder)
        model = without_weights(config)
        name = logical_name_in(config.model)
        if config.model.lora is not None:
            code = config.model.remote_code
            with base_of_adapters(reader.state, newest.path, code, given=base) as frozen:
                plain_module.fill_module(model, frozen, name, fresh=frozenset(reader.names()))
        # A run of Stage B saves its parts beside the backbone; the plain model has none of them.
        stage_b = frozenset(filter(is_stage_b, reader.names()))
        elsewhere = frozen_in(config.model)
        plain_module.load_module(model, reader, name, others=stage_b, elsewhere=elsewhere)
    return TrainedModel(config, model.eval(), tokenizer, digest, newest.path, newest.step)


def without_weights(config: Config) -> Backbone | HuggingFaceModel:
    """Makes a whole model in float32 on the device, for weights that are read into it: a large one
    need not fit into the host's memory."""
    if config.model.kind == "hf":
        # transformers takes seconds to import
        from cdrmix.hf.build import build_causal
        from cdrmix.hf.lora import add_adapters

        training = config.training.model_copy(update={"precision": "fp32"})
        whole = config.model_copy(update={"training": training})
        causal = build_causal(whole, None, folder=Path(str(config.model.path)))
        if config.model.lora is not None:
            causal = add_adapters(causal, config.model.lora, seed=config.training.seed)
        return HuggingFaceModel(causal, config.model)
    with torch.device(runtime.device()):
        return Backbone(config.model)


def continue_text(
    source: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    base: Path | None = None,
    weights: Weights = "trained",
) -> str:
    """Generates the continuation of `prompt` by a trained model; `base` and `weights` as in
    `load_trained`."""
    run = load_trained(source, base=base, weights=weights)
    new = generate(
        run.model,
        _prompt_ids(run.tokenizer, prompt),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stop_id=run.tokenizer.eos_id,
    )
    return _continuation(run.tokenizer, new, prompt)


def continue_speculating(
    source: Path, prompt: str, *, max_new_tokens: int, weights: Weights = "trained"
) -> str:
    """Generates the likeliest continuation, by speculation, and logs what that was worth.

    Raises StateError if the model predicts no further tokens.
    """
    run = load_trained(source, weights=weights)
    model = run.model
    if not isinstance(model, Backbone) or model.mtp is None:
        raise StateError(
            f"{run.checkpoint}: predicts the next token alone (model.mtp is null), and --speculate "
            "needs guesses of further ones. Generate without it, or train with model.mtp"
        )
    done = speculate(
        model,
        _prompt_ids(run.tokenizer, prompt),
        max_new_tokens=max_new_tokens,
        stop_id=run.tokenizer.eos_id,
    )
    shares = (f"token {place} {share:.0%}" for place, share in enumerate(done.acceptance, 2))
    logger.info(
        "speculation: %d tokens in %d passes, %.2f tokens per pass; guesses accepted: %s",
        *(done.num_tokens, done.passes, done.tokens_per_pass, ", ".join(shares)),
    )
    return _continuation(run.tokenizer, done.tokens, prompt)


def _prompt_ids(tokenizer: Tokenizer, prompt: str) -> torch.Tensor:
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(prompt)]
    return torch.tensor([ids], device=runtime.device())


def _continuation(tokenizer: Tokenizer, new: torch.Tensor, prompt: str) -> str:
    """Text of the new tokens behind a prompt, [1, T], without those that end it."""
    tokens = (token for token in new[0].tolist() if token != tokenizer.eos_id)
    return tokenizer.decode(tokens, continues=bool(prompt))


def evaluate_run(
    source: Path,
    *,
    data: str | None = None,
    max_tokens: int | None = None,
    base: Path | None = None,
    weights: Weights = "trained",
) -> Evaluation:
    """Measures the held-out loss of a trained model.

    Args:
        data: folder or URL of a data set; None: the folder of the training.
        max_tokens: most tokens read; None: as many as at the end of the training.
        base, weights: as in `load_trained`.
    Raises:
        StateError: if there is no checkpoint, or no average that is asked for.
        DataError: if the data set is missing, damaged, or of another tokenizer.
    """
    run = load_trained(source, base=base, weights=weights)
    if max_tokens is None:
        max_tokens = run.config.evaluation.final_tokens
    folder = held_out_folder(run.config, run.checkpoint, run.tokenizer_digest, data)
    logger.info("%s: step %d on %s", source, run.step, folder)
    return evaluate(
        run.model,
        TokenDataset(folder, "validation", run.config.training.sequence_length),
        max_tokens=max_tokens,
        batch_size=8,
        segment_documents=run.config.data.segment_documents,
        fim_ids=fim_ids(run.tokenizer) if run.config.objectives is not None else None,
    )


def held_out_folder(
    config: Config, checkpoint: Path, tokenizer_digest: str | None, data: str | None
) -> Path:
    """Finds a folder with held-out text for a model, and verifies its validation split.

    Args:
        config, checkpoint: of the run.
        tokenizer_digest: sha256 of the file of the model's tokenizer, hex; None: any will do.
        data: folder or URL; None: the folder of the training.
    Raises:
        DataError: if it is missing, damaged, or of another tokenizer.
    """
    if data is not None and "://" in data:  # of the caller: no other URL is opened
        length = config.training.sequence_length
        folder = local_folder(DataConfig(path=data, order="sequential"), length)
    else:
        given = local_data(config, checkpoint) if data is None else Path(data)
        if given is None:
            raise DataError(
                f"{checkpoint}: was trained on a data set behind a URL, and one that a "
                "checkpoint names is not opened. Give --data with that URL or a folder"
            )
        folder = given
        if data is None and not folder.is_dir():
            is_sample = config.data.path == SAMPLE
            build = f", or first `cdrmix data sample --out {folder}`" if is_sample else ""
            raise DataError(
                f"{folder.absolute()}: the data set that {checkpoint} was trained on is not "
                f"there. Give --data DIR with its folder{build}"
            )
        # A cache names the URL of its data set, which would be opened without the user's knowledge.
        if remote_files(folder) is not None:
            raise DataError(
                f"{folder}: is a cache of a data set behind a URL, which would be opened for what "
                "is missing. Give --data with that URL, or a whole folder"
            )
    manifest = read_manifest(folder, given_as="data.path" if data is None else "--data")
    if tokenizer_digest not in (None, manifest.tokenizer.sha256):
        raise DataError(
            f"{folder}: its tokens are of another tokenizer than the model's: sha256 "
            f"{manifest.tokenizer.sha256[:12]} here, {str(tokenizer_digest)[:12]} in "
            f"{checkpoint}. Give --data DIR, a data set built with the tokenizer.json there"
        )
    # Only the shards to be read: the training split may be a thousand times as large.
    held_out = tuple(shard for shard in manifest.shards if shard.split == "validation")
    verify_shards(folder, manifest.model_copy(update={"shards": held_out}))
    return folder
