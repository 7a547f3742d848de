"""Backbones of Stage B that were trained otherwise than they are read with."""

from pathlib import Path

import pytest

from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.stage_b.backbone_source import _warn_of_window
from tests.unit.reasoning.small_reader import small_config


@pytest.mark.parametrize(("window", "is_told"), [(64, False), (256, False), (300, True)])
def test_a_backbone_of_shorter_windows_is_told(
    window: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(window_tokens=window)
    state = {"config": {"training": {"sequence_length": 256}}}
    _warn_of_window(config, state, FoundCheckpoint(Path("a/checkpoints/4"), 4, ()))
    said = "trained on 256 tokens at a time, and Stage B reads windows of 300"
    assert (said in caplog.text) is is_told
