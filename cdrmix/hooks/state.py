"""State of hooks in a checkpoint: JSON, with tensors as the text of their bytes.

It stands in state.json, which a checkpoint's manifest covers and which no layout divides.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

from cdrmix.errors import ConfigError, StateError

# A hook's, as text: state.json is read whole by every start.
_MOST_BYTES = 22 * 2**20  # 16 MiB of tensors
_TENSOR = "tensor:"


def to_json(state: object) -> dict[str, Any]:
    """Returns a hook's state as JSON; ConfigError if a value is neither JSON nor a tensor."""
    if not isinstance(state, dict):
        raise ConfigError(f"state_dict returned {type(state).__name__}, not a dict")
    content: dict[str, Any] = _encoded(state, "state_dict()")
    if (size := len(json.dumps(content))) > _MOST_BYTES:
        raise ConfigError(
            f"state_dict returned {size / 2**20:.0f} MiB as text, and {_MOST_BYTES >> 20} are kept "
            "at most. Write what is large into a file of its own"
        )
    return content


def from_json(content: Any) -> Any:
    """Returns a state as `to_json` got it; StateError if it is damaged."""
    if isinstance(content, list):
        return [from_json(value) for value in content]
    if not isinstance(content, dict):
        return content
    if len(content) == 1 and next(iter(content)).startswith(_TENSOR):
        ((kind, data),) = content.items()
        return _tensor(kind.removeprefix(_TENSOR), data)
    return {name: from_json(value) for name, value in content.items()}


def _encoded(value: Any, place: str) -> Any:
    import torch  # here, as planning looks at hooks without it

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_encoded(each, f"{place}[{n}]") for n, each in enumerate(value)]
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str) or name.startswith(_TENSOR):
                raise ConfigError(f"{place}: {name!r} is no name of a value in JSON")
        return {name: _encoded(each, f"{place}[{name!r}]") for name, each in value.items()}
    if isinstance(value, torch.Tensor):
        values = value.detach().cpu().contiguous()
        data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = ",".join([str(value.dtype).removeprefix("torch."), *map(str, value.shape)])
        return {_TENSOR + kind: base64.b64encode(data).decode()}
    raise ConfigError(
        f"{place} is of type {type(value).__name__}: a checkpoint keeps numbers, text, lists, "
        "dicts and tensors"
    )


def _tensor(kind: str, data: Any) -> Any:
    """Tensor of a kind such as "float32,2,3" from the text of its bytes."""
    import torch

    name, *sizes = kind.split(",")
    try:
        shape = [int(size) for size in sizes]
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0:
            raise ValueError("no tensor is of that kind")
        stored = bytearray(base64.b64decode(data, validate=True))
        if len(stored) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(stored)} bytes")
        if not stored:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(stored, dtype=torch.uint8).view(dtype).reshape(shape)
    except (AttributeError, TypeError, ValueError) as error:
        raise StateError(
            f"the state of a hook: a tensor {kind!r} cannot be read: {error}"
        ) from error
