from __future__ import annotations

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.planning.counts import count, flops_above_layers
from cdrmix.planning.utilisation import Utilisation, utilisation

CONFIG = load_config(shipped("model_configs") / "cdrmix-core-1b.yaml")


def reached(device: str | None, *, recomputes: bool = False) -> Utilisation | None:
    return utilisation(
        CONFIG, device=device, world_size=8, tokens_per_second=1e5, recomputes=recomputes
    )


def test_the_share_is_that_of_the_peak_of_all_devices() -> None:
    flops = count(CONFIG.model, CONFIG.training.sequence_length).train_flops_per_token
    found = reached("NVIDIA H200")
    assert found == ("h200-141", pytest.approx(flops * 1e5 / (8 * 989e12)), found.mfu)
    slower = reached("NVIDIA A100-SXM4-80GB")
    assert slower is not None
    assert slower.mfu == pytest.approx(found.mfu * 989 / 312)


def test_what_is_computed_again_counts_for_the_hardware_alone() -> None:
    plain, again = (reached("NVIDIA H200", recomputes=each) for each in (False, True))
    assert plain is not None
    assert again is not None
    assert again.mfu == plain.mfu
    # Of three forward passes a fourth is done, but for the head.
    head = flops_above_layers(CONFIG.model, CONFIG.training.sequence_length)
    flops = count(CONFIG.model, CONFIG.training.sequence_length).train_flops_per_token
    assert again.hfu / again.mfu == pytest.approx(4 / 3 - head / flops)


@pytest.mark.parametrize("device", [None, "NVIDIA H100 PCIe", "AMD Instinct MI210", "NVIDIA H20"])
def test_a_device_whose_peak_is_unknown_has_no_share(device: str | None) -> None:
    assert reached(device) is None
