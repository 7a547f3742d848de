"""Configuration tree: frozen pydantic models with a unit and a meaning for every field.

A class checks its own fields; `cdrmix.planning.rules` checks pairs across sections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cdrmix.config.checkpoint import CheckpointConfig
from cdrmix.config.cpt import CptConfig
from cdrmix.config.evaluation import EvaluationConfig
from cdrmix.config.failures import FailuresConfig
from cdrmix.config.faults import HealthConfig
from cdrmix.config.launch import LaunchConfig, SupervisionConfig
from cdrmix.config.model import ModelConfig
from cdrmix.config.objectives import (
    ObjectivesConfig,
    further_in_stage_b,
    further_refused,
)
from cdrmix.config.optimizer import OptimizerConfig
from cdrmix.config.plugin import HookConfigs, NameOrPlugin, is_plugin
from cdrmix.config.profile import ProfileConfig
from cdrmix.config.reasoning import SMALLEST_WINDOW, StageBConfig
from cdrmix.config.resources import Auto, ResourcesConfig, with_newer_names
from cdrmix.config.section import Section
from cdrmix.config.tracking import TrackerConfig, each_once

# What of a block is computed again in the backward pass.
Recomputation = Literal["none", "selective", "block", "spans"]
SCHEDULES = ("cosine", "wsd", "linear", "constant", "infinite")


def with_named_recomputation(training: Any) -> Any:
    """Names what true and false of `training.activation_checkpointing` mean in older files."""
    if not isinstance(training, Mapping):
        return training
    given = training.get("activation_checkpointing")
    if not isinstance(given, bool):
        return training
    word = "none"
    if given:
        word = "block" if training.get("sequence_checkpoint_tokens") is None else "spans"
    return {**training, "activation_checkpointing": word}


def _with_older_values(schema: dict[str, Any]) -> None:
    """Lets editors take what `with_named_recomputation` names."""
    del schema["type"]
    schema["enum"] = [*schema["enum"], True, False]


class MixturePhase(Section):
    """Phase of a mixture. Without a length it lasts to the end of training."""

    weights: dict[str, float] | None = None
    """Relative weight of each domain; domains without one are not read. null: the number of samples
    in each domain."""
    tokens: int | None = Field(None, ge=1, description="Length (tokens), rounded up to samples.")
    samples: int | None = Field(None, ge=1, description="Length (samples); instead of tokens.")
    change: Literal["step", "linear", "cosine"] = "step"
    """step: the weights apply from the first sample. linear, cosine: they change from those of the
    phase before, and are reached at the end of the phase."""

    @model_validator(mode="after")
    def _one_length(self) -> MixturePhase:
        if self.tokens is not None and self.samples is not None:
            raise ValueError("give tokens or samples, not both")
        return self


class MixtureConfig(Section):
    """Shares of the domains of the training data, phase by phase."""

    temperature: float = Field(1.0, gt=0)
    """Shares are weights to the power of 1 / temperature: above 1, small domains are seen more
    often (ratio)."""
    # Not strict: a list is what JSON has, such as a checkpoint's copy of the configuration.
    phases: tuple[MixturePhase, ...] = Field((MixturePhase(),), min_length=1, strict=False)
    """Phases in order; the last one has no end."""


class TokenWeights(Section):
    """Weights of tokens in the training loss, a weighted mean, by kind of text (ratio)."""

    text: float = Field(1.0, ge=0, description="Documents that are no chain of thought.")
    prompt: float = Field(0.0, ge=0, description="Question of a chain of thought.")
    thought: float = Field(1.0, ge=0, description="Chain of thought without question and answer.")
    answer: float = Field(1.0, ge=0)
    """Answer of a chain of thought, and end of the document."""


class DataConfig(Section):
    """Source of the token shards, and order of the samples."""

    path: str
    """Folder of token shards, URL of one (file, http, https, or any that fsspec supports), or
    'sample', which is built on first use from the text of Python itself."""
    recipe: str | None = None
    """Name of the data recipe for this model, a file of model_configs/data without its suffix; data
    of another recipe cause a warning. null: any recipe."""
    cache_folder: str = "data/cache"
    """Folder for copies of remote shards, on a disk of each machine."""
    # 128 GiB; beyond it the copies used longest ago go first.
    cache_bytes: int = Field(2**37, ge=1)
    """Largest size of these copies, per data set (bytes)."""
    order: Literal["shuffled", "windowed", "sequential"] = "shuffled"
    """shuffled: a keyed permutation of each epoch's samples. windowed: a permutation of windows,
    and of the samples in each, so that few shards are open at once."""
    # Bounds what copies of remote shards need at once; `shuffled` needs room for the whole split.
    window_samples: int = Field(65_536, ge=1)
    """Samples shuffled together with order = windowed."""
    verify: Literal["digest", "size"] = "digest"
    """Check of the shards before training: sha256 of every shard, spread over the ranks, or file
    sizes only."""
    prefetch_batches: int | None = Field(None, ge=0)
    """Older name of resources.prefetch_batches, to which its value goes."""
    mixture: MixtureConfig | None = None
    """Shares of the domains; null: those of the recipe that built the folder, or, if it has none,
    all samples of the split once per epoch."""
    token_weights: TokenWeights | None = None
    """Weights of tokens in the training loss, one mean over all; null: all alike. Not together with
    objectives, whose parts are means of their own."""
    segment_documents: bool = False
    """Separate the documents of a sample: neither attention nor recurrent state crosses from one to
    the next, and the first token of a document is not predicted."""


class ParallelConfig(Section):
    """Parallel degrees (ranks). The plan chooses degrees that are left out."""

    data: int | None = Field(None, ge=1, description="Data-parallel size (ranks).")
    tensor: int = Field(1, ge=1, description="Tensor-parallel size (ranks).")
    pipeline: int = Field(1, ge=1, description="Pipeline stages (ranks).")
    sequence: int = Field(1, ge=1)
    """Ranks that share a sample and split its tokens; divides data."""
    expert: int | None = Field(None, ge=1)
    """Ranks over which the experts of a layer are spread."""


class TrainingConfig(Section):
    """Length, batch, precision, optimizer and learning-rate schedule of a run."""

    stage: Literal["all", "a", "b"] = "all"
    """a: pretraining; b: reasoning enablement; all: all stages of the model."""
    start_from: str | None = None
    """Run directory, checkpoint or exported folder whose weights alone a new run begins with; null:
    random weights. Data order, schedule and optimizer begin anew."""
    max_steps: int | None = Field(None, ge=1)
    """Length of the run and of the schedule (optimizer steps)."""
    total_tokens: int | None = Field(None, ge=1)
    """Length in tokens, rounded up to steps; used without max_steps."""
    global_batch_size: int = Field(ge=1, description="Samples per optimizer step, all ranks.")
    micro_batch_size: Annotated[int, Field(ge=1)] | Auto | None = None
    """Samples per data rank and forward pass; by the plan when left out. auto: the most that fit,
    found by trying before the first step; see resources.probe."""
    sequence_length: int = Field(ge=8, description="Tokens per sample.")
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of weights and activations in forward and backward."""
    seed: int = Field(1234, ge=0, description="Seed of initialisation and data order.")
    deterministic: bool = True
    """Use deterministic kernels if they exist: on CPUs equal runs are then equal bit by bit; on
    GPUs torch warns of each kernel without a deterministic form. false also lets cuDNN's attention
    come first."""
    activation_checkpointing: Recomputation = Field("none", json_schema_extra=_with_older_values)
    """What is computed again in the backward pass to save memory; by the plan when left out. none:
    nothing; selective: what is cheap, such as mixes, gates and norms, while results of large matrix
    products and of the mixers are kept; block: each block; spans: each block, by so many tokens at
    a time. Older files have true (block, or spans where their tokens are given) and false."""
    compile: Literal["off", "blocks", "reduce-overhead"] = "off"
    """Compiles blocks by torch.compile in the first step, which takes one to three minutes on a CPU
    and less from the kept kernels. off: no; blocks: one graph for all layers of a kind;
    reduce-overhead: the same as CUDA graphs, which is refused, with its reason."""
    sequence_checkpoint_tokens: int | None = Field(None, ge=1)
    """Length of the spans of activation_checkpointing = spans (tokens): the activations of one span
    are there at a time. null: by the plan."""
    memory_share: float | None = Field(None, gt=0, le=1)
    """Older name of resources.memory_share, to which its value goes (ratio)."""
    learning_rate: float = Field(gt=0, description="Peak learning rate (per step).")
    min_learning_rate: float = Field(ge=0, description="Learning rate at the end (per step).")
    warmup_steps: int = Field(ge=0, description="Linear warm-up (optimizer steps).")
    schedule: Annotated[str, NameOrPlugin(SCHEDULES)] = "cosine"
    """Learning rate after the warm-up. cosine, linear: falls to the minimum at the last step; wsd:
    stays at the peak and falls in the cooldown; constant: stays at the peak; infinite: falls to
    hold_learning_rate within settle_steps, stays there and falls in the cooldown. A class of yours
    tells the rate of every step, of the warm-up too."""
    schedule_options: dict[str, Any] = {}
    """Options of a schedule of yours, which it checks itself."""
    cooldown_fraction: float = Field(0.2, ge=0, le=1)
    """Last part of the run, in which wsd and infinite fall to the minimum (ratio of its steps)."""
    hold_learning_rate: float | None = Field(None, gt=0)
    """Learning rate that infinite holds (per step)."""
    settle_steps: int | None = Field(None, ge=1)
    """Steps behind the warm-up in which infinite falls to hold_learning_rate (optimizer steps)."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights of Stage A, in float32 beside the
    masters (ratio); smaller in the first steps: n weights go on by (1 + n) / (10 + n) at most.
    null: none is kept."""
    gradient_clipping: float = Field(1.0, ge=0)
    """Largest global gradient norm (L2); 0 turns clipping off."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay on matrices; vectors are never decayed (ratio)."""
    # At 1 the correction of the first steps' bias would divide by zero.
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW decay of the mean (ratio).")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW decay of the square (ratio).")
    # Above 0: an element whose gradient has always been zero would divide by zero.
    epsilon: float = Field(1e-8, gt=0, description="AdamW denominator offset.")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        return with_named_recomputation(values)

    @model_validator(mode="after")
    def _length_is_given(self) -> TrainingConfig:
        if self.max_steps is None and self.total_tokens is None:
            raise ValueError("give max_steps or total_tokens: a run needs a length")
        if self.sequence_checkpoint_tokens is not None and self.activation_checkpointing != "spans":
            raise ValueError(
                f"sequence_checkpoint_tokens = {self.sequence_checkpoint_tokens} needs "
                "activation_checkpointing = spans, and this is "
                f"{self.activation_checkpointing}"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate = {self.min_learning_rate} is above "
                f"learning_rate = {self.learning_rate}"
            )
        self._check_schedule()
        return self

    def _check_schedule(self) -> None:
        if self.schedule_options and not is_plugin(self.schedule):
            raise ValueError(
                f"schedule_options are for a schedule of yours, and schedule = {self.schedule} has "
                "none. Leave them out"
            )
        only_infinite = {
            "hold_learning_rate": self.hold_learning_rate,
            "settle_steps": self.settle_steps,
        }
        for name, value in only_infinite.items():
            if (value is not None) != (self.schedule == "infinite"):
                problem = "is needed by" if value is None else f"= {value} has no meaning without"
                raise ValueError(f"{name} {problem} schedule = infinite")
        hold = self.hold_learning_rate
        if hold is not None and not self.min_learning_rate <= hold <= self.learning_rate:
            raise ValueError(
                f"hold_learning_rate = {hold} is not between min_learning_rate = "
                f"{self.min_learning_rate} and learning_rate = {self.learning_rate}"
            )
        if self.schedule not in ("wsd", "infinite"):
            return
        start = self.warmup_steps + (self.settle_steps or 0)
        if start + self.cooldown_steps > self.num_steps:
            settle = f" + settle_steps = {self.settle_steps}" if self.settle_steps else ""
            raise ValueError(
                f"schedule = {self.schedule} is longer than the run: warmup_steps = "
                f"{self.warmup_steps}{settle} + cooldown of {self.cooldown_steps} are more than "
                f"{self.num_steps} steps. Try shorter ones, or a longer run"
            )

    @property
    def fixed_micro_batch_size(self) -> int | None:
        """Micro batch as given; None: it is left to the plan, or to a probe."""
        return None if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.global_batch_size * self.sequence_length

    @property
    def num_steps(self) -> int:
        """Length of the run in optimizer steps: max_steps, else total_tokens rounded up."""
        if self.max_steps is not None:
            return self.max_steps
        assert self.total_tokens is not None, "checked at construction"
        # Rounded up in whole numbers: a quotient of floats is exact up to 2**53 alone.
        return -(-self.total_tokens // self.tokens_per_step)

    @property
    def cooldown_steps(self) -> int:
        """Length of the cooldown of wsd and infinite in optimizer steps."""
        return round(self.cooldown_fraction * self.num_steps)


class MonitoringConfig(Section):
    """Intervals and extent of what is measured, and trackers, which get a copy of it."""

    log_every_steps: int = Field(10, ge=1, description="Optimizer steps between logged lines.")
    # Not strict: a list is what JSON has, such as a checkpoint's copy of the configuration.
    trackers: tuple[TrackerConfig, ...] | None = Field(None, strict=False)
    """Trackers, which get a copy of metrics.jsonl, each by its name or as a section; []: none.
    null: TensorBoard where it is installed."""
    tracker_wait_seconds: float = Field(10.0, ge=0)
    """Longest wait for trackers at the end of a stage (seconds); what they have not written by then
    is told, and `cdrmix track` writes it."""
    system: bool = True
    """Write processors, memory, disks and network of each host into system.jsonl with each line."""

    @field_validator("trackers")
    @classmethod
    def _each_once(
        cls, value: tuple[TrackerConfig, ...] | None
    ) -> tuple[TrackerConfig, ...] | None:
        return None if value is None else each_once(value)


class Config(Section):
    """Configuration of a run."""

    name: str
    """Name of the variant, shown in logs and reports: one line, at most 200 letters."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    data: DataConfig
    resources: ResourcesConfig = ResourcesConfig()
    objectives: ObjectivesConfig | None = None
    """Weights of the parts of Stage A's loss; null: one mean over all tokens, or by
    data.token_weights."""
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    failures: FailuresConfig = FailuresConfig()
    health: HealthConfig = HealthConfig()
    launch: LaunchConfig = LaunchConfig()
    hooks: HookConfigs = ()
    """Code of yours that the run calls at fixed places, on all ranks."""
    plugins: str | None = None
    """Folder of Python files of yours, whose classes other keys name as module:Name; null:
    `plugins` beside this file, where there is one."""
    changed_plugins: Literal["warn", "refuse"] = "warn"
    """What becomes of a start whose code of yours is not that of the start before."""
    profile: ProfileConfig | None = None
    """Profile of a window of steps; null: none."""
    cpt: CptConfig | None = None
    """Continual pre-training; null: training is not compared with the model that it began with."""
    stage_b: StageBConfig | None = None
    """Reasoning enablement; present in reasoning variants only."""

    @model_validator(mode="before")
    @classmethod
    def _one_place_for_each(cls, values: Any) -> Any:
        return with_newer_names(values)

    @field_validator("name")
    @classmethod
    def _is_one_line(cls, name: str) -> str:
        # control characters and Unicode line breaks would split a line of the log
        if len(name) > 200 or re.search(r"[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]", name):
            raise ValueError(f"{name[:80]!r} is no name: give one line of at most 200 letters")
        return name

    @model_validator(mode="after")
    def _cpt_has_a_start(self) -> Config:
        if self.cpt is None or self.model.kind == "hf" or self.training.start_from is not None:
            return self
        raise ValueError(
            "cpt is for a model that was trained before: give training.start_from, a run directory "
            "or an export; or model.kind = hf with model.path, the folder of a Hugging Face model; "
            "or cpt=null"
        )

    @model_validator(mode="after")
    def _further_tokens_fit(self) -> Config:
        wrong = further_refused(self.objectives, self.model.mtp, self.training.sequence_length)
        if wrong is None and self.model.mtp is not None and self.stage_b is not None:
            wrong = further_in_stage_b(self.training.stage)
        if wrong is not None:
            raise ValueError(wrong)
        return self

    @model_validator(mode="after")
    def _tokens_are_weighed_once(self) -> Config:
        if self.objectives is None or self.data.token_weights is None:
            return self
        raise ValueError(
            "objectives and data.token_weights both weigh tokens, the first in means of their own, "
            "the second in one mean over all. Try data.token_weights=null"
        )

    @model_validator(mode="after")
    def _stages_fit(self) -> Config:
        stage_b = self.stage_b
        if self.model.kind == "hf" and self.training.start_from is not None:
            raise ValueError(
                "training.start_from is for RWKX-V: a Hugging Face model begins with the weights "
                "of model.path. Export the earlier run, and give that folder as model.path"
            )
        if stage_b is not None and self.model.kind == "hf":
            raise ValueError(
                "stage_b is for RWKX-V, and model.kind = hf has no place for its parts. Try "
                "stage_b=null"
            )
        if self.training.stage == "b" and self.health.loss_spike.action == "lower_rate":
            raise ValueError(
                "health.loss_spike.action = lower_rate acts in Stage A: Stage B judges no spikes, "
                "because its lessons differ in length. Try health.loss_spike.action=warn"
            )
        if self.training.stage == "b" and self.training.start_from is not None:
            raise ValueError(
                "training.start_from begins Stage A, and training.stage = b trains none. Try "
                "stage_b.run, the run with the backbone, or leave training.start_from out"
            )
        if stage_b is None:
            if self.training.stage != "b":
                return self
            raise ValueError(
                "training.stage = b needs a reasoning variant: this config has no stage_b section"
            )
        if self.training.stage == "all" and stage_b.run is not None:
            raise ValueError(
                "training.stage = all trains a Stage A of its own, and stage_b.run = "
                f"{stage_b.run} names that of another run: say training.stage = b, or leave "
                "stage_b.run out"
            )
        # A run that goes on behind its own Stage A keeps the degrees of that.
        for axis in ("tensor", "pipeline", "sequence", "expert"):
            degree = getattr(self.parallel, axis) or 1
            if self.training.stage == "b" and stage_b.run is not None and degree > 1:
                raise ValueError(
                    f"parallel.{axis} = {degree} lays out Stage A, and a run with stage_b.run "
                    "trains none. In Stage B a rank holds the whole backbone with all its experts, "
                    "or, of a frozen one, a stage of stage_b.pipeline. Leave "
                    f"parallel.{axis} out"
                )
        # Its own limit checks window_tokens; this is about the length that null stands for.
        window = stage_b.training.window_tokens or self.training.sequence_length
        if self.training.stage != "a" and window < SMALLEST_WINDOW:
            raise ValueError(
                f"stage_b.training.window_tokens = null takes training.sequence_length = {window}, "
                f"but Stage B reads {SMALLEST_WINDOW} tokens at a time or more. Try "
                f"stage_b.training.window_tokens={SMALLEST_WINDOW}"
            )
        return self
