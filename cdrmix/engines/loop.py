"""The one training loop.

It owns DeepSpeed's engine, the order of a step, the cadence of what observes it, and stopping.
What is trained on, and with which loss, is the stage's.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from cdrmix import runtime
from cdrmix.checkpoint.engine_state import before_each_step
from cdrmix.config.schema import Config, TrainingConfig
from cdrmix.engines.optim import adamw
from cdrmix.engines.recovery import hold, react, save_run, settle
from cdrmix.engines.run import Run
from cdrmix.errors import DataError, StateError, TrainingError
from cdrmix.log import get_logger
from cdrmix.monitoring.health import Verdict
from cdrmix.parallel.pipeline import Pipeline
from cdrmix.parallel.topology import ModelParallelUnit, Topology
from cdrmix.planning.plan import Plan

logger = get_logger(__name__)


class Agreement(NamedTuple):
    """What all ranks found out together before a step.

    Attributes:
        tokens: valid tokens of the global batch, or what they weigh.
        stop: whether any rank is asked to stop.
        save: whether any rank is asked to save.
        unread: whether any rank could not read its share of the batch.
        loss: of the step before, in nats per token; None where it was known already.
    """

    tokens: float
    stop: bool
    save: bool
    unread: bool
    loss: float | None


def start_engine(
    model: nn.Module,
    config: Config,
    plan: Plan,
    topology: Topology,
    *,
    optimizer: Callable[[nn.Module, TrainingConfig], torch.optim.Optimizer] = adamw,
) -> Any:
    """DeepSpeed's engine around the model, with our optimizer and the planned JSON."""
    deepspeed = runtime.import_deepspeed()
    degrees = topology.degrees
    # DeepSpeed's pipeline brings a grid of its own; a frozen backbone's stages are none of its
    needs_telling = degrees.model_ranks > 1 and not isinstance(model, Pipeline)
    with contextlib.redirect_stdout(io.StringIO()):  # its bf16 optimizer tells of memory at length
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer(model, config.training),
            config=plan.deepspeed,
            mpu=ModelParallelUnit(topology) if needs_telling else None,
            dist_init_required=False,
        )
    if config.training.precision == "fp16":  # at the lowest scale, cdrmix.monitoring.health judges
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
    return engine


def train(run: Run) -> bool:
    """Train up to the run's length, and wait for the last checkpoint.

    Returns:
        Whether a signal stopped it before; the state is then saved.
    Raises:
        DataError: on every rank, if a shard went missing for any of them; the state is saved.
        StateError: on every rank, if one could not write, or the run is not healthy.
    """
    try:
        with before_each_step(run.engine, partial(hold, run)):
            is_stopped = _train(run)
    except TrainingError:  # the same on all ranks, which can still wait for each other
        try:
            settle(run)
        except StateError as another:
            logger.warning("warning: %s", another)
        raise
    settle(run)
    if is_stopped:
        _say_goodbye(run)
    return is_stopped


def _train(run: Run) -> bool:
    while run.step < run.stage.num_steps:
        position = run.loader.state_dict()
        began = time.perf_counter()
        batch, failure = _next_batch(run)
        waited_for_data = time.perf_counter() - began
        # On GPUs this is also where the optimizer step before is waited for.
        agreed = agree(run, batch, save_is_due=_minutes_are_over(run))
        waited = time.perf_counter() - began
        if agreed.loss is not None:
            verdict = run.health.loss_known(run.step, agreed.loss)
            run.unjudged = None
            # before a save: what a checkpoint holds is then as good as the losses tell
            if react(run, [verdict], position):
                continue
        if agreed.stop or agreed.save or agreed.unread:
            save_run(run, position)
        if agreed.unread:
            runtime.together(partial(_give_up, failure))
        if agreed.stop:
            return True
        assert batch is not None, "agreed.unread otherwise"
        skipped = run.engine.skipped_steps
        may_lower_scale = _may_lower_scale(run.engine)
        stalled = run.saver.stall_seconds
        result = run.stage.train_step(run, batch, weight=agreed.tokens)
        run.step += 1
        run.heartbeat.step_done(run.step)
        if run.start_up.step_done():
            logger.info("start-up: %s", run.start_up)
        is_skipped = run.engine.skipped_steps > skipped
        verdict = None
        if not (is_skipped and may_lower_scale):
            verdict = run.health.step_done(run.step, is_skipped=is_skipped)
        # what the step waited for a checkpoint's copy is that of the checkpoint
        seconds = waited + result.seconds - (run.saver.stall_seconds - stalled)
        result = result._replace(seconds=seconds, waited=waited_for_data)
        _observe(run, result, verdict)
    return False


