"""Base class of all sections of the configuration tree."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values cannot be changed after loading, and
    nothing is converted but a whole number to a float (`true` is not 1, '8' is not 8)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
