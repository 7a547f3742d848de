"""Names of a Hugging Face model's weights, from the module's parameters to tensors of the files.

transformers keeps the experts of a layer in one parameter, and may name modules otherwise than the
files. Its own mapping says how; here it is applied to names and shapes alone, without a value read,
and backwards for an export in the layout of the base.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from cdrmix.config.base_checks import runs_own_code
from cdrmix.errors import ConfigError, DataError

_LISTED = 10  # names in a message
Shape = tuple[int, ...]


class Part(NamedTuple):
    """A tensor of the files, and the box of the parameter that it is, in row-major order."""

    source: str  # name in the files
    offset: Shape  # of the box in the parameter
    shape: Shape  # of the box: that of the tensor, [1, ...] of an expert


@dataclass(frozen=True)
class NameMap:
    """Parameters and saved buffers of a model, and the tensors of the files that they come from."""

    parts: dict[str, tuple[Part, ...]]  # by the module's name
    tied: tuple[tuple[str, str], ...]  # further names in files of tensors that have parts
    dropped: tuple[str, ...]  # tensors of the files that the model has no use for

    def origins(self) -> dict[str, tuple[str, Part]]:
        """The module's name and part of each tensor of the files, by its name there."""
        origins = {part.source: (name, part) for name, ps in self.parts.items() for part in ps}
        # the value of both names
        return origins | {other: origins[source] for other, source in self.tied}


def skeleton(folder: Path, remote_code: Sequence[str] = ()) -> Any:
    """Makes the causal language model of a folder by its config.json, on the meta device.

    Args:
        folder: its small files suffice.
        remote_code: sha256 of Python files there that may run (hex).
    Raises:
        ConfigError: if the family is unknown, or its code is not allowed.
    """
    is_own = runs_own_code(folder, remote_code)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=is_own
        )
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=is_own)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"{folder}: transformers {transformers.__version__} makes no causal language model of "
            f"its config.json: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


