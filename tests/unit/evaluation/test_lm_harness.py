"""lm-evaluation-harness in process against its own `hf` model on the exported folder."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import dynamic_module_utils

from cdrmix.errors import ConfigError
from cdrmix.evaluation.lm_harness import harness_model
from cdrmix.evaluation.suites.local_tasks import find_tasks
from cdrmix.evaluation.suites.zero_shot import run_tasks
from cdrmix.evaluation.trained import TrainedModel, load_trained
from cdrmix.export.exported_run import export_run
from tests.harness import ROOT
from tests.made_run import made_run
from tests.published_tasks import write_published
from tools.architecture import imported_names

_MULTIPLE_CHOICE = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: '{{{{question}}}}'
doc_to_choice: '{{{{choices}}}}'
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
_PERPLEXITY = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{{{text}}}}'
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""
_GENERATION = """
task: answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: '{{{{question}}}}'
doc_to_target: 'return'
generation_kwargs: {{until: ["x", "return"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is downloaded, and the user's caches stay as they are."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(cache / "datasets"))
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache / "modules"))
        import datasets

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
        patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedModel, Path]:
    """A hybrid of experts, whose random weights have opinions, and the folder of its export."""
    root = tmp_path_factory.mktemp("harness")
    made_run(root / "run", "model.init_std_scale=4")
    export_run(root / "run", root / "folder")
    return load_trained(root / "run"), root / "folder"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on twelve lines; some texts are longer than a sequence of the model."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [
        {
            "question": "def f" + "(x)" * (i % 5),
            "choices": [": return x", " x", "\n" * (1 + i)],
            "answer": i % 3,
            "text": f"def f{i}(x): return x\n" * (1 + i),
        }
        for i in range(12)
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for text in (_MULTIPLE_CHOICE, _PERPLEXITY, _GENERATION):
        name = text.split()[1]
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return folder


def results(model: Any, folder: Path, *names: str) -> dict[str, Any]:
    """Metrics of tasks, and the answers of the model to each request."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    done = lm_eval.simple_evaluate(
        model=model, tasks=list(names), task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    assert done is not None
    metrics = {
        (task, name.partition(",")[0]): value
        for task, values in done["results"].items()
        for name, value in values.items()
        if isinstance(value, float) and "stderr" not in name
    }
    answers = {task: [each["resps"] for each in done["samples"][task]] for task in names}
    return {"metrics": metrics, "answers": answers}


def exported_model(folder: Path, **arguments: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=str(folder),
        trust_remote_code=True,
        device="cpu",
        dtype="float32",
        batch_size=5,
        **arguments,
    )


@pytest.mark.usefixtures("offline")
def test_results_are_those_of_the_exported_folder(
    made: tuple[TrainedModel, Path], tasks: Path
) -> None:
    run, folder = made
    here = results(harness_model(run, batch_size=3), tasks, "choices", "texts", "answers")
    there = results(exported_model(folder), tasks, "choices", "answers")
    plain = results(exported_model(folder, add_bos_token=False), tasks, "texts")
    expected = there["metrics"] | plain["metrics"]
    named = {"acc", "acc_norm", "word_perplexity", "byte_perplexity", "bits_per_byte"}
    assert {name for _, name in expected} >= named
    assert here["metrics"] == pytest.approx(expected, rel=1e-6)
    assert here["answers"]["answers"] == there["answers"]["answers"]
    nats = [[nats for [(nats, _)] in each] for each in here["answers"]["choices"]]
    other = [[nats for [(nats, _)] in each] for each in there["answers"]["choices"]]
    torch.testing.assert_close(torch.tensor(nats), torch.tensor(other), rtol=0, atol=1e-4)
    # a control: with the EOS counted as a token that is predicted
    counted = results(exported_model(folder), tasks, "texts")
    assert here["metrics"] != pytest.approx(here["metrics"] | counted["metrics"], rel=1e-3)


@pytest.mark.usefixtures("offline")
def test_zero_shot_rows_are_those_of_the_exported_folder(
    made: tuple[TrainedModel, Path], tasks: Path, tmp_path: Path
) -> None:
    run, folder = made
    write_published(tmp_path)
    # the harness counts the EOS before a whole text; see above
    chosen = [task for task in find_tasks(tasks) if task.name != "texts"] + find_tasks(tmp_path)
    here, there = (
        run_tasks(model, chosen, limit=None, seed=0)
        for model in (harness_model(run, batch_size=3), exported_model(folder))
    )
    assert len(here.rows) >= 18 and here.tasks == there.tasks
    for ours, theirs in zip(here.rows, there.rows, strict=True):
        assert (ours.task, ours.metric, ours.n) == (theirs.task, theirs.metric, theirs.n)
        found, expected = ([row.score, row.low, row.high] for row in (ours, theirs))
        if ours.metric == "perplexity":  # 1e17 of so bad a model: its nats have six digits
            found, expected = (np.log(numbers).tolist() for numbers in (found, expected))
        assert found == pytest.approx(expected, rel=1e-6), ours
    assert any(0 < row.score < 1 for row in here.rows)


def test_what_cannot_be_answered_is_refused(made: tuple[TrainedModel, Path]) -> None:
    run, _ = made
    from lm_eval.api.instance import Instance

    arguments = ("def", {"until": [], "do_sample": True, "temperature": 1.0, "top_k": 5})
    request = Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)
    with pytest.raises(ConfigError, match="a task asks for text with top_k"):
        harness_model(run).generate_until([request])


def test_without_the_package_it_is_refused(
    made: tuple[TrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ConfigError, match=r"pip install 'cdrmix\[evaluation\]'"):
        harness_model(made[0])


def test_the_harness_is_imported_inside_of_functions_only() -> None:
    """It takes seconds, which no other command may wait for."""
    importing = []
    for path in (ROOT / "cdrmix").rglob("*.py"):
        tree = ast.parse(path.read_text())
        if not any(name.startswith("lm_eval") for _, name in imported_names(path, tree)):
            continue
        importing.append(path.name)
        outside = (n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom))
        for node in outside:
            assert not any(name.startswith("lm_eval") for _, name in imported_names(path, node))
    assert sorted(importing) == ["lm_harness.py", "zero_shot.py"]
