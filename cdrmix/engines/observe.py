"""What watches a run: logged metrics, held-out loss, samples of text."""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import torch

from cdrmix import runtime
from cdrmix.config.model import MoEConfig
from cdrmix.engines.optim import learning_rate
from cdrmix.engines.run import Run
from cdrmix.engines.stage_a import RouterMeasures
from cdrmix.engines.step import StepResult
from cdrmix.evaluation.perplexity import Evaluation, evaluate
from cdrmix.models.generate import generate
from cdrmix.monitoring.health import Verdict
from cdrmix.monitoring.metrics import record, take_memory_peak_bytes
from cdrmix.objectives.router import router_monitors
from cdrmix.parallel.apply import for_inference

_ROUTER_METRICS = (
    "moe/overflow_fraction",
    "moe/routing_entropy_bits",
    "moe/load_balance_loss",
    "moe/z_loss",
)


class Measured(NamedTuple):
    """What a step measured over all ranks, the same on each.

    Attributes:
        loss: nats per token.
        routing: the router's metrics by name; none for a dense model.
    """

    loss: float
    routing: dict[str, float]


def measure(run: Run, result: StepResult) -> Measured:
    """Reduce a step's measurements over the ranks; one collective."""
    nats, routing = _over_all_ranks(run, result)
    return Measured(nats / result.tokens, routing)


def judge(run: Run, measured: Measured) -> list[Verdict | None]:
    """Verdicts on the loss and routing of the last step."""
    verdicts = [run.health.loss_known(run.step, measured.loss)]
    if measured.routing:
        overflow, entropy_bits = (measured.routing[name] for name in _ROUTER_METRICS[:2])
        verdicts.append(
            run.health.routing_known(run.step, entropy_bits=entropy_bits, overflow=overflow)
        )
    return verdicts


def log_step(
    run: Run, measured: Measured, evaluated: dict[str, float]
) -> tuple[Verdict | None, Verdict | None]:
    """Have rank 0 write and show what a step measured.

    Args:
        run: the run, its step counted.
        measured: of the step just completed.
        evaluated: eval/* metrics of this step, or none.
    Returns:
        Verdicts on the wait for data and on memory.
    Raises:
        StateError: on every rank, if the metrics could not be written.
    """
    steps, seconds, waited = run.observer.take_window()
    peak, total = take_memory_peak_bytes(), runtime.device_memory_gib() * 2**30
    own = (peak, peak / total, waited, waited / seconds)
    peak, peak_share, waited, waited_share = map(
        max, zip(*runtime.all_gather_object(own), strict=True)
    )
    verdicts = (
        run.health.wait_known(run.step, seconds=waited, share=waited_share),
        run.health.memory_known(run.step, peak_share),
    )
    training = run.config.training
    half = training.precision == "fp16"
    line = record(
        step=run.step,
        loss=measured.loss,
        learning_rate=learning_rate(run.step - 1, training),
        grad_norm=float(run.engine.get_global_grad_norm() or 0.0),
        loss_scale=float(run.engine.optimizer.cur_scale) if half else None,
        tokens_seen=run.tokens_seen,
        tokens_per_second=steps * training.tokens_per_step / seconds,
        step_seconds=seconds / steps,
        memory_peak_bytes=peak,
        **measured.routing,
        **run.health.metrics(),
        **evaluated,
    )
    with run.heartbeat.phase("logging"):  # rank 0 waits for a file server, the others for it
        runtime.together(lambda: run.observer.write(run.step, line))
    return verdicts


def _over_all_ranks(run: Run, result: StepResult) -> tuple[float, dict[str, float]]:
    """Nats of the global batch and the router's metrics, which only the last pipeline stage knows,
    on every rank; one collective."""
    moe, topology = run.config.model.moe, run.topology
    own = torch.zeros(1 if moe is None else 1 + len(_ROUTER_METRICS), dtype=torch.float64)
    own[0] = result.nats
    speaks = topology.counts_tokens and topology.data_rank == 0  # for its stage, all alike
    if moe is not None and result.router is not None and speaks:
        own[1:] = torch.tensor(_router_metrics(moe, result.router), dtype=own.dtype)
    nats, *measured = runtime.all_reduce_sum(own.to(runtime.device())).tolist()
    return nats, dict(zip(_ROUTER_METRICS, measured, strict=False))


def _router_metrics(moe: MoEConfig, router: RouterMeasures) -> list[float]:
    """Values of _ROUTER_METRICS."""
    monitors = router_monitors(router.per_token.cpu(), num_experts=moe.num_experts, top_k=moe.top_k)
    return [
        float(monitors.overflow_fraction.mean()),
        float(monitors.entropy_bits.mean()),
        float(router.load_balance),
        float(router.z),
    ]


def evaluate_now(run: Run, *, max_tokens: int) -> tuple[Evaluation, dict[str, float]]:
    """Held-out loss and a sample of text at the current step; the eval/* metrics of both."""
    began = time.monotonic()
    with run.heartbeat.phase("evaluating"), run.wall_time.spent("evaluation"):
        evaluation = evaluate(
            for_inference(run.engine.module),
            run.corpus.validation,
            max_tokens=max_tokens,
            batch_size=run.choice.micro_batch_size,
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
    settings, tokenizer = run.config.evaluation, run.corpus.tokenizer
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
