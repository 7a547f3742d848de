"""Stage A, pretraining: predict the next token of the corpus.

The stage around `training_step`: batches, metrics, held-out loss, samples of text.

A accumulation steps, B micro batch, T time.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.checkpoint.held_out import LOSS, Score
from cdrmix.config.evaluation import SuiteConfig
from cdrmix.config.schema import Config
from cdrmix.data import remote
from cdrmix.data.document import fim_ids
from cdrmix.data.loader import Loader
from cdrmix.data.mixture import MixedDataset
from cdrmix.data.read_pace import first_limits
from cdrmix.data.replay import ReplayDataset
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines.combination import (
    Batch,
    own_weights,
    weight_names,
    with_further_labels,
)
from cdrmix.engines.reading import Reading
from cdrmix.engines.recovery import averaged
from cdrmix.engines.routing import (
    router_parts,
    routing_metrics,
    routing_sums,
)
from cdrmix.engines.run import JsonObject, Run, Stage
from cdrmix.engines.suites import Suites
from cdrmix.engines.training_data import Corpus
from cdrmix.engines.training_step import StepResult, train_step
from cdrmix.evaluation.perplexity import Evaluation, evaluate, held_out_rows
from cdrmix.log import get_logger
from cdrmix.models.generate import generate
from cdrmix.monitoring.health import Verdict
from cdrmix.monitoring.metrics import member_name
from cdrmix.monitoring.suite_results import set_aside_results
from cdrmix.optimizers.average import has_average
from cdrmix.optimizers.muon import Muon
from cdrmix.optimizers.schedule import learning_rate
from cdrmix.parallel.apply import for_inference, frozen_in, logical_name_in
from cdrmix.parallel.topology import Topology, own_tokens
from cdrmix.planning.plan import Plan

logger = get_logger(__name__)


def _warn(reader: CheckpointFile, what: str) -> None:
    if runtime.rank() == 0:
        logger.warning("warning: %s: %s", reader.path, what)


# Evaluation reads a token at about a third of the cost of training on it, and generates a sample.
# Of the tokens trained on since the last one, this share keeps both within 5 % of the time.
_EVALUATED_SHARE = 0.07


def _tokens_between(config: Config) -> int:
    """Most tokens that an evaluation between steps reads; where there is an average of the weights,
    it reads them once more with that. Without an interval, a hook asks for it, as of the end."""
    if config.evaluation.every_steps is None:
        return config.evaluation.final_tokens
    share = _EVALUATED_SHARE * config.evaluation.every_steps
    passes = 1 if config.training.ema_decay is None else 2
    return int(share * config.training.tokens_per_step) // passes


def evaluation_metrics(evaluation: Evaluation, average: Evaluation | None) -> dict[str, float]:
    """Metrics of an evaluation, and of one of the average of the weights."""
    return {
        "eval/loss": evaluation.loss,
        **({} if average is None else {"eval/ema_loss": average.loss}),
        "eval/perplexity": evaluation.perplexity,
        "eval/bits_per_byte": evaluation.bits_per_byte,
        **{
            member_name("eval/domain/*/loss", each.domain): each.loss for each in evaluation.domains
        },
        **{
            member_name("eval/objective/*/loss", each.objective): each.loss
            for each in evaluation.objectives
        },
    }


class Pretraining(Stage[Batch, StepResult]):
    """Samples of a corpus in the run's global order, with old data among them for replay."""

    name: Literal["a", "b"] = "a"
    loader: Loader

    def __init__(
        self,
        config: Config,
        plan: Plan,
        topology: Topology,
        corpus: Corpus,
        replay: TokenDataset | MixedDataset | None = None,
    ) -> None:
        self.corpus = corpus
        self.train: TokenDataset | MixedDataset | ReplayDataset = corpus.train
        data = config.data
        # Kinds of tokens are told apart for objectives alone.
        self.fim_ids = fim_ids(corpus.tokenizer) if config.objectives is not None else None
        if config.cpt is not None and config.cpt.replay is not None and replay is not None:
            self.train = ReplayDataset(corpus.train, replay, config.cpt.replay.share)
        limits, queue = first_limits(config.resources), config.resources.queue_size
        # This rank's samples in the run's global order; sequence ranks have the same ones.
        self.loader = Loader(
            self.train,
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=plan.micro_batch_size,
            data_rank=topology.sample_rank,
            data_size=plan.degrees.sample_ranks,
            seed=config.training.seed,
            shuffle=data.order != "sequential",
            window_samples=data.window_samples if data.order == "windowed" else None,
            segment_documents=data.segment_documents,
            token_weights=data.token_weights,
            fim_ids=self.fim_ids,
            num_targets=config.model.mtp.num_tokens if config.model.mtp else 1,
            prefetch=limits.batches,
            readers=limits.threads,
            queue_samples=None if queue == "auto" else queue,
            pin=not runtime.use_cpu(),
        )
        self.reading = Reading(self.loader, config.resources)
        self.num_steps = config.training.num_steps
        self.num_weights = len(weight_names(config))
        self.suites = Suites(config.evaluation, corpus)
        self.samples: list[JsonObject] = []  # generated texts, one per evaluation

    def next_batch(self, run: Run) -> Batch:
        """Read this rank's share of the next batch, each tensor [A, B, T]."""
        # A store that does not answer is asked again for minutes, which is no rank that hangs.
        with run.heartbeat.phase("reading") if remote.is_in_use() else nullcontext():
            batch = self.reading.next_batch(step=run.step, folder=run.directory.path)
        return own_tokens(with_further_labels(batch, run.config), run.topology)

    def weights(self, run: Run, batch: Batch) -> list[float]:
        """Valid tokens of this rank's share, or their weight, or tokens of each kind."""
        # Ranks of one tensor group or pipeline see the same tokens, and one of them counts.
        if not run.topology.counts_tokens:
            return [0.0] * self.num_weights
        return own_weights(batch, run.config)

    def train_step(self, run: Run, batch: Batch, *, weights: Sequence[float]) -> StepResult:
        """Take one optimizer step."""
        return train_step(
            *(run.engine, run.config, run.topology, batch),
            step=run.step,
            weights=weights,
            rate_scale=run.health.rate_scale,
        )

    def tokens_seen(self, run: Run) -> int:
        """Tokens trained on, all ranks; earlier starts may have had another global batch."""
        samples = self.loader.samples_consumed - run.health.passed_over_samples
        return samples * run.config.training.sequence_length

    def evaluate(self, run: Run) -> dict[str, float]:
        """Held-out loss and a sample, at a cost in proportion to the steps since the last."""
        began = time.monotonic()
        evaluation = self.evaluate_now(run, max_tokens=_tokens_between(run.config))
        if run.config.evaluation.best_by == LOSS:
            run.evaluated = (run.step, Score(evaluation.loss, evaluation.tokens))
        average = self.evaluate_average(run, max_tokens=_tokens_between(run.config))
        seconds = time.monotonic() - began
        return evaluation_metrics(evaluation, average) | {"eval/seconds": seconds}

    def last_score(self, run: Run, last: Evaluation) -> Score | None:
        """Score of the end, as those between steps; collective.

        Of the held-out loss it is that over the tokens of the evaluations there, since losses over
        others do not compare; without any there, that of `last`, the evaluation of the end. Of a
        suite's row it is the one that the suites of the end gave; None: they failed.
        """
        settings = run.config.evaluation
        if settings.best_by != LOSS:
            return run.score
        if settings.every_steps is not None and run.config.checkpoint.keep_best:
            tokens = _tokens_between(run.config)
            of_end, of_others = (
                len(held_out_rows(self.corpus.validation, each))
                for each in (settings.final_tokens, tokens)
            )
            if of_end != of_others:
                with run.heartbeat.phase("evaluating"), run.wall_time.spent("evaluation"):
                    last = self._evaluate(run, tokens)
        return Score(last.loss, last.tokens)

    def evaluate_average(self, run: Run, *, max_tokens: int) -> Evaluation | None:
        """Held-out loss of the average of the weights; None where there is none (yet)."""
        if run.config.training.ema_decay is None or not has_average(run.engine):
            return None
        with (
            run.heartbeat.phase("evaluating"),
            run.wall_time.spent("evaluation"),
            averaged(run),
        ):
            return self._evaluate(run, max_tokens)

    def _evaluate(self, run: Run, max_tokens: int) -> Evaluation:
        return evaluate(
            for_inference(run.engine.module),
            self.corpus.validation,
            max_tokens=max_tokens,
            batch_size=run.plan.micro_batch_size,
            segment_documents=run.config.data.segment_documents,
            fim_ids=self.fim_ids,
            topology=run.topology,
        )

    def evaluate_now(self, run: Run, *, max_tokens: int) -> Evaluation:
        """Held-out loss at the current step; adds a sample of text."""
        settings = run.config.evaluation
        with run.heartbeat.phase("evaluating"), run.wall_time.spent("evaluation"):
            evaluation = self._evaluate(run, max_tokens)
            tokenizer = self.corpus.tokenizer
            prompt = [*tokenizer.prefix_ids, *tokenizer.encode(settings.sample_prompt)]
            # Without a stop token: the experts of one rank may serve the text of another, and ranks
            # whose rounding differs in the last bit could end the text at different tokens.
            new = generate(
                for_inference(run.engine.module),
                torch.tensor([prompt], device=run.engine.device),
                max_new_tokens=settings.sample_tokens,
                temperature=settings.sample_temperature,
                seed=run.config.training.seed,
            )
            document = itertools.takewhile(lambda token: token != tokenizer.eos_id, new[0].tolist())
            text = tokenizer.decode(document, continues=bool(settings.sample_prompt))
            self.samples.append({"step": run.step, "prompt": settings.sample_prompt, "text": text})
        return evaluation

    def suites_due(self, run: Run, *, looks_again: bool) -> list[SuiteConfig]:
        """Suites due behind the last step that fit into their share of the time."""
        return self.suites.due(run, looks_again=looks_again)

    def measure_suites(
        self, run: Run, suites: Sequence[SuiteConfig]
    ) -> tuple[dict[str, float], bool]:
        """Scores by suites between steps, and whether that of `best_by` is the best so far."""
        return self.suites.measure(run, suites)

    def own_loss(self, result: StepResult) -> tuple[Tensor, float]:
        """Nats of this rank's tokens, and the weight of the global batch."""
        return result.nats, result.combination.tokens

    def measure(self, run: Run, result: StepResult) -> dict[str, float]:
        """Reduce loss and routing, which only the last pipeline stage knows; one collective."""
        training = run.config.training
        routing = routing_sums(run.config.model, result.routing, run.topology)
        # float64: float32 would round a sum of nats over a large batch in its seventh digit.
        sums = (result.nats.reshape(1), result.parts, result.totals)
        own = [*(each.double().cpu() for each in sums), routing]
        totals = runtime.all_reduce_sum(torch.cat(own).to(runtime.device())).tolist()
        nats = totals[0]
        end = 1 + len(own[1])
        parts, of_terms = totals[1:end], totals[end : end + len(own[2])]
        end += len(own[2])
        half = len(parts) // 2
        metrics = {
            "loss": nats / result.combination.tokens,
            **result.combination.metrics(parts[:half], parts[half:], of_terms),
            # Of the step that was taken: its own loss is judged after this.
            "learning_rate": learning_rate(run.step - 1, training) * run.health.rate_scale,
            "grad_norm": float(run.engine.get_global_grad_norm() or 0.0),
            "tokens_seen": self.tokens_seen(run),
            **routing_metrics(run.config.model, training.sequence_length, totals[end:]),
            **self._samples_by_domain(run),
        }
        optimizer = run.engine.optimizer.optimizer
        if isinstance(optimizer, Muon):
            metrics["optimizer/spikes"] = optimizer.spikes
        if training.precision == "fp16":
            metrics["loss_scale"] = float(run.engine.optimizer.cur_scale)
        return metrics

    def _samples_by_domain(self, run: Run) -> dict[str, float]:
        """Samples trained on so far by domain; empty unless a mixture of several draws them."""
        counts: Counter[str] = Counter()
        for start, stop in run.health.trained_windows(self.loader.samples_consumed):
            counts.update(self.train.drawn(start, stop))
        if len(counts) < 2:
            return {}
        return {
            member_name("data/domain/*/samples", domain): count
            for domain, count in counts.items()
            if count
        }

    def judge(self, run: Run, metrics: dict[str, float]) -> list[Verdict | None]:
        """Verdicts on the loss and routing of the last step."""
        verdicts = [run.health.loss_known(run.step, metrics["loss"])]
        if router_parts(run.config.model):
            verdicts.append(
                run.health.routing_known(
                    run.step,
                    entropy_bits=metrics.get("moe/routing_entropy_bits"),
                    overflow=metrics.get("moe/overflow_fraction", 0.0),
                    mixer_entropy_bits=metrics.get("routing_mamba/routing_entropy_bits"),
                )
            )
        return verdicts

    def fragments(self, run: Run) -> Iterator[Fragment]:
        """This rank's share of masters, moments, average and buffers; with adapters, of them
        alone."""
        model = run.config.model
        name = logical_name_in(model)
        return engine_state.fragments(run.engine, name, elsewhere=frozen_in(model))

    def load(self, run: Run, reader: CheckpointFile) -> None:
        """Put a checkpoint into the engine."""
        model = run.config.model
        averages = run.config.training.ema_decay is not None
        engine_state.load_engine(
            run.engine,
            reader,
            logical_name_in(model),
            elsewhere=frozen_in(model),
            averages=averages,
        )
        if reader.has_average and not averages:
            _warn(reader, "its average of the weights is dropped: training.ema_decay is null")
        if averages and not reader.has_average and reader.state["step"]:
            _warn(reader, "holds no average of the weights: training.ema_decay begins one there")
        self.samples = list(reader.state["samples"])
        optimizer = run.engine.optimizer.optimizer
        if isinstance(optimizer, Muon):
            optimizer.load_history(reader.state["muon"])
        if run.config.evaluation.suites:
            self.suites.load_state_dict(reader.state.get("suites"))
            after = partial(set_aside_results, run.directory.path, after=reader.state["step"])
            runtime.first_rank_does(after)

    def saved(self, run: Run) -> JsonObject:
        """The texts generated so far, times of suites, and Muon's gradient norms."""
        saved: JsonObject = {"samples": self.samples}
        if run.config.evaluation.suites:
            saved["suites"] = self.suites.state_dict()
        optimizer = run.engine.optimizer.optimizer
        if isinstance(optimizer, Muon):
            saved["muon"] = optimizer.history()
        return saved
