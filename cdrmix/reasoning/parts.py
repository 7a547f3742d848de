"""Which part of Stage B a parameter belongs to, and what it is called in checkpoints.

In a checkpoint the backbone's parameters have the names that Stage A gave them, so that whoever
reads a backbone reads one of Stage B too; all others stand under `stage_b.`.
"""

from __future__ import annotations

from typing import Literal, get_args

from cdrmix.models import backbone

Part = Literal["memory", "adapters", "policy", "backbone"]
PARTS: tuple[Part, ...] = get_args(Part)
PREFIX = "stage_b."


def part_of(name: str) -> Part:
    """Part of a parameter of a reader, by its name there; retrieval and slots are `memory`."""
    words = name.replace("/", ".").split(".")
    return next((part for part in PARTS[::-1] if part in words), "memory")


def logical_name(name: str) -> str:
    """Name in checkpoints of a reader's parameter or buffer, free of how modules are nested."""
    name = name.replace("/", ".")
    if part_of(name) == "backbone":
        return backbone.logical_name(name.rpartition("backbone.")[2])
    return PREFIX + name


def is_of_a_layer(name: str) -> bool:
    """Whether a reader's parameter belongs to a block, and lies where that lies on a pipeline; all
    others are on every stage."""
    return "blocks" in name.replace("/", ".").split(".")


def is_stage_b(name: str) -> bool:
    """Whether a name in a checkpoint is of Stage B, and not of the backbone."""
    return name.startswith(PREFIX)