def _may_lower_scale(engine: Any) -> bool:
    """Whether a gradient that is not finite would only lower fp16's loss scale."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler is not None and scaler.dynamic and scaler.cur_scale > scaler.min_scale


def _next_batch(run: Run) -> tuple[Any, DataError | None]:
    """This rank's share of the next batch, or why it could not be read."""
    try:
        return run.stage.next_batch(run), None
    except DataError as error:  # the others wait for this rank in `agree` and are told there
        return None, error


def _give_up(failure: DataError | None) -> None:
    if failure is not None:
        raise failure


def _observe(run: Run, result: Any, verdict: Verdict | None) -> None:
    """What is due after a step: verdicts, evaluation, log line, checkpoint."""
    config = run.config
    last = run.step == run.stage.num_steps
    position = run.loader.state_dict()
    evaluated: dict[str, float] = {}
    run.observer.step_done(run.step, result.seconds, waited=result.waited)
    run.wall_time.step_done(run.step, result.seconds)
    evaluates = _is_due(run.step, config.evaluation.every_steps) and not last  # the end has its own
    logs = evaluates or last or _is_due(run.step, config.monitoring.log_every_steps)
    saves = last or _is_due(run.step, config.checkpoint.every_steps)
    verdicts = [verdict]
    if logs or saves:
        measured = run.stage.measure(run, result)
        verdicts += run.stage.judge(run, measured)
    else:  # its loss becomes known in `agree`, without a collective of its own
        run.unjudged = run.stage.own_loss(result)
    if react(run, verdicts, position):
        return
    if evaluates:
        evaluated = run.stage.evaluate(run)
    if logs:
        react(run, run.stage.log(run, measured, evaluated), position)
    if saves:
        save_run(run, position)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _minutes_are_over(run: Run) -> bool:
    """Whether a checkpoint is due by the clock; rank 0's alone decides."""
    every = run.config.checkpoint.every_minutes
    if every is None or runtime.rank() != 0:
        return False
    return time.monotonic() - run.saved_time >= 60 * every


def agree(run: Run, batch: Any, *, save_is_due: bool) -> Agreement:
    """Sum the valid tokens of the global batch, or what they weigh, every rank's wishes, the loss
    of the step before, and how far each is with the checkpoint that it writes in the background,
    in one collective.

    Args:
        run: the run, for its signals, this rank's place and its last measures.
        batch: this rank's share of the coming step; None: it has none.
        save_is_due: whether this rank's clock says that a checkpoint is due.
    Raises:
        StateError: on every rank, if any of them could not write that checkpoint.
    """
    stop, save_asked = run.requests.poll()
    valid = run.stage.weight(run, batch) if batch is not None else 0.0
    # float64 counts tokens exactly, up to 9e15 of them.
    wishes = [stop, save_asked or save_is_due, batch is None]
    own_loss, weight = run.unjudged or (0.0, 0.0)
    votes = torch.tensor([valid, float(own_loss), *wishes, *run.saver.votes()], dtype=torch.float64)
    tokens, loss, *asked = runtime.all_reduce_sum(votes.to(runtime.device())).tolist()
    run.saver.advance(asked[len(wishes) :])
    stop, save_asked, unread = (count > 0 for count in asked[: len(wishes)])
    # A batch of nothing but prompts may weigh nothing: its loss is 0, not 0 / 0.
    last_loss = loss / weight if run.unjudged else None
    return Agreement(tokens or 1.0, stop, save_asked, unread, last_loss)


def _say_goodbye(run: Run) -> None:
    reason = next(filter(None, runtime.all_gather_object(run.requests.stop)), "a request")
    logger.info(
        "stopped by %s after step %d, which is saved. Go on with --run-dir %s --resume auto",
        reason,
        run.step,
        run.directory.path,
    )
