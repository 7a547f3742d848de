"""A trained run as one plain model: for text, evaluation and export in a single process.

A checkpoint may come from anybody. Its configuration says what the model is; no URL in it is
opened, nothing is written where it says, and its tokenizer counts only by digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from cdrmix import runtime
from cdrmix.checkpoint import engine_state, store
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import is_stage_b
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
    """Model, configuration and tokenizer of one checkpoint.

    Attributes:
        config: resolved configuration that it was trained with.
        model: the whole backbone, float32, evaluation mode.
        tokenizer: that it was trained with.
        tokenizer_digest: sha256 of the tokenizer's file, hex.
        checkpoint: folder that it was read from, verified.
        step: optimizer steps it was trained for.
    """

    config: Config
    model: Backbone
    tokenizer: Tokenizer
    tokenizer_digest: str
    checkpoint: Path
    step: int


def load_trained(source: Path) -> TrainedModel:
    """Load the newest checkpoint under `source` that verifies, whatever layout saved it.

    Args:
        source: a run directory or a checkpoint.
    Raises:
        StateError: if there is none, it is of no model, or its tokenizer is missing or another.
    """
    found = store.find_newest(source)
    if found is None:
        raise StateError(
            f"{source}: holds no checkpoint. Give a run directory that has trained to its first "
            "save, or one of its checkpoints/<step> folders"
        )
    for name, why in found.skipped:
        logger.warning("skipped checkpoint %s: %s", name, why)
    with CheckpointFile(found.path) as reader:
        config = _config_of(reader)
        tokenizer, digest = _tokenizer_of(found.path, reader.state, config)
        with torch.device(runtime.device()):
            model = Backbone(config.model)
        stage_b = frozenset(filter(is_stage_b, reader.names()))
        engine_state.load_module(model, reader, logical_name, others=stage_b)
    return TrainedModel(config, model.eval(), tokenizer, digest, found.path, found.step)


def _config_of(reader: CheckpointFile) -> Config:
    """Configuration in a checkpoint, of a model no larger than its tensors."""
    path = reader.path / "state.json"
    try:
        config = Config.model_validate(reader.state["config"])
    except KeyError:
        raise StateError(f"{path}: tells no configuration. Give a checkpoint of a run") from None
    except (ValidationError, ConfigError) as error:
        raise StateError(
            f"{path}: its configuration is not one of this version: {error}. Use the version that "
            "environment.json of its run directory names"
        ) from error
    sizes = (torch.Size(reader.shape(name, reader.content_kind(name))) for name in reader.names())
    held = sum(map(torch.Size.numel, sizes))
    needed = count(config.model, 1).total_params
    if needed > held:
        raise StateError(
            f"{path}: its configuration has {needed:,} parameters, and the checkpoint holds "
            f"{held:,}. Give the checkpoint of one run, as it was saved"
        )
    return config


def _tokenizer_of(checkpoint: Path, state: dict[str, Any], config: Config) -> tuple[Tokenizer, str]:
    """Tokenizer that travels with a checkpoint, and its digest.

    Raises:
        StateError: if there is none, or it is not the one that the checkpoint was trained with.
        DataError: if it cannot be read.
    """
    expected = state.get("tokenizer")
    places = list(_tokenizer_folders(checkpoint, config))
    for folder in places:
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
        f"{checkpoint}: its tokenizer is in none of {', '.join(map(str, places))}. Put the "
        f"tokenizer.json of its run directory or data set into {checkpoint}"
    )


def _tokenizer_folders(checkpoint: Path, config: Config) -> Iterator[Path]:
    """Folders where a checkpoint's tokenizer may be, in this order."""
    yield checkpoint
    yield checkpoint.parent
    if checkpoint.parent.name == "checkpoints":
        yield checkpoint.parent.parent
    folder = _local_data(config)  # run directories of older versions hold none
    if folder is not None:
        yield folder


def _local_data(config: Config) -> Path | None:
    """Data set of a run on this machine; None if it is behind a URL, which nobody asked for."""
    if config.data.path == "sample":
        return Path("data") / f"sample-{config.model.vocab_size}"
    return None if "://" in config.data.path else Path(config.data.path)


def continue_text(
    source: Path, prompt: str, *, max_new_tokens: int, temperature: float, seed: int
) -> str:
    """The text that a trained model goes on with after `prompt`."""
    trained = load_trained(source)
    tokenizer = trained.tokenizer
    ids = [tokenizer.eos_id, *tokenizer.encode(prompt)]  # documents follow an EOS in training
    new = generate(
        trained.model,
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
    """Held-out loss of a trained model.

    Args:
        source: a run directory or a checkpoint.
        data: folder or URL of a data set; None: the folder that it was trained on.
        max_tokens: most tokens read; None: as many as at the end of its training.
    Raises:
        StateError: if there is no checkpoint.
        DataError: if the data set is missing, damaged, or of another tokenizer.
    """
    trained = load_trained(source)
    if max_tokens is None:
        max_tokens = trained.config.evaluation.final_tokens
    length = trained.config.training.sequence_length
    folder = _evaluation_data(trained, data)
    manifest = read_manifest(folder)
    if manifest.tokenizer.sha256 != trained.tokenizer_digest:
        raise DataError(
            f"{folder}: its tokens are of another tokenizer than the model's: sha256 "
            f"{manifest.tokenizer.sha256[:12]} here, {trained.tokenizer_digest[:12]} in "
            f"{trained.checkpoint}. Give --data DIR, a data set built with the tokenizer.json there"
        )
    held_out = tuple(shard for shard in manifest.shards if shard.split == "validation")
    verify_shards(folder, manifest.model_copy(update={"shards": held_out}))
    logger.info("%s: step %d on %s", source, trained.step, folder)
    return evaluate(
        trained.model,
        TokenDataset(folder, "validation", length),
        max_tokens=max_tokens,
        batch_size=8,
        segment_documents=trained.config.data.segment_documents,
    )


def _evaluation_data(trained: TrainedModel, data: str | None) -> Path:
    """Folder of the data set to evaluate on; a URL only where the caller names it."""
    if data is not None and "://" in data:
        asked = DataConfig(path=data, order="sequential")
        return local_folder(asked, trained.config.training.sequence_length)
    folder = _local_data(trained.config) if data is None else Path(data)
    if folder is None:
        raise DataError(
            f"{trained.checkpoint}: was trained on a data set behind a URL, and one that a "
            "checkpoint names is not opened. Give --data with that URL or a folder"
        )
    if data is None and not folder.is_dir():
        raise DataError(
            f"{folder}: the data set that {trained.checkpoint} was trained on is not here. Give "
            "--data DIR, or build the sample corpus with `cdrmix data sample`"
        )
    if remote_files(folder) is not None:
        raise DataError(
            f"{folder}: is a cache of a data set behind a URL, which would be opened for what is "
            "missing. Give --data with that URL, or a whole folder"
        )
    return folder