def map_names(model: Any, sizes: Mapping[str, Shape], *, place: object) -> NameMap:
    """Maps the names of a model to those of the files that hold its weights.

    Args:
        model: a causal language model of transformers, on any device.
        sizes: shape of each tensor of the files.
        place: of the files, for messages.
    Raises:
        DataError: if tensors are missing, unexpected or of another shape.
        ConfigError: if the family's weights are converted in a way that is not supported.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", {}))
    taken: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    unexpected = []
    # In the order of transformers, which is that of the experts in their parameter.
    for source in sorted(sizes, key=dot_natural_key):
        prefix = model.base_model_prefix
        name, pattern = rename_source_key(source, renamings, converters, prefix, shapes)
        if name not in shapes and source in shapes:
            name, pattern = source, None
        if name not in shapes:
            unexpected.append(source)
            continue
        taken[name][pattern].append(source)
    dropped = [name for name in unexpected if _is_ignored(model, name)]
    problems = [f"{name}: not of the model" for name in unexpected if name not in dropped]
    parts: dict[str, tuple[Part, ...]] = {}
    for name, by_source in taken.items():
        found = _parts(by_source, by_pattern, sizes, family=model.config.model_type)
        lost = _lost_experts(by_source, shapes[name])
        problems += [f"{each}: missing" for each in lost]
        problems += [] if lost else _differences(name, shapes[name], found, sizes)
        parts[name] = tuple(found)
    tied = _untie(parts, ties)
    names = [name for name in shapes if name not in ties]
    problems += [f"{name}: missing" for name in names if name not in parts]
    if problems:
        listed = "\n".join(f"  {each}" for each in problems[:_LISTED])
        raise DataError(
            f"{place}: its tensors are not those of a {type(model).__name__} "
            f"({len(problems)} differences):\n{listed}\nGive the whole folder of one model"
        )
    return NameMap({name: parts[name] for name in names}, tuple(tied), tuple(dropped))


def _parts(
    by_pattern: Mapping[str | None, list[str]],
    converters: Mapping[str, WeightConverter],
    sizes: Mapping[str, Shape],
    *,
    family: str,
) -> list[Part]:
    """Parts of a parameter, from the tensors that transformers collects for each pattern."""
    plain = by_pattern.get(None)
    if plain is not None:
        return [Part(source, (0,) * len(sizes[source]), sizes[source]) for source in plain]
    converter = converters[next(pattern for pattern in by_pattern if pattern is not None)]
    _check_operations(converter, family)
    parts = []
    rows = 0
    # Experts along the first dimension; for each, the tensors of one pattern after another.
    for pattern in converter.source_patterns:
        sources = by_pattern.get(pattern, [])
        for expert, source in enumerate(sources):
            size = sizes[source]
            offset = (expert, *((rows,) if size else ()), *(0 for _ in size[1:]))
            parts.append(Part(source, offset, (1, *size)))
        rows += sizes[sources[0]][0] if sources and sizes[sources[0]] else 0
    return parts


def _check_operations(converter: WeightConverter, family: str) -> None:
    """Raises ConfigError unless a conversion stacks experts, and joins the rows of each."""
    operations = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    stacks = (MergeModulelist, 0)
    if operations not in ([stacks], [stacks, (Concatenate, 1)]) or (
        len(converter.source_patterns) > 1 and len(operations) == 1
    ):
        named = ", ".join(f"{kind.__name__}(dim={dim})" for kind, dim in operations)
        raise ConfigError(
            f"model.path: weights of the family {family!r} are converted by {named} when they are "
            "read, which is not supported. Supported are renamed tensors, and experts that are "
            "stacked (MergeModulelist) and joined (Concatenate)"
        )


def _lost_experts(by_pattern: Mapping[str | None, list[str]], shape: Shape) -> list[str]:
    """Names of tensors of single experts that are not there, in a parameter that stacks them."""
    lost = []
    for pattern, sources in by_pattern.items():
        before, _, after = (pattern or "").partition("*")
        numbered = re.compile(rf"(.*{before})(\d+)({after}.*)") if after else None
        if numbered is None or (match := numbered.fullmatch(sources[0])) is None:
            continue
        expected = [f"{match[1]}{expert}{match[3]}" for expert in range(shape[0])]
        lost += [name for name in expected if name not in sources]
    return lost


def _differences(
    name: str, shape: Shape, parts: Iterable[Part], sizes: Mapping[str, Shape]
) -> list[str]:
    """Reasons why parts do not make a parameter of this shape, naming their tensors."""
    parts = list(parts)
    if len(parts) == 1 and not any(parts[0].offset) and parts[0].shape == shape:
        return []
    if len({part.offset for part in parts}) < len(parts):
        twice = " and ".join(part.source for part in parts)
        return [f"{name}: given twice, by {twice}"]
    problems = [
        f"{part.source}: {sizes[part.source]}, beyond {name}, which is {shape}"
        for part in parts
        if len(part.shape) != len(shape)
        or any(
            # joined tensors share the rows; in all others a part is as large as the whole
            start + size > whole or (dimension > 1 and size != whole)
            for dimension, (start, size, whole) in enumerate(
                zip(part.offset, part.shape, shape, strict=True)
            )
        )
    ]
    if problems:
        return problems
    held = sum(math.prod(part.shape) for part in parts)
    if held != math.prod(shape):
        return [f"{name}: {shape}, of which its {len(parts)} tensors hold {held:,} numbers"]
    return []


def _untie(parts: dict[str, tuple[Part, ...]], ties: Mapping[str, str]) -> list[tuple[str, str]]:
    """Moves parts of tied names to the one name that the module keeps; gives those held twice."""
    twice = []
    for target, source in ties.items():
        if target not in parts:
            continue
        if source not in parts:
            parts[source] = parts[target]
        elif parts[target] != parts[source]:
            pairs = zip(parts[target], parts[source], strict=True)
            twice += [(other.source, one.source) for other, one in pairs]
    return twice


def _is_ignored(model: Any, name: str) -> bool:
    """True for a tensor that the family leaves out when it reads a folder."""
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [each for each, _ in model.named_buffers()]
    # Early versions saved what is computed now.
    if any(buffer.endswith("rotary_emb.inv_freq") for buffer in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    return any(re.search(pattern, name) for pattern in patterns)


def kept_in_float32(model: Any, name: str) -> bool:
    """True for a parameter or buffer that transformers reads as float32 into any model."""
    patterns: Iterable[str] = model._keep_in_fp32_modules_strict or ()
    return any(pattern in name.split(".") for pattern in patterns)
