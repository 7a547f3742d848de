"""Suite `code` from the model to the rows: with one that knows a task, and one that knows none."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cdrmix.config.load import load_config
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from cdrmix.errors import ConfigError, DataError
from cdrmix.evaluation.code_tasks.extraction import asked
from cdrmix.evaluation.code_tasks.files import read_sets
from cdrmix.evaluation.code_tasks.judging import Sample
from cdrmix.evaluation.code_tasks.task import CodeTask
from cdrmix.evaluation.scoring import Scorer
from cdrmix.evaluation.suite import Judged, Request, suite_of
from cdrmix.evaluation.suites.code import Code, Options, _draw
from cdrmix.models.backbone import Backbone
from cdrmix.objectives.language_model import IGNORED_LABEL
from cdrmix.parallel.topology import ALONE
from tests.sandboxed import needs_sandbox
from tests.small_run import CONFIG

pytestmark = needs_sandbox

PROMPT = "def double(x):\n"
TASKS = [
    {
        "name": "double",
        "grade": 1,
        "prompt": PROMPT,
        "entry_point": "double",
        "solution": PROMPT + "    return 2 * x\n",
        "cases": [[[3], 6]],
    },
    {
        "name": "halve",
        "grade": 2,
        "prompt": "def halve(x):\n",
        "entry_point": "halve",
        "solution": "def halve(x):\n    return x // 2\n",
        "cases": [[[6], 3], [[7], 3]],
    },
]
# Of the texts learned, both go on in the same way: right for one task, and wrong for the other.
LEARNED = [each["prompt"] + "    return 2 * x\n" for each in TASKS]
FEW = {"samples": 3, "k": "1,2", "max_new_tokens": 24}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(train_tokenizer(["-"], 266).to_str())
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def untrained(tokenizer: Tokenizer) -> Judged:
    settings = (
        "model.num_layers=2",
        "model.transformer_fraction=1.0",
        "model.hidden_size=64",
        "model.num_heads=2",
        f"model.vocab_size={tokenizer.vocab_size}",
        "model.moe=null",
        "model.ffn_hidden_size=128",
        "training.sequence_length=64",
    )
    config = load_config(CONFIG, list(settings))
    model = Backbone(config.model)
    model.initialize(seed=0)
    return Judged(
        model=model.eval(),
        tokenizer=tokenizer,
        config=config,
        topology=ALONE,
        max_length=64,
        batch_size=4,
        source="here",
        step=3,
        weights="trained",
        data=None,
    )


@pytest.fixture(scope="module")
def trained(untrained: Judged, tokenizer: Tokenizer) -> Judged:
    """A tiny model that knows the texts by heart."""
    model = Backbone(untrained.config.model)
    model.initialize(seed=0)
    rows = [[*tokenizer.prefix_ids, *tokenizer.encode(text), tokenizer.eos_id] for text in LEARNED]
    length = max(map(len, rows))
    batch = torch.tensor([row + [IGNORED_LABEL] * (length - len(row)) for row in rows])
    inputs, labels = batch[:, :-1].clamp(min=0), batch[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for _ in range(60):
        logits = model.logits(model(inputs).hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    return replace(untrained, model=model.eval())


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "two.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TASKS))
    return path


def test_a_model_that_knows_a_task_passes_it(trained: Judged, tasks: Path) -> None:
    request = Request(tasks=tasks, execute_code=True, options=FEW)
    suite = suite_of("code")
    suite.check(request)
    result = suite.measure(trained, request)
    scores = {(row.task, row.metric): row.score for row in result.rows}
    assert scores["two grade 1", "pass@1"] == 1, result
    assert scores["two grade 2", "pass@1"] == 0, result
    assert scores["two", "pass@1"] == 0.5
    assert scores["two", "pass@2"] == 0.5
    assert scores["two", "compile_rate"] == 1
    assert scores["two", "empty"] == scores["two", "truncated"] == 0
    assert result.details["verdicts"] == {"two": {"passed": 6, "wrong": 6}}
    assert result.details["passed"]["double"] == {"temperature 0.2": 3, "temperature 0.8": 3}
    first = next(row for row in result.rows if row.metric == "pass@1")
    assert (first.low, first.high, first.n) == (0, 1, 2)
    named = result.settings
    assert (named["samples"], named["top_p"], named["two_process"]) == (3, 0.95, {"two": 2})
    assert named["temperatures"] == {"pass@1": 0.2, "pass@2": 0.8}
    assert named["sandbox"].startswith("kernel")
    assert len(named["task_digests"]["two"]) == 64
    assert json.loads(json.dumps(result.as_json()))["verdicts"]["two"]["passed"] == 6
    assert (result.source, result.step) == ("here", 3)
    assert result.details["cut_prompts"] == 0


def test_an_untrained_model_passes_nothing(
    untrained: Judged, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"samples": 2, "k": 1, "max_new_tokens": 8}
    request = Request(execute_code=True, limit=4, options=options)
    result = Code().measure(untrained, request)
    scores = {row.metric: row.score for row in result.rows if row.task == "cdrmix"}
    assert scores["pass@1"] == 0
    assert 0 <= scores["compile_rate"] < 1
    assert scores["empty"] + scores["truncated"] > 0.5
    assert sum(result.details["verdicts"]["cdrmix"].values()) == 8
    assert result.details["cut_prompts"] == 4, "an input has 64 tokens"
    assert "code: 4 of 4 prompts lose their beginning" in caplog.text
    assert {row.task for row in result.rows} == {
        "cdrmix",
        *(f"cdrmix grade {grade}" for grade in (1, 2, 3, 4)),
    }


def drawn(
    judged: Judged, tasks: Sequence[CodeTask], samples: int = 3, seed: int = 0, style: str = ""
) -> dict[str, list[Sample]]:
    options = Options.of(FEW | {"samples": samples, "style": style or "completion"})
    return _draw(Scorer.of(judged), tasks, options, 1.0, seed)


def test_a_sample_is_its_own_draw(untrained: Judged, tasks: Path) -> None:
    """It depends on the seed, the task and its number, and on no other sample."""
    (two,) = read_sets(tasks)
    whole = drawn(untrained, two.tasks)
    assert len({sample.text for own in whole.values() for sample in own}) == 6
    alone = drawn(replace(untrained, batch_size=1), two.tasks[1:], samples=2)
    assert alone == {"halve": whole["halve"][:2]}
    assert drawn(untrained, two.tasks[::-1]) == whole
    assert drawn(untrained, two.tasks, seed=1)["halve"] != whole["halve"]


def test_a_fenced_task_shows_the_prompt_in_a_fence(tasks: Path) -> None:
    (two,) = read_sets(tasks)
    assert "```python\ndef double(x):\n```" in asked(two.tasks[0], "fenced")
    assert asked(two.tasks[0], "completion") == PROMPT


def test_a_solution_that_fails_is_told_before_the_model_is_asked(
    untrained: Judged, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(TASKS[0] | {"solution": PROMPT + "    return x\n"}))
    request = Request(tasks=path, execute_code=True)
    Code().check(request)
    # without a model that could be asked
    nobody = replace(untrained, model=None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the solution of double fails its own tests"):
        Code().measure(nobody, request)


def test_nothing_runs_without_leave() -> None:
    with pytest.raises(ConfigError, match="Give --execute-code, or .*execute_code: true"):
        Code().check(Request())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 9}, "pass@10 needs 10 samples of a task or more, and there are to be 9"),
        ({"samples": 0}, "samples=0: give a whole number of 1 or more"),
        ({"samples": True}, "samples=True: give a whole number"),
        ({"k": "0,1"}, "k=0,1: give whole numbers of 1 or more"),
        ({"k": "one"}, "k=one: give whole numbers"),
        ({"k": 40}, "pass@40 needs 40 samples"),
        ({"temperature": -1}, "temperature=-1: give a number of 0 or more"),
        ({"top_p": 1.5}, "top_p=1.5: give a number from 0 to 1"),
        ({"max_new_tokens": "many"}, "max_new_tokens=many: give a whole number"),
        ({"style": "chat"}, "style=chat: give one of completion, fenced"),
    ],
)
def test_a_wrong_option_is_told(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Code().check(Request(execute_code=True, options=options))


def test_options_have_the_defaults_of_the_field() -> None:
    assert Options.of({}).temperatures == {1: 0.2, 5: 0.8, 10: 0.8}
    assert Options.of({"k": 1, "samples": 1}).temperatures == {1: 0.2}
    assert Options.of({"temperature": 0, "k": "10,1"}).temperatures == {1: 0.0, 10: 0.0}
    assert (Options.of({}).samples, Options.of({}).top_p) == (20, 0.95)
    assert set(Code.options) == set(Options.__dataclass_fields__)


def test_the_check_imports_no_torch() -> None:
    import subprocess

    program = (
        "import sys\n"
        "from cdrmix.evaluation.suite import Request, suite_of\n"
        "suite_of('code').check(Request(execute_code=True))\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "False\n", done.stderr
