"""The configuration tree: frozen pydantic models with a unit and a meaning for every field.

A class checks its own fields; pairs across sections are checked in `cdrmix.planning.rules`.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from cdrmix.config.data import DataConfig
from cdrmix.config.health import HealthConfig
from cdrmix.config.model import ModelConfig
from cdrmix.config.reasoning import SMALLEST_WINDOW, StageBConfig
from cdrmix.config.section import Section


class ParallelConfig(Section):
    """Parallel degrees (ranks). Left out, a degree is chosen when the run is planned."""

    data: int | None = Field(None, ge=1, description="Data-parallel size (ranks).")
    tensor: int = Field(1, ge=1, description="Tensor-parallel size (ranks).")
    pipeline: int = Field(1, ge=1, description="Pipeline stages (ranks).")
    sequence: int = Field(
        1, ge=1, description="Ranks that share a sample and split its tokens; divides data."
    )
    expert: int | None = Field(
        None, ge=1, description="Ranks over which the experts of a layer are spread."
    )


class TrainingConfig(Section):
    """Length, batch, precision and optimizer of a run. AdamW, warm-up, then cosine."""

    stage: Literal["all", "a", "b"] = Field(
        "all", description="a: pretraining; b: reasoning enablement; all: what the model has."
    )
    max_steps: int | None = Field(
        None, ge=1, description="Length of the run and of the schedule (optimizer steps)."
    )
    total_tokens: int | None = Field(
        None, ge=1, description="Length in tokens, rounded up to steps; used without max_steps."
    )
    global_batch_size: int = Field(ge=1, description="Samples per optimizer step, all ranks.")
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples per data rank and forward pass; chosen when left out.",
    )
    sequence_length: int = Field(ge=8, description="Tokens per sample.")
    precision: Literal["bf16", "fp16", "fp32"] = Field(
        "bf16", description="Type of weights and activations in forward and backward."
    )
    seed: int = Field(1234, ge=0, description="Seed of initialisation and data order.")
    deterministic: bool = Field(
        True,
        description="Use deterministic kernels where there are any: on CPUs equal runs are then "
        "equal bit by bit; on GPUs torch warns of a kernel that has no such form.",
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute each block in the backward pass instead of keeping it."
    )
    sequence_checkpoint_tokens: int | None = Field(
        None,
        ge=1,
        description="With activation checkpointing: recompute a block in spans of so many tokens, "
        "so that the activations of one span are there at a time; null: all tokens together.",
    )
    memory_share: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a device's memory, and of a host's, that a plan may fill (ratio).",
    )
    learning_rate: float = Field(gt=0, description="Peak learning rate (per step).")
    min_learning_rate: float = Field(ge=0, description="Learning rate at the end (per step).")
    warmup_steps: int = Field(ge=0, description="Linear warm-up (optimizer steps).")
    gradient_clipping: float = Field(
        1.0, ge=0, description="Largest global gradient norm (L2); 0 turns clipping off."
    )
    weight_decay: float = Field(
        0.1, ge=0, description="Decoupled decay on matrices; vectors are never decayed (ratio)."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW decay of the mean (ratio).")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW decay of the square (ratio).")
    epsilon: float = Field(1e-8, gt=0, description="AdamW denominator offset.")

    @model_validator(mode="after")
    def _length_is_given(self) -> TrainingConfig:
        if self.max_steps is None and self.total_tokens is None:
            raise ValueError("give max_steps or total_tokens: a run needs a length")
        if self.sequence_checkpoint_tokens is not None and not self.activation_checkpointing:
            raise ValueError(
                f"sequence_checkpoint_tokens = {self.sequence_checkpoint_tokens} needs "
                "activation_checkpointing = true: what is not recomputed is kept"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate = {self.min_learning_rate} is above "
                f"learning_rate = {self.learning_rate}"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks; the one place where this is written."""
        return self.global_batch_size * self.sequence_length

    @property
    def num_steps(self) -> int:
        """Length of the run in optimizer steps: max_steps, else total_tokens rounded up."""
        if self.max_steps is not None:
            return self.max_steps
        assert self.total_tokens is not None, "checked at construction"
        return -(-self.total_tokens // self.tokens_per_step)


class CheckpointConfig(Section):
    """Times of checkpoints, and how many stay. The end of a run always writes one."""

    every_steps: int | None = Field(1_000, ge=1, description="Optimizer steps between saves.")
    every_minutes: float | None = Field(None, gt=0, description="Minutes between saves.")
    keep: int = Field(
        3,
        ge=1,
        description="Newest checkpoints kept (count); Stage B keeps that of the end of Stage A "
        "besides.",
    )
    background: bool | None = Field(
        None,
        description="Training goes on while the state is copied to host memory, which takes 12 "
        "bytes per parameter of a rank's share, and written; only the next optimizer step waits "
        "for the copy. false: training waits for the disk. null: the plan decides, by whether "
        "hosts have room for the copy.",
    )
    replica: str | None = Field(
        None,
        description="Second folder, seen by all ranks, in which each run keeps a copy of its "
        "checkpoints, such as a local disk beside shared storage. --resume auto takes the newest "
        "good one of both.",
    )


class EvaluationConfig(Section):
    """Held-out evaluation. At its cadence it reads at most 7 % of the tokens trained on
    since the last one, which keeps it below 5 % of the run's time; at the end it reads
    `final_tokens`."""

    every_steps: int | None = Field(500, ge=1, description="Optimizer steps between evaluations.")
    final_tokens: int = Field(
        1_000_000, ge=1, description="Largest number of held-out tokens read at the end."
    )
    sample_prompt: str = Field(
        "def", description="Text that the generated sample goes on from; not ending in a blank."
    )
    sample_tokens: int = Field(64, ge=0, description="Tokens generated at each evaluation.")
    sample_temperature: float = Field(
        0.8, ge=0, description="Temperature of the sample (ratio); 0 takes the likeliest token."
    )
    reasoning_examples: int = Field(
        32,
        ge=0,
        description="Texts of each task and length that are read at the end of Stage B, with "
        "memory and without (count); 0: none.",
    )
    baselines: bool = Field(
        False,
        description="At the end, compare with a smoothed unigram and bigram model counted on the "
        "tokens that were trained on. For small vocabularies.",
    )


class MonitoringConfig(Section):
    """Cadence of the log."""

    log_every_steps: int = Field(10, ge=1, description="Optimizer steps between logged lines.")


# They end a line of a script or file of variables, or a variable's value.
_BREAKS = re.compile(r"[\x00\n\r]")


class LaunchConfig(Section):
    """Preparations of `cdrmix launch` and `cdrmix slurm` for the ranks."""

    environment: dict[str, str] = Field(
        {}, description="Variables of every rank on every host, such as NCCL_DEBUG: INFO."
    )

    @field_validator("environment", mode="before")
    @classmethod
    def _texts_of_one_line(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, text in value.items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.A):
                raise ValueError(f"{name!r} is no name of a variable: letters, digits and _")
            if (
                isinstance(text, bool)
                or not isinstance(text, str | int)
                or _BREAKS.search(str(text))
            ):
                raise ValueError(f"{name} = {text!r} is no text of one line. Try quotes around it")
        return {name: str(text) for name, text in value.items()}  # 1 is a text too


class SupervisionConfig(Section):
    """Limits after which a run that stands still is ended, on all hosts, to be started again."""

    deadline_seconds: float = Field(
        60.0,
        ge=1,
        description="A rank that is silent for so long is lost, and one that gets no further is "
        "stuck, unless the step before took more than a quarter of it, or another rank that the "
        "others wait for may take longer (seconds).",
    )
    phase_seconds: float = Field(
        1_800.0,
        ge=1,
        description="Longest time to start (up to the end of the first step), for a step of Stage "
        "B before the first save, to log, to save, to evaluate or to finish (seconds).",
    )


class Config(Section):
    """One run: model, layout, training, data and cadences."""

    name: str = Field(
        description="Name of the variant, shown in logs and reports: one line, at most 200 letters."
    )
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    data: DataConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    health: HealthConfig = HealthConfig()
    launch: LaunchConfig = LaunchConfig()
    stage_b: StageBConfig | None = Field(
        None, description="Reasoning enablement; present in reasoning variants only."
    )

    @field_validator("name")
    @classmethod
    def _is_one_line(cls, name: str) -> str:
        if len(name) > 200 or re.search(r"[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]", name):
            raise ValueError(f"{name[:80]!r} is no name: give one line of at most 200 letters")
        return name

    @property
    def variant(self) -> Literal["core", "reasoning"]:
        """Recognised from the structure: a reasoning variant has a `stage_b` section."""
        return "core" if self.stage_b is None else "reasoning"

    @model_validator(mode="after")
    def _stage_exists(self) -> Config:
        if self.training.stage == "b" and self.stage_b is None:
            raise ValueError(
                "training.stage = b needs a reasoning variant: this config has no stage_b section"
            )
        if (
            self.training.stage == "all"
            and self.stage_b is not None
            and self.stage_b.run is not None
        ):
            raise ValueError(
                "training.stage = all trains a Stage A of its own, and stage_b.run = "
                f"{self.stage_b.run} names that of another run: say training.stage = b, or leave "
                "stage_b.run out"
            )
        return self

    @model_validator(mode="after")
    def _window_holds_a_sentence(self) -> Config:
        if self.stage_b is None or self.training.stage == "a":
            return self
        window = self.stage_b.training.window_tokens or self.training.sequence_length
        if window < SMALLEST_WINDOW:
            raise ValueError(
                f"stage_b.training.window_tokens = null takes training.sequence_length = {window}, "
                f"but Stage B reads {SMALLEST_WINDOW} tokens at a time or more. Try "
                f"stage_b.training.window_tokens={SMALLEST_WINDOW}"
            )
        return self
