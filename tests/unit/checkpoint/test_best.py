"""The checkpoint with the best score: recorded, kept, found, and told apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix import cli
from cdrmix.checkpoint import folder
from cdrmix.checkpoint.candidates import step_folders, step_of
from cdrmix.checkpoint.held_out import (
    HELD_OUT_FILE,
    Score,
    best_checkpoint,
    recorded_scores,
    score_of,
)
from cdrmix.checkpoint.saver import Saver
from cdrmix.checkpoint.store import FoundCheckpoint, set_aside
from cdrmix.checkpoint.trained_run import checkpoint_place, newest_checkpoint
from cdrmix.errors import NoUsableStateError, StateError
from tests.checkpoints import whole


def save(
    saver: Saver,
    step: int,
    loss: float | None = None,
    state: dict[str, Any] | None = None,
    tokens: int = 64,
) -> None:
    saver.start(
        step,
        [whole("w", torch.full((4,), float(step)))],
        state=state or {},
        rank_state={},
        score=None if loss is None else Score(loss, tokens),
    )
    saver.wait()


def new_saver(*roots: Path, keep: int = 2, keep_best: bool = True, **more: Any) -> Saver:
    return Saver(roots, keep=keep, keep_best=keep_best, background=False, **more)


def steps(root: Path) -> list[int]:
    return sorted(map(step_of, step_folders(root)))


def best_step(root: Path) -> int | None:
    best = best_checkpoint(root)
    return None if best is None else best.step


@pytest.mark.parametrize("background", [False, True])
def test_the_best_stays_besides_the_newest_until_there_is_a_better_one(
    tmp_path: Path, background: bool
) -> None:
    roots = (tmp_path / "own", tmp_path / "replica")
    saver = Saver(roots, keep=2, keep_best=True, background=background)
    for step, loss in enumerate([3.0, 2.0, 2.5, 2.2, None, 2.1], 1):
        save(saver, step, loss)
        saver.wait()
    for root in roots:
        assert steps(root) == [2, 5, 6]
        assert best_step(root) == 2
    save(saver, 7, 1.9)
    save(saver, 8)
    saver.close()
    for root in roots:
        assert steps(root) == [7, 8]
        assert best_step(root) == 7


def test_the_best_is_not_kept_and_not_recorded_where_nobody_asks(tmp_path: Path) -> None:
    saver = new_saver(tmp_path, keep_best=False)
    for step, loss in enumerate([1.0, 2.0, 3.0], 1):
        save(saver, step, loss)
    saver.evaluated(Score(0.5, 64))
    assert steps(tmp_path) == [2, 3]
    assert saver.best() is None
    assert not (tmp_path / HELD_OUT_FILE).exists()


def test_a_loss_that_is_no_number_is_not_the_lowest(tmp_path: Path) -> None:
    saver = new_saver(tmp_path)
    for step, loss in enumerate([float("nan"), float("-inf"), 5.0], 1):
        save(saver, step, loss)
    assert [each.step for each in recorded_scores(tmp_path)] == [3]


def test_the_evaluation_of_the_end_comes_behind_the_save(tmp_path: Path) -> None:
    saver = new_saver(tmp_path, tmp_path / "replica", keep=1)
    save(saver, 1, 2.0)
    save(saver, 2)
    manifest = (tmp_path / "2" / "manifest.json").read_bytes()
    assert steps(tmp_path) == [1, 2]
    saver.evaluated(Score(2.5, 64))
    assert saver.best() == best_checkpoint(tmp_path)
    assert best_step(tmp_path) == 1
    assert steps(tmp_path) == [1, 2]
    # better: the one before goes, and the checkpoint is as it was
    saver.evaluated(Score(1.5, 64))
    for root in (tmp_path, tmp_path / "replica"):
        assert [(each.step, each.score.value) for each in recorded_scores(root)] == [(2, 1.5)]
        assert steps(root) == [2]
    assert (tmp_path / "2" / "manifest.json").read_bytes() == manifest
    assert newest_checkpoint(tmp_path).step == 2
    # a resumed run has it from the record
    assert score_of(tmp_path / "2") == Score(1.5, 64)


def test_a_resumed_run_goes_on_with_the_record(tmp_path: Path) -> None:
    save(new_saver(tmp_path, keep=1), 1, 2.0)
    resumed = new_saver(tmp_path, keep=1)
    for step in (2, 3):
        save(resumed, step, 2.0 + step)
    assert steps(tmp_path) == [1, 3]


def test_what_is_removed_set_aside_or_saved_again_is_not_the_best(tmp_path: Path) -> None:
    saver = new_saver(tmp_path, keep=9)
    for step, loss in ((1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)):
        save(saver, step, loss)
    start = FoundCheckpoint(tmp_path / "3", 3, ())
    set_aside(start, [tmp_path], newer=True)
    assert best_step(tmp_path) == 3
    # another state of that step, which was not evaluated
    save(saver, 3)
    assert best_step(tmp_path) == 2
    assert score_of(tmp_path / "3") is None
    shutil.rmtree(tmp_path / "2")
    assert best_step(tmp_path) == 1
    # going back removes what is newer, however good
    save(saver, 2, 0.5)
    save(saver, 1)
    assert steps(tmp_path) == [1]
    assert best_step(tmp_path) is None


def test_losses_over_other_text_than_the_newest_are_not_compared(tmp_path: Path) -> None:
    saver = new_saver(tmp_path, keep=9)
    save(saver, 1, 1.0, tokens=4096)
    save(saver, 2, 2.0)
    save(saver, 3, 3.0)
    save(saver, 4)
    assert best_step(tmp_path) == 2
    saver.evaluated(Score(4.0, 4096))
    assert best_step(tmp_path) == 1
    assert score_of(tmp_path / "4") == Score(4.0, 4096)
    # of a record that does not tell
    path = tmp_path / HELD_OUT_FILE
    entries = json.loads(path.read_text())["checkpoints"]
    for each in entries:
        del each["tokens"]
    path.write_text(json.dumps({"checkpoints": entries}))
    assert best_step(tmp_path) == 1
    save(saver, 5, 9.0)
    assert best_step(tmp_path) == 5


@pytest.mark.parametrize(
    ("metric", "best"),
    [("pass@1", 2), ("acc_norm", 2), ("word_perplexity", 3), ("bits_per_byte", 3)],
)
def test_the_best_row_is_the_highest_or_the_lowest(tmp_path: Path, metric: str, best: int) -> None:
    by = f"zero-shot/group/task/{metric}"
    saver = new_saver(tmp_path, keep=1)
    save(saver, 1, 0.0)  # a held-out loss: of a time before evaluation.best_by was set
    for step, value in ((2, 0.9), (3, 0.3), (4, 0.5)):
        tensors = [whole("w", torch.full((4,), float(step)))]
        saver.start(step, tensors, state={}, rank_state={}, score=Score(value, 100, by))
        saver.wait()
    assert steps(tmp_path) == [best, 4]
    assert saver.best() == best_checkpoint(tmp_path)
    assert score_of(tmp_path / str(best)) == Score(0.9 if best == 2 else 0.3, 100, by)
    # over fewer examples it says nothing about the others
    saver.evaluated(Score(0.4, 50, by))
    assert best_step(tmp_path) == 4


def test_a_damaged_checkpoint_is_not_the_best(tmp_path: Path) -> None:
    saver = new_saver(tmp_path, keep=1)
    save(saver, 1, 1.0)
    save(saver, 2, 2.0)
    path = tmp_path / "1" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert best_step(tmp_path) == 2
    save(saver, 3, 3.0)
    assert steps(tmp_path) == [2, 3]


def test_a_kill_before_the_name_leaves_a_record_that_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = new_saver(tmp_path)
    save(saver, 1, 2.0)

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(folder, "publish", kill)
        save(saver, 2, 1.0)
    assert len(json.loads((tmp_path / HELD_OUT_FILE).read_text())["checkpoints"]) == 2
    assert best_step(tmp_path) == 1
    # the same number of the save again, by a start that knows nothing of the first
    save(new_saver(tmp_path), 2, state={"seconds": 1})
    assert best_step(tmp_path) == 1


def test_a_damaged_record_is_told_and_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = new_saver(tmp_path)
    save(saver, 1, 2.0)
    (tmp_path / HELD_OUT_FILE).write_text("[]")
    with pytest.raises(StateError, match=r"held_out.json: not a record of held-out losses"):
        best_checkpoint(tmp_path)
    assert score_of(tmp_path / "1") is None
    save(saver, 2, 3.0)
    assert best_step(tmp_path) == 2
    assert "not a record of held-out losses" in caplog.text


def run_with(
    tmp_path: Path,
    *,
    keep_best: bool = True,
    loss: float | None = None,
    evaluation: dict[str, str] | None = None,
) -> Path:
    config = {
        "checkpoint": {"every_steps": 3, "keep_best": keep_best},
        "evaluation": {"every_steps": 4, **(evaluation or {})},
    }
    saver = new_saver(tmp_path / "run" / "checkpoints", keep_best=keep_best)
    save(saver, 3, loss, {"config": config})
    save(saver, 6, None, {"config": config})
    return tmp_path / "run"


def test_the_best_the_last_and_a_step_can_be_named(tmp_path: Path) -> None:
    run = run_with(tmp_path, loss=2.0)
    for which, step in (("last", 6), ("best", 3), ("6", 6), ("3", 3)):
        assert newest_checkpoint(checkpoint_place(run, which)).step == step
    with pytest.raises(StateError, match=r"no checkpoint of step 4; it has .* steps 3, 6. Try"):
        checkpoint_place(run, "4")
    with pytest.raises(StateError, match="has no checkpoints folder to look for the best check"):
        checkpoint_place(run / "checkpoints" / "3", "best")
    path = run / "checkpoints" / "3" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(NoUsableStateError, match="its content has changed"):
        newest_checkpoint(checkpoint_place(run, "best"))


@pytest.mark.parametrize("verb", ["evaluate", "generate", "export --out {out}"])
def test_no_best_checkpoint_is_told_with_the_reason(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*verb.format(out=tmp_path / "out").split(), "--checkpoint", "best"]
    run = run_with(tmp_path)
    assert cli.main([*words, str(run)]) == 2
    told = capsys.readouterr().err
    assert "no evaluation fell on a saved step" in told
    assert "evaluation.every_steps: 4, checkpoint.every_steps: 3" in told
    shutil.rmtree(run)
    assert cli.main([*words, str(run_with(tmp_path, keep_best=False))]) == 2
    assert "because checkpoint.keep_best is false" in capsys.readouterr().err
    shutil.rmtree(run)
    by = {"best_by": "zero-shot/piqa/acc"}
    assert cli.main([*words, str(run_with(tmp_path, evaluation=by))]) == 2
    assert "by evaluation.best_by = zero-shot/piqa/acc: none" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_word_for_a_checkpoint_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "run", "--checkpoint", "newest"])
    assert ended.value.code == 2
    assert "given newest, allowed is best, last or the step of one" in capsys.readouterr().err
