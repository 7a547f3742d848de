"""The one training loop.

It owns DeepSpeed's engine, the order of a step, the cadence of what observes it, and stopping.
What is trained on, and with which loss, is the stage's.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.engines.observe import evaluate_now
from cdrmix.engines.optim import adamw, learning_rate
from cdrmix.engines.resume import save
from cdrmix.engines.run import Run
from cdrmix.engines.stage_a import MicroStep, RouterMeasures, micro_step
from cdrmix.engines.stopping import Requests
from cdrmix.log import get_logger
from cdrmix.models.backbone import Backbone
from cdrmix.objectives.language_model import count_valid
from cdrmix.planning.profile import Choice

logger = get_logger(__name__)

# Evaluation reads a token at about a third of the cost of training on it, and generates a sample.
# Of the tokens trained on since the last one, this share keeps both within 5 % of the time.
_EVALUATED_SHARE = 0.07


class StepResult(NamedTuple):
    """What one optimizer step measured.

    Attributes:
        nats: summed cross-entropy over this rank's micro-steps, scalar.
        tokens: valid tokens of the global batch.
        router: means over the micro-steps, or None for a dense model.
        seconds: wall time of the step.
    """

    nats: Tensor
    tokens: int
    router: RouterMeasures | None
    seconds: float


class Agreement(NamedTuple):
    """What all ranks found out together before a step: tokens of the batch, anybody's wishes."""

    tokens: int
    stop: bool
    save: bool


def start_engine(model: Backbone, config: Config, choice: Choice) -> Any:
    """DeepSpeed's engine around the model, with our optimizer and the planned JSON."""
    deepspeed = runtime.import_deepspeed()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model, config.training),
        config=choice.deepspeed,
        dist_init_required=False,
    )
    return engine


def train(run: Run) -> bool:
    """Train up to the run's length.

    Returns:
        Whether a signal stopped it before; the state is then saved.
    """
    while run.step < run.config.training.num_steps:
        position = run.loader.state_dict()
        batch = run.loader.next()
        agreed = agree(batch["labels"], run.requests, save_is_due=_minutes_are_over(run))
        if agreed.stop or agreed.save:
            save(run, position)
        if agreed.stop:
            _say_goodbye(run)
            return True
        result = train_step(run.engine, run.config, batch, step=run.step, tokens=agreed.tokens)
        run.step += 1
        _observe(run, result)
    return False


def _observe(run: Run, result: StepResult) -> None:
    """What is due after a step: evaluation, log line, checkpoint."""
    config, last = run.config, run.step == run.config.training.num_steps
    evaluated: dict[str, float] = {}
    run.observer.step_done(run, result)
    if _is_due(run.step, config.evaluation.every_steps) and not last:  # the end has its own
        share = _EVALUATED_SHARE * (config.evaluation.every_steps or 0)
        tokens = int(share * config.training.tokens_per_step)
        _, evaluated = evaluate_now(run, max_tokens=tokens)
    if evaluated or last or _is_due(run.step, config.monitoring.log_every_steps):
        run.observer.log(run, result, evaluated)
    if last or _is_due(run.step, config.checkpoint.every_steps):
        save(run, run.loader.state_dict())


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _minutes_are_over(run: Run) -> bool:
    """Whether a checkpoint is due by the clock; rank 0's alone decides."""
    every = run.config.checkpoint.every_minutes
    if every is None or runtime.rank() != 0:
        return False
    return time.monotonic() - run.saved_time >= 60 * every


def agree(labels: Tensor, requests: Requests, *, save_is_due: bool) -> Agreement:
    """Sum the valid tokens of the global batch and every rank's wishes, in one collective.

    Args:
        labels: this rank's labels of the coming step, [A, B, T].
        requests: what signals asked this rank for.
        save_is_due: whether this rank's clock says that a checkpoint is due.
    """
    stop, save_asked = requests.poll()
    votes = torch.tensor([int(count_valid(labels)), int(stop), int(save_asked or save_is_due)])
    tokens, stops, saves = runtime.all_reduce_sum(votes.to(runtime.device())).tolist()
    return Agreement(tokens, stops > 0, saves > 0)


def train_step(
    engine: Any, config: Config, batch: dict[str, Tensor], *, step: int, tokens: int
) -> StepResult:
    """One optimizer step over this rank's micro-batches.

    Args:
        engine: DeepSpeed engine.
        config: the run's configuration.
        batch: `input_ids` and `labels`, each [A, B, T].
        step: steps completed before this one.
        tokens: valid tokens of the global batch, all ranks.
    """
    began = time.perf_counter()
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(step, config.training)
    input_ids = batch["input_ids"].to(engine.device, non_blocking=True)
    labels = batch["labels"].to(engine.device, non_blocking=True)
    nats_scale = runtime.world_size() * len(input_ids) / tokens
    parts: list[MicroStep] = []
    for ids, targets in zip(input_ids, labels, strict=True):
        part = micro_step(engine, config, ids, targets, nats_scale=nats_scale)
        engine.backward(part.loss)
        engine.step()  # acts on the last micro-step: clip, AdamW, zero gradients
        parts.append(part)
    return StepResult(
        nats=torch.stack([part.nats for part in parts]).sum(),
        tokens=tokens,
        router=RouterMeasures.mean([part.router for part in parts if part.router]),
        seconds=time.perf_counter() - began,
    )


def _say_goodbye(run: Run) -> None:
    reason = next(filter(None, runtime.all_gather_object(run.requests.stop)), "a request")
    logger.info(
        "stopped by %s after step %d, which is saved. Go on with --run-dir %s --resume auto",
        reason,
        run.step,
        run.directory.path,
    )
