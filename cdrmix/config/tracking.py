"""Trackers of a run in the configuration: `monitoring.trackers`."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, Literal, get_args

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from cdrmix.config.plugin import PluginConfig, is_plugin
from cdrmix.config.section import Section

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)


class TensorBoardOptions(Section):
    """Options of TensorBoard."""

    by_tokens: bool = False
    """Write a second copy of the points, in the folder `by_tokens`, whose axis is tokens_seen."""


class WandbOptions(Section):
    """Options of W&B. Its key is read from the variable WANDB_API_KEY alone."""

    mode: Literal["offline", "online"] = "offline"
    """offline: to files, for `wandb sync`. online: to the server, as the run goes."""
    project: str = "cdrmix"
    """Project of the runs."""
    entity: str | None = None
    """Team or user; null: the one that the key belongs to."""


class MlflowOptions(Section):
    """Options of MLflow. User, password or token are read from MLFLOW_TRACKING_* alone."""

    uri: str | None = None
    """Server, http(s)://...; null: a SQLite file in the run directory."""
    experiment: str = Field("cdrmix", min_length=1)
    """Experiment of the runs."""

    @field_validator("uri")
    @classmethod
    def _is_a_server(cls, uri: str | None) -> str | None:
        if uri is not None and not re.match(r"https?://[^/\s]", uri):
            raise ValueError(
                f"{uri!r} is no server: give http(s)://..., or leave it out for a SQLite file in "
                "the run directory"
            )
        if uri is not None and "@" in uri:
            raise ValueError(
                "user and password do not belong here. Set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the environment"
            )
        return uri


OPTIONS: dict[str, type[Section]] = {
    "tensorboard": TensorBoardOptions,
    "wandb": WandbOptions,
    "mlflow": MlflowOptions,
}


class TrackerConfig(PluginConfig):
    """Tracker, a program that gets a copy of the metrics; in short its name."""

    use: str
    """tensorboard, wandb, mlflow, or a class of yours as package.module:Name."""
    options: dict[str, Any] = {}
    """Options of the tracker; see docs/tracking.md."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @field_validator("use")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value in TRACKERS or is_plugin(value):
            return value
        near = get_close_matches(value.lower(), TRACKERS, n=1)
        advice = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"{value!r} is no tracker.{advice} Allowed: {', '.join(TRACKERS)}, or a class of yours "
            "as package.module:Name"
        )

    @model_validator(mode="after")
    def _options_fit(self) -> TrackerConfig:
        known = OPTIONS.get(self.use)
        if known is not None:
            try:
                known.model_validate(self.options)
            except ValidationError as error:
                first = error.errors()[0]
                name = ".".join(str(part) for part in first["loc"])
                text = first["msg"].removeprefix("Value error, ")
                raise ValueError(
                    f"options.{name}: {text} ({self.use} knows: {', '.join(known.model_fields)})"
                ) from error
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        # Its keys are those of a section alone: JSON schema asks a text for none.
        return {**handler.resolve_ref_schema(handler(schema)), "type": ["string", "object"]}


def each_once(trackers: tuple[TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
    """Returns the trackers. Raises ValueError if two have one name, and so one folder."""
    names = [name_of(each.use) for each in trackers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)}: named twice. Name each tracker once")
    return trackers


def name_of(use: str) -> str:
    """Returns the name of a tracker's folder, and of the tracker in messages."""
    return use.rpartition(":")[2]
