"""Suite `reasoning`: tasks over texts of several windows, answered from memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdrmix.errors import ConfigError, StateError
from cdrmix.evaluation.suite import Judged, Request
from cdrmix.log import get_logger
from cdrmix.monitoring.suite_results import Row, SuiteResult

if TYPE_CHECKING:
    from cdrmix.evaluation.trained import TrainedModel
    from cdrmix.stage_b.long_context import Evaluated

logger = get_logger(__name__)
_NUM_EXAMPLES = 32


@dataclass(frozen=True)
class ReasoningRow(Row):
    """Score of one task and length, as the metric `score@Nx`.

    Attributes:
        length_ratio: of the texts, in windows.
        backbone_score: of the backbone alone, on the same texts.
    """

    length_ratio: int
    backbone_score: float


class Reasoning:
    """Scores of a reader after Stage B by task and length of the text, with those of its backbone
    alone beside them.

    `limit` texts of each task and length, 32 by default, or tasks of a file. Options: `branches`,
    to act by branches instead of the likeliest action, from the advantage `accept_threshold` on;
    `write_tasks`, a file to write the tasks to; `controls`, to answer the same texts in the ways of
    `stage_b.controls`; `held_out_wording`, to make texts of names and sentences that training makes
    none of; `lengths` of the texts, in windows.
    """

    def check(self, request: Request) -> None:
        """Raises ConfigError if options do not go together, or the file of tasks is not there."""
        options = request.options
        if options.get("accept_threshold") is not None and not options.get("branches"):
            raise ConfigError("reasoning: accept_threshold goes with branches. Give both")
        if request.tasks is None:
            return
        if not request.tasks.is_file():
            raise ConfigError(
                f"reasoning: --tasks {request.tasks} is no file. Give one with a JSON object per "
                "line (docs/reasoning.md)"
            )
        given = [
            request.limit,
            request.seed,
            *map(options.get, ("write_tasks", "held_out_wording", "lengths")),
        ]
        if any(given):
            raise ConfigError(
                "reasoning: --tasks reads every row of its file. Leave --limit, --examples, "
                "--seed, --lengths, --write-tasks and --held-out-wording out"
            )

    def measure(self, judged: Judged, request: Request) -> SuiteResult:
        """Scores the reader of the checkpoint that the model is from.

        The rows of the standard suite are kept as RUN_DIR/reasoning.json too. Raises ConfigError
        for a model that is spread over ranks, StateError for one without memory.
        """
        from cdrmix.reasoning.tasks import HELD_OUT, TRAINED
        from cdrmix.stage_b.long_context import (
            evaluate_reasoning,
            reader_of,
            store_rows,
            with_held_out,
        )

        options = request.options
        trained = _trained(judged)
        threshold = options.get("accept_threshold")
        loaded = reader_of(trained, accept_threshold=threshold)
        if request.tasks is None:
            loaded = with_held_out(loaded, data=judged.data)
        written = options.get("write_tasks")
        branches = bool(options.get("branches"))
        wording = HELD_OUT if options.get("held_out_wording") else TRAINED
        lengths = options.get("lengths")
        evaluated = evaluate_reasoning(
            loaded,
            num_examples=request.limit or _NUM_EXAMPLES,
            seed=request.seed,
            wording=wording,
            length_ratios=lengths and sorted(set(lengths)),
            file=request.tasks,
            written=None if written is None else Path(written),
            branches=branches,
            controls=bool(options.get("controls")),
        )
        # The run directory keeps the table of the standard suite alone.
        is_as_usual = wording is TRAINED and lengths is None and not branches
        is_standard = request.seed == 0 and is_as_usual
        if request.tasks is None and is_standard:
            try:
                store_rows(trained.checkpoint, evaluated.rows)
            except StateError as error:  # it may be read-only, and the suite takes minutes
                logger.warning("warning: %s", error)
        return judged.result(
            "reasoning",
            _rows(evaluated),
            settings={
                "seed": loaded.lessons.seed,
                "text_seed": request.seed,
                "held_out_wording": wording is HELD_OUT,
                "window_tokens": loaded.lessons.window_tokens,
                "task_file": own.digest if (own := loaded.lessons.own) else None,
                "tasks": None if request.tasks is None else str(request.tasks),
                "branches": branches,
                "accept_threshold": threshold,
            },
            details=_details(evaluated),
            notes=["", *evaluated.table().splitlines()],
        )


def _rows(evaluated: Evaluated) -> list[Row]:
    return [
        ReasoningRow(
            each.task,
            f"score@{each.length_ratio}x",
            *(each.score, each.low, each.high, each.n),
            *(each.length_ratio, each.backbone_score),
        )
        for each in evaluated.rows
    ]


def _details(evaluated: Evaluated) -> dict[str, Any]:
    """Parts of the printed object beside the rows: accepted branches, and answers of controls."""
    details: dict[str, Any] = {}
    if evaluated.accepted is not None:
        details["accepted_branches"] = evaluated.accepted
    of_controls = [each for each in evaluated.rows if each.controls is not None]
    if of_controls:
        details["controls"] = [
            {
                "task": each.task,
                "length_ratio": each.length_ratio,
                "columns": each.as_json()["controls"],
            }
            for each in of_controls
        ]
    return details


def _trained(judged: Judged) -> TrainedModel:
    """The model with its checkpoint, in which the parts beside the backbone are."""
    from cdrmix.evaluation.trained import TrainedModel
    from cdrmix.models.backbone import Backbone

    model = judged.model
    if judged.topology.degrees.world_size > 1:
        raise ConfigError(
            "reasoning: is measured in one process. Run `cdrmix evaluate --suite reasoning`"
        )
    source = Path(judged.source)
    if not isinstance(model, Backbone) or judged.step is None or judged.weights != "trained":
        raise ConfigError(
            f"{source}: reasoning is measured on the trained weights of a run with Stage B. Give "
            "its run directory, without --weights"
        )
    of_run = source / "checkpoints" / str(judged.step)
    checkpoint = of_run if of_run.is_dir() else source
    digest = judged.tokenizer_digest or ""
    return TrainedModel(judged.config, model, judged.tokenizer, digest, checkpoint, judged.step)
