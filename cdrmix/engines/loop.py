"""The one training loop: the order of a step, its intervals of logging, evaluation and saving.

Batches and losses are the stage's.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from cdrmix import runtime
from cdrmix.checkpoint.engine_state import before_each_step
from cdrmix.cluster.messages import want_no_more_starts
from cdrmix.cluster.start_records import command_to_go_on
from cdrmix.config.schema import Config, TrainingConfig
from cdrmix.engines.cadence import SaveTimes
from cdrmix.engines.reading import record_change
from cdrmix.engines.recovery import hold, react, save_on_hosts, save_run, settle
from cdrmix.engines.run import Batch, JsonObject, Result, Run
from cdrmix.engines.stage_a_optimizer import join, make_optimizer
from cdrmix.engines.supervision import LostAlone
from cdrmix.errors import DataError, StateError, TrainingError
from cdrmix.hooks import StepFigures
from cdrmix.hooks.called import Called
from cdrmix.hooks.dispatch import Ending
from cdrmix.log import get_logger
from cdrmix.monitoring.health import Verdict
from cdrmix.monitoring.metrics import record
from cdrmix.optimizers.muon import Muon
from cdrmix.parallel.gradient_sums import add_without_copies
from cdrmix.parallel.pipeline import Pipeline, name_phases
from cdrmix.parallel.topology import ModelParallelUnit, Topology
from cdrmix.planning.plan import Plan
from cdrmix.runtime.phases import phase

logger = get_logger(__name__)

# Ranks that fail alike in training do so within moments: they have just met in a collective.
_SECONDS_TO_FAIL = 10.0


def start_engine(
    model: nn.Module,
    config: Config,
    plan: Plan,
    topology: Topology,
    *,
    optimizer: Callable[[nn.Module, TrainingConfig], torch.optim.Optimizer] | None = None,
) -> Any:
    """Returns DeepSpeed's engine around the model, with our optimizer and the planned JSON.

    `optimizer` makes it; None: Stage A's, as configured. An average of the weights is kept by a
    hook of the run, `optimizers.average`.
    """
    deepspeed = runtime.import_deepspeed()
    # DeepSpeed's pipeline builds its own grid. The stages of a frozen backbone are unknown to
    # DeepSpeed, which has to learn of them here as of tensor parallelism.
    is_told = topology.degrees.model_ranks > 1 and not isinstance(model, Pipeline)
    made = optimizer(model, config.training) if optimizer else make_optimizer(model, config)
    # The bf16 optimizer prints pages on memory, and DeepSpeed warns of optimizers that it does not
    # know, such as Muon.
    level = deepspeed.utils.logger.level
    with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        if optimizer is None and config.optimizer.kind != "adamw":
            deepspeed.utils.logger.setLevel("ERROR")
            stack.callback(deepspeed.utils.logger.setLevel, level)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=made,
            config=plan.deepspeed,
            mpu=ModelParallelUnit(topology) if is_told else None,
            # cdrmix.runtime has made the process group, with a time-out of its own.
            dist_init_required=False,
        )
    runtime.share_timeout()
    add_without_copies(engine)
    if isinstance(made, Muon):
        join(engine, made, config)
    if isinstance(model, Pipeline):
        name_phases(engine)
    if config.training.precision == "fp16":  # at the lowest scale, cdrmix.monitoring.health judges
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
    return engine


def end_engine(engine: Any) -> None:
    """Free the memory of an engine that is not used any more."""
    engine.destroy()
    for parameter in engine.module.parameters():
        # DeepSpeed's bf16 optimizer binds methods to the parameters, which hold it and which the
        # garbage collector cannot see.
        vars(parameter).clear()


def train(run: Run) -> bool:
    """Train up to the end of a stage, and wait for the last checkpoint.

    Returns:
        True if a signal or a hook stopped it before; the state is then saved.
    Raises:
        DataError: on every rank, if a shard cannot be read on any of them; the state is saved.
        StateError: on every rank, if one could not write, or the run is not healthy.
        LostAlone: where code of a user's has failed on this rank, while others may wait for it.
    """
    try:
        with before_each_step(run.engine, partial(hold, run)):
            is_stopped = _train(run)
    except TrainingError as error:
        # Nearly all come on all ranks, which can wait for each other here. One of code of a user's
        # within a step may be of this rank alone: the others wait in a collective of that step.
        if not runtime.fails_everywhere(within_seconds=_SECONDS_TO_FAIL):
            logger.error("error: [rank %d] %s", runtime.rank(), error)
            raise LostAlone(error.exit_code) from error
        try:
            settle(run)
        except StateError as another:
            logger.warning("warning: %s", another)
        raise
    settle(run)
    run.hooks.check()
    if is_stopped:
        _tell_of_stop(run)
    return is_stopped


def _tell_of_stop(run: Run) -> None:
    """Log who stopped the run, and keep a batch script from starting it again for a hook's wish;
    collective."""
    asked = (run.hooks.take_wishes().reason_to_stop, run.requests.stop)
    of_hooks, of_signals = zip(*runtime.all_gather_object(asked), strict=True)
    by_hook = next(filter(None, of_hooks), None)
    folder = runtime.launch_folder()
    if by_hook is not None and folder is not None and runtime.rank() == 0:
        want_no_more_starts(folder)
    run.observer.end_progress()  # a live bar would be drawn again, below the command
    logger.info(
        "stopped by %s after step %d, which is saved. Go on with: %s",
        by_hook or next(filter(None, of_signals), "a request"),
        *(run.step, command_to_go_on(run.command, run.directory.path)),
    )


def _train(run: Run[Batch, Result]) -> bool:
    stage = run.stage
    while run.step < stage.num_steps:
        # Before the batch is read: a checkpoint saved in this turn begins with that batch.
        position = stage.loader.state_dict()
        began = time.perf_counter()
        batch = weights = None
        failure: TrainingError | None = None
        try:
            with phase("data"):
                batch = stage.next_batch(run)
        except DataError as error:  # the other ranks wait in `agree` and learn of it there
            failure = error
        waited_for_data = time.perf_counter() - began
        if batch is not None:
            batch = run.hooks.batch(batch)
            try:
                weights = stage.weights(run, batch)
            except TrainingError as error:  # as above: a user's term counts what it likes
                failure = error
        # On GPUs the optimizer step before ends in here: the first wait for the device.
        agreement = agree(run, weights)
        waited = time.perf_counter() - began
        if agreement.loss is not None:
            verdict = run.health.loss_known(run.step, agreement.loss)
            run.observer.loss_known(agreement.loss)
            run.unjudged = None
            # Before a save: a checkpoint then holds no step whose loss is known to be bad.
            if react(run, [verdict], position):
                continue
        _carry_out(run, agreement, position, failure)
        if agreement.stop:
            return True
        assert batch is not None, "agreement.failed otherwise"
        skipped = run.engine.skipped_steps
        lowers_scale = may_lower_scale(run.engine)
        stalled = run.saver.stall_seconds
        result = stage.train_step(run, batch, weights=agreement.weights)
        run.step += 1
        run.heartbeat.step_done(run.step)
        if run.start_up.step_done():
            logger.info("start-up: %s", run.start_up)
        is_skipped = run.engine.skipped_steps > skipped
        # Dynamic scaling in fp16 looks for its scale by skipping steps, which is no fault of a run.
        verdict = None
        if not (is_skipped and lowers_scale):
            verdict = run.health.step_done(run.step, is_skipped=is_skipped)
        # The wait for a checkpoint's copy inside the step counts as the checkpoint's, not the
        # step's.
        seconds = waited + result.seconds - (run.saver.stall_seconds - stalled)
        run.observer.step_done(run.step, seconds, waited=waited_for_data)
        run.wall_time.step_done(run.step, seconds)
        run.hooks.step_done(run.step, StepFigures(seconds, waited_for_data, is_skipped))
        step = run.step  # a verdict on it may go back
        _observe(run, result, verdict)
        run.memory.step_done(step)
    return False


def _carry_out(
    run: Run, agreement: Agreement, position: JsonObject, failure: TrainingError | None
) -> None:
    """Evaluate and save as agreed before a step, and raise on all ranks what one has failed with.

    `failure` is this rank's, if its share of the batch could not be read or weighed.
    """

    def raise_failure() -> None:
        if failure is not None:
            raise failure

    if agreement.ending is not None:
        _end(run, agreement.ending, position)
    if agreement.evaluate:
        _evaluate_now(run)
    if agreement.stop or agreement.save or agreement.failed:
        save_run(run, position)
    if agreement.failed:
        runtime.together(raise_failure)


def _evaluate_now(run: Run) -> None:
    """Evaluate behind the last step, as a hook has asked for; a line of its own in the metrics."""
    if run.hooks.is_evaluated(run.step):
        return
    results = run.stage.evaluate(run)
    if not results:
        logger.info("a hook asked for an evaluation, and this stage has none between steps")
        return
    run.hooks.evaluated(run.step, results)
    _write(run, run.hooks.log(run.step, record(step=run.step, **results)))


def _end(run: Run, ending: Ending, position: JsonObject) -> None:
    """Save, unless the state may be bad, and raise the error of a hook; on all ranks."""
    if ending.is_state_good:
        save_run(run, position)
    raise ending.error


def may_lower_scale(engine: Any) -> bool:
    """Tells if a gradient that is not finite would only lower fp16's loss scale."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler is not None and scaler.dynamic and scaler.cur_scale > scaler.min_scale


