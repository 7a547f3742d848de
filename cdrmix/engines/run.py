"""What one run consists of while it is under way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Self

from cdrmix.cluster.heartbeat import Heartbeat
from cdrmix.config.schema import Config
from cdrmix.data.loader import Loader
from cdrmix.engines.observer import Observer
from cdrmix.engines.run_directory import RunDirectory
from cdrmix.engines.stage_a import Corpus
from cdrmix.engines.step import StepResult
from cdrmix.engines.stopping import Requests
from cdrmix.monitoring.health import Health
from cdrmix.parallel.topology import Topology
from cdrmix.planning.profile import Choice


@dataclass
class Run:
    """A run under way on this rank.

    Attributes:
        config: resolved configuration.
        choice: profile, degrees and batch sizes.
        topology: this rank's place in the layout.
        directory: where everything is written.
        corpus: token shards and tokenizer.
        loader: batches of this data rank.
        engine: DeepSpeed engine around the backbone.
        observer: metrics file and progress.
        requests: what signals ask for.
        heartbeat: tells the watchdogs how far this rank is.
        health: judges steps, and keeps what became of the unhealthy ones.
        step: optimizer steps completed.
        unjudged: measures of the last step, whose loss is not known yet to all ranks.
        samples: generated texts, one per evaluation.
        saved_step: step of the newest checkpoint in the run directory, or None.
        earlier_seconds: wall time of earlier starts of this run.
    """

    config: Config
    choice: Choice
    topology: Topology
    directory: RunDirectory
    corpus: Corpus
    loader: Loader
    engine: Any
    observer: Observer
    requests: Requests
    heartbeat: Heartbeat
    health: Health
    step: int = 0
    unjudged: StepResult | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    saved_step: int | None = None
    earlier_seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)
    saved_time: float = field(default_factory=time.monotonic)

    @property
    def tokens_seen(self) -> int:
        """Tokens trained on, all ranks; earlier starts may have had another global batch."""
        samples = self.loader.samples_consumed - self.health.passed_over_samples
        return samples * self.config.training.sequence_length

    @property
    def seconds(self) -> float:
        """Wall time of all starts of this run."""
        return self.earlier_seconds + time.monotonic() - self.started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading ahead, close the files."""
        self.loader.close()
        self.observer.close()
