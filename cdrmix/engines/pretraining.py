"""Stage A as the loop sees it: predict the next token of the corpus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.checkpoint.reader import CheckpointReader
from cdrmix.data.loader import Loader
from cdrmix.engines.observe import Measured, evaluate_now, judge, log_step, measure
from cdrmix.engines.run import Run
from cdrmix.engines.step import StepResult, train_step
from cdrmix.models.backbone import logical_name
from cdrmix.monitoring.health import Verdict
from cdrmix.objectives.language_model import sum_weights
from cdrmix.parallel.topology import own_tokens

# Evaluation reads a token at about a third of the cost of training on it, and generates a sample.
# Of the tokens trained on since the last one, this share keeps both within 5 % of the time.
_EVALUATED_SHARE = 0.07


class Pretraining:
    """Stage A.

    Attributes:
        num_steps: see `Stage`.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def next_batch(self, run: Run) -> dict[str, Tensor]:
        """This rank's share of the next batch, each tensor [A, B, T]."""
        assert isinstance(run.loader, Loader), "Stage A runs on tokens"
        return own_tokens(run.loader.next(), run.topology)

    def weight(self, run: Run, batch: dict[str, Tensor]) -> float:
        """Valid tokens of this rank's share, or what they weigh."""
        if not run.topology.counts_tokens:
            return 0.0
        return float(sum_weights(batch["labels"], batch.get("weights")))

    def train_step(self, run: Run, batch: dict[str, Tensor], *, weight: float) -> StepResult:
        """One optimizer step."""
        return train_step(run.engine, run.config, run.topology, batch, step=run.step, tokens=weight)

    def evaluate(self, run: Run) -> dict[str, float]:
        """Held-out loss and a sample, at a cost in proportion to the steps since the last."""
        share = _EVALUATED_SHARE * (run.config.evaluation.every_steps or 0)
        tokens = int(share * run.config.training.tokens_per_step)
        return evaluate_now(run, max_tokens=tokens)[1]

    def own_loss(self, result: StepResult) -> tuple[Tensor, float]:
        """Nats of this rank's tokens, and what all tokens of the batch weigh."""
        return result.nats, result.tokens

    def measure(self, run: Run, result: StepResult) -> Measured:
        """See `measure`."""
        return measure(run, result)

    def judge(self, run: Run, measured: Measured) -> list[Verdict | None]:
        """See `judge`."""
        return judge(run, measured)

    def log(
        self, run: Run, measured: Measured, evaluated: dict[str, float]
    ) -> tuple[Verdict | None, ...]:
        """See `log_step`."""
        return log_step(run, measured, evaluated)

    def fragments(self, run: Run) -> Iterator[Fragment]:
        """What this rank saves of masters, moments and buffers."""
        return engine_state.fragments(run.engine, logical_name)

    def load(self, run: Run, reader: CheckpointReader) -> None:
        """Put a checkpoint into the engine."""
        engine_state.load(run.engine, reader, logical_name)

    def saved(self, run: Run) -> dict[str, Any]:
        """What a checkpoint's state says beside what it says of every run."""
        return {"stage": "a"}