def _observe(run: Run[Batch, Result], result: Result, verdict: Verdict | None) -> None:
    """Judge, evaluate, log and save after a step, each where it is due."""
    config = run.config
    stage = run.stage
    last = run.step == stage.num_steps
    position = stage.loader.state_dict()
    intervals = (config.evaluation.every_steps, config.monitoring.log_every_steps)
    evaluates, logs = (each is not None and run.step % each == 0 for each in intervals)
    saves = run.cadence.is_due(run.step)
    evaluates = evaluates and not last  # the end has its own
    measuring = run.hooks.measuring(run.step, is_last=last)
    logs = logs or evaluates or bool(measuring) or last
    # A suite that waits is looked at again where ranks exchange objects anyway.
    suites = () if last else stage.suites_due(run, looks_again=logs)
    logs = logs or bool(suites)
    saves = saves or last
    verdicts = [verdict]
    # A save to the tiers of hosts alone is one of a judged step, too.
    saves_on_hosts = not saves and run.saver.host_tiers_due(run.step)
    if logs or saves or saves_on_hosts:
        metrics = stage.measure(run, result)
        verdicts += stage.judge(run, metrics)
    else:  # the loss becomes known in the next `agree`, without a collective of its own
        run.unjudged = stage.own_loss(result)
    # Before an evaluation or a save, which would be of weights known to be bad.
    if react(run, verdicts, position):
        return
    # Before what takes its time, so that a hook that has failed is told of at once.
    ending = run.hooks.agreed() if evaluates or measuring or suites else None
    if ending is not None:
        _end(run, ending, position)
    results: dict[str, float] = {}
    if evaluates:
        results |= stage.evaluate(run)
    if measuring:
        results |= measure(run, measuring)
    if suites:
        judged, is_best = stage.measure_suites(run, suites)
        results |= judged
        saves = saves or (is_best and config.checkpoint.keep_best)
    if results:
        run.hooks.evaluated(run.step, results)
    # The metrics first: a run resumed from the checkpoint of this step does not write them again.
    if logs:
        react(run, [*_log(run, metrics | results), run.health.take_forgetting()], position)
    if saves:
        save_run(run, position)
    elif saves_on_hosts:
        save_on_hosts(run, position)


