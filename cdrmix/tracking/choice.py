"""The trackers that a configuration means, and what each needs to be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from cdrmix.config.schema import Config
from cdrmix.config.tracking import MlflowOptions, TrackerConfig, WandbOptions
from cdrmix.errors import ConfigError
from cdrmix.runtime.mounts import file_system, is_between_hosts
from cdrmix.tracking.environment import has_wandb_key

# Packages of each of ours, all of its extra.
_PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}


def trackers_of(config: Config) -> Sequence[TrackerConfig]:
    """Returns the trackers that a run names, else TensorBoard where it is installed."""
    named = config.monitoring.trackers
    if named is not None:
        return named
    return (TrackerConfig(use="tensorboard"),) if find_spec("tensorboard") else ()


def check_trackers(
    trackers: Sequence[TrackerConfig],
    place: Path,
    *,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Refuses trackers that cannot work here, one to a line; a class of a user's is not imported.

    Args:
        place: run directory or folder of the copies; need not exist.
        environment: variables that the run gets besides those of this process.
    Raises:
        ConfigError: if a package or the key of W&B is missing, or SQLite has no place.
    """
    problems = []
    for tracker in trackers:
        missing = [name for name in _PACKAGES.get(tracker.use, ()) if find_spec(name) is None]
        if missing:
            problems.append(
                f"monitoring.trackers, {tracker.use}: needs the package {', '.join(missing)}. Try "
                f"pip install 'cdrmix[{tracker.use}]', or leave the tracker out"
            )
        elif tracker.use == "wandb":
            is_online = WandbOptions.model_validate(tracker.options).mode == "online"
            if is_online and not has_wandb_key(environment or {}):
                problems.append(
                    "monitoring.trackers, wandb: mode = online needs the variable WANDB_API_KEY; a "
                    "key elsewhere, such as in ~/.netrc, is not read. Set it, or take mode: offline"
                )
        elif tracker.use == "mlflow":
            own_file = MlflowOptions.model_validate(tracker.options).uri is None
            if own_file and is_between_hosts(place):
                problems.append(
                    f"monitoring.trackers, mlflow: {place} is on {file_system(place)}, whose locks "
                    "SQLite cannot rely on. Give options.uri, an MLflow server, or leave the "
                    "tracker out and make its copy on a local disk: cdrmix track RUN_DIR --to "
                    "mlflow --out DIR"
                )
    if problems:
        raise ConfigError("\n".join(problems))
