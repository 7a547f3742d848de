"""Parts of a report for people: plan, health, provenance, and loss by domain."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdrmix.monitoring.page import leaves
from cdrmix.monitoring.plan_page import plan_card
from cdrmix.monitoring.plots import Curve, Moment, line_plot
from cdrmix.monitoring.provenance_page import mixture_in_words
from cdrmix.monitoring.report import read_run
from cdrmix.monitoring.sinks import write_json_atomic
from tests.unit.monitoring.test_report import PLAN, Page, kinds_of_tables, make_run, report_of

PHASES = [
    {"weights": {"prose": 2.0, "code": 1.0}, "samples": 3_000, "tokens": None, "change": "step"},
    {"weights": {"code": 1.0}, "samples": None, "tokens": 9_000, "change": "linear"},
    {"weights": None, "samples": None, "tokens": None, "change": "step"},
]
DATA = {
    "folder": "/data/built/a-folder",
    "digest": "sha256:0123456789abcdef0123456789abcdef",
    "recipe": "standard",
    "tokenizer_sha256": "fedcba9876543210fedcba9876543210",
    "mixture": {"temperature": 1.0, "phases": PHASES},
    "domains": [
        {"name": "prose", "train_tokens": 1_234_567, "validation_tokens": 8_901, "weight": 2.0},
        {"name": "code", "train_tokens": 7_654_321, "validation_tokens": 2_345, "weight": 1.0},
    ],
}


def start(number: int, **changed: Any) -> dict[str, Any]:
    """The record of one start."""
    return {
        "number": number,
        "began": "2026-11-22T08:09:10.5+01:00",
        "from_step": 0,
        "version": "0.7.0",
        "commit": "0f1e2d3c4b5a69788796a5b4c3d2e1f001234567",
        "modified": False,
        "command": ["deepspeed", "launch/train.py", "--config", "a file.yaml"],
        "folder": "/home/somebody",
        "config": "a file.yaml",
        "config_hash": "1ff9ca8cd80a",
        "changes": [],
        "data": DATA,
        "hosts": [{"name": "node-7", "ranks": 2}],
        "plan": {
            "profile": "zero1",
            "degrees": {"data": 2, "tensor": 1, "pipeline": 1, "sequence": 1, "expert": 1},
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 2,
        },
        "stage": "a",
    } | changed


def run_with(tmp_path: Path, *starts: dict[str, Any], num_steps: int = 8) -> Path:
    folder = make_run(tmp_path / "run", num_steps=num_steps)
    (folder / "starts").mkdir()
    for values in starts:
        write_json_atomic(folder / "starts" / f"{values['number']}.json", values)
    return folder


def logged(folder: Path, **values: float) -> None:
    with open(folder / "metrics.jsonl", "a") as lines:
        lines.write(json.dumps(values) + "\n")


def test_a_run_without_records_of_starts_has_none_of_their_parts(tmp_path):
    source, _ = report_of(make_run(tmp_path / "run", num_steps=8))
    for title in ("Starts", "Data", "Loss by domain"):
        assert f"<h2>{title}</h2>" not in source


def test_starts_tell_when_by_what_and_where(tmp_path):
    text = report_of(run_with(tmp_path, start(1)))[1].text
    assert "1 · stage a 2026-11-22 07:09:10 UTC 0 cdrmix 0.7.0, commit 0f1e2d3c4b5a " in text
    assert "node-7: 2 ranks zero1, data 2, micro batch 4, accumulation 2" in text
    assert "the first start" in text and "not committed" not in text
    assert kinds_of_tables((tmp_path / "run" / "report.html").read_text()) >= {"stack", "counts"}
    assert "deepspeed launch/train.py --config 'a file.yaml'" in text
    assert "in /home/somebody with a file.yaml, configuration 1ff9ca8cd80a" in text


def test_a_changed_learning_rate_is_seen_in_the_table_and_in_the_chart(tmp_path):
    change = {"key": "training.learning_rate", "old": 0.004, "new": 0.002}
    other = {"key": "data.mixture", "old": None, "new": {"phases": []}}
    second = start(2, from_step=4, changes=[change, other], modified=True)
    tenth = start(10, from_step=6)
    source, page = report_of(run_with(tmp_path, tenth, start(1), second))
    assert "training.learning_rate 0.004 → 0.002" in page.text
    assert 'data.mixture null → {"phases": []}' in page.text
    assert "with files that are not committed" in page.text
    assert "start 2: learning_rate 0.004 → 0.002, 1 more" in page.text
    assert page.text.index("0.004 → 0.002") < page.text.index("nothing changed"), "by number"
    assert source.count("<h2>Starts</h2>") == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"from_step": "four"},
        {"from_step": "NaN"},
        {"hosts": ["node-7"]},
        {"hosts": [{"name": "node-7", "ranks": "all"}]},
        {"plan": {"degrees": {"data": None}}},
        {"changes": [{"old": 1}]},
        {"data": {"domains": [{"name": "code", "weight": "much"}]}},
        {"data": {"mixture": {"phases": ["first"]}}},
    ],
)
def test_a_start_changed_by_hand_is_named_and_left_out(tmp_path, changed):
    text = report_of(run_with(tmp_path, start(1), start(2, **changed)))[1].text
    assert "starts/2.json is not as a start writes it: " in text
    assert "1 · stage a" in text and "2 · stage a" not in text


def test_hosts_of_a_cluster_are_counted(tmp_path):
    hosts = [{"name": f"node-{i}", "ranks": 8} for i in range(64)]
    values = start(1, hosts=hosts)
    assert (
        "64 hosts with 8 ranks each, from node-0 on"
        in report_of(run_with(tmp_path, values))[1].text
    )
    hosts[0]["ranks"] = 4
    write_json_atomic(tmp_path / "run" / "starts" / "1.json", values)
    assert "64 hosts with 4 to 8 ranks, 508 in all" in report_of(tmp_path / "run")[1].text


@pytest.mark.parametrize("broken", ["{half", "[]", '{"number": 2}'])
def test_a_damaged_record_of_a_start_is_named_and_the_rest_is_shown(tmp_path, broken):
    folder = run_with(tmp_path, start(1))
    (folder / "starts" / "2.json").write_text(broken)
    text = report_of(folder)[1].text
    assert "the first start" in text
    assert ("starts/2.json" in text) == ("number" not in broken)


def test_a_start_is_no_markup(tmp_path):
    evil = "</pre><script>alert(1)</script>"
    values = start(1, command=[evil], folder=evil, commit=evil, hosts=[{"name": evil, "ranks": 1}])
    _, page = report_of(run_with(tmp_path, values))
    assert "script" not in page.tags and "alert(1)" in page.text


def test_data_are_named_with_digests_domains_and_mixture(tmp_path):
    source, page = report_of(run_with(tmp_path, start(1)))
    assert "folder /data/built/a-folder recipe standard" in page.text
    assert "0123456789ab " in page.text and "0123456789abc" not in page.text
    assert "fedcba987654 " in page.text and "fedcba9876543" not in page.text
    assert "prose 1,234,567 8,901 66.7% code 7,654,321 2,345 33.3%" in page.text
    assert "The first 3,000 samples: prose 67%, code 33%." in page.text
    data = source[source.index("<h2>Data</h2>") :]
    assert data.index("width:100.0%") < data.index("width:50.0%"), "bars by weight"


def test_data_without_weights_have_bars_by_tokens(tmp_path):
    bare = [{**domain, "weight": None} for domain in DATA["domains"]]
    values = start(1, data={**DATA, "domains": bare, "mixture": None, "recipe": None})
    text = report_of(run_with(tmp_path, values))[1].text
    assert "No mixture was asked for" in text and "Bars: tokens to train on." in text


def test_a_mixture_is_told_in_words():
    assert mixture_in_words({"temperature": 1.0, "phases": PHASES}) == [
        "The first 3,000 samples: prose 67%, code 33%.",
        "The next 9,000 tokens: a change, in equal steps, to code 100%.",
        "From then to the end: domains by their numbers of samples.",
    ]
    assert mixture_in_words(PHASES[:1]) == mixture_in_words({"phases": PHASES[:1]})
    warm = {"temperature": 2.0, "phases": [{"weights": {"a": 9.0, "b": 1.0, "c": 0.0}}]}
    assert mixture_in_words(warm) == ["From the first sample to the last: a 75%, b 25%."]


def test_losses_by_domain_are_listed_and_drawn(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=8)
    logged(folder, step=9, **{"eval/domain/code/loss": 2.75, "eval/domain/q/a/loss": 3.5})
    summary = json.loads((folder / "metrics.json").read_text())
    source, page = report_of(folder)
    assert "There is no final evaluation yet." in page.text and source.count("<svg") == 10 + 2
    summary["steps"] = 10
    summary["evaluation"]["domains"] = [
        {"domain": "code", "loss": 2.5, "perplexity": math.exp(2.5), "tokens": 40_000},
        {"domain": "q/a", "loss": 3.25, "perplexity": math.exp(3.25), "tokens": 7_000},
        {"domain": "empty", "loss": None, "perplexity": None, "tokens": 0},
    ]
    write_json_atomic(folder / "metrics.json", summary)
    source, page = report_of(folder)
    assert "q/a 3.2500 25.8 7,000 code 2.5000 12.2 40,000" in page.text, "the worst first"
    card = source[source.index("Loss by domain") :]
    assert re.findall(r'class="(bar[^"]*)"', card[: card.index("</table>")]) == ["bar own"] * 2
    assert "Bars: nats per token." in page.text
    figure = source[source.index("<figcaption>code") :]
    assert "2.500</text>" in figure[: figure.index("</svg>")], "the curve ends with the final loss"


def test_a_final_evaluation_stands_at_its_step_in_a_run_that_was_made_longer(tmp_path):
    folder = run_with(tmp_path, start(1))
    write_json_atomic(folder / "metrics.json", {"steps": 6})
    steps, values = read_run(folder).with_final(np.array([4.0, 8.0]), np.array([3.0, 1.0]), 2.0)
    assert (steps.tolist(), values.tolist()) == ([4.0, 6.0, 8.0], [3.0, 2.0, 1.0])


def test_routing_that_is_not_judged_yet_is_not_called_healthy(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=8)
    logged(folder, step=8, **{"moe/overflow_fraction": 0.21})
    source, page = report_of(folder)
    assert (
        "judged from step 101 on (health.warmup_steps = 100); this run is at step 8." in page.text
    )
    assert "overflow is 21.0%, above its limit of 5.0%, not judged yet." in page.text
    assert 'class="note good">Nothing unhealthy' not in source
    config = (folder / "config_snapshot.yaml").read_text() + "health: {warmup_steps: 4}\n"
    (folder / "config_snapshot.yaml").write_text(config)
    text = report_of(folder)[1].text
    assert "Nothing unhealthy was seen." in text and "from step 5 on" in text
    assert "not judged" not in text and "judged from here" in text


def test_even_routing_beyond_the_first_steps_is_called_healthy(tmp_path):
    source, page = report_of(make_run(tmp_path / "run", num_steps=400))
    assert 'class="note good">Nothing unhealthy was seen.' in source
    assert "Routing at the last logged step" not in page.text


def test_the_plan_is_written_for_people(tmp_path):
    plan = PLAN | {
        "profile_path": "/opt/cdrmix/ds_configs/zero1.json",
        "degrees": {"data": 4, "tensor": 2, "pipeline": 1, "sequence": 1, "expert": 8},
        "gradient_accumulation_steps": 3,
        "activation_checkpointing": False,
        "sequence_checkpoint_tokens": None,
        "memory_per_rank_bytes": {"weights": 2**30, "optimizer": 3 * 2**30, "total": 2**32},
        "saves_in_background": True,
        "warnings": [],
        "reasons": ["memory: fits", "accumulation 3 = 24 / 8"],
        "future_bytes": 2**31,
        "future_list": [],
    }
    folder = make_run(tmp_path / "run", num_steps=8)
    write_json_atomic(folder / "plan.json", plan)
    source, page = report_of(folder)
    card = source[source.index("<h2>Plan</h2>") : source.index("<h2>Environment</h2>")]
    text = Page(card[: card.rindex("<section>")].replace("</section>", "")).text
    for shown in (
        "zero1 (/opt/cdrmix/ds_configs/zero1.json)", "8 ranks: data 4, tensor 2, expert 8",
        "8 samples per data rank at a time, 3 micro batches before each optimizer step",
        "2.89M, 1.71M of them active", "optimizer 3 GiB", "together 4 GiB", "future 2 GiB",
        "memory fits", "accumulation 3 24 / 8",
    ):  # fmt: skip
        assert shown in text
    for raw in ("None", "True", "False", "1073741824", "1,073,741,824", "[]", "_", "warnings"):
        assert raw not in text.replace("ds_configs", "")


def test_a_warning_of_the_plan_is_seen():
    assert plan_card({"warnings": ["does not fit"]})["warnings"] == ["does not fit"]
    assert plan_card({})["rows"] == {} and plan_card({})["memory"] == []


def test_a_plan_of_both_stages_has_rows_of_the_second():
    inner = {
        "profile": "zero1",
        "degrees": {"data": 2},
        "num_steps": 10,
        "reasons": ["Stage B: why"],
    }
    card = plan_card({"profile": "zero2", "stage_b": inner})
    assert card["rows"] == {
        "profile": "zero2",
        "Stage B: profile": "zero1",
        "Stage B: layout": "2 ranks: data 2",
        "Stage B: num_steps": 10,
    }
    assert card["reasons"] == [("Stage B", "why")]


@pytest.mark.parametrize(
    ("values", "ticks"), [([0.0, 0.0], ["0", "1"]), ([0.0, 1e-9], ["2.5e-10"])]
)
def test_ticks_of_nothing_and_of_little(values, ticks):
    curve = Curve("", np.array([1.0, 2.0]), np.array(values), "c1")
    drawing = line_plot("key", [curve], label="", text="{:.3g}".format, limits=(0, None))
    labels = re.findall(r">([^<>\n]+)</text>", drawing.shapes)
    assert {*ticks} <= {*labels} and "2.5e-1" not in labels


def test_leaves_have_units_and_nothing_empty():
    values = {
        "a_bytes": 3 * 2**29, "is_on": True, "nothing": None, "empty": [], "none": {},
        "sizes_bytes": {"x_y": 512, "z": None}, "wait_seconds": 0.5, "list": [1, 2],
        "deep": {"down": {"count": 12_345}},
    }  # fmt: skip
    assert dict(leaves(values)) == {
        "a": "1.5 GiB", "is on": "yes", "sizes": "x y 512 bytes", "wait": "0.5 s", "list": "1, 2",
        "deep, down": "count 12,345",
    }  # fmt: skip


def test_labels_of_moments_do_not_cover_each_other():
    curve = Curve("", np.arange(100.0), np.arange(100.0), "c1")
    moments = [Moment("a long label of it", 20, "short"), Moment("another long label", 22)]
    moments += [Moment("at the right edge", 97, "edge"), Moment("outside", 400)]
    shapes = line_plot("key", [curve], label="", moments=moments).shapes
    assert "a long label of it" in shapes and "another long label" not in shapes
    assert "at the right edge" in shapes and "outside" not in shapes


@pytest.mark.parametrize(
    ("active", "trained", "shown"),
    [
        (2e6, 2e6, "2M parameters"),
        (1e6, 2e6, "2M parameters, 1M active"),
        (2e6, 5e5, "2M parameters, 500,000 trained"),  # adapters beside frozen weights
    ],
)
def test_the_size_tells_what_is_active_and_what_is_trained(
    active: float, trained: float, shown: str, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", num_steps=8)
    size = {"total_params": 2e6, "active_params": active, "trained_params": trained}
    write_json_atomic(folder / "plan.json", PLAN | size)
    text = report_of(folder)[1].text
    assert f"Size {shown}" in text
    assert f"Size {shown}," not in text


def test_objectives_have_a_table_and_a_plot_each(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=8)
    source, _ = report_of(folder)
    assert "Loss by objective" not in source
    snapshot = folder / "config_snapshot.yaml"
    snapshot.write_text(snapshot.read_text() + "objectives: {thought: 2.5, z_loss: 1.0e-4}\n")
    parts = {f"objective/{name}/loss": 3.25 for name in ("text", "thought", "fim", "fim_middle")}
    further = {"objective/z_loss": 34.5, "objective/mtp_2/loss": 4.125}
    logged(folder, step=9, **parts, **further, **{"eval/objective/thought/loss": 3.5})
    summary = json.loads((folder / "metrics.json").read_text())
    summary["evaluation"]["objectives"] = [{"objective": "text", "loss": 3.375, "tokens": 7}]
    write_json_atomic(folder / "metrics.json", summary)
    source, page = report_of(folder)
    for row in (
        "text 1.0 3.2500 3.3750",
        "thought 2.5 3.2500 3.5000",
        "answer 1.0 – –",
        "fim_middle – 3.2500 –",
        "mtp_2 – 4.1250 –",
    ):
        assert row in page.text, row
    assert "prompt 0.0" not in page.text, "neither learned nor measured"
    assert "z-loss: 0.0001 times" in page.text and "which is 34.5 now" in page.text
    drawn = set(re.findall(r'aria-label="([^"]*) over steps"', source))
    assert {"text", "thought", "fim", "fim_middle", "mtp_2", "z-loss"} <= drawn
    assert "answer" not in drawn
