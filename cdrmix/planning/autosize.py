"""Computes the dimensions of a model from a target size, and prints the table of sizes.

Depth, width and expert width are interpolated between the shipped variants, then searched nearby
for the combination that meets the target.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config
from cdrmix.config.yaml_text import dump_yaml
from cdrmix.errors import ConfigError
from cdrmix.planning.counts import Counts, StageBCounts, count, stage_b_params

Family = Literal["core", "reason"]
SCALES = ("1b", "4b", "40b", "200b")
HEAD_DIM = 128
LAYER_MULTIPLE = 4  # so that a quarter of the blocks, the Transformer blocks, is a whole number
EXPERT_WIDTH_MULTIPLE = 256
TOLERANCE = 0.03
SMALLEST_ACTIVE = 20e6
LARGEST_ACTIVE = 1e15
# Range of widths and depths searched, as a share of the interpolated value to either side.
SEARCHED = 0.35
_SIZE = re.compile(r"^([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)([kmbt]?)$", re.IGNORECASE)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
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


@dataclass(frozen=True)
class Size:
    """One row of the size table: a named model, its counts, and those of Stage B if it has one."""

    name: str
    model: ModelConfig
    counts: Counts
    stage_b: StageBCounts | None = None


def parse_size(text: str) -> float:
    """Parses a number of parameters such as '3B', '1.5b', '500M' or '3e9'.

    Raises:
        ConfigError: if it is not a positive size.
    """
    match = _SIZE.match(text.strip())
    size = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 0 < size <= LARGEST_ACTIVE:
        raise ConfigError(
            f"given {text!r}, allowed is a number of parameters from "
            f"{_short(SMALLEST_ACTIVE)} to {_short(LARGEST_ACTIVE)}, such as 500M, 3B, 1.5b or 3e9"
        )
    return size


def variant(family: Family, scale: str) -> Config:
    """Loads the shipped configuration of a scale: `1b`, `4b`, `40b` or `200b`."""
    return load_config(shipped("model_configs") / f"cdrmix-{family}-{scale}.yaml")


def variant_sizes(family: Family) -> list[Size]:
    """Returns the sizes of the four shipped variants of a family, smallest first."""
    return [_size(variant(family, scale)) for scale in SCALES]


def size_for_active(family: Family, target_active: float) -> Size:
    """Sizes a new model with about `target_active` active parameters, within 3 %.

    The number of experts, the vocabulary and Stage B are those of the nearest variant.

    Raises:
        ConfigError: if no model of the family's shape is within 3 % of the target.
    """
    configs = [variant(family, scale) for scale in SCALES]
    active = [math.log(_size(config).counts.active_params) for config in configs]
    target = math.log(target_active)
    nearest = configs[min(range(len(configs)), key=lambda i: abs(active[i] - target))]
    models = [config.model for config in configs]
    ratios = [model.moe.expert_hidden_size / model.hidden_size for model in models if model.moe]
    model = _nearest_model(
        nearest.model,
        target_active,
        width=_interpolated(target, active, [model.hidden_size for model in models]),
        depth=_interpolated(target, active, [model.num_layers for model in models]),
        ratio=_interpolated(target, active, ratios),
    )
    name = f"cdrmix-{family}-{_short(target_active).lower()}-active"
    return _size(nearest.model_copy(update={"name": name, "model": model}))


def _size(config: Config) -> Size:
    stage_b = stage_b_params(config.model, config.stage_b) if config.stage_b else None
    counts = count(config.model, config.training.sequence_length)
    return Size(config.name, config.model, counts, stage_b)


def _interpolated(x: float, xs: list[float], ys: list[float] | list[int]) -> float:
    """Interpolates log y linearly between the two nearest points, and extrapolates beyond them."""
    right = next((i for i in range(1, len(xs) - 1) if x < xs[i]), len(xs) - 1)
    x0 = xs[right - 1]
    x1 = xs[right]
    y0 = math.log(ys[right - 1])
    y1 = math.log(ys[right])
    return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def _nearest_model(
    template: ModelConfig, target_active: float, *, width: float, depth: float, ratio: float
) -> ModelConfig:
    """Searches the models within tolerance for the one nearest to a shape.

    Args:
        template: model with the other settings.
        target_active: active parameters.
        width: hidden size of the shape.
        depth: number of blocks of the shape.
        ratio: expert width over hidden size.
    """
    # Wider models get a number of heads with more factors of two, for tensor and sequence
    # parallelism to split: 16 heads go by 2, 96 by 8.
    eighths = max(1.0, width / HEAD_DIM / 8)
    multiple = HEAD_DIM * 2 ** math.floor(math.log2(eighths))
    assert template.moe is not None, "every shipped variant has experts"
    step = EXPERT_WIDTH_MULTIPLE
    best: tuple[float, ModelConfig] | None = None
    for hidden in _around(width, multiple):
        # Groups of four blocks are alike, so the count of any depth follows from two counts.
        shallow, deeper = (
            count(_resized(template, hidden, blocks * LAYER_MULTIPLE, step), 1).active_params
            for blocks in (1, 2)
        )
        for layers in _around(depth, LAYER_MULTIPLE):
            narrowest = shallow + (deeper - shallow) * (layers // LAYER_MULTIPLE - 1)
            per_step = layers * template.moe.top_k * 2 * hidden * step
            more_steps = max(0, round((target_active - narrowest) / per_step))
            if abs((narrowest + more_steps * per_step) / target_active - 1) > TOLERANCE:
                continue
            inner = step * (1 + more_steps)
            pairs = ((hidden, width), (layers, depth), (inner / hidden, ratio))
            distance = sum(math.log(value / goal) ** 2 for value, goal in pairs)
            if best is None or distance < best[0]:
                best = distance, _resized(template, hidden, layers, inner)
    if best is None:
        raise ConfigError(
            f"no model within {TOLERANCE:.0%} of {_short(target_active)} active parameters: "
            f"{template.vocab_size} vocabulary rows, heads of {HEAD_DIM}, blocks by "
            f"{LAYER_MULTIPLE} and expert widths by {EXPERT_WIDTH_MULTIPLE} leave nothing so "
            f"small. Try a target from {_short(SMALLEST_ACTIVE)}"
        )
    return best[1]


def _around(wanted: float, multiple: int) -> range:
    low = max(1, math.floor(wanted * (1 - SEARCHED) / multiple))
    high = max(1, math.ceil(wanted * (1 + SEARCHED) / multiple))
    return range(low * multiple, (high + 1) * multiple, multiple)


def _resized(template: ModelConfig, hidden: int, layers: int, inner: int) -> ModelConfig:
    assert template.moe is not None, "every shipped variant has experts"
    derived = {"head_dim": HEAD_DIM, "num_heads": hidden // HEAD_DIM, "num_layers": layers}
    moe = template.moe.model_dump() | {"expert_hidden_size": inner}
    values = template.model_dump(exclude={"num_kv_heads", "ffn_hidden_size"})
    return ModelConfig.model_validate(values | derived | {"hidden_size": hidden, "moe": moe})


def _short(number: float) -> str:
    """Formats a number with its unit, 3000000000 as '3B', in four significant digits."""
    unit = max((u for u in _UNITS if number >= _UNITS[u]), key=_UNITS.__getitem__, default="")
    return f"{number / _UNITS[unit]:.4g}{unit.upper()}"


def autosizer(family: Family, argv: Sequence[str] | None = None) -> None:
    """Runs the command line of an autosizer: prints a family's sizes, or sizes a new model."""
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
        print(json.dumps([sizes_json(size) for size in ([new] if new else variant_sizes(family))]))
        return
    print(sizes_text([*variant_sizes(family), *([new] if new else [])]))
    if new:
        print(f"\n{model_yaml(new)}", end="")


def sizes_json(size: Size) -> dict[str, Any]:
    """Returns a size as plain values; total_params counts the backbone without Stage B."""
    model = size.model
    counts = size.counts
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


def sizes_text(sizes: Sequence[Size]) -> str:
    """Formats sizes as a table; reasoning variants have a column for Stage B (M parameters)."""
    has_stage_b = any(size.stage_b is not None for size in sizes)
    rows = [[*_COLUMNS, *(["Stage B M"] if has_stage_b else [])]]
    for size in sizes:
        model = size.model
        counts = size.counts
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
        if size.stage_b is not None:
            cells.append(f"{size.stage_b.total_params / 1e6:.2f}")
        rows.append(cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    )


def model_yaml(size: Size) -> str:
    """Formats the `model` section of a size for a config file."""
    return dump_yaml({"model": size.model.model_dump()})
