import contextlib
import html
import json
import math
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from cdrmix.config.load import shipped
from cdrmix.errors import StateError
from cdrmix.monitoring import report
from cdrmix.monitoring.metrics import record
from cdrmix.monitoring.plots import decimate
from cdrmix.monitoring.report import write_report
from cdrmix.monitoring.sinks import MetricsFile, write_json_atomic

CONFIG = """\
name: cdrmix-core-tiny
model:
  hidden_size: 128
  num_layers: 4
  num_heads: 4
  vocab_size: 4096
  moe: {num_experts: 8, top_k: 2, expert_hidden_size: 256}
training:
  max_steps: NUM_STEPS
  global_batch_size: 8
  sequence_length: 256
  precision: fp32
  learning_rate: 2.0e-3
  min_learning_rate: 2.0e-4
  warmup_steps: 40
data: {path: sample}  # <built on first use>
"""
PLAN = {
    "profile": "zero1",
    "total_params": 2_893_056,
    "active_params": 1_713_408,
    "degrees": {"data": 1, "tensor": 1, "pipeline": 1, "sequence": 1, "expert": 1},
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "reasons": ["zero1: one rank, the model fits & nothing has to be partitioned"],
}
ENVIRONMENT = {
    "python": "3.11.2",
    "packages": {"torch": "2.13.0", "deepspeed": "0.19.8"},
    "devices": ["cpu"],
    "cpu_count": 2,
}
HEALTHY = {"skipped_steps": 0, "rollbacks": 0, "warnings": 0, "events": []}
VOID = {"meta", "br", "hr", "img", "link", "input"}


def step_metrics(step: int, num_steps: int, noise: np.random.Generator) -> dict[str, float]:
    done = step / num_steps
    warm = min(step / 40, 1)
    return {
        "loss": 3.05 + 5.3 * math.exp(-9 * done) + noise.normal(0, 0.09),
        "learning_rate": warm * (2e-4 + 9e-4 * (1 + math.cos(math.pi * done))),
        "grad_norm": 0.45 + 5 * math.exp(-25 * done) + noise.gamma(2, 0.06),
        "tokens_seen": step * 2048,
        "tokens_per_second": 12_300 + noise.normal(0, 300) - 3_000 * (noise.random() < 0.02),
        "step_seconds": 0.166,
        "memory_peak_bytes": int(0.91 * 2**30 + min(done, 0.1) * 2**28),
        "moe/overflow_fraction": 0.02 + 0.2 * math.exp(-14 * done) + noise.gamma(2, 0.002),
        "moe/routing_entropy_bits": 2.97 - 0.7 * math.exp(-12 * done) + noise.normal(0, 0.006),
        "moe/load_balance_loss": 1.01 + 0.4 * math.exp(-12 * done) + noise.gamma(2, 0.003),
        "moe/z_loss": 4.2 - 1.5 * math.exp(-6 * done) + noise.normal(0, 0.03),
    }


def evaluation_of(loss: float) -> dict[str, float]:
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(loss),
        "eval/bits_per_byte": loss / math.log(2) / 3.1,
        "eval/seconds": 1.7,
    }


def layer_summary(layer: int, num_experts: int, noise: np.random.Generator) -> dict:
    shares = noise.dirichlet(np.full(num_experts, 40.0))
    return {
        "layer": layer,
        "utilisation": shares.tolist(),
        "overflow_fraction": 0.013 * (layer + 1),
        "routing_entropy_bits": float(-(shares * np.log2(shares)).sum()),
    }


