"""Losses on old and new data: compared with a base that was measured alike, or refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdrmix.config.load import load_config
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines.forgetting import Forgetting
from cdrmix.engines.old_data import HeldOut
from cdrmix.errors import StateError
from cdrmix.models.backbone import Backbone
from cdrmix.parallel.topology import ALONE
from tests.small_run import CONFIG, SMALL
from tests.unit.data.token_folder import write_token_folder

MORE = (
    "training.max_steps=9",
    "training.start_from=base",
    "cpt.replay.source=old",
    "cpt.forgetting.data=[old]",
)


def test_a_base_that_was_measured_otherwise_is_refused(tmp_path: Path) -> None:
    config = load_config(CONFIG, [*SMALL, *MORE])
    documents = [[*range(1, 40), 0]] * 4
    data = write_token_folder(tmp_path / "data", {"validation": documents})
    new = HeldOut("new", TokenDataset(data, "validation", 64))
    assert config.cpt is not None
    forgetting = Forgetting(config.cpt, [], new)
    here: Any = nullcontext()
    run: Any = SimpleNamespace(
        engine=SimpleNamespace(module=Backbone(config.model)),
        heartbeat=SimpleNamespace(phase=lambda _: here),
        wall_time=SimpleNamespace(spent=lambda _: here),
        plan=SimpleNamespace(micro_batch_size=2),
        topology=ALONE,
        step=0,
    )
    forgetting.measure(run)
    saved = forgetting.state_dict()
    same = Forgetting(config.cpt, [], new)
    same.load_state_dict(saved)
    same.measure(run)
    assert same.sets[0].tokens == 128
    apart = Forgetting(config.cpt, [], new, segment_documents=True)
    with pytest.raises(StateError, match=r"segment_documents = false, and this run has true"):
        apart.load_state_dict(saved)
    # saved by an earlier version, which did not tell
    del saved["segment_documents"]
    apart.load_state_dict(saved)
    with pytest.raises(StateError, match=r"before the first step is over 128 tokens, and now"):
        apart.measure(run)
