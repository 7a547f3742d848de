"""State of a run, and its figures, from what its directory holds."""

import json
import math
import os
import time

import pytest

from cdrmix.live.facts import facts, plain, state_text
from cdrmix.live.run_folder import METRICS, RunFolder, is_run, may_become_run, runs_below
from cdrmix.live.runs import ServedRun
from cdrmix.live.status import Status, status_of
from cdrmix.monitoring.metric_columns import read_columns
from cdrmix.monitoring.sinks import write_json_atomic
from tests.live_run import DEAD, STEPS, LiveRun


@pytest.fixture
def run(tmp_path) -> LiveRun:
    return LiveRun(tmp_path / "run")


def status(run: LiveRun) -> Status:
    return status_of(RunFolder(run.path), read_columns(run.path / METRICS), name="run")


def texts(run: LiveRun) -> dict[str, str]:
    return {fact.name: fact.value for fact in facts(status(run))}


def test_a_run_whose_process_lives_is_running(run):
    run.log(1, 2)
    assert status(run).state == "running"
    run.age(86_400)
    assert status(run).state == "running", "however long it says nothing"


def test_a_process_with_the_number_of_another_is_no_sign_of_life(run):
    run.log(1)
    lock = json.loads((run.path / ".lock").read_text()) | {"started": "1"}
    (run.path / ".lock").write_text(json.dumps(lock))
    assert status(run).state == "lost"


def test_an_end_with_all_saved_is_a_stop_and_another_a_loss(run):
    run.log(1, 2, 3)
    run.hold(process=DEAD)
    run.save(2)
    assert status(run).state == "lost"
    run.save(3)
    assert status(run).state == "stopped"


def test_a_stop_by_a_signal_is_told_with_its_words(run):
    run.log(10)
    run.hold(process=DEAD)
    run.tell("INFO", "stopped by SIGTERM after step 13, which is saved. Go on with: cdrmix launch")
    assert status(run).state == "stopped"
    assert status(run).why.startswith("stopped by SIGTERM after step 13")


def test_a_loss_is_told_with_the_last_error(run):
    run.log(1)
    run.hold(process=DEAD)
    run.tell("ERROR", "error: rank 3 died at https://user:secret@store/x")
    assert (status(run).state, "secret" in status(run).why) == ("lost", False)
    assert "rank 3 died" in status(run).why


@pytest.mark.parametrize(("code", "state"), [(75, "stopped"), (0, "stopped"), (69, "lost")])
def test_the_launcher_knows_how_a_start_ended(run, code, state):
    run.log(1)
    run.hold(process=DEAD)
    run.age(10, ".lock")
    record = {"began": "2026-11-22T08:00:00+00:00", "ended": "2126-11-22T08:00:00+00:00"}
    record |= {"hosts": [], "exit_code": code, "reason": "for a reason", "resumed_at": 0, "step": 1}
    (run.path / "starts.jsonl").write_text(json.dumps(record) + "\n")
    assert (status(run).state, status(run).why) == (state, "for a reason")


def test_a_marker_is_the_end_until_a_start_removes_it(run):
    run.log(STEPS)
    run.age(10, ".lock")
    run.finish()
    assert status(run).state == "finished"
    run.hold()
    run.age(-10, ".lock")
    assert status(run).state == "running", "a run that is extended"


def test_a_run_of_an_earlier_version_is_finished_by_its_summary(run):
    (run.path / ".lock").unlink()
    run.log(STEPS)
    write_json_atomic(run.path / "metrics.json", {"steps": STEPS, "evaluation": {"loss": 3.25}})
    assert status(run).state == "finished"
    assert texts(run)["held-out loss"] == "3.2500"


def evaluated(run: LiveRun) -> dict[str, float]:
    return {n: v for n, v in status(run).values.items() if n.startswith("eval/")}


def test_values_of_held_out_text_are_all_of_one_evaluation(run):
    first = {"eval/loss": 3.0, "eval/perplexity": math.exp(3.0), "eval/bits_per_byte": 1.2}
    run.log(5, **first, **{"eval/domain/a/loss": 3.0, "eval/seconds": 9.0})
    second = {"eval/loss": 2.5, "eval/perplexity": math.exp(2.5), "eval/bits_per_byte": 1.0}
    run.log(10, **second, **{"eval/domain/b%2Fc/loss": 2.5})
    run.log(13)
    assert evaluated(run) == second | {"eval/domain/b%2Fc/loss": 2.5}
    final = {"loss": 2.0, "perplexity": math.exp(2.0), "bits_per_byte": 0.9, "tokens": 100}
    domains = [{"domain": "b/c", "loss": 2.0, "perplexity": math.exp(2.0), "tokens": 100}]
    summary = {"steps": 13, "evaluation": final | {"domains": domains}}
    write_json_atomic(run.path / "metrics.json", summary | {"ema_evaluation": {"loss": 1.5}})
    assert evaluated(run) == {
        "eval/loss": 2.0,
        "eval/perplexity": math.exp(2.0),
        "eval/bits_per_byte": 0.9,
        "eval/ema_loss": 1.5,
        "eval/domain/b%2Fc/loss": 2.0,
    }
    run.log(20, **first)  # trained on, beyond the end that the summary is of
    assert evaluated(run) == first


