"""Part of a report on continual pre-training: the plane, both losses, and the held-out sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdrmix.monitoring.metrics import member_name
from cdrmix.monitoring.plots import Course, plane_plot
from cdrmix.monitoring.sinks import write_json_atomic
from tests.unit.monitoring.test_report import make_run, report_of
from tests.unit.monitoring.test_report_parts import logged

FOLDERS = ("old code", "a/b")


def measured(folder: Path, steps: int, *names: str) -> None:
    """Logs a gain that doubles forgetting, step by step, and by folder half and twice of it."""
    for step in range(steps):
        values = {
            "cpt/old_loss": 2 + 0.01 * step,
            "cpt/new_loss": 4 - 0.02 * step,
            "cpt/forgetting_nats": 0.01 * step,
            "cpt/gain_nats": 0.02 * step,
        }
        for factor, name in zip((0.5, 2), names, strict=False):
            values[member_name("cpt/old/*/loss", name)] = 2 + factor * 0.01 * step
            values[member_name("cpt/old/*/forgetting_nats", name)] = factor * 0.01 * step
        logged(folder, step=step, **values)


def measures(kind: str, **changed: Any) -> dict[str, Any]:
    return {
        "name": kind,
        "kind": kind,
        "digest": "0123456789abcdef" * 4,
        "tokens": 12_345,
        "base_loss": 2.0,
        "loss": 2.25,
        "change": 0.25,
    } | changed


def test_a_run_without_measures_has_no_such_part(tmp_path: Path) -> None:
    source, _ = report_of(make_run(tmp_path / "run", num_steps=8))
    assert "Continual pre-training" not in source


def test_a_run_under_way_shows_plane_and_curves(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=8)
    measured(folder, 9)
    source, page = report_of(folder)
    assert "Gain on new data +0.1600 nats per token, forgetting of old data +0.0800" in page.text
    for text in ("step 0", "step 8", "gain on new data →", "forgetting of old data ↑"):
        assert f">{text}</text>" in source, text
    for text in ("new 3.840", "old 2.080", "new before", "old before"):
        assert f">{text}</text>" in source, text


def test_the_end_lists_the_sets_by_digest(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=8)
    measured(folder, 9)
    summary = json.loads((folder / "metrics.json").read_text())
    sets = [measures("old"), measures("new", change=-1.5)]
    write_json_atomic(folder / "metrics.json", summary | {"cpt": {"sets": sets}})
    source, page = report_of(folder)
    assert "old old 0123456789ab 12,345 2.0000 2.2500 +0.2500" in page.text
    assert "-1.5000" in page.text
    assert "cpt, sets" not in page.text, "shown twice"


def test_each_of_several_folders_has_a_course_of_its_own(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=8)
    measured(folder, 5, *FOLDERS)
    source, _ = report_of(folder)
    for name in FOLDERS:
        assert f">{name} step 4</text>" in source


def test_without_old_data_there_is_no_plane(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=8)
    logged(folder, step=0, **{"cpt/new_loss": 3.0, "cpt/gain_nats": 0.0})
    source, page = report_of(folder)
    assert "no old data were measured" in page.text
    assert "Learning and forgetting" not in page.text


@pytest.mark.parametrize("count", [1, 2, 3, 500])
def test_a_plane_marks_the_first_and_the_last_finite_step(count: int) -> None:
    steps = np.arange(count, dtype=float)
    up = steps.copy()
    up[-1:] = [np.nan] if count > 2 else up[-1:]
    course = Course("", steps, steps, up, "c2")
    shapes = plane_plot("p", [course], label="", across="x", up="y").shapes
    last = count - 2 if count > 2 else count - 1
    assert ">step 0</text>" in shapes
    assert f">step {last}</text>" in shapes
    assert "var(--c2)" in shapes and "#0" not in shapes.replace('href="#', "").replace("url(#", "")
