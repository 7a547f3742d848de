"""The sections `launch` and `supervision`: how ranks are started, and when a stalled run ends."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator

from cdrmix.config.section import Section


class LaunchConfig(Section):
    """Settings of `cdrmix launch` and `cdrmix slurm`."""

    environment: dict[str, str] = {}
    """Environment variables of every rank, such as NCCL_DEBUG: INFO."""

    @field_validator("environment", mode="before")
    @classmethod
    def _texts_of_one_line(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, text in value.items():
            # re.A: shells accept ASCII names only
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.A):
                raise ValueError(f"{name!r} is no name of a variable: letters, digits and _")
            # `true` would become the text True, which is not what the file says.
            is_text = isinstance(text, str | int) and not isinstance(text, bool)
            # These end a line of a job script or environment file, or a variable's value.
            if not is_text or re.search(r"[\x00\n\r]", str(text)):
                raise ValueError(f"{name} = {text!r} is no text of one line. Try quotes around it")
        return {name: str(text) for name, text in value.items()}  # 1 is a text too


class SupervisionConfig(Section):
    """Time limits after which a stalled run ends on all hosts, to be restarted."""

    deadline_seconds: float = Field(60.0, ge=1)
    """Time after which a silent rank is lost and one without progress is stuck, unless the step
    before took more than a quarter of it, or the ranks wait for one that may take longer
    (seconds)."""
    # In these phases ranks wait for a file server or for rank 0, and show no progress.
    phase_seconds: float = Field(1_800.0, ge=1)
    """Longest time to start (up to the end of the first step), for a step of Stage B before the
    first save, to log, to save, to evaluate or to finish (seconds)."""
