"""What watches a run: logged metrics, held-out loss, samples of text."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.engines.optim import learning_rate
from cdrmix.errors import StateError
from cdrmix.evaluation.perplexity import Evaluation, evaluate
from cdrmix.models.generate import generate
from cdrmix.monitoring.metrics import memory_peak_bytes, record
from cdrmix.monitoring.sinks import MetricsFile, Progress
from cdrmix.objectives.router import router_monitors

if TYPE_CHECKING:
    from cdrmix.engines.loop import StepResult
    from cdrmix.engines.run import Run

_SAMPLE_TEMPERATURE = 0.8


class Observer:
    """Metrics file and progress of rank 0, and the time window between two logged lines.

    Attributes:
        last_loss: loss of the newest logged step, or None.
    """

    def __init__(self) -> None:
        self.last_loss: float | None = None
        self._metrics: MetricsFile | None = None
        self._progress: Progress | None = None
        self._steps, self._seconds = 0, 0.0

    def open(self, run: Run) -> None:
        """Start at the run's current step; metrics beyond it are cut off."""
        if runtime.rank() != 0:
            return
        self._metrics = MetricsFile(run.directory.path / "metrics.jsonl")
        self._metrics.truncate_after(run.step)
        total = run.config.training.num_steps
        self._progress = Progress(total, initial=run.step, stream=sys.stderr)

    def step_done(self, run: Run, result: StepResult) -> None:
        """Count a step that is not logged."""
        self._steps += 1
        self._seconds += result.seconds
        if self._progress is not None:
            self._progress.update(run.step)

    def log(self, run: Run, result: StepResult, evaluated: dict[str, float]) -> None:
        """Reduce a step's measurements over the ranks; rank 0 writes and shows them.

        Args:
            run: the run, its step counted.
            result: of the step just completed.
            evaluated: eval/* metrics of this step, or none.
        Raises:
            StateError: on every rank, if loss or gradient norm is no longer finite.
        """
        loss = float(runtime.all_reduce_sum(result.nats.double())) / result.tokens
        norm = float(run.engine.get_global_grad_norm() or 0.0)
        peak = max(runtime.all_gather_object(memory_peak_bytes()))
        self.last_loss = loss
        steps, seconds = self._steps, self._seconds
        self._steps, self._seconds = 0, 0.0
        training = run.config.training
        half = training.precision == "fp16"
        line = record(
            step=run.step,
            loss=loss,
            learning_rate=learning_rate(run.step - 1, training),
            grad_norm=norm,
            loss_scale=float(run.engine.optimizer.cur_scale) if half else None,
            tokens_seen=run.tokens_seen,
            tokens_per_second=steps * training.tokens_per_step / seconds,
            step_seconds=seconds / steps,
            memory_peak_bytes=peak,
            **_router_metrics(run.config, result),
            **evaluated,
        )
        if self._metrics is not None and self._progress is not None:
            self._metrics.write(line)
            self._progress.update(run.step, line)
        _stop_if_diverged(run, loss, norm if not half else 0.0)  # fp16 skips such a step

    def sync(self) -> None:
        """Make the written metrics durable, before a checkpoint of their step is named."""
        if self._metrics is not None:
            self._metrics.sync()

    def close(self) -> None:
        """End the progress and close the metrics file."""
        if self._progress is not None:
            self._progress.close()
        if self._metrics is not None:
            self._metrics.close()


def _stop_if_diverged(run: Run, loss: float, norm: float) -> None:
    if math.isfinite(loss) and math.isfinite(norm):
        return
    raise StateError(
        f"step {run.step}: loss = {loss}, gradient norm = {norm}: the run has diverged and was "
        f"stopped. The newest checkpoint is that of step {run.saved_step}. Try a lower "
        "training.learning_rate, more training.warmup_steps or training.precision = fp32"
    )


def _router_metrics(config: Config, result: StepResult) -> dict[str, float]:
    moe = config.model.moe
    if moe is None or result.router is None:
        return {}
    monitors = router_monitors(
        result.router.per_token.cpu(), num_experts=moe.num_experts, top_k=moe.top_k
    )
    return {
        "moe/overflow_fraction": float(monitors.overflow_fraction.mean()),
        "moe/routing_entropy_bits": float(monitors.entropy_bits.mean()),
        "moe/load_balance_loss": float(result.router.load_balance),
        "moe/z_loss": float(result.router.z),
    }


def evaluate_now(run: Run, *, max_tokens: int) -> tuple[Evaluation, dict[str, float]]:
    """Held-out loss and a sample of text at the current step; the eval/* metrics of both."""
    began = time.monotonic()
    evaluation = evaluate(
        run.engine.module,
        run.corpus.validation,
        max_tokens=max_tokens,
        batch_size=run.choice.micro_batch_size,
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
    new = generate(
        run.engine.module,
        torch.tensor([prompt], device=run.engine.device),
        max_new_tokens=settings.sample_tokens,
        temperature=_SAMPLE_TEMPERATURE,
        seed=run.config.training.seed,
        stop_id=tokenizer.eos_id,
    )
    text = tokenizer.decode([token for token in new[0].tolist() if token != tokenizer.eos_id])
    return {"step": run.step, "prompt": settings.sample_prompt, "text": text}
