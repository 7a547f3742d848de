"""index.json: logical name -> kind -> shape, dtype and the files in which its fragments lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cdrmix.checkpoint.fragments import Block, Fragment, Span, check_cover


def index_entry(file: str, key: str, fragment: Fragment) -> dict[str, Any]:
    """What the index says of one fragment that lies in `file` under `key`."""
    span = fragment.span
    assert fragment.values.numel() == span.numel, f"{key}: values do not fill their span"
    return {
        "name": fragment.name,
        "kind": fragment.kind,
        "shape": list(fragment.shape),
        "dtype": str(fragment.values.dtype).removeprefix("torch."),
        "fragment": {
            "file": file,
            "key": key,
            "block_offset": list(span.block.offset),
            "block_shape": list(span.block.shape),
            "start": span.start,
            "numel": span.numel,
        },
    }


def span_of(fragment: Mapping[str, Any]) -> Span:
    """The span that an index entry's `fragment` describes."""
    block = Block(tuple(fragment["block_offset"]), tuple(fragment["block_shape"]))
    return Span(block, fragment["start"], fragment["numel"])


def merge_entries(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """name -> kind -> shape, dtype and fragments, from the entries of all ranks.

    Raises:
        AssertionError: if ranks disagree, or an element is held by no rank or by several.
    """
    index: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name, kind, shape, dtype = (entry[key] for key in ("name", "kind", "shape", "dtype"))
        whole = index.setdefault(name, {}).setdefault(
            kind, {"shape": shape, "dtype": dtype, "fragments": []}
        )
        assert (whole["shape"], whole["dtype"]) == (shape, dtype), (
            f"{kind} of {name} is {whole['dtype']} {whole['shape']} on one rank and "
            f"{dtype} {shape} on another"
        )
        whole["fragments"].append(entry["fragment"])
    for name, kinds in index.items():
        for kind, whole in kinds.items():
            spans = [span_of(fragment) for fragment in whole["fragments"]]
            check_cover(f"{kind} of {name}", tuple(whole["shape"]), spans)
    return index
