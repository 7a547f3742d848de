"""The base of a run that begins with a Hugging Face model: verified, and read into the engine."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.base_model import (
    BaseWeights,
    base_folder,
    base_records,
    digest_of_base,
    recorded_base,
    refuse_other_base,
    run_of,
)
from cdrmix.checkpoint.files import FileRecord
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.checkpoint.weight_folder import read_sizes
from cdrmix.config.hugging_face import CONFIG_FILE
from cdrmix.config.schema import Config
from cdrmix.engines.recovery import state_of
from cdrmix.engines.run import JsonObject, Start
from cdrmix.engines.training_data import check_same
from cdrmix.errors import DataError, StateError
from cdrmix.export.manifest import MANIFEST_FILE, read_export_manifest
from cdrmix.hf.family_check import check_family
from cdrmix.hf.names import is_adapter, logical_name
from cdrmix.log import get_logger

logger = get_logger(__name__)


def begin(start: Start, engine: Any, checkpoint: FoundCheckpoint | None) -> None:
    """Gives a fresh engine the weights of the base, unless a checkpoint holds all; collective.

    Raises as `load_base` and `check_family` do, and StateError if the base of the checkpoint's run
    is unknown.
    """
    model = start.config.model
    if checkpoint is None:
        start.base = load_base(start.config, engine)
        check_family(engine.module)
        # Not what a start before kept, which ended before its first save: the folder may have
        # been replaced since.
        start.base_files = Path(str(model.path))
    else:
        state = state_of(checkpoint)
        start.base = state.get("base")
        if model.lora is not None:  # it holds adapters alone
            expected = recorded_base(state, checkpoint.path)
            start.base = load_base(start.config, engine, expected=expected)
        kept = base_folder(model, start.directory.path, run_of(checkpoint.path))
        runtime.first_rank_does(lambda: _refuse_other(Path(str(model.path)), kept))
        start.base_files = kept


def _refuse_other(folder: Path, kept: Path) -> None:
    """Raises StateError if the model of a resumed run is made by another config.json than before:
    the weights of a checkpoint may fit it by their shapes and mean something else."""
    if _text(folder / CONFIG_FILE) != _text(kept / CONFIG_FILE):
        raise StateError(
            f"model.path = {folder}: its {CONFIG_FILE} is not that of the run, {kept}. Give the "
            "folder that the run began with, or start in a new run directory"
        )


def load_base(config: Config, engine: Any, *, expected: JsonObject | None = None) -> JsonObject:
    """Reads the weights of the folder `model.path` into a fresh engine; collective.

    Each rank reads what it owns, whatever the layout. Adapters keep their initial values.

    Args:
        config, engine: of this start.
        expected: the base of a checkpoint's adapters, and no other one is read; None: any.
    Returns:
        Folder, digest and family of the base, for the records of a run.
    Raises:
        ConfigError, DataError, StateError: on every rank, if the folder cannot be used, hosts have
            different ones, or it holds another model.
    """
    model = config.model
    folder = Path(str(model.path))
    digest = verified_digest(folder)
    if expected is not None:
        refuse_other_base(expected, digest, folder)
    with runtime.together(lambda: BaseWeights(folder, model.remote_code)) as weights:
        runtime.first_rank_does(weights.check_tied)
        names = [logical_name(name) for name, _ in engine.module.named_parameters()]
        adapters = {name for name in names if is_adapter(name)}
        engine_state.load_weights(engine, weights, logical_name, fresh=adapters)
        dropped = weights.name_map.dropped
        record = {
            "folder": os.path.abspath(folder),
            "digest": digest,
            "family": weights.family,
            "parameters": weights.num_parameters,
            "dropped": list(dropped),
        }
    if runtime.rank() == 0:
        parameters = f"{record['parameters']:,} parameters"
        place = (record["family"], parameters, folder, digest[:12])
        logger.info("model: %s, %s of %s (digest %s)", *place)
        if dropped:
            logger.info(
                "model: left out, as transformers does: %s",
                dropped[0] + (f" and {len(dropped) - 1} more tensors" if dropped[1:] else ""),
            )
    return record


def verified_digest(folder: Path) -> str:
    """Digest of a base's config.json and weights, each file read by one rank of every host;
    collective.

    Raises:
        DataError: on every rank, if a file cannot be read, or hosts have different folders.
    """
    # By headers, sizes and config.json: other files are told in a second, without reading all.
    check_same("folders of the base model", "digest", runtime.together(lambda: _outline(folder)))
    # Ranks would train on weights of their own hosts: every host reads all files.
    host = socket.gethostname()
    hosts = runtime.all_gather_object(host)
    part, parts = hosts[: runtime.rank()].count(host), hosts.count(host)
    own = runtime.together(lambda: base_records(folder, part=part, parts=parts))
    everywhere = zip(hosts, runtime.all_gather_object(own), strict=True)
    shares = [share for name, share in everywhere if name == host]
    records = {name: record for share in shares for name, record in share.items()}
    runtime.together(lambda: _compare_with_export(folder, records))
    found = digest_of_base(records)
    check_same("weights of the base model", "digest", found)
    return found


def _compare_with_export(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Raises DataError where files of an export are no longer those that were written."""
    if not (folder / MANIFEST_FILE).is_file():
        return
    written = read_export_manifest(folder)
    changed = [
        name
        for name, record in sorted(records.items())
        if name in written and written[name] != (record["bytes"], record["sha256"])
    ]
    if changed:
        raise DataError(
            f"{folder}: {', '.join(changed)} changed since the export: `cdrmix export --verify "
            f"{folder}` compares all files. Copy the folder again, or, if it was changed on "
            f"purpose, remove {MANIFEST_FILE}"
        )


def _outline(folder: Path) -> str:
    """sha256 over config.json and the headers of the weights, hex."""
    text = _text(folder / CONFIG_FILE)
    return hashlib.sha256(text + repr(sorted(read_sizes(folder).items())).encode()).hexdigest()


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
