"""Loads a trained run as one plain model, for text, evaluation and export in one process.

A checkpoint may be of an untrusted author. Its configuration describes the model, but no URL in it
is opened, nothing is written to its paths, and its tokenizer is checked by digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from cdrmix import runtime
from cdrmix.checkpoint import engine_state, store
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import is_stage_b
from cdrmix.cluster.start_records import recorded_data
from cdrmix.config.load import SAMPLE
from cdrmix.config.schema import Config, DataConfig
from cdrmix.data.remote import remote_files
from cdrmix.data.remote_folder import local_folder
from cdrmix.data.shards import read_manifest, verify_shards
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from cdrmix.errors import ConfigError, DataError, StateError
from cdrmix.evaluation.perplexity import Evaluation, evaluate
from cdrmix.log import get_logger
from cdrmix.models.backbone import Backbone, logical_name
from cdrmix.models.generate import generate
from cdrmix.planning.counts import count

logger = get_logger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """Model, resolved configuration and tokenizer of one checkpoint.

    Attributes:
        model: the whole backbone, float32, evaluation mode.
        tokenizer_digest: sha256 of the tokenizer's file, hex.
        checkpoint: folder of the checkpoint, verified.
        step: optimizer steps of the training.
    """

    config: Config
    model: Backbone
    tokenizer: Tokenizer
    tokenizer_digest: str
    checkpoint: Path
    step: int


def load_trained(source: Path) -> TrainedModel:
    """Loads the newest checkpoint under `source` that verifies, saved in any layout.

    Args:
        source: a run directory or a checkpoint.
    Raises:
        StateError: if there is none, it holds no model, or its tokenizer is missing or wrong.
    """
    newest = store.find_newest(source)
    if newest is None:
        raise StateError(
            f"{source}: holds no checkpoint. Give a run directory that has trained to its first "
            "save, or one of its checkpoints/<step> folders"
        )
    for name, reason in newest.skipped:
        logger.warning("skipped checkpoint %s: %s", name, reason)
    with CheckpointFile(newest.path) as reader:
        path = reader.path / "state.json"
        try:
            config = Config.model_validate(reader.state["config"])
        except KeyError:
            raise StateError(
                f"{path}: tells no configuration. Give a checkpoint of a run"
            ) from None
        except (ValidationError, ConfigError) as error:
            raise StateError(
                f"{path}: its configuration is not one of this version: {error}. Use the version "
                "that environment.json of its run directory names"
            ) from error
        # Checked before the model is made: a configuration of terabytes would take all memory.
        names = reader.names()
        sizes = (torch.Size(reader.shape(name, reader.content_kind(name))) for name in names)
        available = sum(map(torch.Size.numel, sizes))
        needed = count(config.model, 1).total_params
        if needed > available:
            raise StateError(
                f"{path}: its configuration has {needed:,} parameters, and the checkpoint holds "
                f"{available:,}. Give the checkpoint of one run, as it was saved"
            )
        tokenizer, digest = _tokenizer_of(newest.path, reader.state, config)
        # Made on the device: a large model need not fit into the host's memory.
        with torch.device(runtime.device()):
            model = Backbone(config.model)
        # A run of Stage B saves its parts beside the backbone; the plain model has none of them.
        stage_b = frozenset(filter(is_stage_b, names))
        engine_state.load_module(model, reader, logical_name, others=stage_b)
    return TrainedModel(config, model.eval(), tokenizer, digest, newest.path, newest.step)


def _tokenizer_of(checkpoint: Path, state: dict[str, Any], config: Config) -> tuple[Tokenizer, str]:
    """Loads the tokenizer of a checkpoint, checked against the digest there; gives its digest."""
    # A tokenizer of the same size but other merges would give wrong text without any error.
    expected = state.get("tokenizer")
    folders = [checkpoint, checkpoint.parent]
    if checkpoint.parent.name == "checkpoints":
        folders.append(checkpoint.parent.parent)
    # Run directories of older versions hold none: their data set does.
    if (data := _local_data(config, checkpoint)) is not None:
        folders.append(data)
    for folder in folders:
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if expected is None:
            logger.warning("warning: %s: does not tell its tokenizer; taking %s", checkpoint, path)
        elif digest != expected:
            raise StateError(
                f"{path}: is not the tokenizer of {checkpoint}: sha256 {digest[:12]} here, "
                f"{str(expected)[:12]} there. Put the tokenizer.json of its run directory or data "
                f"set into {checkpoint}"
            )
        return load_tokenizer(folder), digest
    raise StateError(
        f"{checkpoint}: its tokenizer is in none of {', '.join(map(str, folders))}. Put the "
        f"tokenizer.json of its run directory or data set into {checkpoint}"
    )


def _local_data(config: Config, checkpoint: Path) -> Path | None:
    """Returns the folder that the newest start of a checkpoint's run has read, wherever this
    process runs; None if the data set is behind a URL. Runs of earlier versions have no record."""
    if "://" in config.data.path:
        return None
    is_in_run = checkpoint.parent.name == "checkpoints"
    recorded = recorded_data(checkpoint.parent.parent) if is_in_run else None
    if recorded is not None:
        return recorded
    if config.data.path == SAMPLE:
        # The folder of `cdrmix data sample`; it is read if it is there, and never built.
        return Path("data") / f"sample-{config.model.vocab_size}"
    return Path(config.data.path)


def continue_text(
    source: Path, prompt: str, *, max_new_tokens: int, temperature: float, seed: int
) -> str:
    """Generates the continuation of `prompt` by a trained model."""
    run = load_trained(source)
    tokenizer = run.tokenizer
    # In training each document follows an EOS.
    ids = [tokenizer.eos_id, *tokenizer.encode(prompt)]
    new = generate(
        run.model,
        torch.tensor([ids], device=runtime.device()),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stop_id=tokenizer.eos_id,
    )
    return tokenizer.decode([token for token in new[0].tolist() if token != tokenizer.eos_id])


def evaluate_run(
    source: Path, *, data: str | None = None, max_tokens: int | None = None
) -> Evaluation:
    """Measures the held-out loss of a trained model.

    Args:
        data: folder or URL of a data set; None: the folder of the training.
        max_tokens: most tokens read; None: as many as at the end of the training.
    Raises:
        StateError: if there is no checkpoint.
        DataError: if the data set is missing, damaged, or of another tokenizer.
    """
    run = load_trained(source)
    if max_tokens is None:
        max_tokens = run.config.evaluation.final_tokens
    length = run.config.training.sequence_length
    if data is not None and "://" in data:  # of the caller: no other URL is opened
        folder = local_folder(DataConfig(path=data, order="sequential"), length)
    else:
        given = _local_data(run.config, run.checkpoint) if data is None else Path(data)
        if given is None:
            raise DataError(
                f"{run.checkpoint}: was trained on a data set behind a URL, and one that a "
                "checkpoint names is not opened. Give --data with that URL or a folder"
            )
        folder = given
        if data is None and not folder.is_dir():
            is_sample = run.config.data.path == SAMPLE
            build = f", or first `cdrmix data sample --out {folder}`" if is_sample else ""
            raise DataError(
                f"{folder.absolute()}: the data set that {run.checkpoint} was trained on is not "
                f"there. Give --data DIR with its folder{build}"
            )
        # A cache names the URL of its data set, which would be opened without the user's knowledge.
        if remote_files(folder) is not None:
            raise DataError(
                f"{folder}: is a cache of a data set behind a URL, which would be opened for what "
                "is missing. Give --data with that URL, or a whole folder"
            )
    manifest = read_manifest(folder)
    if manifest.tokenizer.sha256 != run.tokenizer_digest:
        raise DataError(
            f"{folder}: its tokens are of another tokenizer than the model's: sha256 "
            f"{manifest.tokenizer.sha256[:12]} here, {run.tokenizer_digest[:12]} in "
            f"{run.checkpoint}. Give --data DIR, a data set built with the tokenizer.json there"
        )
    # Only the shards to be read: the training split may be a thousand times as large.
    held_out = tuple(shard for shard in manifest.shards if shard.split == "validation")
    verify_shards(folder, manifest.model_copy(update={"shards": held_out}))
    logger.info("%s: step %d on %s", source, run.step, folder)
    return evaluate(
        run.model,
        TokenDataset(folder, "validation", length),
        max_tokens=max_tokens,
        batch_size=8,
        segment_documents=run.config.data.segment_documents,
    )
