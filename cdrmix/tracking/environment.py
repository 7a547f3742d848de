"""Environment variables of the packages of trackers, in the process that uses them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Variables of W&B that stay: who it is, and where its server is. The others would change a run's
# name, mode or place.
_KEPT = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_INSECURE_DISABLE_SSL")


def has_wandb_key(more: Mapping[str, str]) -> bool:
    """Tells if the key of W&B is in the environment, or in `more` that is added to it."""
    return "WANDB_API_KEY" in {**os.environ, **more}


def keep_wandb_in(folder: Path) -> None:
    """Has W&B write into a folder alone, take its key from the environment alone, and send no
    reports of errors to its makers."""
    for name in [each for each in os.environ if each.startswith("WANDB_")]:
        if name not in _KEPT:
            del os.environ[name]
    folders = ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "ARTIFACT_DIR")
    os.environ.update({f"WANDB_{name}": str(folder) for name in folders})
    os.environ.update({"NETRC": str(folder / "netrc"), "WANDB_ERROR_REPORTING": "false"})


def keep_mlflow_quiet() -> None:
    """Has MLflow send nothing to its makers."""
    os.environ.update({"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"})