def test_an_evaluation_before_the_newest_lines_is_found_whole(run, monkeypatch):
    values = {"eval/loss": 3.0, "eval/perplexity": math.exp(3.0), "eval/bits_per_byte": 1.2}
    run.log(1, **values)
    run.log(*range(2, 100))
    monkeypatch.setattr("cdrmix.live.runs._NEWEST_BYTES", 2_000)
    found = ServedRun("run", run.path).status().values
    assert {n: v for n, v in found.items() if n.startswith("eval/")} == values


def test_a_run_on_another_host_lives_as_long_as_lines_come(run):
    run.log(1, 2, 3)
    run.hold(host="node-7")
    assert (status(run).state, status(run).why) == ("running", "on node-7")
    run.age(3_600)
    assert status(run).state == "silent"
    assert "node-7" in status(run).why


def test_a_run_that_stands_still_is_late(run):
    run.log(*range(1, 20))
    run.age(600, ".lock")
    assert not status(run).is_late
    run.age(300, METRICS)
    assert status(run).is_late
    assert state_text(status(run)) == "running, late"
    assert texts(run)["newest line"] == "5m00s ago"


def test_the_time_left_counts_saves_and_evaluations(run):
    run.log(*range(1, 101))
    assert status(run).eta_seconds == pytest.approx(300 * 0.5)
    parts = {"productive": 100.0, "evaluation": 30.0, "checkpoint_stall": 20.0}
    write_json_atomic(run.path / "wall_time.json", {"parts": parts})
    assert status(run).eta_seconds == pytest.approx(300 * 0.5 * 1.5)


def test_figures_are_those_of_the_files(run):
    run.log(1, 2, **{"moe/overflow_fraction": 0.031, "memory_peak_bytes": 3 * 2**30})
    run.save(2)
    event = {"watched": "loss_spike", "times": 2}
    write_json_atomic(run.path / "health.json", {"skipped_steps": 1, "events": [event]})
    run.tell("WARNING", "warning: something")
    run.tell("INFO", "nothing")
    found = texts(run)
    assert found["loss"] == "7.9800"
    assert found["overflow"] == "3.10%"
    assert found["memory peak"] == "3 GiB"
    assert found["health"] == "1 skipped, 2 spikes"
    assert found["checkpoint"].startswith("step 2, ")
    assert [line.text for line in status(run).warnings] == ["warning: something"]
    assert (status(run).step, status(run).num_steps, status(run).stage) == (2, STEPS, "a")


def test_a_file_is_read_again_where_it_has_changed(run):
    folder = RunFolder(run.path)
    assert folder.json("health.json") == {}
    write_json_atomic(run.path / "health.json", {"rollbacks": 1})
    assert folder.json("health.json") == {"rollbacks": 1}
    kept = folder.json("health.json")
    assert folder.json("health.json") is kept
    (run.path / "health.json").write_text("{half")
    assert folder.json("health.json") == {}


def test_links_and_pipes_are_not_followed(run, tmp_path):
    (tmp_path / "secret").write_text('{"rollbacks": 7}')
    (run.path / "health.json").symlink_to(tmp_path / "secret")
    assert RunFolder(run.path).json("health.json") == {}
    assert not is_run(run.path)
    (run.path / "health.json").unlink()
    assert is_run(run.path)
    os.mkfifo(run.path / "plan.json2")
    assert is_run(run.path), "it is no file of a run"
    os.mkfifo(run.path / "reasoning.json")
    assert not is_run(run.path)
    assert RunFolder(run.path).json("reasoning.json") == {}, "and nothing waits for its writer"


def test_runs_are_found_below_folders_and_not_below_runs(tmp_path):
    for name in ("b/c/two", "a-one", ".hidden/three"):
        LiveRun(tmp_path / name)
    LiveRun(tmp_path / "a-one" / "inner")
    (tmp_path / "link").symlink_to(tmp_path / "a-one")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in runs_below(tmp_path)]
    assert found == ["a-one", "b/c/two"]
    assert list(runs_below(tmp_path / "a-one")) == [tmp_path / "a-one"]


def test_a_run_may_begin_where_there_is_nothing_yet(tmp_path):
    assert may_become_run(tmp_path / "later")
    assert not may_become_run(tmp_path / "no" / "later")
    (tmp_path / "launch").mkdir()
    assert may_become_run(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert not may_become_run(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", "null", '{"parts": 3}', "\x00"])
@pytest.mark.parametrize(
    "name", ["health.json", "metrics.json", "plan.json", ".lock", "saves.json", "train.log"]
)
def test_damaged_files_are_as_if_they_were_not_there(run, name, content):
    run.log(1)
    (run.path / name).write_text(content)
    assert status(run).step == 1


@pytest.mark.parametrize("count", [1_000, 100_000])
@pytest.mark.parametrize("opening", ["[", "- "])
def test_a_configuration_nested_without_end_ends_no_page(run, opening, count):
    (run.path / "config_snapshot.yaml").write_text(f"a:\n {opening * count}")
    assert RunFolder(run.path).values.keys() <= {"a"}


def test_texts_of_a_run_command_no_terminal():
    assert plain("a\x1b[31mb\x9bc\u202ed\n") == "a\ufffd[31mb\ufffdc\ufffdd\ufffd"


def test_the_age_of_lines_is_never_negative(run):
    run.log(1)
    os.utime(run.path / METRICS, (time.time() + 99, time.time() + 99))
    assert texts(run)["newest line"] == "0s ago"
