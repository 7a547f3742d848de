"""What a start tells of its plan."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdrmix.config.load import load_config
from cdrmix.planning.cluster import make_cluster
from cdrmix.planning.profile import choose
from cdrmix.sessions import session
from tests.conftest import TINY


@pytest.mark.parametrize(("stage", "of_stage_a"), [("b", False), ("all", True)])
def test_the_layout_of_stage_a_is_told_of_runs_that_have_one(
    stage: str,
    of_stage_a: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = TINY.with_name("cdrmix-reason-tiny.yaml")
    settings = ["stage_b.run=none"] if stage == "b" else []
    config = load_config(reason, [f"training.stage={stage}", *settings])
    cluster = make_cluster(nodes=1, gpus_per_node=2, gpu="cpu", gpu_memory_gib=8)
    monkeypatch.setattr(session, "log_to_file", lambda path: None)
    start: Any = SimpleNamespace(
        config=config,
        plan=choose(config, cluster),
        directory=SimpleNamespace(path=tmp_path),
        heartbeat=SimpleNamespace(log_to=lambda path, go_on: None),
        command=("cdrmix", "train"),
    )
    with caplog.at_level("INFO"):
        session._announce(start)
    assert "plan: Stage B: " in caplog.text
    assert ("plan: micro batch " in caplog.text) == of_stage_a
