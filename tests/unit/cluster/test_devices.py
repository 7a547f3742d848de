from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cdrmix.cluster import devices, probe
from cdrmix.cluster.devices import devices_here
from cdrmix.cluster.probe import RocmDevice, look, rocm_devices
from tests.unit.cluster.test_doctor import programs

GIB = 2**30
# As versions 5 and 6 of ROCm print it: capitals of the keys differ.
CARDS = {
    "card0": {"Card series": "AMD Instinct MI250X", "VRAM Total Memory (B)": f"{64 * GIB}"},
    "card1": {"Card Series": "AMD Instinct MI250X", "VRAM Total Memory (B)": f"{63 * GIB}"},
    "system": {"Driver version": "6.3"},
}


def install(output: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rocm-smi that prints this, the only program on PATH."""
    folder.mkdir()
    (folder / "output").write_text(output)
    script = f'while read -r line; do echo "$line"; done < {folder / "output"}'
    monkeypatch.setenv("PATH", programs(folder / "bin", **{"rocm-smi": script}))


def test_amds_devices_are_told_with_name_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(json.dumps(CARDS) + "\n", tmp_path / "programs", monkeypatch)
    name = "AMD Instinct MI250X"
    assert rocm_devices() == [RocmDevice(name, 64 * GIB), RocmDevice(name, 63 * GIB)]
    for module in (devices, probe):
        monkeypatch.setattr(module, "driver_devices", lambda *_: {"AMD": 2})
    for variable in ("DS_ACCELERATOR", *probe.HIDING):
        monkeypatch.delenv(variable, raising=False)
    assert devices_here() == ("cuda", 2, 63)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert devices_here() == ("cuda", 1, 63)
    monkeypatch.setattr(sys, "executable", "/bin/false")  # torch is asked in another process
    told = look(str(tmp_path), "127.0.0.1")
    assert told["devices"] == [f"{name}, {gib * 1024} MiB" for gib in (64, 63)]


@pytest.mark.parametrize("output", ["", "no JSON\n", "[]\n", '{"card0": "x"}\n', "null\n"])
def test_a_program_that_says_nothing_of_use_leaves_the_maker(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(output, tmp_path / "programs", monkeypatch)
    assert rocm_devices() == []
    monkeypatch.setattr(devices, "driver_devices", lambda: {"AMD": 2})
    for variable in ("DS_ACCELERATOR", *probe.HIDING):
        monkeypatch.delenv(variable, raising=False)
    assert devices_here() == ("cuda", 2, None)


def test_without_amds_program_there_is_nothing_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rocm_devices() == []
