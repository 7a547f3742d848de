"""One optimizer step: forward, loss, backward; then clip, AdamW, zero gradients.

What watches a run: logged metrics, held-out loss, samples of text.

Stage A as the loop sees it: predict the next token of the corpus.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.config.model import MoEConfig
from cdrmix.config.schema import Config
from cdrmix.data.loader import Loader
from cdrmix.engines.finish import evaluate_now
from cdrmix.engines.optim import learning_rate
from cdrmix.engines.run import Run
from cdrmix.models.backbone import Output, TokenEmbedding, logical_name
from cdrmix.monitoring.health import Verdict
from cdrmix.monitoring.metrics import record, take_memory_peak_bytes
from cdrmix.objectives.language_model import sum_weights
from cdrmix.objectives.router import router_losses, router_monitors
from cdrmix.parallel.exchange import mean_over_ranks
from cdrmix.parallel.pipeline import Pipeline
from cdrmix.parallel.topology import Topology, own_tokens
from cdrmix.parallel.zero3 import next_token_nats


class RouterMeasures(NamedTuple):
    """What the router did, detached and over all data ranks.

    Attributes:
        per_token: router statistics per token, [L, 2E + 3].
        load_balance: load-balance loss, scalar.
        z: z-loss, scalar.
    """

    per_token: Tensor
    load_balance: Tensor
    z: Tensor

    @classmethod
    def mean(cls, measured: list[RouterMeasures]) -> RouterMeasures | None:
        """Mean over micro-steps; None where nothing was measured."""
        if not measured:
            return None
        return cls(*(torch.stack(values).mean(0) for values in zip(*measured, strict=True)))


class MicroStep(NamedTuple):
    """What one micro-step gives.

    Attributes:
        loss: what backward starts from, scalar.
        nats: summed cross-entropy of this rank's tokens, weighted, scalar, detached.
        router: what the router did, or None for a dense model.
    """

    loss: Tensor
    nats: Tensor
    router: RouterMeasures | None


def micro_step(
    engine: Any,
    config: Config,
    topology: Topology,
    input_ids: Tensor,
    labels: Tensor,
    *,
    nats_scale: float,
    segment_ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> MicroStep:
    """Forward pass and loss of one micro-batch.

    Args:
        engine: DeepSpeed engine around the backbone.
        config: loss weights.
        topology: of this rank.
        input_ids: [B, T].
        labels: [B, T]; -100 is ignored.
        nats_scale: see `loss`.
        segment_ids: document of each token, [B, T]; None: a sample is one document.
        weights: of the labels, [B, T], float32; None: 1.
    """
    output: Output = engine(input_ids, segment_ids=segment_ids)
    embedding = engine.module.embedding
    return loss(output, embedding, labels, config, topology, nats_scale=nats_scale, weights=weights)


def loss(
    output: Output,
    embedding: TokenEmbedding,
    labels: Tensor,
    config: Config,
    topology: Topology,
    *,
    nats_scale: float,
    weights: Tensor | None = None,
) -> MicroStep:
    """Loss of one micro-batch from what the backbone gave.

    Args:
        output: hidden states of every position, router statistics of all layers.
        embedding: of this rank; tied with the head.
        labels: [B, T]; -100 is ignored.
        config: loss weights.
        topology: of this rank.
        nats_scale: factor on the summed cross-entropy: W * A / valid tokens of the global batch,
            or their weight. DeepSpeed divides by A and averages over W; what is left is the mean
            over all tokens.
        weights: of the labels, [B, T], float32; None: 1.
    """
    nats = next_token_nats(embedding, output.hidden, labels, weights)
    loss = nats * nats_scale
    moe = config.model.moe
    statistics = output.router_statistics
    if moe is None or statistics is None:
        return MicroStep(_all_or_nothing(loss), nats.detach(), None)
    per_token = mean_over_ranks(statistics, topology) / labels.numel()
    losses = router_losses(per_token, num_experts=moe.num_experts, top_k=moe.top_k)
    loss = loss + moe.load_balance_weight * losses.load_balance + moe.z_loss_weight * losses.z
    measured = RouterMeasures(per_token.detach(), losses.load_balance.detach(), losses.z.detach())
    return MicroStep(_all_or_nothing(loss), nats.detach(), measured)


def _all_or_nothing(loss: Tensor) -> Tensor:
    """The same loss, whose gradients are not finite where it is not.

    DeepSpeed skips a step by its gradients. Those of an infinite loss can be finite: softmax minus
    target, where the target's logit is minus infinity.
    """
    return loss * (1 + 0 * loss.detach())


# tensors of one micro-batch, [B, T], by the names that `Loader` gives them
Batch = dict[str, Tensor]


class StepResult(NamedTuple):
    """What one optimizer step measured.

    Attributes:
        nats: summed cross-entropy over this rank's micro-steps, scalar; zero where another rank
            counts the same tokens.
        tokens: valid tokens of the global batch, or what they weigh.
        router: means over the micro-steps; None for a dense model, and before the last stage.
        seconds: wall time of the step; in the loop, with its wait for data and other ranks.
        waited: seconds of them that this rank waited for data; known to the loop.
    """

    nats: Tensor
    tokens: float
    router: RouterMeasures | None
    seconds: float
    waited: float = 0.0


def train_step(
    engine: Any,
    config: Config,
    topology: Topology,
    batch: dict[str, Tensor],
    *,
    step: int,
    tokens: float,
) -> StepResult:
    """One optimizer step over this rank's micro-batches.

    Args:
        engine: DeepSpeed engine.
        config: the run's configuration.
        topology: of this rank.
        batch: `input_ids` and `labels`, each [A, B, T], `segment_ids` if documents are apart, and
            `weights` of the labels if they differ.
        step: steps completed before this one.
        tokens: valid tokens of the global batch, all ranks, or what they weigh.
    """
    began = time.perf_counter()
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(step, config.training)
    here = {name: values.to(engine.device, non_blocking=True) for name, values in batch.items()}
    nats_scale = topology.degrees.data * len(here["input_ids"]) / tokens
    micro_batches = [
        dict(zip(here, micro_batch, strict=True))
        for micro_batch in zip(*here.values(), strict=True)
    ]
    run = _pass_through_stages if topology.degrees.pipeline > 1 else _pass_one_by_one
    parts = run(engine, config, topology, micro_batches, nats_scale)
    nats = torch.stack([part.nats for part in parts]).sum() if parts else torch.zeros(())
    return StepResult(
        nats=nats.to(engine.device) * float(topology.counts_tokens),
        tokens=tokens,
        router=RouterMeasures.mean([part.router for part in parts if part.router]),
        seconds=time.perf_counter() - began,
    )


def _pass_one_by_one(
    engine: Any, config: Config, topology: Topology, micro_batches: list[Batch], nats_scale: float
) -> list[MicroStep]:
    """Forward and backward of each micro-batch in turn."""
    parts = []
    for inputs in micro_batches:
        part = micro_step(engine, config, topology, **inputs, nats_scale=nats_scale)
        engine.backward(part.loss)
        engine.step()  # acts on the last micro-step: clip, AdamW, zero gradients
        parts.append(part)
    return parts


def _pass_through_stages(
    engine: Any, config: Config, topology: Topology, micro_batches: list[Batch], nats_scale: float
) -> list[MicroStep]:
    """DeepSpeed's schedule of one forward, one backward; losses are on the last stage only."""
    parts: list[MicroStep] = []
    pipeline: Pipeline = engine.module
    coming = iter(micro_batches)

    def objective(output: Output) -> Tensor:  # of each micro-batch in turn
        inputs = next(coming)
        embedding = pipeline.stage.embedding
        part = loss(
            *(output, embedding, inputs["labels"], config, topology),
            nats_scale=nats_scale,
            weights=inputs.get("weights"),
        )
        parts.append(part)
        return part.loss

    pipeline.stage.objective = objective
    names = [name for name in ("input_ids", "segment_ids") if name in micro_batches[0]]
    # DeepSpeed takes pairs: what enters the first stage, and what its own loss would be given
    engine.train_batch((tuple(inputs[name] for name in names), ()) for inputs in micro_batches)
    pipeline.align_embeddings()
    return parts


