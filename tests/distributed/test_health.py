"""Unhealthy steps: not taken, undone, or the end of the run; on all ranks alike."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.checkpoint.held_out import score_of
from cdrmix.monitoring.sinks import read_metrics
from cdrmix.objectives.language_model import HeadLoss
from tests.equal_runs import assert_equal_runs, result_of
from tests.harness import run_ranks
from tests.layouts import Case, run_steps, wake_blocks
from tests.layouts import start as start_case
from tests.small_run import STEPS, arguments, overrides, refused, start

# --- a step that is not taken leaves nothing behind, in every engine ------------------------

ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
BF16 = {"precision": "bf16"}
ROUTED = {"mod": {"threshold_rate": 2.0}}  # thresholds of Mixture of Depths stay too
ENGINES = [
    Case(data=2, expert=2, accumulation=2),
    Case(data=2, expert=2, profile="zero2", model=ROUTED),
    Case(data=2, training=BF16),  # DeepSpeed's BF16_Optimizer
    Case(data=2, training=BF16, profile="zero2"),
    Case(data=2, profile="zero2", zero=ON_HOST, note="offloaded"),
    Case(data=2, moe=False, profile="zero3"),
    Case(tensor=2, accumulation=2),
    Case(pipeline=2, profile="pipeline", accumulation=2, model=ROUTED),
]


def around_a_bad_step(case: Case) -> tuple[bool, list[str], list[str]]:
    """Steps 0, 1, 2, 3, of which rank 1 spoils the gradient of 2, beside steps 0, 1, 3.

    Returns:
        Whether 2 was skipped, what it changed, and what is unlike the other run in the end.
    """
    from cdrmix import runtime
    from cdrmix.parallel.tensor import shard_of

    runtime.initialize_distributed()
    wake_blocks()
    case = replace(case, training=case.training | {"ema_decay": 0.4})
    spoilt, clean = start_case(case), start_case(case)
    factor = 1.0
    parameters = list(spoilt.engine.module.parameters())
    if case.tensor > 1:  # what is whole on all tensor ranks has the same gradient on all of them
        parameters = [parameter for parameter in parameters if shard_of(parameter)]
    if runtime.rank() == 1:
        parameters[-1].register_hook(lambda gradient: gradient * factor)
    run_steps(spoilt, count=2)
    before, skipped = held_by(spoilt.engine), spoilt.engine.skipped_steps
    kinds = {name.partition(" ")[0] for name in before}
    assert kinds >= {"param", "exp_avg", "ema"}
    if runtime.rank() == 0 and "mod" in case.model:  # one of the ranks that hold a buffer saves it
        assert any("threshold" in name for name in before)
    factor = float("nan")
    run_steps(spoilt, first=2, count=1)
    factor = 1.0
    is_skipped = spoilt.engine.skipped_steps == skipped + 1
    changed = different(held_by(spoilt.engine), before)
    run_steps(spoilt, first=3, count=1)
    run_steps(clean, count=2)
    run_steps(clean, first=3, count=1)
    unlike = different(held_by(spoilt.engine), held_by(clean.engine))
    runtime.destroy_distributed()
    return is_skipped, changed, unlike


def held_by(engine: Any) -> dict[str, torch.Tensor]:
    """Master weights, moments, average and step counts on this rank."""
    from cdrmix.checkpoint import engine_state
    from cdrmix.models.backbone import logical_name

    parts = engine_state.fragments(engine, logical_name)
    return {f"{part.kind} {part.name}": part.values.clone() for part in parts}


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, values in found.items() if not torch.equal(values, expected[name])]


@pytest.mark.parametrize("case", ENGINES, ids=str)
def test_a_step_with_a_spoilt_gradient_leaves_nothing_behind(case: Case) -> None:
    for is_skipped, changed, unlike in run_ranks(around_a_bad_step, case.world_size, case):
        assert is_skipped
        assert changed == []
        assert unlike == []


def scales_until_nothing_can_be_lowered() -> list[float]:
    """Scales of fp16's scaler at which a gradient that is not finite tells nothing yet."""
    from types import SimpleNamespace

    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from cdrmix import runtime
    from cdrmix.engines.loop import may_lower_scale

    runtime.initialize_distributed()
    # from 8 by halves to 1, at the first gradient that is not finite
    shape = {"init_scale": 8.0, "scale_window": 1000, "min_scale": 1.0}
    patience = {"delayed_shift": 1, "consecutive_hysteresis": False}
    scaler = DynamicLossScaler(**shape, **patience, raise_error_at_min_scale=False)
    engine, scales = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler)), []
    for _ in range(6):
        if may_lower_scale(engine):
            scales.append(scaler.cur_scale)
        scaler.update_scale(True)
    runtime.destroy_distributed()
    return scales


