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
from typing import Any, Literal, NamedTuple

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config
from cdrmix.config.yaml_text import dump_yaml
from cdrmix.errors import ConfigError
from cdrmix.planning.counts import Counts, StageBCounts, attended_tokens, count, stage_b_params

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
# Keys of a model section that are for Hugging Face models alone.
_OF_FOLDERS = ("kind", "path", "lora", "remote_code")
# Columns of the table of sizes: title, key of `sizes_json`, unit; None: a plain value.
_COLUMNS: tuple[tuple[str, str, float | None], ...] = (
    ("name", "name", None),
    ("hidden", "hidden_size", None),
    ("layers", "num_layers", None),
    ("heads", "num_heads", None),
    ("expert width", "expert_hidden_size", None),
    ("total B", "total_params", 1e9),
    ("active B", "active_params", 1e9),
    ("GFLOP/token", "train_flops_per_token", 1e9),
    ("Stage B M", "stage_b_params", 1e6),
)


class Size(NamedTuple):
    """One row of the size table: a named model, its counts, and those of Stage B if it has one."""

    name: str
    model: ModelConfig
    counts: Counts
    stage_b: StageBCounts | None = None


def parse_size(text: str) -> float:
    """Parses a number of parameters such as '3B' or '3e9'; raises ConfigError if it is none."""
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

    The number of experts, the vocabulary and Stage B are those of the nearest variant. Raises
    ConfigError if no model of the family's shape is within 3 % of the target.
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
    counts = count(config.model, attended_tokens(config))
    return Size(config.name, config.model, counts, stage_b)


def _interpolated(x: float, xs: list[float], ys: list[float] | list[int]) -> float:
    """Interpolates log y linearly between the two nearest points, and extrapolates beyond them."""
    right = next((i for i in range(1, len(xs) - 1) if x < xs[i]), len(xs) - 1)
    x0, x1 = xs[right - 1 : right + 1]
    y0, y1 = map(math.log, ys[right - 1 : right + 1])
    return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def _nearest_model(
    template: ModelConfig, target_active: float, *, width: float, depth: float, ratio: float
) -> ModelConfig:
    """Searches the models within tolerance for the one nearest to a shape.

    The shape is a hidden size, a number of blocks, and expert width over hidden size; `template`
    has the other settings.
    """
    # Wider models get a number of heads with more factors of two, for tensor and sequence
    # parallelism to split: 16 heads go by 2, 96 by 8.
    eighths = max(1.0, width / HEAD_DIM / 8)
    multiple = HEAD_DIM * 2 ** math.floor(math.log2(eighths))
    assert template.moe is not None, "every shipped variant has experts"
    step = EXPERT_WIDTH_MULTIPLE
    found: list[tuple[float, int, int, int]] = []
    for hidden in _around(width, multiple):
        # Groups of four blocks are alike, so the count of any depth follows from two counts.
        shallow, deeper = (
            count(_resized(template, hidden, blocks, step), 1).active_params
            for blocks in (LAYER_MULTIPLE, 2 * LAYER_MULTIPLE)
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
            found.append((distance, hidden, layers, inner))
    if not found:
        raise ConfigError(
            f"no model within {TOLERANCE:.0%} of {_short(target_active)} active parameters: "
            f"{template.vocab_size} vocabulary rows, heads of {HEAD_DIM}, blocks by "
            f"{LAYER_MULTIPLE} and expert widths by {EXPERT_WIDTH_MULTIPLE} leave nothing so "
            f"small. Try a target from {_short(SMALLEST_ACTIVE)}"
        )
    _, hidden, layers, inner = min(found, key=lambda each: each[0])
    return _resized(template, hidden, layers, inner)


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
    rows = [sizes_json(size) for size in (*variant_sizes(family), *([new] if new else []))]
    columns = []
    for title, key, unit in _COLUMNS:
        values = [row[key] for row in rows if key in row]
        if values:  # only reasoning variants have the column of Stage B
            cells = [str(value) if unit is None else f"{value / unit:.2f}" for value in values]
            width = max(map(len, [title, *cells]))
            justify = str.ljust if key == "name" else str.rjust
            columns.append([justify(cell, width) for cell in (title, *cells)])
    print("\n".join("  ".join(cells) for cells in zip(*columns, strict=True)))
    if new:  # the section of a configuration file
        sizes = new.model.model_dump(exclude=set(_OF_FOLDERS))
        print(f"\n{dump_yaml({'model': sizes})}", end="")


def sizes_json(size: Size) -> dict[str, Any]:
    """Returns a size as plain values; total_params counts the backbone without Stage B."""
    model = size.model
    row: dict[str, Any] = {
        "name": size.name,
        **size.counts._asdict(),
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "expert_hidden_size": model.moe.expert_hidden_size if model.moe else None,
    }
    if size.stage_b is not None:
        parts = size.stage_b._asdict()
        parts["plastic_state_per_sequence"] = parts.pop("plastic_state")
        row |= {"stage_b_params": size.stage_b.total_params, "stage_b": parts}
    return row
