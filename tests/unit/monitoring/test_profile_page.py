from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cdrmix.monitoring.report import write_report

PROFILE: dict[str, Any] = {
    "rank": 0,
    "steps": [10, 13],
    "seconds": 2.0,
    "device": "cpu",
    "phases": [{"phase": "forward", "calls": 8, "seconds": 0.5}],
    "kernels": [
        {"name": "aten::mm", "calls": 96, "seconds": 0.75, "share": 0.5, "flops": 10**9},
        {"name": "aten::<b>add", "calls": 12, "seconds": 0.25, "share": 0.125},
    ],
    "communication": [{"collective": "all_reduce", "calls": 4, "bytes": 3 * 2**20, "seconds": 0.1}],
    "flops": {"counted": 1.25e9, "planned": 1.19e9},
    "trace": "rank0_steps_10-13.pt.trace.json.gz",
    "memory_snapshot": None,
}


def page(folder: Path, **files: str) -> str:
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (folder / "profile").mkdir()
    for name, text in files.items():
        (folder / "profile" / f"{name}.json").write_text(text)
    return write_report(folder).read_text()


def test_the_tables_of_each_profiled_rank_are_on_the_page(tmp_path: Path) -> None:
    second = json.dumps({**PROFILE, "rank": 11, "steps": [13, 13]})
    text = page(
        tmp_path, **{"rank0_steps_10-13": json.dumps(PROFILE), "rank11_steps_13-13": second}
    )
    assert text.index("Rank 0, steps 10 to 13") < text.index("Rank 11, step 13")
    assert "profile/rank0_steps_10-13.pt.trace.json.gz" in text
    assert "1.19e+09 for its steps by the plan" in text
    assert "aten::&lt;b&gt;add" in text
    assert "3 MiB" in text
    bars = text[text.index("aten::mm") : text.index("all reduce")]
    # By the dearest kernel: of an eighth of all a quarter of its half.
    assert "width:100.0%" in bars
    assert "width:25.0%" in bars


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    text = page(tmp_path, **{"rank0_steps_1-2": "{", "rank1_steps_1-2": "{}"})
    assert "profile/rank0_steps_1-2.json cannot be read" in text
    assert "profile/rank1_steps_1-2.json cannot be read" in text


def test_a_run_without_a_profile_has_no_such_part(tmp_path: Path) -> None:
    assert "<h2>Profile</h2>" not in page(tmp_path)