def test_fp16_lowers_its_scale_before_a_gradient_counts() -> None:
    assert run_ranks(scales_until_nothing_can_be_lowered, 1) == [[8.0, 4.0, 2.0]]


# --- runs -----------------------------------------------------------------------------------

# The batch that is spoilt is the seventh: it stays so when the step is done again with another.
BAD_SAMPLE, BATCH = 48, 8
JUDGED_EARLY = (
    "health.warmup_steps=0",
    "health.loss_spike.window_steps=8",
    "health.loss_spike.deviations=5",
    "checkpoint.every_steps=4",
)
SPIKE, NOT_FINITE = 3.0, float("inf")


def spoil(factor: float, first: int = BAD_SAMPLE, last: int = BAD_SAMPLE) -> None:
    """Have this rank's loss be `factor` times what it is in batches that begin at such samples."""
    from cdrmix.data.loader import Loader
    from cdrmix.engines import training_step

    read, losses = Loader.next, training_step.next_token_losses
    is_bad = False

    def note_and_read(loader: Loader) -> Any:
        nonlocal is_bad
        is_bad = first <= loader.samples_consumed <= last
        return read(loader)

    def spoilt(*args: Any) -> HeadLoss:
        return HeadLoss(*(each * (factor if is_bad else 1.0) for each in losses(*args)))

    Loader.next, training_step.next_token_losses = note_and_read, spoilt


def pass_over(first: int, end: int) -> None:
    """Have the loader go on at sample `end` where it came to `first`."""
    from cdrmix.data.loader import Loader

    read = Loader.next

    def read_past(loader: Loader) -> Any:
        if loader.samples_consumed == first:
            loader.load_state_dict(loader.state_dict() | {"samples_consumed": end})
        return read(loader)

    Loader.next = read_past


def stop_at(sample: int) -> None:
    """Have this rank told to stop when it reads the batch that begins at `sample`."""
    from cdrmix.data.loader import Loader

    read = Loader.next

    def signal_and_read(loader: Loader) -> Any:
        if loader.samples_consumed == sample:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(loader)

    Loader.next = signal_and_read


def start_spoilt(
    argv: list[str], factor: float, last: int = BAD_SAMPLE, stopped_at: int | None = None
) -> int:
    """What a rank does; all have the bad batch, and one is told to stop at a sample."""
    spoil(factor, last=last)
    if stopped_at is not None and os.environ["RANK"] == "0":
        stop_at(stopped_at)
    return start(argv)


def start_without_window(argv: list[str], first: int, end: int) -> int:
    pass_over(first, end)
    return start(argv)


def record_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "health.json").read_text())


def test_a_skipped_step_takes_its_batch_and_is_told_everywhere(
    small_corpus: Path, run_dir: Path, tmp_path: Path
) -> None:
    argv = arguments(small_corpus, run_dir)
    assert run_ranks(start_spoilt, 2, argv, NOT_FINITE) == [0, 0]
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line.get("health/skipped_steps", 0) for line in lines] == [0] * 6 + [1] * 2
    assert [line["tokens_seen"] for line in lines] == [64 * BATCH * n for n in range(1, 9)]
    assert lines[6]["grad_norm"] == float("inf")
    told = "unhealthy: step 7: the gradients are not finite (health.non_finite: skip)"
    assert (run_dir / "train.log").read_text().count(told) == 1
    (event,) = record_of(run_dir)["events"]
    assert (event["watched"], event["action"], event["last_step"]) == ("non_finite", "skip", 7)
    assert "the gradients are not finite" in (run_dir / "report.html").read_text()
    # stopped behind the skipped step and resumed, it is the same run
    again = arguments(small_corpus, tmp_path / "again")
    assert run_ranks(start_spoilt, 2, again, NOT_FINITE, BAD_SAMPLE, BAD_SAMPLE + BATCH) == [75, 75]
    assert run_ranks(start, 2, [*again, "--resume", "auto"]) == [0, 0]
    assert_equal_runs(tmp_path / "again", run_dir, steps=STEPS)
    assert record_of(tmp_path / "again") == record_of(run_dir)


