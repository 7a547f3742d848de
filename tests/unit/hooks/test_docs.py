"""The example of docs/extending.md."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from cdrmix.config.load import load_config
from cdrmix.config.plugin import HookConfig
from cdrmix.hooks import RunView
from cdrmix.hooks.dispatch import Hooks, configured_hooks
from cdrmix.hooks.events import EVENTS
from cdrmix.hooks.source import check_sources
from cdrmix.models.backbone import Backbone
from tests.conftest import TINY
from tests.harness import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PAGE = PAGE.split("\n## Hooks\n")[1].split("\n## ")[0]


def test_the_example_stops_a_run_that_learns_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, code = (
        re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)[0] for kind in ("yaml", "python")
    )
    assert len([line for line in code.split("\n") if line.strip()]) <= 30
    (tmp_path / "patience.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    hooks = [HookConfig.model_validate(each) for each in yaml.safe_load(setting)["hooks"]]
    check_sources(hooks)
    view: dict[str, Any] = {"config": load_config(TINY), "directory": tmp_path, "stage": "a"}
    view |= {"rank": 0, "world_size": 1, "num_steps": 9, "step": 0}

    def started(state: dict[str, Any] | None) -> Hooks:
        made = Hooks(configured_hooks(hooks))
        made.start(RunView(**view), state=state)
        return made

    run = started(None)
    for step, loss in enumerate([3.0, 2.0, 2.5, 2.0, 2.25], start=1):
        run.evaluated(step, {"eval/loss": loss})
    assert run.take_wishes().reason_to_stop is None
    assert run.log(5, {"step": 5})["plugin/Patience/evaluations_without_gain"] == 3
    run = started(json.loads(json.dumps(run.state_dict())))
    for step in (6, 7):
        run.evaluated(step, {"eval/loss": 2.0})
    told = "hook Patience: no lower loss than 2.0000 in 5 evaluations"
    assert run.take_wishes().reason_to_stop == told
    run.check()
    sys.modules.pop("patience")


def test_the_example_of_a_measure_is_that_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, code = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "own_norm.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    entry = {"use": "own_norm:EmbeddingNorm", "unsafe": True}
    run = Hooks(configured_hooks([HookConfig.model_validate(entry)]))
    config = load_config(TINY)
    engine = SimpleNamespace(module=Backbone(config.model))
    view: dict[str, Any] = {"config": config, "directory": tmp_path, "stage": "a"}
    # the sum over four ranks that hold the same
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: values.mul_(4))
    view |= {"rank": 0, "world_size": 4, "num_steps": 250, "step": 0, "engine": engine}
    run.start(RunView(**view), state=None)
    due = [run.measuring(step, is_last=step == 250) for step in (0, 99, 100, 250)]
    assert [len(each) for each in due] == [1, 0, 1, 1]
    expected = float(engine.module.embedding.weight.detach().norm())
    measured = run.measured(due[0], 0)
    assert measured == {"plugin/EmbeddingNorm/norm": pytest.approx(expected, rel=1e-4)}
    sys.modules.pop("own_norm")


def test_every_event_is_on_the_page() -> None:
    for event, arguments in EVENTS.items():
        assert f"`{event}({', '.join(arguments)})`" in PAGE
