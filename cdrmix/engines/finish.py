"""The end of Stage A: last evaluation, baselines, summary, report."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix import runtime
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.engines.forgetting import Forgetting
from cdrmix.engines.recovery import write_record
from cdrmix.engines.run import Run
from cdrmix.engines.run_directory import METRICS
from cdrmix.engines.stage_a import Pretraining, evaluation_metrics
from cdrmix.evaluation.ngram import unigram_and_bigram
from cdrmix.evaluation.perplexity import Evaluation, held_out_rows
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import read_metrics, write_json_atomic
from cdrmix.planning.utilisation import utilisation

logger = get_logger(__name__)
# Folder in a run directory with the adapters of a finished run.
ADAPTER_FOLDER = "adapter"
_ROWS_AT_ONCE = 256  # in memory, of a corpus that may not fit in it


def finish(run: Run, stage: Pretraining, forgetting: Forgetting | None) -> None:
    """Evaluate, write metrics.json, report.html and adapters, and log the results; collective."""
    evaluation = stage.evaluate_now(run, max_tokens=run.config.evaluation.final_tokens)
    average = stage.evaluate_average(run, max_tokens=run.config.evaluation.final_tokens)
    judged = stage.suites.measure_at_the_end(run)
    run.hooks.evaluated(run.step, evaluation_metrics(evaluation, average) | judged)
    score = stage.last_score(run, evaluation)

    def write_results() -> None:
        from cdrmix.monitoring.report import write_report  # Matplotlib, which only the end needs

        if score is not None:
            run.saver.evaluated(score)
        baselines = _baselines(run, stage) if run.config.evaluation.baselines else None
        path = run.directory.path
        lines = read_metrics(path / METRICS)
        # Before the first step there is none.
        speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
        speed = statistics.median(speeds) if speeds else None
        summary: dict[str, Any] = {
            "name": run.config.name,
            "steps": run.step,
            "tokens_seen": stage.tokens_seen(run),
            "loss": lines[-1].get("loss") if lines else None,
            "seconds": run.seconds,
            # A mean would count the slow first steps of each start.
            "tokens_per_second_median": speed,
            **_utilisation(run, speed),
            "goodput": run.wall_time.to_json(),
            "start_up": run.start_up.to_json(),
            "evaluation": evaluation.as_json(),
            **({} if average is None else {"ema_evaluation": average.as_json()}),
            "baselines": baselines,
            "samples": stage.samples,
            **({} if forgetting is None else {"cpt": forgetting.summary()}),
            **({"suites": stage.suites.summary(run)} if run.config.evaluation.suites else {}),
            "checkpoints": run.checkpoints(),
        }
        write_json_atomic(path / "metrics.json", summary)
        write_record(run)
        report = write_report(path)
        sample = stage.samples[-1]
        logger.info("sample: %s%s", sample["prompt"], sample["text"])
        _log_evaluation(evaluation, average)
        if baselines is not None:
            logger.info(
                "for comparison, n-gram models of the same training tokens: "
                "loss %.4f of a smoothed bigram, %.4f of a smoothed unigram",
                *(baselines["bigram_loss"], baselines["unigram_loss"]),
            )
        logger.info("report: %s", report)

    runtime.first_rank_does(write_results)
    if run.config.model.lora is not None:
        runtime.first_rank_does(lambda: _write_adapter(run))


def _utilisation(run: Run, speed: float | None) -> dict[str, Any]:
    """Entry on the share of the devices' peak at a speed (tokens per second); empty where either is
    unknown."""
    found = speed and utilisation(
        run.config,
        device=runtime.device_name(),
        world_size=runtime.world_size(),
        tokens_per_second=speed,
        recomputes=run.plan.recomputes_blocks,
    )
    return {"utilisation": found._asdict()} if found else {}


def _log_evaluation(evaluation: Evaluation, average: Evaluation | None) -> None:
    """Log the held-out loss of the weights, of their average, by domain and by objective."""
    logger.info(
        "validation: loss %.4f, perplexity %.2f, %.4f bits per byte over %s tokens",
        *(evaluation.loss, evaluation.perplexity, evaluation.bits_per_byte),
        f"{evaluation.tokens:,}",
    )
    if average is not None:
        logger.info(
            "validation of the average of the weights: loss %.4f, perplexity %.2f",
            *(average.loss, average.perplexity),
        )
    if evaluation.domains:
        by_domain = (f"{each.domain} {each.loss:.4f}" for each in evaluation.domains)
        logger.info("validation loss by domain: %s", ", ".join(by_domain))
    if evaluation.objectives:
        by_objective = (f"{each.objective} {each.loss:.4f}" for each in evaluation.objectives)
        logger.info("validation loss by objective: %s", ", ".join(by_objective))


def _write_adapter(run: Run) -> None:
    """Write the adapters of the last checkpoint as a folder for peft; rank 0."""
    from cdrmix.export.exported_run import export_checkpoint  # brings transformers

    out = run.directory.path / ADAPTER_FOLDER
    new, old = (out.with_name(f".{ADAPTER_FOLDER}.{name}") for name in ("new", "old"))
    _remove(new)  # of a killed process
    saved = FoundCheckpoint(run.directory.folders[0] / str(run.step), run.step, ())
    exported = export_checkpoint(saved, new, format="peft")
    # Those of an earlier end, before the run was extended, stay until the new ones are whole.
    if out.exists():
        _remove(old)
        out.rename(old)
    new.rename(out)
    _remove(old)
    logger.info("adapter: %s, %s parameters", out, f"{exported.num_parameters:,}")


def _remove(folder: Path) -> None:
    """Remove an exported folder, which is read-only, if it is there."""
    if folder.exists():
        folder.chmod(0o755)
        shutil.rmtree(folder)


def _baselines(run: Run, stage: Pretraining) -> dict[str, float]:
    """Unigram and bigram loss on the rows just evaluated, counted on the tokens trained on."""
    # A second epoch would count its rows twice and leave the smoothing no rare bigrams.
    consumed = min(stage.loader.samples_consumed, stage.train.num_samples)
    validation = stage.corpus.validation
    held_out = held_out_rows(validation, run.config.evaluation.final_tokens)
    num_parts = -(-len(held_out) // _ROWS_AT_ONCE)

    # The rows trained on, in order, [n, T + 1] at a time.
    trained_rows = (
        stage.loader.sample_rows(start, min(start + _ROWS_AT_ONCE, end))
        for first, end in run.health.trained_windows(consumed)
        for start in range(first, end, _ROWS_AT_ONCE)
    )
    baselines = unigram_and_bigram(
        trained_rows,
        (validation.rows(rows) for rows in np.array_split(held_out, num_parts)),
        run.config.model.vocab_size,
    )
    return {"unigram_loss": baselines.unigram_loss, "bigram_loss": baselines.bigram_loss}