def make_run(folder: Path, *, num_steps: int = 400, every: int = 1, num_layers: int = 4) -> Path:
    """A finished run as training leaves it, with curves of the usual shapes."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0)
    samples = []
    with contextlib.closing(MetricsFile(folder / "metrics.jsonl")) as lines:
        for step in range(every, num_steps + 1, every):
            values = step_metrics(step, num_steps, noise)
            if step % (num_steps // 4) < every:
                if step < num_steps:  # the final evaluation stands in metrics.json alone
                    values |= evaluation_of(3.11 + 5.3 * math.exp(-9 * step / num_steps))
                text = f"read_{step}(self, path):\n    return path < 3 and '<script>'\x00"
                samples.append({"step": step, "prompt": "def ", "text": text})
            lines.write(record(step=step, **values))
    final = evaluation_of(3.1113)
    summary = {
        "name": "cdrmix-core-tiny",
        "steps": num_steps,
        "tokens_seen": num_steps * 2048,
        "loss": 3.0521,
        "seconds": 96.3,
        "tokens_per_second_median": 12_312.4,
        "evaluation": {
            **{name.removeprefix("eval/"): value for name, value in final.items()},
            "tokens": 200_000,
            "layers": [layer_summary(i, 8, noise) for i in range(num_layers)],
        },
        "baselines": {"unigram_loss": 6.5918, "bigram_loss": 4.345},
        "samples": samples,
        "checkpoints": {"saves": 4, "seconds": 1.2},
    }
    write_json_atomic(folder / "metrics.json", summary)
    write_json_atomic(folder / "plan.json", PLAN)
    write_json_atomic(folder / "environment.json", ENVIRONMENT)
    write_json_atomic(folder / "health.json", HEALTHY)
    (folder / "config_snapshot.yaml").write_text(CONFIG.replace("NUM_STEPS", str(num_steps)))
    return folder


class Page(HTMLParser):
    """Checks nesting while it reads; collects ids, attributes and visible text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def report_of(folder: Path) -> tuple[str, Page]:
    source = write_report(folder).read_text(encoding="utf-8")
    return source, Page(source)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[str, Page]:
    return report_of(make_run(tmp_path_factory.mktemp("runs") / "20260101T000000Z-0123456789ab"))


def test_the_page_is_well_formed_and_its_ids_are_unique(finished):
    _, page = finished
    assert len(page.ids) == len(set(page.ids))
    assert {"html", "head", "title", "svg", "table"} <= page.tags


def test_the_page_loads_nothing_and_runs_no_script(finished):
    source, page = finished
    assert "script" not in page.tags
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert "http:" not in source and "https:" not in source and "@import" not in source
    assert set(re.findall(r"url\((#?)", source)) <= {"#"}


def test_key_numbers_and_baselines_are_shown(finished):
    _, page = finished
    for shown in ("finished", "3.1113", "22.45", "819,200", "1m36s", "12,312", "2.89M", "1.71M"):
        assert shown in page.text
    assert (
        "The model is below the best baseline (smoothed bigram) by 1.2337 nats per token."
        in page.text
    )
    assert "smoothed unigram 6.5918" in page.text


def test_the_average_of_the_weights_has_a_tile_and_a_curve(tmp_path, finished, monkeypatch):
    folder = make_run(tmp_path / "run", num_steps=8)
    lines = (folder / "metrics.jsonl").read_text()
    lines = lines.replace('"eval/loss": ', '"eval/ema_loss": 3.5, "eval/loss": ')
    (folder / "metrics.jsonl").write_text(lines)
    summary = json.loads((folder / "metrics.json").read_text())
    summary["ema_evaluation"] = summary["evaluation"] | {"loss": 3.0777}
    write_json_atomic(folder / "metrics.json", summary)
    drawn, plot = {}, report.plot

    def noted(title, unit, name, curves, *rest, **given):
        drawn.update({curve.label: curve.values.tolist() for curve in curves})
        return plot(title, unit, name, curves, *rest, **given)

    monkeypatch.setattr(report, "plot", noted)
    assert "Loss of the average 3.0777 nats per token" in report_of(folder)[1].text
    assert drawn["validation of the average"] == [3.5, 3.5, 3.5, 3.0777]
    assert "Loss of the average" not in finished[1].text


def test_the_time_is_that_of_the_goodput_or_else_named_as_training_alone(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=8)
    summary = json.loads((folder / "metrics.json").read_text()) | {"stage_b": {"seconds": 20.0}}
    write_json_atomic(folder / "metrics.json", summary)
    assert "Training time 1m56s start-up and breaks left out" in report_of(folder)[1].text
    account = {"starts": 3, "seconds": 165.0, "productive_seconds": 165.0, "share": 1.0}
    account |= {"productive_steps": 8, "redone_steps": 0, "share_of_steps": 1.0}
    write_json_atomic(folder / "metrics.json", summary | {"goodput": account})
    text = report_of(folder)[1].text
    assert "Time 2m45s from the first command to the end" in text and "1m56s" not in text


