"""A user's rule for the checkpoints that stay: what it is told, and which answers count."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from cdrmix.checkpoint.folder import drop_others
from cdrmix.checkpoint.retention import Retention, StoredCheckpoint, configured_retention
from cdrmix.config.load import load_config, shipped
from cdrmix.errors import ConfigError
from tests.unit.checkpoint.test_best import new_saver, save, steps

TINY = shipped("model_configs") / "cdrmix-core-tiny.yaml"


class Rule(Retention):
    """Answers as it is told, and notes what it was asked."""

    def __init__(self, answer: Callable[[Sequence[StoredCheckpoint]], Iterable[int]]) -> None:
        self.answer = answer
        self.asked: list[Sequence[StoredCheckpoint]] = []

    def drop(self, checkpoints: Sequence[StoredCheckpoint]) -> Iterable[int]:
        self.asked.append(checkpoints)
        return self.answer(checkpoints)


def every_tenth(checkpoints: Sequence[StoredCheckpoint]) -> Iterable[int]:
    return [each.step for each in checkpoints if each.step % 10 and not each.stays]


def test_a_rule_says_which_checkpoints_stay(tmp_path: Path) -> None:
    saver = new_saver(tmp_path, keep_best=False, retention=Rule(every_tenth))
    for step in (5, 10, 15, 20, 25):
        save(saver, step)
    assert steps(tmp_path) == [10, 20, 25]
    plain = new_saver(tmp_path / "plain", keep_best=False, keep=2)  # control: without a rule
    for step in (5, 10, 15, 20, 25):
        save(plain, step)
    assert steps(tmp_path / "plain") == [20, 25]


def test_a_rule_is_told_all_that_it_may_go_by(tmp_path: Path) -> None:
    rule = Rule(lambda checkpoints: [])
    saver = new_saver(tmp_path, retention=rule, pinned=1)
    save(saver, 1, 3.0)
    save(saver, 2, 1.0)
    save(saver, 3, 2.0)
    three, two, one = rule.asked[-1]
    assert (three.step, three.is_newest, three.is_best, three.is_pinned) == (3, True, False, False)
    assert (two.step, two.score, two.is_best, two.stays) == (2, 1.0, True, True)
    assert (one.step, one.score, one.is_pinned) == (1, 3.0, True)
    files = (tmp_path / "3").iterdir()
    assert three.num_bytes == sum(file.stat().st_size for file in files) > 0
    assert three.saved_at >= two.saved_at > 1.6e9


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda each: [each[0].step], "it drops the newest, the best or one in use: 4"),
        (lambda each: [each[1].step, 1], "one in use: 1"),  # pinned
        (lambda each: [2, 3], "one in use: 2"),  # the best
        (lambda each: [3, 99], "it drops steps without a checkpoint: 99"),
        (lambda each: 3, "TypeError: 'int' object is not iterable"),
        (lambda each: [{}], "TypeError: unhashable"),
        (lambda each: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_answer_drops_nothing(
    tmp_path: Path,
    answer: Callable[[Sequence[StoredCheckpoint]], Iterable[int]],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saver = new_saver(tmp_path, keep=9, pinned=1)
    for step, loss in ((1, 4.0), (2, 1.0), (3, 2.0), (4, 3.0)):
        save(saver, step, loss)
    drop_others(tmp_path, 4, 9, {1}, keep_best=True, retention=Rule(answer))
    assert steps(tmp_path) == [1, 2, 3, 4]
    warnings = [each for each in caplog.records if each.levelname == "WARNING"]
    [warning] = [each.getMessage() for each in warnings]
    assert message in warning and warning.endswith("nothing is dropped")
    right = Rule(lambda each: [3])  # control
    drop_others(tmp_path, 4, 9, {1}, keep_best=True, retention=right)
    assert steps(tmp_path) == [1, 2, 4]


def test_a_damaged_checkpoint_is_no_business_of_a_rule(tmp_path: Path) -> None:
    saver = new_saver(tmp_path, keep=9, keep_best=False)
    for step in (1, 2, 3, 4, 5):
        save(saver, step)
    for step in (1, 4):
        (tmp_path / str(step) / "index.json").unlink()
    rule = Rule(lambda checkpoints: [2])
    drop_others(tmp_path, 5, 9, retention=rule)
    assert [each.step for each in rule.asked[0]] == [5, 3, 2]
    # The older damaged one goes with those that are gone; the newer waits for people to look at.
    assert steps(tmp_path) == [3, 4, 5]


def test_steps_that_a_run_has_gone_back_behind_go_without_a_rule(tmp_path: Path) -> None:
    saver = new_saver(tmp_path, keep=9, keep_best=False)
    for step in (1, 2, 3):
        save(saver, step)
    rule = Rule(lambda checkpoints: [])
    drop_others(tmp_path, 2, 9, retention=rule)
    assert steps(tmp_path) == [1, 2]
    assert [each.step for each in rule.asked[0]] == [2, 1]


def test_a_configuration_names_a_rule_of_a_file_beside_it(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    shutil.copy(TINY, config)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "cdrmix_weekly.py").write_text(
        "from cdrmix.checkpoint.retention import Retention\n"
        "class Weekly(Retention):\n    def drop(self, checkpoints):\n        return []\n"
    )
    rule = "checkpoint.retention.use=cdrmix_weekly:Weekly"
    loaded = load_config(config, [rule])
    assert type(configured_retention(loaded.checkpoint)).__name__ == "Weekly"
    assert loaded.plugins == str(tmp_path / "plugins")
    for words, message in (
        ([rule, "checkpoint.keep=2"], "keep and retention both say which checkpoints stay"),
        (["checkpoint.retention.use=weekly"], "checkpoint.retention.use"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(config, words)
    wrong = load_config(config, ["checkpoint.retention.use=cdrmix_weekly:Retentoin"])
    with pytest.raises(ConfigError, match="has no Retentoin. Did you mean Retention"):
        configured_retention(wrong.checkpoint)
    abstract = load_config(config, ["checkpoint.retention.use=cdrmix_weekly:Retention"])
    with pytest.raises(ConfigError, match="Retention lacks drop, without which"):
        configured_retention(abstract.checkpoint)