def measure(run: Run, measuring: Sequence[Called]) -> dict[str, float]:
    """Have hooks measure the model as it stands; collective."""
    with run.heartbeat.phase("evaluating"), run.wall_time.spent("evaluation"):
        return run.hooks.measured(measuring, run.step)


def _log(run: Run, metrics: dict[str, float]) -> list[Verdict | None]:
    """Have rank 0 write and show a step's metrics; returns verdicts on the machine."""
    window = run.observer.window
    run.observer.window = []
    seconds = sum(of_step for of_step, _ in window)
    waited = sum(of_step for _, of_step in window)
    peak = run.memory.take()
    step_seconds = seconds / len(window)
    # The slowest and the fullest rank count: the others wait for the one, and the run ends with
    # the other.
    usage = (peak, peak / (runtime.device_memory_gib() * 2**30), waited, waited / seconds)
    times = (step_seconds, *run.cadence.take(run.saver))
    of_ranks = runtime.all_gather_object((*usage, *times, *run.hooks.take_seconds()))
    largest = [*map(max, zip(*of_ranks, strict=True))]
    peak, peak_share, waited, waited_share, slowest_step, stall, write, *of_hooks = largest
    _adapt_saves(run, SaveTimes(stall, write), step_seconds=slowest_step)
    verdicts = []
    if run.stage.name == "a":  # what Stage B waits for is its own making of lessons
        verdicts.append(run.health.wait_known(run.step, seconds=waited, share=waited_share))
        metrics["tokens_per_second"] = len(window) * run.config.training.tokens_per_step / seconds
    verdicts.append(run.health.memory_known(run.step, peak_share))
    metrics |= {
        "step_seconds": step_seconds,
        "memory_peak_bytes": peak,
        **run.health.metrics(),
        **run.hooks.timed(of_hooks, num_steps=len(window), step_seconds=step_seconds),
    }
    _write(run, run.hooks.log(run.step, record(step=run.step, **metrics)))
    return verdicts