def kinds_of_tables(source: str) -> set[str]:
    """Kinds that page.css turns into blocks on a narrow page; other tables would be cut there."""
    kinds = {"wide", "counts", "stack", "pairs", "heat"}
    return {
        kind if (kind := next((c for c in classes.split() if c in kinds), "")) else "other"
        for classes in re.findall(r'<table(?: class="([^"]*)")?>', source)
    }


def test_no_table_is_cut_on_a_narrow_page_and_the_loss_has_a_drawing_of_its_own(finished):
    source, _ = finished
    assert kinds_of_tables(source) == {"wide", "pairs", "heat"}
    assert source.count('class="plot broad"') == source.count('class="plot narrow"') == 1
    style = source[: source.index("</style>")]
    assert "min-width: 640px" not in style and ".plot.narrow { display: none; }" in style


def test_labels_of_the_narrow_drawing_have_the_size_that_the_page_gives_them(finished):
    source = finished[0]
    narrow = source[source.index('class="plot narrow"') :]
    narrow = narrow[: narrow.index("</svg>")]
    label = narrow[: narrow.index("unigram 6.5918")].rpartition("<text")[2]
    (size,) = re.findall(r"\n *\.plot text { font-size: (\d+)px !important; }", source)
    assert f"{size}px" in label
    begin = float(re.search(r'x="([\d.]+)"', label)[1])
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', narrow)[1])
    assert begin + 0.55 * float(size) * len("smoothed unigram 6.5918") < width


def test_every_plot_is_drawn_with_the_colours_of_the_page(finished):
    source, page = finished
    assert source.count("<svg") == 9 + 1, "the loss is drawn for a narrow page too"
    assert "not been logged" not in page.text and "Nothing has been logged" not in page.text
    svgs = "".join(re.findall(r"<svg.*?</svg>", source, flags=re.S))
    assert set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svgs)) <= {
        "none", "var(--ink)", "var(--muted)", "var(--grid)",
        *(f"var(--c{i})" for i in range(1, 5)),
    }  # fmt: skip


def test_generated_text_is_escaped_and_cleared_of_control_characters(finished):
    source, page = finished
    assert "&lt;script&gt;&#39;\N{REPLACEMENT CHARACTER}</pre>" in source
    assert "<built on first use>" in page.text


def test_a_model_above_its_baselines_is_called_so(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=8)
    summary = json.loads((folder / "metrics.json").read_text())
    summary["baselines"]["bigram_loss"] = 3.0
    write_json_atomic(folder / "metrics.json", summary)
    assert (
        "above the best baseline (smoothed bigram) by 0.1113 nats per token"
        in report_of(folder)[1].text
    )


@pytest.mark.parametrize(
    "name",
    ["metrics.json", "plan.json", "environment.json", "health.json", "config_snapshot.yaml"],
)
def test_a_missing_or_broken_file_is_named_and_the_rest_is_shown(tmp_path, name):
    folder = make_run(tmp_path / "run", num_steps=8)
    (folder / name).write_text("{half: [")
    assert f"{name} cannot be read" in report_of(folder)[1].text
    (folder / name).unlink()
    source, page = report_of(folder)
    assert f"{name} is missing" in page.text
    assert source.count("<svg") == 9 + 1


def test_a_live_run_without_a_summary_shows_what_is_logged_so_far(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=8)
    (folder / "metrics.json").unlink()
    with open(folder / "metrics.jsonl", "a") as half_written:
        half_written.write('{"step": 9, "lo')
    text = report_of(folder)[1].text
    assert "no final summary" in text and "step 8 of 8" in text and "so far" in text
    assert "16,384" in text


def test_the_final_evaluation_ends_the_validation_curve(finished):
    assert "validation 3.111" in finished[1].text


def test_a_log_of_some_steps_says_that_the_others_are_not_seen(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=40)
    snapshot = folder / "config_snapshot.yaml"
    text = f"{snapshot.read_text()}\nmonitoring: {{log_every_steps: EVERY}}\n"
    for every in (1, 10):
        snapshot.write_text(text.replace("EVERY", str(every)))
        assert ("One step in 10 is logged" in report_of(folder)[1].text) == (every == 10)


