"""Removes secrets from a configuration: values of variables, and credentials in URLs."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<redacted>"
# Up to the last @ before the path, because a password may contain one.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")


def redacted_text(text: str) -> str:
    """Removes user and password from the URLs of a text."""
    return _CREDENTIALS.sub(f"{REDACTED}@", text)


def redacted(values: dict[str, Any]) -> dict[str, Any]:
    """Removes credentials from a dumped configuration, and all values of `launch.environment`: only
    the user knows which of them are secret."""
    public: dict[str, Any] = _without_credentials(values)
    launch = public.get("launch")
    if isinstance(launch, dict) and isinstance(launch.get("environment"), dict):
        launch["environment"] = dict.fromkeys(launch["environment"], REDACTED)
    return public


def _without_credentials(value: Any) -> Any:
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, dict):
        return {key: _without_credentials(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_credentials(each) for each in value)
    return value
