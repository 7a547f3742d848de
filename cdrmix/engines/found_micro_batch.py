"""Micro batches that probes found, kept in the run directory and for later runs on such devices.

An entry counts only for what it was found for: device, versions, layout, model, and all else of
the configuration that takes memory. What cannot be read, or is of something else, is passed over
with a line, and the size is looked for again.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix import __version__, runtime
from cdrmix.config.schema import Config
from cdrmix.engines.reading import RESOURCES, read_resources
from cdrmix.errors import StateError
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import write_json_atomic
from cdrmix.planning.plan import Plan

logger = get_logger(__name__)

_FOLDER = "micro_batches"
_PACKAGES = ("torch", "deepspeed")


class Found(NamedTuple):
    """Micro batch that was found to be the largest that fits."""

    micro_batch_size: int
    measured_size: int  # of which the bytes are: larger, if that has failed since
    used_bytes: int  # on the fullest rank, a checkpoint's copy included
    share: float  # resources.memory_share
    tried: Mapping[str, int | None]  # bytes by size; None: it ran out of memory
    limit_bytes: int
    seconds: float  # that the probe took
    when: str  # UTC date

    @classmethod
    def now(
        cls,
        micro: int,
        *,
        used_bytes: int,
        share: float,
        tried: Mapping[int, int | None],
        limit_bytes: int,
        seconds: float,
    ) -> Found:
        """Makes what a probe has just found."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        named = {str(size): used for size, used in tried.items()}
        return cls(micro, micro, used_bytes, share, named, limit_bytes, seconds, today)


def key_of(config: Config, plan: Plan) -> dict[str, Any]:
    """Everything that the memory of a step depends on, as plain values."""
    training = config.training
    batches = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        "cdrmix": __version__,
        "packages": {name: version(name) for name in _PACKAGES},
        "device": runtime.device_name() or "cpu",
        # rounded: kernels reserve a little more or less of a host at each start
        "device_memory_gib": round(runtime.device_memory_gib(), 1),
        "memory_share": config.resources.share,
        "degrees": asdict(plan.degrees),
        "recompute": [plan.activation_checkpointing, plan.sequence_checkpoint_tokens],
        "saves_in_background": plan.saves_in_background,
        "deepspeed": {key: each for key, each in plan.deepspeed.items() if key not in batches},
        "samples_of_a_rank": plan.micro_batch_size * plan.gradient_accumulation_steps,
        "sequence_length": training.sequence_length,
        "precision": training.precision,
        "ema_decay": training.ema_decay,
        "model": config.model.model_dump(mode="json"),
        "optimizer": config.optimizer.model_dump(mode="json"),
        "objectives": config.objectives and config.objectives.model_dump(mode="json"),
        "segment_documents": config.data.segment_documents,
        "token_weights": config.data.token_weights is not None,
    }


def read(key: dict[str, Any], run_dir: Path) -> Found | None:
    """Reads what was found for a key: by an earlier start of the run, or by any run on this
    machine; None if nothing was."""
    own = read_resources(run_dir).get("micro_batch")
    if isinstance(own, dict) and (found := _found_in(own, key)) is not None:
        return found
    path = _path(key)
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.info("%s: passed over: %s", path, error)
        return None
    found = _found_in(entry, key)
    if found is None:
        logger.info("%s: passed over: it is not of this model, layout and device", path)
    return found


def write(key: dict[str, Any], found: Found, run_dir: Path) -> None:
    """Keeps what was found, in the run directory and for later runs on such devices."""
    entry = {"key": key, "found": found._asdict()}
    write_json_atomic(run_dir / RESOURCES, read_resources(run_dir) | {"micro_batch": entry})
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, entry)
    except (OSError, StateError) as error:  # the next run looks for it again
        logger.warning("warning: micro batch: not kept for later runs: %s", error)


def _found_in(entry: Any, key: dict[str, Any]) -> Found | None:
    """Reads an entry; None if it is not of this key, or not whole."""
    if not isinstance(entry, dict) or entry.get("key") != json.loads(json.dumps(key)):
        return None
    values = entry.get("found")
    if not isinstance(values, dict) or values.keys() != {*Found._fields}:
        return None
    found = Found(**values)
    sizes = (found.micro_batch_size, found.measured_size, found.used_bytes, found.limit_bytes)
    is_whole = all(isinstance(size, int) and size > 0 for size in sizes)
    are_numbers = isinstance(found.seconds, int | float) and isinstance(found.share, int | float)
    return found if is_whole and are_numbers and isinstance(found.when, str) else None


def _path(key: dict[str, Any]) -> Path:
    text = json.dumps(key, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return runtime.cache_dir() / _FOLDER / f"{name}.json"
