"""Base class of the sections of a configuration."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys, without conversions but of a whole number
    to a float (`true` is not 1, '8' is not 8). A text below a field is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        # In one line, for messages and the JSON schema.
        for field in cls.model_fields.values():
            field.description = field.description and " ".join(field.description.split())
        return handler(source)
