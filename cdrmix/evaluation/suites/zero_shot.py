"""Suite `zero-shot`: tasks of lm-eval whose data are local, on the model in its layout."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix.errors import DataError, TrainingError
from cdrmix.evaluation.suite import Judged, Request
from cdrmix.evaluation.suites.local_tasks import LocalTask, find_tasks, write_stubs
from cdrmix.monitoring.suite_results import Row, SuiteResult, bootstrap_interval

_MMLU = "mmlu_"


class ZeroShot:
    """Accuracies, perplexities and the like, by lm-eval's own definitions of tasks."""

    def check(self, request: Request) -> None:
        """Raises DataError with what is missing, or ConfigError without lm_eval. No torch."""
        find_tasks(request.tasks)

    def measure(self, judged: Judged, request: Request) -> SuiteResult:
        """Judges a model; collective over the ranks of its layout, equal on all of them."""
        from cdrmix import runtime
        from cdrmix.evaluation.lm_harness import harness_of
        from cdrmix.evaluation.scoring import Scorer

        tasks = runtime.together(partial(find_tasks, request.tasks))
        scorer = Scorer.of(judged)
        found = run_tasks(
            harness_of(scorer, seed=request.seed), tasks, limit=request.limit, seed=request.seed
        )
        prefix = judged.tokenizer.prefix_ids[-1]
        settings = {
            "lm_eval": found.version,
            "tasks": found.tasks,
            "limit": request.limit,
            "seed": request.seed,
            "prefix_token": {"id": prefix, "text": judged.tokenizer.decode([prefix])},
            "max_length": judged.max_length,
            "batch_size": judged.batch_size,
            "dtype": str(judged.model.dtype).removeprefix("torch."),
        }
        return judged.result("zero-shot", found.rows, settings=settings)


@dataclass(frozen=True)
class Found:
    """Rows of tasks, and what each depends on: digests of files, examples, version, shots."""

    rows: list[Row]
    tasks: dict[str, Any]
    version: str


def run_tasks(model: Any, tasks: Sequence[LocalTask], *, limit: int | None, seed: int) -> Found:
    """Runs tasks on a model of the harness, of any kind.

    Args:
        limit: most examples of each task (count); None: all.
        seed: of the examples that a definition puts before a question, if it does.
    Raises:
        DataError: if a definition and its data do not go together.
    """
    from cdrmix import runtime

    runtime.download_nothing()
    import lm_eval
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory(prefix="cdrmix-zero-shot-") as folder, _quiet():

        def load() -> dict[str, Any]:
            write_stubs(tasks, Path(folder))
            manager = TaskManager(include_path=folder, include_defaults=False)
            return {task.name: _loaded(manager, task, seed) for task in tasks}

        made = runtime.together(load)
        try:
            # Not simple_evaluate: it sets the seeds of this process, and gives nothing on rank 1.
            done = evaluate(model, {"tasks": made}, limit=limit, bootstrap_iters=0)
        except TrainingError:
            raise
        except Exception as error:
            raise DataError(
                f"a task of {', '.join(made)} cannot be run: {type(error).__name__}: {error}. "
                "Its definition and the fields of its data do not go together"
            ) from error
    rows: list[Row] = []
    about: dict[str, Any] = {}
    for task in tasks:
        samples = done["samples"][task.name]
        rows += _rows(task.name, done["results"][task.name], samples, made[task.name], seed)
        about[task.name] = {
            "digests": task.digests,
            "examples": len({sample["doc_id"] for sample in samples}),
            "num_fewshot": done["n-shot"][task.name],
            "version": done["versions"][task.name],
        }
    rows += _of_all_subjects(rows, done["samples"], seed)
    return Found(rows, about, lm_eval.__version__)


def _loaded(manager: Any, task: LocalTask, seed: int) -> Any:
    """Makes a task of the harness."""
    try:
        made = manager.load([task.name])["tasks"][task.name]
    except Exception as error:  # of templates, functions and readers of data, whatever they raise
        raise DataError(
            f"{task.origin}: task {task.name} cannot be made: {type(error).__name__}: {error}. "
            "Its definition and the fields of its data do not go together"
        ) from error
    if made.get_config("num_fewshot") is None:
        made.set_config(key="num_fewshot", value=0)
    made.set_fewshot_seed(seed=seed)
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out the harness's progress bars and its remarks on definitions."""
    harness = logging.getLogger("lm_eval")
    level = harness.level
    harness.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # tqdm has no other switch by now
            yield
    finally:
        harness.setLevel(level)


def _rows(
    name: str, results: dict[str, Any], samples: list[dict[str, Any]], task: Any, seed: int
) -> list[Row]:
    """Rows of one task: each of its metrics, with an interval over its examples."""
    rows = []
    for key, score in results.items():
        metric, comma, kept = key.partition(",")
        if not comma or metric.endswith("_stderr") or isinstance(score, str):
            continue
        values = [
            sample[metric] for sample in samples if sample["filter"] == kept and metric in sample
        ]
        low, high = _interval(values, task.aggregation().get(metric), seed)
        # `none` is the name of no filter; others change what is counted as an answer
        named = metric if kept == "none" else key
        rows.append(Row(name, named, float(score), low, high, len(values)))
    return rows


def _interval(
    values: list[Any], total: Callable[[list[Any]], float] | None, seed: int
) -> tuple[float | None, float | None]:
    """95 % interval of a metric over examples; None for one that is no mean, nor a function of it.

    `total` is the harness's function that makes the metric of the values of all examples.
    """
    from lm_eval.api.registry import get_aggregation

    if total is get_aggregation("mean"):
        return bootstrap_interval([float(value) for value in values], seed=seed)
    if total is get_aggregation("perplexity"):  # of the log-likelihood of each example
        low, high = bootstrap_interval(values, seed=seed)
        return math.exp(-high), math.exp(-low)
    if total in (get_aggregation("weighted_perplexity"), get_aggregation("bits_per_byte")):
        # of log-likelihoods, and words or bytes
        nats = [nats / max(1, size) for nats, size in values]
        low, high = bootstrap_interval(nats, [size for _, size in values], seed=seed)
        if total is get_aggregation("bits_per_byte"):
            return -high / math.log(2), -low / math.log(2)
        return math.exp(-high), math.exp(-low)
    return None, None


def _of_all_subjects(rows: list[Row], samples: dict[str, Any], seed: int) -> list[Row]:
    """Accuracy over the questions of all subjects of MMLU, where there are several."""
    subjects = [row.task for row in rows if row.task.startswith(_MMLU) and row.metric == "acc"]
    if len(subjects) < 2:
        return []
    values = [float(sample["acc"]) for name in subjects for sample in samples[name]]
    interval = bootstrap_interval(values, seed=seed)
    return [Row("mmlu", "acc", sum(values) / len(values), *interval, len(values))]
