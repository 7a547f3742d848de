"""Documents of packed rows as sequences of one flat batch: where each begins and ends.

Found once for a tensor of segment ids, whatever number of layers asks for it. Borders are numbers
that kernels and loops of the host read, so that ids on a device are waited for, once, unless the
host had them before (`remember`).
"""

# B batch, T time, N documents in a batch

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class Packing:
    """Documents of a batch, row by row, in one flat sequence of B T tokens."""

    ends: Tensor  # 0 and the end of each document, [N + 1], int64, on the device of the ids
    ends_cpu: Tensor  # the same on the CPU
    first: Tensor  # index of the first document of each row, [B], on the device
    last: Tensor  # index of the last document of each row, [B], on the device

    @cached_property
    def ends_int32(self) -> Tensor:
        """Ends as attention kernels take them."""
        return self.ends.to(torch.int32)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.ends_cpu.diff().max())

    @cached_property
    def ends_list(self) -> list[int]:
        """Ends as numbers."""
        numbers: list[int] = self.ends_cpu.tolist()
        return numbers


_packings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packing_of(segment_ids: Tensor) -> Packing:
    """Returns the packing of ids, [B, T], which never fall along T; nothing crosses a row's end."""
    version, packing = _packings.get(segment_ids, (None, None))
    if packing is None or version != segment_ids._version:
        packing = _found(segment_ids.cpu(), segment_ids.device)
        _packings[segment_ids] = (segment_ids._version, packing)
    found: Packing = packing
    return found


def remember(segment_ids: Tensor, on_host: Tensor) -> None:
    """Notes the packing of ids on a device whose values the host has, so that nothing waits."""
    if segment_ids.device.type != "cpu":
        packing = _found(on_host, segment_ids.device)
        _packings[segment_ids] = (segment_ids._version, packing)


def _found(ids: Tensor, device: torch.device) -> Packing:
    values = ids.numpy()
    starts = np.ones(values.shape, dtype=bool)
    np.not_equal(values[:, 1:], values[:, :-1], out=starts[:, 1:])
    ends_cpu = torch.from_numpy(np.append(np.flatnonzero(starts), values.size))
    through = starts.sum(1).cumsum()  # documents up to the end of each row
    first, last = torch.from_numpy(np.stack([np.append(0, through[:-1]), through - 1]))
    ends = ends_cpu.to(device, non_blocking=True)
    return Packing(ends, ends_cpu, first.to(device), last.to(device))