def _adapt_saves(run: Run, longest: SaveTimes, *, step_seconds: float) -> None:
    """Have the times of saves follow what they take, alike on all ranks, and tell of it."""
    change = run.cadence.adapt(longest, step_seconds=step_seconds)
    if change is not None and runtime.rank() == 0:
        logger.info("saves: behind step %d: %s", run.step, change)
        record_change(run.directory.path, {"saves": run.cadence.setting}, run.step, change)


def _write(run: Run, line: dict[str, float]) -> None:
    # A phase, for its limit: rank 0 may wait for a file server, and the others for rank 0.
    with run.heartbeat.phase("logging"):
        runtime.together(lambda: run.observer.write(run.step, line))


class Agreement(NamedTuple):
    """Facts that all ranks know alike before a step."""

    # of the global batch: valid tokens, or those of each kind, in Stage A, lessons in Stage B
    weights: tuple[float, ...]
    stop: bool  # a rank received a signal to stop, or a hook there asks for it
    save: bool  # a signal or a hook asks a rank for it, or rank 0's clock says that one is due
    evaluate: bool  # a hook of a rank asks for it
    failed: bool  # a rank could not read or weigh its share of the batch
    ending: Ending | None  # error of a hook on a rank
    loss: float | None  # of the step before, in nats per token; None where it was known already


def agree(run: Run[Batch, Result], weights: Sequence[float] | None) -> Agreement:
    """Exchange in one collective: the weights of the global batch, requests of signals and hooks,
    hooks that failed, the loss of the step before, and each rank's progress with the checkpoint
    written in the background.

    `weights` are those of this rank's share of the coming step, None where it has failed.

    Raises:
        StateError: on every rank, if any of them could not write that checkpoint.
    """
    stop, save = run.requests.poll()
    wishes = run.hooks.take_wishes()
    stop = stop or wishes.reason_to_stop is not None
    save = save or wishes.wants_save
    minutes = run.cadence.minutes
    if minutes is not None and runtime.rank() == 0:  # clocks differ: one of them decides
        save = save or time.monotonic() - run.saved_time >= 60 * minutes
    num_weights = run.stage.num_weights
    own_weights = [0.0] * num_weights if weights is None else weights
    assert len(own_weights) == num_weights, "alike on all ranks"
    own_loss, loss_weight = run.unjudged or (0.0, 0.0)
    requests = [stop, save, weights is None]
    of_hooks = run.hooks.votes(wishes)
    # float64 counts tokens exactly up to 9e15.
    votes = [*own_weights, float(own_loss), *requests, *of_hooks, *run.saver.votes()]
    sums = torch.tensor(votes, dtype=torch.float64).to(runtime.device())
    totals = runtime.all_reduce_sum(sums).tolist()
    loss, *counts = totals[num_weights:]
    asked, counts = counts[: len(requests)], counts[len(requests) :]
    run.saver.advance(counts[len(of_hooks) :])
    evaluate, ending = run.hooks.heed(counts[: len(of_hooks)])
    stop, save, failed = (count > 0 for count in asked)
    last_loss = loss / loss_weight if run.unjudged else None
    weights_of_all = tuple(totals[:num_weights])
    return Agreement(weights_of_all, stop, save, evaluate, failed, ending, last_loss)
