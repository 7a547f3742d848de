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
from cdrmix.config.schema import Config, TrainingConfig
from cdrmix.engines.observe import diverged
from cdrmix.engines.optim import adamw
from cdrmix.engines.resume import save, settle
from cdrmix.engines.run import Run
from cdrmix.errors import DataError, StateError, TrainingError
from cdrmix.log import get_logger
from cdrmix.parallel.mpu import ModelParallelUnit
from cdrmix.parallel.topology import Topology
from cdrmix.planning.profile import Choice

logger = get_logger(__name__)


class Agreement(NamedTuple):
    """What all ranks found out together before a step.

    Attributes:
        tokens: valid tokens of the global batch, or what they weigh.
        stop: whether any rank is asked to stop.
        save: whether any rank is asked to save.
        unread: whether any rank could not read its share of the batch.
    """

    tokens: float
    stop: bool
    save: bool
    unread: bool


def start_engine(
    model: nn.Module,
    config: Config,
    choice: Choice,
    topology: Topology,
    *,
    optimizer: Callable[[nn.Module, TrainingConfig], torch.optim.Optimizer] = adamw,
) -> Any:
    """DeepSpeed's engine around the model, with our optimizer and the planned JSON."""
    deepspeed, degrees = runtime.import_deepspeed(), topology.degrees
    # a pipeline brings a grid of its own
    needs_telling = degrees.tensor > 1 and degrees.pipeline == 1
    with contextlib.redirect_stdout(io.StringIO()):  # its bf16 optimizer tells of memory at length
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer(model, config.training),
            config=choice.deepspeed,
            mpu=ModelParallelUnit(topology) if needs_telling else None,
            dist_init_required=False,
        )
    return engine


def train(run: Run) -> bool:
    """Train up to the run's length, and wait for the last checkpoint.

    Returns:
        Whether a signal stopped it before; the state is then saved.
    Raises:
        DataError: on every rank, if a shard went missing for any of them; the state is saved.
        StateError: on every rank, if one could not write, or the run diverged.
    """
    try:
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
        position, began = run.loader.state_dict(), time.perf_counter()
        batch, failure = _next_batch(run)
        # On GPUs this is also where the optimizer step before is waited for.
        agreed = agree(run, batch, save_is_due=_minutes_are_over(run))
        waited = time.perf_counter() - began
        if agreed.stop or agreed.save or agreed.unread:
            save(run, position)
        if agreed.unread:
            runtime.together(partial(_give_up, failure))
        if agreed.stop:
            return True
        assert batch is not None, "agreed.unread otherwise"
        skipped = run.engine.skipped_steps
        result = run.stage.train_step(run, batch, weight=agreed.tokens)
        run.step += 1
        run.heartbeat.step_done(run.step)
        if run.start_up.step_done():
            logger.info("start-up: %s", run.start_up)
        if run.engine.skipped_steps > skipped and run.config.training.precision != "fp16":
            raise diverged(run, "the gradients are not finite")  # fp16 lowers its scale instead
        _observe(run, result._replace(seconds=waited + result.seconds))
    return False


def _next_batch(run: Run) -> tuple[Any, DataError | None]:
    """This rank's share of the next batch, or why it could not be read."""
    try:
        return run.stage.next_batch(run), None
    except DataError as error:  # the others wait for this rank in `agree` and are told there
        return None, error


def _give_up(failure: DataError | None) -> None:
    if failure is not None:
        raise failure


def _observe(run: Run, result: Any) -> None:
    """What is due after a step: evaluation, log line, checkpoint."""
    config, last = run.config, run.step == run.stage.num_steps
    evaluated: dict[str, float] = {}
    run.observer.step_done(run.step, result.seconds)
    run.wall_time.step_done(run.step, result.seconds)
    if _is_due(run.step, config.evaluation.every_steps) and not last:  # the end has its own
        evaluated = run.stage.evaluate(run)
    if evaluated or last or _is_due(run.step, config.monitoring.log_every_steps):
        run.stage.log(run, result, evaluated)
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


def agree(run: Run, batch: Any, *, save_is_due: bool) -> Agreement:
    """Sum the valid tokens of the global batch, or what they weigh, every rank's wishes, and how
    far it is with the checkpoint that it writes in the background, in one collective.

    Args:
        run: the run, for its signals and this rank's place.
        batch: this rank's share of the coming step; None: it has none.
        save_is_due: whether this rank's clock says that a checkpoint is due.
    Raises:
        StateError: on every rank, if any of them could not write that checkpoint.
    """
    stop, save_asked = run.requests.poll()
    valid = run.stage.weight(run, batch) if batch is not None else 0.0
    # float64 counts tokens exactly, up to 9e15 of them.
    wishes = [stop, save_asked or save_is_due, batch is None]
    votes = torch.tensor([valid, *wishes, *run.saver.votes()], dtype=torch.float64)
    tokens, *asked = runtime.all_reduce_sum(votes.to(runtime.device())).tolist()
    run.saver.advance(asked[len(wishes) :])
    # A batch of nothing but prompts may weigh nothing: its loss is 0, not 0 / 0.
    return Agreement(tokens or 1.0, *(count > 0 for count in asked[: len(wishes)]))


def _say_goodbye(run: Run) -> None:
    reason = next(filter(None, runtime.all_gather_object(run.requests.stop)), "a request")
    logger.info(
        "stopped by %s after step %d, which is saved. Go on with --run-dir %s --resume auto",
        reason,
        run.step,
        run.directory.path,
    )
