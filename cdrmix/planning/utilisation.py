"""Share of the devices' peak that a run has reached."""

from __future__ import annotations

import re
from typing import NamedTuple

from cdrmix.config.schema import Config
from cdrmix.planning.cluster import PRESETS
from cdrmix.planning.counts import attended_tokens, count, forward_flops_by_layer

# Names that torch gives the devices of presets. Others of a series, such as the H100 for PCIe, are
# slower, and a preset's peak would be wrong for them.
_DEVICES = {
    "a100-80": r"NVIDIA A100-SXM4-80GB",
    "h100-80": r"NVIDIA H100 80GB HBM3",
    "h200-141": r"NVIDIA H200",
    "mi300x-192": r"AMD Instinct MI300X( OAM)?",
    "mi250x-64": r"AMD Instinct MI250X",
    "rtx4090-24": r"NVIDIA GeForce RTX 4090",
}


class Utilisation(NamedTuple):
    """Reached share of a peak."""

    peak: str  # preset whose peak it is
    mfu: float  # FLOPs of the model, over the peak of all devices
    hfu: float  # with those that are computed twice


def utilisation(
    config: Config,
    *,
    device: str | None,
    world_size: int,
    tokens_per_second: float,
    recomputes: bool,
) -> Utilisation | None:
    """Utilisation at a speed of all ranks; None on devices whose peak is not known, as CPUs'.

    `device` is its name by torch. Recomputation runs the blocks' forward pass once more.
    """
    presets = (n for n, pattern in _DEVICES.items() if device and re.fullmatch(pattern, device))
    preset = next(presets, None)
    if preset is None:
        return None
    length = attended_tokens(config)
    peak = PRESETS[preset].peak_flops[config.training.precision] * world_size
    of_model = count(config.model, length).train_flops_per_token
    again = sum(forward_flops_by_layer(config.model, length)) if recomputes else 0
    mfu, hfu = (flops * tokens_per_second / peak for flops in (of_model, of_model + again))
    return Utilisation(preset, mfu, hfu)