def test_a_run_that_ended_before_its_length_is_called_unfinished(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=8)
    longer = (folder / "config_snapshot.yaml").read_text().replace("max_steps: 8", "max_steps: 9")
    (folder / "config_snapshot.yaml").write_text(longer)
    text = report_of(folder)[1].text
    assert "unfinished" in text and "step 8 of 9" in text


@pytest.mark.parametrize("loss", [math.nan, math.inf, 900.0])
def test_a_diverged_run_has_a_report_that_says_so(tmp_path, loss):
    folder = make_run(tmp_path / "run", num_steps=8)
    summary = json.loads((folder / "metrics.json").read_text())
    summary["evaluation"]["loss"] = loss
    summary["evaluation"]["layers"][0]["utilisation"] = [math.nan] * 8
    write_json_atomic(folder / "metrics.json", summary)
    with contextlib.closing(MetricsFile(folder / "metrics.jsonl")) as lines:
        lines.write(record(step=9, loss=math.nan, grad_norm=math.inf))
    text = report_of(folder)[1].text
    assert "Logged steps with a loss that is not finite: 1." in text
    assert "The model is above the best baseline" in text


def test_what_was_unhealthy_is_listed_with_what_was_done(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=8)
    assert "Nothing unhealthy was seen" in report_of(folder)[1].text
    event = {"watched": "loss_spike", "action": "rollback", "first_step": 7, "last_step": 7}
    event |= {"times": 1, "why": "loss 9.1 is above 8.7", "outcome": "back to step 4"}
    warned = event | {"watched": "memory", "action": "warn", "last_step": 1_200, "outcome": ""}
    record = HEALTHY | {"rollbacks": 1, "warnings": 3, "events": [event, *[warned] * 60]}
    write_json_atomic(folder / "health.json", record)
    text = report_of(folder)[1].text
    assert "7 to 1,200 memory 1 loss 9.1 is above 8.7 warn" in text
    assert "skipped steps 0, rollbacks 1, lowerings 0, warnings 3 (50 newest of 61)." in text
    write_json_atomic(folder / "health.json", record | {"events": [event]})
    text = report_of(folder)[1].text
    assert "7 loss spike 1 loss 9.1 is above 8.7 rollback back to step 4" in text


def test_a_suite_that_was_run_after_the_end_is_shown(tmp_path):
    run = make_run(tmp_path / "run", num_steps=8)
    shutil.copy(shipped("model_configs") / "cdrmix-reason-tiny.yaml", run / "config_snapshot.yaml")
    with contextlib.closing(MetricsFile(run / "metrics.jsonl")) as lines:
        lines.write(record(step=9, **{"stage_b/loss": 1.0}))
    assert "The suite has not been run" in report_of(run)[1].text
    cell = {"task": "logic", "score": 0.53, "backbone_score": 0.21, "n": 8}
    rows = [{**cell, "length_ratio": 2}, {**cell, "length_ratio": 4, "n": 5}]
    write_json_atomic(run / "reasoning.json", {"rows": rows})
    text = report_of(run)[1].text
    assert "0.53, 0.21" in text and "over 5 to 8 texts each" in text
    assert "Reasoning 0.53 over all lengths; backbone alone 0.21" in text
    assert "Rivals and controls" not in text
    column = {"score": 0.25, "low": 0.1, "high": 0.41, "n": 8, "operations": None, "seconds": 0.5}
    rows[0]["controls"] = {"agent": column | {"operations": 3.0}, "whole": column}
    write_json_atomic(run / "reasoning.json", {"rows": rows})
    text = report_of(run)[1].text
    shown = "0.25 (0.10 to 0.41)"
    assert f"logic 2x agent {shown} 3.0 operations, 0.500 s whole {shown} 0.500 s" in text


def test_a_run_of_stage_b_alone_leaves_stage_a_to_the_report_of_its_own_run(tmp_path):
    run = make_run(tmp_path / "run", num_steps=8)
    shutil.copy(shipped("model_configs") / "cdrmix-reason-tiny.yaml", run / "config_snapshot.yaml")
    (run / "metrics.jsonl").write_text('{"step": 9, "stage_b/answer_loss": 1.0}\n')
    (run / "metrics.json").unlink()
    source, page = report_of(run)
    titles = re.findall("<h2>(.*?)</h2>", source)
    assert "Stage B: learning" in titles and not {"Loss", "Routing", "Generated text"} & {*titles}
    assert "Validation loss" not in page.text


