"""A configuration as it may be shown: without values of variables and credentials in URLs."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<redacted>"
# Up to the last @ before the path: a password may hold one.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")


def redacted_text(text: str) -> str:
    """Text whose URLs have lost their user and password."""
    return _CREDENTIALS.sub(f"{REDACTED}@", text)


def redacted(values: dict[str, Any]) -> dict[str, Any]:
    """Dumped configuration, with names alone in `launch.environment` and no credentials.

    The environment of a run is where tokens are given; which of its values are secret only the
    user knows, so all of them go.
    """
    shown: dict[str, Any] = _without_credentials(values)
    launch = shown.get("launch")
    if isinstance(launch, dict) and isinstance(launch.get("environment"), dict):
        launch["environment"] = dict.fromkeys(launch["environment"], REDACTED)
    return shown


def _without_credentials(value: Any) -> Any:
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, dict):
        return {key: _without_credentials(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_credentials(each) for each in value)
    return value
