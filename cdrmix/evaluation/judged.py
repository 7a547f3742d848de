"""Makes a `Judged` of a run, a checkpoint, an export or a Hugging Face folder.

`find_model` says which weights there are, `load_whole` reads them into one process, and `judged`
puts model and surroundings together; `cdrmix.sessions.evaluation` reads the same weights into a
layout of several ranks. A folder may be of an untrusted author: no URL in it is opened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cdrmix import runtime
from cdrmix.checkpoint.base_model import BaseWeights, base_of_adapters
from cdrmix.checkpoint.checkpoint_file import CheckpointFile, Weights
from cdrmix.checkpoint.plain_module import fill_module, nowhere, saved_tensors
from cdrmix.checkpoint.trained_run import (
    checkpoint_place,
    config_of,
    newest_checkpoint,
    tokenizer_of,
)
from cdrmix.checkpoint.weight_folder import WeightFolder
from cdrmix.checkpoint.weight_source import CheckpointWeights, WeightSource
from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.errors import ConfigError, DataError
from cdrmix.evaluation.model_folder import Kind, describe_folder, kind_of
from cdrmix.evaluation.suite import Judged, Request
from cdrmix.evaluation.trained import held_out_folder, without_weights
from cdrmix.hf.family_check import check_family
from cdrmix.hf.model import HuggingFaceModel
from cdrmix.hf.names import is_adapter
from cdrmix.log import get_logger
from cdrmix.models.backbone import LanguageModel
from cdrmix.parallel.apply import frozen_in, logical_name_in
from cdrmix.parallel.topology import ALONE, Topology

logger = get_logger(__name__)

_EXPORT_PREFIX = "model."  # of a tensor's name in an export, before the logical one


@dataclass(frozen=True)
class Wanted:
    """Model that a user asks to have judged.

    Attributes:
        source: run directory, checkpoint, export, or folder of a Hugging Face model.
        checkpoint: of a run: best, last or a step; None: last.
        weights: of a run; None: those trained.
        base: folder of the base of a run's adapters; None: where the run has read it.
        batch_size: samples of a forward pass.
        max_length: most tokens of an input; None: as the model was trained, of a Hugging Face model
            its max_position_embeddings, and 4,096 at most.
    """

    source: Path
    checkpoint: str | None = None
    weights: Weights | None = None
    base: Path | None = None
    batch_size: int = 8
    max_length: int | None = None


@dataclass(frozen=True)
class FoundModel:
    """Model in files, found and verified, and not loaded.

    Attributes:
        source: as given.
        path: checkpoint or folder.
        run_dir: that the checkpoint is in; None for others.
        tokenizer: folder of its file.
        tokenizer_digest: sha256 of the file that it was trained with, hex.
        step, weights: as of `SuiteResult`.
        base: as of `Wanted`.
    """

    kind: Kind
    source: Path
    path: Path
    run_dir: Path | None
    config: Config
    tokenizer: Path
    tokenizer_digest: str
    step: int | None
    weights: Weights
    base: Path | None


class Part(NamedTuple):
    """Weights that fill a model, or a part of it.

    `absent` tells of a logical name in the model that they need not have.
    """

    weights: WeightSource
    absent: Callable[[str], bool]


def find_model(wanted: Wanted) -> FoundModel:
    """Finds the model that is asked for; collective. An export is verified by the caller.

    Raises:
        StateError: if there is none, its checkpoint is not one of this version, or its tokenizer is
            missing or another.
        ConfigError: if a flag of a run is given for a folder, or the folder describes no model.
    """
    kind = kind_of(wanted.source)
    if kind == "run":
        return _of_run(wanted)
    given = [name for name in ("checkpoint", "weights", "base") if getattr(wanted, name)]
    if given:
        flags = " and ".join(f"--{name}" for name in given)
        raise ConfigError(
            f"{wanted.source}: is an exported folder, and {flags} choose among the weights of a "
            "run. Leave them out, or give the run directory"
        )
    folder = runtime.together(lambda: describe_folder(wanted.source, kind))
    return FoundModel(
        kind=kind,
        source=wanted.source,
        path=wanted.source,
        run_dir=None,
        config=folder.config,
        tokenizer=wanted.source,
        tokenizer_digest=folder.tokenizer_digest,
        step=folder.step,
        weights=folder.weights,
        base=None,
    )


def _of_run(wanted: Wanted) -> FoundModel:
    weights = wanted.weights or "trained"
    # One collective at a time, so that no rank waits in it for one that has failed.
    which = wanted.checkpoint or "last"
    newest = newest_checkpoint(runtime.together(lambda: checkpoint_place(wanted.source, which)))

    def describe() -> tuple[Config, Path, str]:
        with CheckpointFile(newest.path, weights=weights) as reader:
            config = config_of(reader, base=wanted.base)
            return config, *tokenizer_of(newest.path, reader.state, config)

    config, folder, digest = runtime.together(describe)
    above = newest.path.resolve().parent
    return FoundModel(
        kind="run",
        source=wanted.source,
        path=newest.path,
        run_dir=above.parent if above.name == "checkpoints" else None,
        config=config,
        tokenizer=folder,
        tokenizer_digest=digest,
        step=newest.step,
        weights=weights,
        base=wanted.base,
    )


@contextlib.contextmanager
def open_weights(found: FoundModel) -> Iterator[list[Part]]:
    """Opens all weights of a model, which together fill it, for as long as the context lasts.

    Raises:
        StateError, DataError: if they cannot be read, or the base of adapters is not there.
    """
    model = found.config.model
    with contextlib.ExitStack() as stack:
        if found.kind == "export":
            folder = WeightFolder.of_whole(found.path, prefix=_EXPORT_PREFIX)
            yield [Part(stack.enter_context(folder), nowhere)]
            return
        if found.kind == "hf":
            base = BaseWeights(found.path, model.remote_code)
            base.check_tied()
            yield [Part(stack.enter_context(base), nowhere)]
            return
        reader = stack.enter_context(CheckpointFile(found.path, weights=found.weights))
        parts = []
        if model.lora is not None:
            code = model.remote_code
            base = base_of_adapters(reader.state, found.path, code, given=found.base)
            parts.append(Part(stack.enter_context(base), is_adapter))
        yield [*parts, Part(CheckpointWeights(reader), frozen_in(model))]


def load_whole(found: FoundModel) -> LanguageModel:
    """Loads a model into this process, float32, in evaluation mode.

    Raises:
        StateError, DataError: as `open_weights`, or if the weights are those of another model.
        ConfigError: if scores of its family cannot be computed here.
    """
    model = without_weights(found.config)
    name = logical_name_in(found.config.model)
    names = [name(each) for each, *_ in saved_tensors(model)]
    with open_weights(found) as parts:
        for part in parts:
            fill_module(model, part.weights, name, fresh=set(filter(part.absent, names)))
    if isinstance(model, HuggingFaceModel):
        check_family(model, trains=False)
    return model.eval()


def judged(
    found: FoundModel,
    model: LanguageModel,
    wanted: Wanted,
    request: Request,
    *,
    topology: Topology = ALONE,
) -> Judged:
    """Puts a loaded model together with what suites need beside it; collective.

    Raises:
        DataError: on every rank, if the tokenizer or the data set that is asked for cannot be used.
    """
    length = wanted.max_length or found.config.training.sequence_length
    # Text of a data set in tokens of another tokenizer can be encoded anew.
    digest = None if found.kind == "hf" else found.tokenizer_digest
    data, no_data = None, Judged.no_data
    if request.data is not None:
        data = runtime.together(
            lambda: held_out_folder(found.config, found.path, digest, request.data)
        )
    elif found.kind == "run":
        try:
            data = runtime.together(lambda: held_out_folder(found.config, found.path, digest, None))
        except DataError as error:  # of importance to suites that read it alone
            no_data = str(error)
    if no_data == Judged.no_data:
        no_data = f"{found.source}: {no_data}"
    made = Judged(
        model=model,
        tokenizer=runtime.together(lambda: load_tokenizer(found.tokenizer)),
        config=found.config,
        topology=topology,
        max_length=length,
        batch_size=wanted.batch_size,
        source=str(found.source),
        step=found.step,
        weights=found.weights,
        data=data,
        tokenizer_digest=found.tokenizer_digest,
        no_data=no_data,
    )
    logger.info(
        "%s: %s, weights %s, on %s",
        *(found.path, "step not known" if found.step is None else f"step {found.step:,}"),
        *(found.weights, data or "no data set"),
    )
    return made