def test_a_dense_model_has_no_routing_plots(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=8)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    dense = [{k: v for k, v in line.items() if not k.startswith("moe/")} for line in lines]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, dense)))
    source, page = report_of(folder)
    assert source.count("<svg") == 5 + 1
    assert "a dense model has no routing" in page.text
    snapshot = folder / "config_snapshot.yaml"
    values = yaml.safe_load(snapshot.read_text(encoding="utf-8"))
    values["model"]["moe"] = None
    snapshot.write_text(yaml.safe_dump(values), encoding="utf-8")
    (folder / "metrics.json").unlink()
    titles = re.findall("<h2>(.*?)</h2>", report_of(folder)[0])
    assert "Loss" in titles and not {"Routing", "Experts at the final evaluation"} & {*titles}


def test_routing_beyond_its_limits_is_marked_by_layer(finished):
    source, _ = finished
    assert 'of-layer bad">5.2%</td>' in source and 'of-layer">3.9%</td>' in source


@pytest.mark.parametrize("lines", ["", '{"step": 1, "loss": 8.3}\n', '{"step": 1, "loss": "NaN"}'])
def test_a_run_with_next_to_nothing_logged_has_a_report(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_text(lines)
    source, page = report_of(tmp_path)
    assert source.count("<svg") == 2 * ("8.3" in lines)
    assert "Nothing has been logged" in page.text
    assert ("a loss that is not finite" in page.text) == ("NaN" in lines)


def test_a_run_without_stage_b_loads_nothing_of_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "cdrmix.monitoring.stage_b_page", raising=False)
    (tmp_path / "metrics.jsonl").write_text("")
    write_report(tmp_path)
    assert "cdrmix.monitoring.stage_b_page" not in sys.modules


def test_a_run_of_stage_b_alone_has_a_plan_without_reasons_of_stage_a(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=8)
    write_json_atomic(folder / "plan.json", {"stage_b": {"num_steps": 8}})
    write_json_atomic(folder / "health.json", {})
    _, page = report_of(folder)
    assert "Nothing unhealthy was seen" in page.text
    assert "num steps 8" in page.text


def test_a_folder_without_metrics_is_refused_by_name(tmp_path):
    with pytest.raises(StateError, match=r"metrics\.jsonl: not found"):
        write_report(tmp_path)


def test_a_long_run_keeps_its_spikes_and_a_modest_page():
    steps = np.arange(100_000.0)
    values = np.sin(steps / 9_000)
    values[54_321], values[12_345] = 40.0, -40.0
    kept_steps, kept = decimate(steps, values)
    assert len(kept) <= 2_000
    assert kept.max() == 40.0 and kept_steps[kept.argmax()] == 54_321
    assert kept.min() == -40.0 and kept_steps[kept.argmin()] == 12_345
    assert (np.diff(kept_steps) > 0).all()


def test_equal_runs_give_equal_pages(tmp_path):
    first, second = (make_run(tmp_path / side / "run", num_steps=8) for side in "ab")
    assert report_of(first)[0] == report_of(second)[0]


def test_a_prompt_is_shown_as_it_was_given_and_is_no_markup(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=8)
    summary = json.loads((folder / "metrics.json").read_text())
    prompt = "</pre><script>alert(1)</script>\n  if a < b && c > 'd':\n\treturn &amp; \"<b>\" é🙂\r"
    text = "  indented</b></pre><img src=x onerror=alert(2)>\n\n"
    summary["samples"] = [
        {"step": step, "prompt": prompt, "text": f"{step}{text}"} for step in (4, 8)
    ]
    (folder / "metrics.json").write_text(json.dumps(summary))
    source, page = report_of(folder)
    assert "script" not in page.tags and "img" not in page.tags
    shown = re.findall(r"<pre><b>(.*?)</b>(.*?)</pre>", source, flags=re.S)
    # the newest first; nothing but a control character is altered
    wanted = [
        (prompt.replace("\r", "\N{REPLACEMENT CHARACTER}"), f"{step}{text}") for step in (8, 4)
    ]
    assert [tuple(map(html.unescape, pair)) for pair in shown] == wanted
