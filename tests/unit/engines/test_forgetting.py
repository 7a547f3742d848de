"""Losses on old and new data: compared with a base that was measured alike, or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdrmix.config.load import load_config
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines.forgetting import FORGETTING, Forgetting
from cdrmix.engines.old_data import HeldOut
from cdrmix.engines.recovery import _with_hooks_of_today
from cdrmix.errors import StateError
from cdrmix.hooks import RunView
from cdrmix.models.backbone import Backbone
from cdrmix.monitoring.health import Health
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
    engine: Any = SimpleNamespace(module=Backbone(config.model))
    run = RunView(
        directory=tmp_path,
        config=config,
        stage="a",
        rank=0,
        world_size=1,
        num_steps=9,
        step=0,
        engine=engine,
    )

    def started(*, segment_documents: bool = False) -> Forgetting:
        forgetting = Forgetting(
            *(config.cpt, [], new),
            health=Health.of_run(config),
            topology=ALONE,
            batch_size=2,
            segment_documents=segment_documents,
        )
        forgetting.on_start(run)
        return forgetting

    forgetting = started()
    assert [forgetting.measures_at(step, step == 9) for step in (0, 3, 9)] == [True, False, True]
    forgetting.on_measure(0)
    saved = forgetting.state_dict()
    same = started()
    with pytest.raises(StateError, match="checkpoint: none"):
        same.check(None)
    same.check(saved)
    same.load_state_dict(saved)
    same.on_measure(4)
    assert same.sets[0].tokens == 128
    apart = started(segment_documents=True)
    with pytest.raises(StateError, match=r"segment_documents = false, and this run has true"):
        apart.check(saved)
    old = {"step": 3, "cpt": saved, "hooks": {"mine": {"count": 1}}}
    assert _with_hooks_of_today(old)["hooks"] == {"mine": {"count": 1}, FORGETTING: saved}
    assert _with_hooks_of_today({"step": 3}) == {"step": 3}
    # saved by an earlier version, which did not tell
    del saved["segment_documents"]
    apart.check(saved)
    apart.load_state_dict(saved)
    with pytest.raises(StateError, match=r"before the first step is over 128 tokens, and now"):
        apart.on_measure(4)
