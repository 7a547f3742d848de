"""Removes secrets from a configuration: values of variables, and credentials in URLs."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<redacted>"
# Up to the last @ before the path, because a password may contain one.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")
# Names of secrets among the options of a class of a user's: api_key, authToken, PASSWORD.
SECRET_NAMES = "key|token|secret|passw|credential"


def redacted_text(text: str) -> str:
    """Removes user and password from the URLs of a text."""
    return _CREDENTIALS.sub(f"{REDACTED}@", text)


def redacted(values: dict[str, Any]) -> dict[str, Any]:
    """Removes credentials from a dumped configuration, all values of `launch.environment`, of which
    only the user knows which are secret, and texts among options whose names say that they are."""
    public: dict[str, Any] = _without_credentials(values)
    launch = public.get("launch")
    if isinstance(launch, dict) and isinstance(launch.get("environment"), dict):
        launch["environment"] = dict.fromkeys(launch["environment"], REDACTED)
    return public


def _without_credentials(value: Any) -> Any:
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, dict):
        made = {key: _without_credentials(each) for key, each in value.items()}
        if "use" in made and isinstance(made.get("options"), dict):
            made["options"] = _without_secrets(made["options"])
        return made
    if isinstance(value, list | tuple):
        return type(value)(_without_credentials(each) for each in value)
    return value


def _without_secrets(options: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, dict):
            made[key] = _without_secrets(value)
        elif isinstance(value, str) and re.search(SECRET_NAMES, str(key), re.IGNORECASE):
            made[key] = REDACTED
        else:
            made[key] = value
    return made
