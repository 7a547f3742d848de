"""The table of model sizes, as text and as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from cdrmix.config.yaml_text import dump_yaml
from cdrmix.errors import ConfigError
from cdrmix.planning.autosize import (
    Family,
    Size,
    parse_size,
    size_for_active,
    variant_sizes,
)

_COLUMNS = (
    "name",
    "hidden",
    "layers",
    "heads",
    "expert width",
    "total B",
    "active B",
    "GFLOP/token",
)


def autosizer(family: Family, argv: Sequence[str] | None = None) -> None:
    """Command line of an autosizer tool: prints the family's sizes, or sizes a new model."""
    parser = argparse.ArgumentParser(
        description=f"Sizes of the cdrmix-{family} variants: dimensions, parameters and training "
        "FLOPs per token at their sequence length."
    )
    parser.add_argument(
        "--target-active",
        metavar="SIZE",
        help="size a new model by its active parameters (500M, 3B, 1.5b, 3e9), within 3 %%",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a list of objects: the variants, or only the new model",
    )
    arguments = parser.parse_args(argv)
    new = None
    if arguments.target_active is not None:
        try:
            new = size_for_active(family, parse_size(arguments.target_active))
        except ConfigError as error:
            parser.error(f"--target-active: {error}")
    if arguments.json:
        print(json.dumps([as_json(size) for size in ([new] if new else variant_sizes(family))]))
        return
    print(as_text([*variant_sizes(family), *([new] if new else [])]))
    if new:
        print(f"\n{model_yaml(new)}", end="")


def as_json(size: Size) -> dict[str, Any]:
    """A size as plain values; total_params is the backbone, `stage_b` what is trained beside it."""
    model, counts = size.model, size.counts
    row: dict[str, Any] = {
        "name": size.name,
        "total_params": counts.total_params,
        "active_params": counts.active_params,
        "train_flops_per_token": counts.train_flops_per_token,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "expert_hidden_size": model.moe.expert_hidden_size if model.moe else None,
    }
    if size.stage_b is not None:
        row["stage_b_params"] = size.stage_b.total_params
        row["stage_b"] = {
            "adapters": size.stage_b.adapters,
            "gates": size.stage_b.gates,
            "heads": size.stage_b.heads,
            "summariser": size.stage_b.summariser,
            "retrieval": size.stage_b.retrieval,
            "plastic_state_per_sequence": size.stage_b.plastic_state,
        }
    return row


def as_text(sizes: Sequence[Size]) -> str:
    """Sizes as an aligned table; reasoning variants get a column for what Stage B adds (M)."""
    reasoning = any(size.stage_b is not None for size in sizes)
    header = [*_COLUMNS, *(["Stage B M"] if reasoning else [])]
    rows = [header, *(_cells(size) for size in sizes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    )


def _cells(size: Size) -> list[str]:
    model, counts = size.model, size.counts
    cells = [
        size.name,
        str(model.hidden_size),
        str(model.num_layers),
        str(model.num_heads),
        str(model.moe.expert_hidden_size) if model.moe else "-",
        f"{counts.total_params / 1e9:.2f}",
        f"{counts.active_params / 1e9:.2f}",
        f"{counts.train_flops_per_token / 1e9:.2f}",
    ]
    return cells + ([f"{size.stage_b.total_params / 1e6:.2f}"] if size.stage_b else [])


def model_yaml(size: Size) -> str:
    """The `model` section of a size, to be pasted into a config file."""
    return dump_yaml({"model": size.model.model_dump()})