@pytest.mark.parametrize(
    ("watched", "factor", "every"),
    [("non_finite", NOT_FINITE, 1), ("loss_spike", SPIKE, 1), ("loss_spike", SPIKE, 8)],
)
def test_a_run_that_went_back_is_one_that_never_saw_the_window(
    watched: str, factor: float, every: int, small_corpus: Path, tmp_path: Path
) -> None:
    settings = [*JUDGED_EARLY, f"health.{watched}.action=rollback"]
    settings += [f"monitoring.log_every_steps={every}"]
    settings += ["evaluation.every_steps=null"] if every == 8 else []  # an evaluation is logged

    def argv(name: str) -> list[str]:
        return [*arguments(small_corpus, tmp_path / name), *overrides(settings)]

    assert run_ranks(start_spoilt, 2, argv("whole"), factor) == [0, 0]
    record = record_of(tmp_path / "whole")
    assert (record["rollbacks"], record["rolled_back_to"]) == (1, 4)
    assert record["passed_over"] == [[4 * BATCH, 7 * BATCH]]
    assert record["events"][0]["outcome"] == "back to step 4, past samples 32 to 55"

    assert run_ranks(start_without_window, 2, argv("unseen"), 4 * BATCH, 7 * BATCH) == [0, 0]
    (lines, tensors), (expected, expected_tensors) = (
        result_of(tmp_path / name, STEPS) for name in ("whole", "unseen")
    )
    assert [line["step"] for line in lines] == ([STEPS] if every == 8 else [*range(1, STEPS + 1)])
    numbers = ("step", "loss", "grad_norm", "learning_rate")
    assert [[line[name] for name in numbers] for line in lines] == [
        [line[name] for name in numbers] for line in expected
    ]
    assert different(tensors, expected_tensors) == []
    assert lines[-1]["health/passed_over_samples"] == 3 * BATCH
    assert lines[-1]["tokens_seen"] == 64 * BATCH * STEPS

    if every == 1:
        # saved before, and again when the run went back to it
        evaluated = [line["eval/loss"] for line in lines if "eval/loss" in line]
        held_out = score_of(tmp_path / "whole" / "checkpoints" / "4")
        assert held_out is not None
        assert [held_out.value] == evaluated
        return  # the hardest to resume is the one below: lines that sum up what was not logged
    # stopped as soon as it went back, and a step later, and resumed
    for name, sample in (("at once", 7 * BATCH), ("later", 8 * BATCH)):
        assert run_ranks(start_spoilt, 2, argv(name), factor, BAD_SAMPLE, sample) == [75, 75]
        assert run_ranks(start_spoilt, 2, [*argv(name), "--resume", "auto"], factor) == [0, 0]
        assert result_of(tmp_path / name, STEPS)[0] == lines
        assert different(result_of(tmp_path / name, STEPS)[1], tensors) == []
        assert record_of(tmp_path / name) == record


def start_spoilt_and_note_rates(argv: list[str], factor: float, file: str) -> int:
    """What a rank does that also writes the rates of each step's optimizer, a line a step."""
    from cdrmix.engines import stage_a

    original = stage_a.train_step

    def noted(engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, *args, **kwargs)
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        with open(f"{file}-{os.environ['RANK']}", "a") as lines:
            lines.write(json.dumps(rates) + "\n")
        return result

    stage_a.train_step = noted
    return start_spoilt(argv, factor)


def test_a_spike_lowers_the_rate_of_all_later_steps_also_of_a_resumed_run(
    small_corpus: Path, tmp_path: Path
) -> None:
    settings = [*JUDGED_EARLY, "health.loss_spike.action=lower_rate"]
    settings += ["health.loss_spike.rate_factor=0.25", "training.schedule=constant"]
    whole = [*arguments(small_corpus, tmp_path / "whole"), *overrides(settings)]
    noted = str(tmp_path / "rates")
    assert run_ranks(start_spoilt_and_note_rates, 2, whole, SPIKE, noted) == [0, 0]
    lines = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    full, lowered = 3e-3, 3e-3 * 0.25
    expected_rates = [full / 2, *[full] * 6, lowered]
    assert [line["learning_rate"] for line in lines] == expected_rates
    for rank in range(2):
        applied = [json.loads(line) for line in Path(f"{noted}-{rank}").read_text().splitlines()]
        assert [set(rates) for rates in applied] == [{rate} for rate in expected_rates]
    assert [line.get("health/lowerings", 0) for line in lines] == [0] * 6 + [1] * 2
    (event,) = record_of(tmp_path / "whole")["events"]
    assert (event["action"], event["first_step"]) == ("lower_rate", 7)
    log = (tmp_path / "whole" / "train.log").read_text()
    assert "learning rate: the schedule's times 0.25 from step 8 on, lowering 1" in log
    assert event["outcome"] in (tmp_path / "whole" / "report.html").read_text()
    # Stopped behind the spike, whose loss is not logged here: known before the next step alike.
    settings += ["monitoring.log_every_steps=8", "evaluation.every_steps=null"]
    again = [*arguments(small_corpus, tmp_path / "again"), *overrides(settings)]
    assert run_ranks(start_spoilt, 2, again, SPIKE, BAD_SAMPLE, 7 * BATCH) == [75, 75]
    assert run_ranks(start, 2, [*again, "--resume", "auto"]) == [0, 0]
    (resumed, tensors), (_, expected) = (
        result_of(tmp_path / name, STEPS) for name in ("again", "whole")
    )
    assert [line["learning_rate"] for line in resumed] == [lowered]
    assert different(tensors, expected) == []
    assert record_of(tmp_path / "again") == record_of(tmp_path / "whole")


