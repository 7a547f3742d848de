"""Where Stage B takes its backbone from: a finished Stage A, of this run or of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cdrmix import runtime
from cdrmix.checkpoint import engine_state, store
from cdrmix.checkpoint.checkpoint_file import CheckpointReader
from cdrmix.checkpoint.fragments import is_stage_b
from cdrmix.config.load import changed_keys
from cdrmix.config.schema import Config
from cdrmix.data.shards import Manifest, manifest_digest
from cdrmix.engines.run_directory import RunDirectory
from cdrmix.errors import ConfigError, StateError
from cdrmix.log import get_logger
from cdrmix.models.backbone import Backbone, logical_name
from cdrmix.parallel.frozen_stages import FrozenStages
from cdrmix.parallel.topology import Topology
from cdrmix.planning.counts import parameters
from cdrmix.planning.stage_b import stage_b_layers

logger = get_logger(__name__)
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_given(config: Config, *, run_dir: Path | None, resume: str) -> None:
    """Refuse a Stage B without a Stage A, before any process group starts.

    Args:
        config: of the run.
        run_dir: --run-dir.
        resume: --resume.
    Raises:
        ConfigError: if nothing says where the backbone is.
        StateError: if there is no checkpoint where it should be.
    """
    if config.training.stage != "b":
        return
    assert config.stage_b is not None, "checked at construction"
    goes_on = run_dir if resume == "auto" else None if resume == "never" else Path(resume)
    if goes_on is not None and _is_in_stage_b(goes_on):
        return
    if config.stage_b.run is not None:
        place = Path(config.stage_b.run)
        told = f"stage_b.run = {config.stage_b.run}"
    elif resume not in ("never", "auto"):
        place = Path(resume)
        told = f"--resume {resume}"
    elif resume == "auto" and run_dir is not None:
        place = run_dir
        told = f"--run-dir {run_dir} --resume auto"
    else:
        raise ConfigError(
            "training.stage = b: Stage B starts from a finished Stage A. Try --set "
            "stage_b.run=RUN_DIR, --run-dir RUN_DIR --resume auto to go on in its run directory, "
            "or training.stage = all"
        )
    if not store.has_checkpoints(place):
        raise StateError(
            f"{told}: holds no checkpoint to take the backbone from. Give the run directory of a "
            "finished Stage A, or training.stage = all"
        )


def _is_in_stage_b(place: Path) -> bool:
    """Whether a run has a checkpoint of Stage B: that holds the backbone too."""
    return any(state.get("stage") == "b" for state in store.readable_states(place))


def find_backbone(
    config: Config, directory: RunDirectory, manifest: Manifest, found: store.FoundCheckpoint | None
) -> store.FoundCheckpoint:
    """The checkpoint that Stage B starts from; collective.

    Args:
        config: names another run, or leaves it to this one's.
        directory: of this run.
        manifest: of the data that Stage B reads.
        found: what --resume names, to be taken where the configuration names no run.
    Raises:
        NoUsableStateError: if there are checkpoints and all are damaged.
        StateError: if there is none, it is of an unfinished Stage A, or of another architecture or
            tokenizer, or all backbones there were trained in Stage B.
    """
    assert config.stage_b is not None, "Stage B has its section"
    given = config.stage_b.run
    place = directory.path if given is None else Path(given)
    copies = directory.copies if given is None else ()
    if given is not None or found is None:
        found = store.find_newest(place, *copies)
    if found is None:
        raise StateError(
            f"{place}: holds no checkpoint to take the backbone from. Give stage_b.run = RUN_DIR, "
            "the run directory of a finished Stage A"
        )
    trained = _trained_in_stage_b(found)
    if trained is not None:
        earlier = store.find_newest(place, *copies, before=trained["first_step"] + 1)
        if earlier is None or _trained_in_stage_b(earlier) is not None:
            raise StateError(
                f"{found.path}: its backbone was trained in Stage B (backbone_lr_scale > 0), and "
                f"{place} has no checkpoint of step {trained['first_step']}, where that began. The "
                f"backbone came from {trained['origin']}. Try stage_b.run = another run"
            )
        found = earlier
    for name, why in found.skipped:
        logger.warning("skipped checkpoint %s: %s", name, why)
    with runtime.together(lambda: CheckpointReader(found.path)) as reader:
        runtime.together(lambda: _check(config, reader.state, found))
        runtime.together(lambda: _check_tokenizer(manifest, reader.state, found))
    return found


def _trained_in_stage_b(found: store.FoundCheckpoint) -> dict[str, Any] | None:
    """What a checkpoint says of Stage B, if that has trained the backbone; collective."""
    with runtime.together(lambda: CheckpointReader(found.path)) as reader:
        state = reader.state
    is_trained = state.get("stage") == "b" and state["stage_b"]["is_backbone_trained"]
    return state["stage_b"] if is_trained else None


def _check(config: Config, state: dict[str, Any], found: store.FoundCheckpoint) -> None:
    changed = changed_keys({"model": state["config"]["model"]}, {"model": _model(config)})
    if changed:
        listed = "; ".join(f"{key}: {old} there, {new} here" for key, old, new in changed)
        raise ConfigError(
            f"{found.path}: its backbone has another architecture: {listed}. Try the values there, "
            "or the run of a Stage A with those here"
        )
    if state.get("stage") == "b":
        return
    length = Config.model_validate(state["config"]).training.num_steps
    if found.step < length:
        damaged = "; newer ones are damaged" if found.skipped else ""
        raise StateError(
            f"{found.path}: Stage A stopped at step {found.step} of {length}{damaged}. Finish it "
            "first, with --resume auto and training.stage = a"
        )


def _check_tokenizer(
    manifest: Manifest, state: dict[str, Any], found: store.FoundCheckpoint
) -> None:
    """Refuse token ids that mean other text; other data of the same tokenizer is what Stage B may
    have."""
    ours = manifest.tokenizer.sha256
    theirs = state.get("tokenizer")
    if theirs is None:  # of older versions, which tell of the data set alone
        if state["loader"].get("manifest_digest") != manifest_digest(manifest):
            logger.warning(
                "warning: %s: does not tell its tokenizer, and its data set is another. Make sure "
                "that data.path was built with the same tokenizer",
                found.path,
            )
    elif theirs != ours:
        raise StateError(
            f"{found.path}: its backbone has another tokenizer: sha256 {theirs} there, {ours} "
            f"here ({manifest.tokenizer.file}). Try data built with the tokenizer there"
        )


def _model(config: Config) -> dict[str, Any]:
    return config.model.model_dump(mode="json")


def load_backbone(config: Config, reader: CheckpointReader, topology: Topology) -> Backbone:
    """The backbone of a checkpoint of either stage, on this rank's device: of a pipeline, the part
    on this stage.

    Raises:
        StateError: if it cannot be read.
    """
    assert config.stage_b is not None, "Stage B has its section"
    if config.stage_b.training.backbone_lr_scale == 0:
        backbone = _frozen(config, topology)
    else:  # DeepSpeed gives it its type
        with torch.device(runtime.device()):
            backbone = Backbone(config.model)
    held = {logical_name(name) for name, _ in backbone.named_parameters()}
    elsewhere = {parameter.name for parameter in parameters(config.model)} - held
    others = elsewhere.union(filter(is_stage_b, reader.names()))
    engine_state.load_module(backbone, reader, logical_name, others=others)
    return backbone


def _frozen(config: Config, topology: Topology) -> Backbone:
    """A backbone without values, from the first in the type of the run: a device that this fills
    has no room for float32 on the way."""
    pipeline = topology.degrees.pipeline
    with torch.device("meta"):
        if pipeline == 1:
            backbone = Backbone(config.model)
        else:
            layers = stage_b_layers(config, pipeline)[topology.stage]
            backbone = FrozenStages(config.model, topology, layers)
    backbone.requires_grad_(False)
    return backbone.to(_TYPES[config.training.precision]).to_empty(device=runtime.device())