_ROUTER_METRICS = (
    "moe/overflow_fraction",
    "moe/routing_entropy_bits",
    "moe/load_balance_loss",
    "moe/z_loss",
)


class StepMeasures(NamedTuple):
    """What a step measured over all ranks, the same on each.

    Attributes:
        loss: nats per token.
        routing: the router's metrics by name; none for a dense model.
    """

    loss: float
    routing: dict[str, float]


def measure(run: Run, result: StepResult) -> StepMeasures:
    """Reduce a step's measurements over the ranks; one collective."""
    nats, routing = _over_all_ranks(run, result)
    return StepMeasures(nats / result.tokens, routing)


def judge(run: Run, measured: StepMeasures) -> list[Verdict | None]:
    """Verdicts on the loss and routing of the last step."""
    verdicts = [run.health.loss_known(run.step, measured.loss)]
    if measured.routing:
        overflow, entropy_bits = (measured.routing[name] for name in _ROUTER_METRICS[:2])
        verdicts.append(
            run.health.routing_known(run.step, entropy_bits=entropy_bits, overflow=overflow)
        )
    return verdicts


def log_step(
    run: Run, measured: StepMeasures, evaluated: dict[str, float]
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
    peak = take_memory_peak_bytes()
    total = runtime.device_memory_gib() * 2**30
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
    moe = run.config.model.moe
    topology = run.topology
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

    def measure(self, run: Run, result: StepResult) -> StepMeasures:
        """See `measure`."""
        return measure(run, result)

    def judge(self, run: Run, measured: StepMeasures) -> list[Verdict | None]:
        """See `judge`."""
        return judge(run, measured)

    def log(
        self, run: Run, measured: StepMeasures, evaluated: dict[str, float]
    ) -> tuple[Verdict | None, ...]:
        """See `log_step`."""
        return log_step(run, measured, evaluated)

    def fragments(self, run: Run) -> Iterator[Fragment]:
        """What this rank saves of masters, moments and buffers."""
        return engine_state.fragments(run.engine, logical_name)

    def load(self, run: Run, reader: CheckpointFile) -> None:
        """Put a checkpoint into the engine."""
        engine_state.load_engine(run.engine, reader, logical_name)

    def saved(self, run: Run) -> dict[str, Any]:
        """What a checkpoint's state says beside what it says of every run."""
        return {"stage": "a"}
