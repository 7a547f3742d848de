"""The end of a run: last evaluation, baselines, summary, report."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cdrmix import runtime
from cdrmix.data.loader import Loader
from cdrmix.engines.recovery import write_record
from cdrmix.engines.run import Run
from cdrmix.evaluation.ngram import unigram_and_bigram
from cdrmix.evaluation.perplexity import Evaluation, evaluate, held_out_rows
from cdrmix.log import get_logger
from cdrmix.models.generate import generate
from cdrmix.monitoring.sinks import read_metrics, write_json_atomic
from cdrmix.parallel.apply import for_inference


def evaluate_now(run: Run, *, max_tokens: int) -> tuple[Evaluation, dict[str, float]]:
    """Held-out loss and a sample of text at the current step; the eval/* metrics of both."""
    began = time.monotonic()
    with run.heartbeat.phase("evaluating"), run.wall_time.spent("evaluation"):
        evaluation = evaluate(
            for_inference(run.engine.module),
            run.corpus.validation,
            max_tokens=max_tokens,
            batch_size=run.plan.micro_batch_size,
            segment_documents=run.config.data.segment_documents,
            topology=run.topology,
        )
        run.samples.append(_sample(run))
    return evaluation, {
        "eval/loss": evaluation.loss,
        "eval/perplexity": evaluation.perplexity,
        "eval/bits_per_byte": evaluation.bits_per_byte,
        "eval/seconds": time.monotonic() - began,
    }


def _sample(run: Run) -> dict[str, Any]:
    """A text that the model goes on with; every rank decodes the same one, in step."""
    settings = run.config.evaluation
    tokenizer = run.corpus.tokenizer
    prompt = [tokenizer.eos_id, *tokenizer.encode(settings.sample_prompt)]
    # Without a stop token: the experts of one rank may serve the text of another, and ranks whose
    # rounding differs in the last bit could come to an end of the text at different tokens.
    new = generate(
        for_inference(run.engine.module),
        torch.tensor([prompt], device=run.engine.device),
        max_new_tokens=settings.sample_tokens,
        temperature=settings.sample_temperature,
        seed=run.config.training.seed,
    )
    document = itertools.takewhile(lambda token: token != tokenizer.eos_id, new[0].tolist())
    text = tokenizer.decode(list(document))
    return {"step": run.step, "prompt": settings.sample_prompt, "text": text}


logger = get_logger(__name__)
_ROWS_AT_ONCE = 256


def finish(run: Run) -> None:
    """Evaluate, write metrics.json and report.html, and say how the run ended; collective."""
    evaluation, _ = evaluate_now(run, max_tokens=run.config.evaluation.final_tokens)
    runtime.together(lambda: _write(run, evaluation) if runtime.rank() == 0 else None)


def _write(run: Run, evaluation: Evaluation) -> None:
    from cdrmix.monitoring.report import write_report  # Matplotlib, which only the end needs

    baselines = _baselines(run) if run.config.evaluation.baselines else None
    path = run.directory.path
    write_json_atomic(path / "metrics.json", _summary(run, evaluation, baselines))
    write_record(run)
    report = write_report(path)
    sample = run.samples[-1]
    logger.info("sample: %s%s", sample["prompt"], sample["text"])
    logger.info(
        "validation: loss %.4f, perplexity %.2f, %.4f bits per byte over %s tokens",
        evaluation.loss,
        evaluation.perplexity,
        evaluation.bits_per_byte,
        f"{evaluation.tokens:,}",
    )
    if baselines is not None:
        logger.info(
            "counted on the very tokens it trained on: smoothed bigram %.4f, smoothed unigram %.4f",
            baselines["bigram_loss"],
            baselines["unigram_loss"],
        )
    logger.info("report: %s", report)


def _baselines(run: Run) -> dict[str, float]:
    """Unigram and bigram loss on the rows just evaluated, counted on the tokens trained on."""
    # a second epoch would count its rows twice and leave the smoothing no rare bigrams
    assert isinstance(run.loader, Loader), "Stage A runs on tokens"
    consumed = min(run.loader.samples_consumed, run.corpus.train.num_samples)
    validation = run.corpus.validation
    held_out = held_out_rows(validation, run.config.evaluation.final_tokens)
    counted = unigram_and_bigram(
        _trained_rows(run, consumed),
        (
            validation.rows(rows)
            for rows in np.array_split(held_out, -(-len(held_out) // _ROWS_AT_ONCE))
        ),
        run.config.model.vocab_size,
    )
    return {"unigram_loss": counted.unigram_loss, "bigram_loss": counted.bigram_loss}


def _trained_rows(run: Run, consumed: int) -> Iterator[np.ndarray]:
    """The samples trained on, in order, [n, T + 1] at a time."""
    assert isinstance(run.loader, Loader), "Stage A runs on tokens"
    for first, end in run.health.trained_windows(consumed):
        for start in range(first, end, _ROWS_AT_ONCE):
            yield run.loader.sample_rows(start, min(start + _ROWS_AT_ONCE, end))


def _summary(
    run: Run, evaluation: Evaluation, baselines: dict[str, float] | None
) -> dict[str, Any]:
    lines = read_metrics(run.directory.path / "metrics.jsonl")
    speeds = [line["tokens_per_second"] for line in lines]
    return {
        "name": run.config.name,
        "steps": run.step,
        "tokens_seen": run.tokens_seen,
        "loss": lines[-1]["loss"] if lines else None,
        "seconds": run.seconds,
        "tokens_per_second_median": statistics.median(speeds) if speeds else None,
        "goodput": run.wall_time.to_json(),
        "start_up": run.start_up.to_json(),
        "evaluation": evaluation.as_json(),
        "baselines": baselines,
        "samples": run.samples,
        "checkpoints": {"last": run.saver.saved_step, "folder": "checkpoints"},
    }