def test_a_run_that_does_not_recover_goes_further_back_and_then_stops(
    small_corpus: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = [*JUDGED_EARLY, "health.loss_spike.action=rollback", "health.max_rollbacks=2"]
    argv = [*arguments(small_corpus, run_dir), *overrides([*settings, "checkpoint.every_steps=3"])]
    text = refused(argv, capfd, SPIKE, 10_000, run=start_spoilt)
    assert "health.max_rollbacks = 2 were done: the run has diverged and was stopped" in text
    events = record_of(run_dir)["events"]
    assert [event["outcome"] for event in events] == [
        "back to step 6, past samples 48 to 55",
        "back to step 3, past samples 24 to 63",
        "",
    ]


def test_without_a_checkpoint_there_is_no_way_back(
    small_corpus: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ["health.non_finite.action=rollback", "checkpoint.every_steps=null"]
    argv = [*arguments(small_corpus, run_dir), *overrides(settings)]
    text = refused(argv, capfd, NOT_FINITE, run=start_spoilt)
    assert "there is no checkpoint to go back to" in text
    (event,) = record_of(run_dir)["events"]
    assert (event["action"], event["outcome"]) == ("rollback", "")
    assert "The newest checkpoint is none yet" in text


WAIT_SECONDS = 0.3


def start_on_a_slow_disk(argv: list[str]) -> int:
    from cdrmix.data.loader import Loader

    read = Loader.next

    def read_slowly(loader: Loader) -> dict:
        if os.environ["RANK"] == "1":  # one slow rank is enough
            time.sleep(WAIT_SECONDS)
        return read(loader)

    Loader.next = read_slowly
    return start(argv)


STRICT = ("health.warmup_steps=0", "health.loader.min_seconds=0.1", "health.loader.max_share=0.01")


def test_what_is_only_warned_of_changes_nothing_and_is_told_once(
    small_corpus: Path, run_dir: Path
) -> None:
    settings = [*STRICT, "health.memory.max_share=1e-6"]
    settings += ["health.routing.min_entropy_share=1.0", "health.routing.times=1"]
    argv = arguments(small_corpus, run_dir, *overrides(settings), "--max-steps", "3")
    assert run_ranks(start_on_a_slow_disk, 2, argv) == [0, 0]
    log = (run_dir / "train.log").read_text()
    for watched in ("loader", "memory", "routing"):
        assert log.count(f"(health.{watched}: warn)") == 1
    events = {event["watched"]: event for event in record_of(run_dir)["events"]}
    assert [events[name]["times"] for name in ("loader", "memory", "routing")] == [3, 3, 3]
    line = read_metrics(run_dir / "metrics.jsonl")[-1]
    assert not [name for name in line if name.startswith("health/")], "equal runs, equal lines"


def test_a_run_that_is_stopped_for_its_machine_is_saved_first(
    small_corpus: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = [*STRICT, "health.loader.action=stop"]
    argv = arguments(small_corpus, run_dir, *overrides(settings))
    text = refused(argv, capfd, run=start_on_a_slow_disk)
    assert "s were waited for data" in text
    assert "The newest checkpoint is that of step 1. Try data on a faster disk" in text


def test_a_healthy_run_leaves_an_empty_record(small_corpus: Path, run_dir: Path) -> None:
    argv = arguments(small_corpus, run_dir, "--max-steps", "2")
    assert run_ranks(start, 1, argv) == [0]
    assert record_of(run_dir)["events"] == []
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert not [name for line in lines for name in line if name.startswith("health/")]
