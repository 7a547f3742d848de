"""Source of the backbone of Stage B: a finished Stage A, of this run or of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cdrmix import runtime
from cdrmix.checkpoint import plain_module, store
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import is_stage_b
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.config.load import changed_keys
from cdrmix.config.schema import Config
from cdrmix.data.shards import Manifest, manifest_digest
from cdrmix.engines.recovery import state_of
from cdrmix.engines.run_directory import RunDirectory
from cdrmix.errors import ConfigError, StateError
from cdrmix.log import get_logger
from cdrmix.models.backbone import Backbone, logical_name
from cdrmix.parallel.frozen_stages import FrozenStages
from cdrmix.parallel.topology import Topology
from cdrmix.planning.counts import is_further, parameters
from cdrmix.planning.stage_b import stage_b_layers

logger = get_logger(__name__)
# DeepSpeed converts what it trains; a frozen backbone stays outside of it.
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def find_backbone(
    config: Config, directory: RunDirectory, manifest: Manifest, resumed: FoundCheckpoint | None
) -> FoundCheckpoint:
    """Finds and checks the checkpoint that Stage B starts from; collective.

    The checkpoint `resumed`, of --resume, serves where the configuration names no other run.

    Raises:
        StateError: if there is none, or all are damaged, it is of an unfinished Stage A, or of
            another architecture or tokenizer, or all backbones there were trained in Stage B.
    """
    assert config.stage_b is not None, "Stage B has its section"
    other_run = config.stage_b.run
    place = directory.path if other_run is None else Path(other_run)
    # A replica has copies of this run alone.
    copies = directory.copies if other_run is None else ()
    source = resumed if other_run is None else None
    source = source or store.find_newest(place, *copies)
    if source is None:
        raise StateError(
            f"{place}: holds no checkpoint to take the backbone from. Give stage_b.run = RUN_DIR, "
            "the run directory of a finished Stage A"
        )
    state = state_of(source)
    # Stage A saves no entry of Stage B.
    if state.get("stage_b", {}).get("is_backbone_trained"):
        # Stage B cannot begin again from weights that it has trained: only from those before.
        # Of the very step in which Stage B began, too: it is the last one of Stage A.
        first_step = state["stage_b"]["first_step"]
        earlier = store.find_newest(place, *copies, before=first_step + 1)
        before = {} if earlier is None else state_of(earlier)
        if earlier is None or before.get("stage_b", {}).get("is_backbone_trained"):
            raise StateError(
                f"{source.path}: its backbone was trained in Stage B (backbone_lr_scale > 0), and "
                f"{place} has no checkpoint of step {first_step}, where that began. The backbone "
                f"came from {state['stage_b']['origin']}. Try stage_b.run = another run"
            )
        source = earlier
        state = before
    for name, why in source.skipped:
        logger.warning("skipped checkpoint %s: %s", name, why)
    runtime.together(lambda: _check(config, manifest, state, source))
    return source


def _check(
    config: Config, manifest: Manifest, state: dict[str, Any], source: FoundCheckpoint
) -> None:
    """Refuses a backbone of another architecture, tokenizer or an unfinished Stage A."""
    model = config.model.model_dump(mode="json")
    # What predicts further tokens there is left there: this model has none (config/objectives.py).
    there = state["config"]["model"] | {"mtp": None}
    changed = changed_keys({"model": there}, {"model": model})
    if changed:
        listed = "; ".join(f"{key}: {old} there, {new} here" for key, old, new in changed)
        raise ConfigError(
            f"{source.path}: its backbone has another architecture: {listed}. Try the values "
            "there, or the run of a Stage A with those here"
        )
    _warn_of_window(config, state, source)
    if state.get("stage") != "b":
        # By its own configuration: a Stage A of this one may be longer or shorter.
        length = Config.model_validate(state["config"]).training.num_steps
        if source.step < length:
            damaged = "; newer ones are damaged" if source.skipped else ""
            raise StateError(
                f"{source.path}: Stage A stopped at step {source.step} of {length}{damaged}. "
                "Finish it first, with --resume auto and training.stage = a"
            )
    # Token ids of another tokenizer mean other text. Other data is allowed.
    ours = manifest.tokenizer.sha256
    theirs = state.get("tokenizer")
    if theirs is None:  # older versions recorded the data set alone
        if state["loader"].get("manifest_digest") != manifest_digest(manifest):
            logger.warning(
                "warning: %s: does not tell its tokenizer, and its data set is another. Make sure "
                "that data.path was built with the same tokenizer",
                source.path,
            )
    elif theirs != ours:
        raise StateError(
            f"{source.path}: its backbone has another tokenizer: sha256 {theirs} there, {ours} "
            f"here ({manifest.tokenizer.file}). Try data built with the tokenizer there"
        )


def _warn_of_window(config: Config, state: dict[str, Any], source: FoundCheckpoint) -> None:
    """Warns of a backbone that was trained on shorter windows than Stage B reads."""
    assert config.stage_b is not None, "Stage B has its section"
    window = config.stage_b.training.window_tokens or config.training.sequence_length
    learned = state["config"]["training"]["sequence_length"]
    if window > learned:
        logger.warning(
            "warning: %s: its backbone was trained on %d tokens at a time, and Stage B reads "
            "windows of %d: it has never seen the end of one. Try "
            "stage_b.training.window_tokens=%d",
            *(source.path, learned, window, learned),
        )


def load_backbone(config: Config, checkpoint: CheckpointFile, topology: Topology) -> Backbone:
    """Loads the backbone of a checkpoint of either stage, or this rank's pipeline stage of it."""
    assert config.stage_b is not None, "Stage B has its section"
    pipeline = topology.degrees.pipeline
    if config.stage_b.training.backbone_lr_scale > 0:  # DeepSpeed converts it to the run's type
        with torch.device(runtime.device()):
            backbone = Backbone(config.model)
    else:
        # Frozen, and in the type of the run from the first: a device that it fills has no room for
        # float32 on the way. Without memory: initial values would be replaced at once.
        with torch.device("meta"):
            if pipeline == 1:
                backbone = Backbone(config.model)
            else:
                layers = stage_b_layers(config, pipeline)[topology.stage]
                backbone = FrozenStages(config.model, topology, layers)
        backbone.requires_grad_(False)
        backbone.to(_TYPES[config.training.precision]).to_empty(device=runtime.device())
    # In a pipeline the parameters of other stages, and everything of Stage B, are read elsewhere.
    here = {logical_name(name) for name, _ in backbone.named_parameters()}
    elsewhere = {parameter.name for parameter in parameters(config.model)} - here
    left = (name for name in checkpoint.names() if is_stage_b(name) or is_further(name))
    others = elsewhere.union(left)
    plain_module.load_module(backbone, checkpoint, logical_name, others=others)
    return backbone
