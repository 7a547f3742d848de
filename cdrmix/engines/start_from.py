"""The first weights of a new run from an earlier one: those alone, into any layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.checkpoint import engine_state, store
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.files import MANIFEST_FILE, digest
from cdrmix.checkpoint.weight_folder import WeightFolder
from cdrmix.checkpoint.weight_source import CheckpointWeights, LeftOut, WeightSource
from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config
from cdrmix.engines.start_point import (
    EXPORT_PREFIX,
    StartPoint,
    all_damaged,
    check_fits,
    fresh_and_left,
    kind_of,
    of_checkpoint,
    of_export,
)
from cdrmix.engines.training_data import Corpus, check_same
from cdrmix.errors import NoUsableStateError, StateError
from cdrmix.export.manifest import MANIFEST_FILE as EXPORT_MANIFEST
from cdrmix.export.manifest import verify_export
from cdrmix.log import get_logger
from cdrmix.models.backbone import logical_name

logger = get_logger(__name__)


def find_start(config: Config, corpus: Corpus) -> StartPoint | None:
    """Finds and verifies the weights that `training.start_from` names; collective.

    Returns None where a run begins with weights of its own. Raises StateError on every rank if they
    are missing, damaged, of another model or of another tokenizer, or not the same on all hosts.
    """
    if config.training.start_from is None:
        return None
    place = Path(config.training.start_from)
    kind = runtime.first_rank_does(lambda: kind_of(place))
    if kind == "export":
        rank, ranks = runtime.rank(), runtime.world_size()
        runtime.together(lambda: verify_export(place, part=rank, parts=ranks))
        path, manifest = place, EXPORT_MANIFEST
    else:
        try:
            found = store.find_newest(place)
        except NoUsableStateError as error:
            raise all_damaged(place, str(error)) from error
        if found is None:
            raise StateError(f"training.start_from = {place}: holds no checkpoint any more")
        for name, why in found.skipped:
            logger.warning("start_from: skipped checkpoint %s: %s", name, why)
        path, manifest = found.path, MANIFEST_FILE

    def describe() -> StartPoint:
        point = of_export(path) if kind == "export" else of_checkpoint(path)
        check_fits(point, config.model, data=corpus.manifest)
        return point

    point = runtime.first_rank_does(describe)
    # Hosts may have folders of their own under one name.
    check_same("weights to start from", "manifest", digest(path / manifest))
    return point


def take_weights(engine: Any, point: StartPoint, model: ModelConfig) -> dict[str, Any]:
    """Loads the weights, and nothing else, into a new engine; collective.

    Parts that predict further tokens begin anew unless the model there has the same ones.

    Returns the description for the record of the start. Raises StateError on every rank if any of
    them cannot read its part.
    """
    apart = fresh_and_left(point, model)

    def load(source: WeightSource) -> None:
        engine_state.load_weights(engine, LeftOut(source, apart), logical_name, fresh=apart)

    if point.kind == "export":
        open_folder = partial(WeightFolder.of_whole, point.path, prefix=EXPORT_PREFIX)
        with runtime.together(open_folder) as folder:
            load(folder)
    else:
        with runtime.together(lambda: CheckpointFile(point.path)) as checkpoint:
            load(CheckpointWeights(checkpoint))
    left = f", {len(point.others)} tensors of Stage B left there" if point.others else ""
    logger.info(
        "start_from: %s parameters of step %s of %s (manifest %s)%s",
        *(f"{point.num_parameters:,}", f"{point.step:,}", point.run, point.manifest[:12], left),
    )
    if apart:
        here = "those of model.mtp here begin anew" if model.mtp else "there are none here"
        logger.info(
            "start_from: %d tensors there that predict further tokens are not taken; %s",
            *(len(apart.intersection(point.shapes)), here),
        )
    not_taken = sorted({*point.others, *apart.intersection(point.shapes)})
    return point.as_json() | {"not_taken": not_taken}
