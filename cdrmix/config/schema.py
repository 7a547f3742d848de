"""The configuration tree: frozen pydantic models with a unit and a meaning for every field.

A class checks its own fields; pairs across sections are checked in `cdrmix.planning.rules`. This
file also owns the two things derived from a model's fields that several packages need: the layer
schedule and the low-rank sizes of RWKV-7.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, TypeGuard, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

LayerKind = Literal["rwkv", "transformer"]
Phase = Literal["memory", "adapters", "policy", "joint"]
ReasoningTask = Literal[
    "needle_keys",
    "needle_values",
    "needle_queries",
    "variable_tracking",
    "common_words",
    "look_up",
    "arithmetic",
    "logic",
]

HEAD_DIMS = (32, 64, 128)
# Fields of ModelConfig that follow from others when left out: required of the built config, not of
# the person who writes one.
DERIVED_MODEL_FIELDS = ("num_kv_heads", "head_dim", "ffn_hidden_size")


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values cannot be changed after loading, and
    nothing is converted but a whole number to a float (`true` is not 1, '8' is not 8)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MoEConfig(Section):
    """Mixture-of-experts feed-forward: two-matrix squared-ReLU experts, top-k routed."""

    num_experts: int = Field(8, ge=1, description="Experts per layer (count).")
    top_k: int = Field(2, ge=1, description="Experts that each token is sent to (count).")
    expert_hidden_size: int = Field(ge=1, description="Inner width of one expert (features).")
    capacity_factor: float = Field(
        1.25,
        ge=1.0,
        description="Slots per expert over tokens * top_k / num_experts (ratio); also what "
        "overflow is measured against when nothing is dropped.",
    )
    drop_tokens: bool = Field(
        False,
        description="True: assignments beyond the capacity are dropped in training. False: "
        "dropless. Evaluation is always dropless.",
    )
    load_balance_weight: float = Field(
        0.01, ge=0, description="Weight of the load-balance loss, mean over layers (ratio)."
    )
    z_loss_weight: float = Field(
        1e-3, ge=0, description="Weight of the router z-loss, mean over layers (ratio)."
    )

    @field_validator("expert_hidden_size")
    @classmethod
    def _rows_are_aligned(cls, value: int) -> int:
        # torch's grouped_mm: "strides should be multiple of 16 bytes", which are 8 numbers in bf16
        if value % 8:
            raise ValueError(
                f"expert_hidden_size = {value} is no multiple of 8, which the grouped matrix "
                f"product of the experts needs. Try {value - value % 8 + 8}"
            )
        return value

    @model_validator(mode="after")
    def _top_k_fits(self) -> MoEConfig:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k = {self.top_k} is more than num_experts = {self.num_experts}; "
                "a token goes to distinct experts"
            )
        return self


class LowRankSizes(BaseModel):
    """Ranks of the four low-rank paths of an RWKV-7 time mix (features)."""

    model_config = ConfigDict(frozen=True)

    decay: int
    iclr: int
    value: int
    gate: int


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _active_expert_width(moe: Any) -> int | None:
    if isinstance(moe, MoEConfig):
        return moe.top_k * moe.expert_hidden_size
    experts = moe if isinstance(moe, dict) else {}
    width, top_k = experts.get("expert_hidden_size"), experts.get("top_k", 2)
    return width * top_k if _is_count(width) and _is_count(top_k) else None


def _derived_not_required(schema: dict[str, Any]) -> None:
    schema["required"] = [key for key in schema["required"] if key not in DERIVED_MODEL_FIELDS]


class ModelConfig(Section):
    """Dimensions of the RWKX-V backbone. Embedding and head are tied."""

    model_config = ConfigDict(json_schema_extra=_derived_not_required)

    hidden_size: int = Field(ge=32, description="Width of the residual stream (features).")
    num_layers: int = Field(ge=1, description="Blocks, RWKV and Transformer together (count).")
    num_heads: int = Field(ge=1, description="Heads of attention and of RWKV (count).")
    num_kv_heads: int = Field(
        ge=1, description="Key/value heads of attention (count); num_heads when left out."
    )
    head_dim: Literal[32, 64, 128] = Field(
        description="Width of one head (features); hidden_size / num_heads when left out."
    )
    vocab_size: int = Field(
        ge=256, description="Rows of the embedding (tokens); a tokenizer may use fewer."
    )
    schedule: Literal["top-of-x", "interleave-x"] = Field(
        "interleave-x",
        description="Where the Transformer blocks stand: top-of-x, the last ones; interleave-x, "
        "every (1 / transformer_fraction)-th.",
    )
    transformer_fraction: float = Field(
        0.25, ge=0, le=1, description="Share of blocks that are Transformer blocks (ratio)."
    )
    ffn_hidden_size: int = Field(
        ge=1,
        description="Inner width of the dense feed-forward used when moe is null (features); "
        "top_k * expert_hidden_size, or 4 * hidden_size without experts, when left out.",
    )
    moe: MoEConfig | None = Field(
        None, description="Mixture-of-experts feed-forward; null is a dense model."
    )
    init_std_scale: float = Field(
        1.0, gt=0, description="Factor on the initial standard deviation of 0.02 (ratio)."
    )
    rope_theta: float = Field(10_000.0, gt=1, description="Base of the rotary angles (ratio).")

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        hidden, heads, moe = (filled.get(key) for key in ("hidden_size", "num_heads", "moe"))
        if filled.get("num_kv_heads") is None and _is_count(heads):
            filled["num_kv_heads"] = heads
        if filled.get("head_dim") is None and _is_count(hidden) and _is_count(heads):
            # Kept as a fraction where it is one, for `_head_dim_is_known` to refuse by name.
            filled["head_dim"] = hidden // heads if hidden % heads == 0 else hidden / heads
        if filled.get("ffn_hidden_size") is None and _is_count(hidden):
            filled["ffn_hidden_size"] = _active_expert_width(moe) or 4 * hidden
        return filled

    @field_validator("head_dim", mode="before")
    @classmethod
    def _head_dim_is_known(cls, value: Any, info: ValidationInfo) -> Any:
        hidden, heads = info.data.get("hidden_size"), info.data.get("num_heads")
        if value in HEAD_DIMS or not hidden or not heads or value != hidden / heads:
            return value
        fitting = " or ".join(str(hidden // dim) for dim in HEAD_DIMS if hidden % dim == 0)
        advice = f"num_heads = {fitting}" if fitting else "a hidden_size that 32 divides"
        raise ValueError(
            f"hidden_size / num_heads = {hidden} / {heads} = {value:g}; a head has 32, 64 or 128 "
            f"features. Try {advice}"
        )

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelConfig:
        if self.num_heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"num_heads * head_dim = {self.num_heads} * {self.head_dim} = "
                f"{self.num_heads * self.head_dim} is not hidden_size = {self.hidden_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}"
            )
        self.layer_kinds()
        return self

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each block from the input upwards, by `schedule` and `transformer_fraction`.

        Raises:
            ValueError: if an interleaved fraction is not one over a whole number.
        """
        kinds: list[LayerKind] = ["rwkv"] * self.num_layers
        if self.transformer_fraction == 0:
            return tuple(kinds)
        if self.schedule == "top-of-x":
            # The margin is for fractions that binary floats miss: 0.29 * 100 is below 29.
            top = math.floor(self.num_layers * self.transformer_fraction + 1e-9)
            kinds[self.num_layers - top :] = ["transformer"] * top
            return tuple(kinds)
        period = round(1 / self.transformer_fraction)
        if abs(period * self.transformer_fraction - 1) > 1e-6:
            raise ValueError(
                f"transformer_fraction = {self.transformer_fraction} cannot be interleaved: "
                "give one over a whole number (1, 0.5, 0.25, ...) or schedule = top-of-x"
            )
        for layer in range(period - 1, self.num_layers, period):
            kinds[layer] = "transformer"
        return tuple(kinds)

    @property
    def init_std(self) -> float:
        """Standard deviation of normal initial values."""
        return 0.02 * self.init_std_scale

    def low_rank_sizes(self) -> LowRankSizes:
        """Ranks by RWKV-LM's rule: a multiple of 32 near a factor of sqrt(hidden_size)."""

        def near(factor: float) -> int:
            return max(32, round(factor * math.sqrt(self.hidden_size) / 32) * 32)

        return LowRankSizes(decay=near(2.5), iclr=near(2.5), value=near(1.7), gate=near(5))


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


class MixturePhase(Section):
    """One phase of a mixture. Without a length it lasts to the end of training."""

    weights: dict[str, float] | None = Field(
        None,
        description="Weight of each domain, relative; a domain that is left out is not read. Left "
        "out altogether: the number of samples in each domain.",
    )
    tokens: int | None = Field(None, ge=1, description="Length (tokens), rounded up to samples.")
    samples: int | None = Field(None, ge=1, description="Length (samples); instead of tokens.")
    change: Literal["step", "linear", "cosine"] = Field(
        "step",
        description="step: the weights hold from the first sample. linear, cosine: they are "
        "reached at the end of the phase, starting from those of the phase before.",
    )

    @model_validator(mode="after")
    def _one_length(self) -> MixturePhase:
        if self.tokens is not None and self.samples is not None:
            raise ValueError("give tokens or samples, not both")
        return self


class MixtureConfig(Section):
    """Shares of the domains of the training data, phase by phase."""

    temperature: float = Field(
        1.0,
        gt=0,
        description="Shares are weights to the power of 1 / temperature: above 1, small domains "
        "are seen more often (ratio).",
    )
    phases: tuple[MixturePhase, ...] = Field(
        (MixturePhase(),),
        min_length=1,
        strict=False,  # a list is what JSON has: a checkpoint's copy of the configuration
        description="In order; the last goes on after its end.",
    )


class TokenWeights(Section):
    """Weights of tokens in the training loss, a weighted mean, by what they are part of (ratio)."""

    text: float = Field(1.0, ge=0, description="Documents that are no chain of thought.")
    prompt: float = Field(0.0, ge=0, description="What a chain of thought is asked.")
    thought: float = Field(1.0, ge=0, description="The way to its answer.")
    answer: float = Field(1.0, ge=0, description="Its answer, with the end of the document.")


class DataConfig(Section):
    """Where the token shards come from and in which order samples are taken."""

    path: str = Field(
        description="Folder of token shards, the URL of one (file, http, https, or what fsspec "
        "knows), or 'sample': built on first use from the text that ships with Python."
    )
    cache_folder: str = Field(
        "data/cache", description="Where shards of a URL are copied to; a disk of each machine."
    )
    cache_bytes: int = Field(
        2**37, ge=1, description="Most that these copies take up, per data set (bytes)."
    )
    order: Literal["shuffled", "windowed", "sequential"] = Field(
        "shuffled",
        description="shuffled: a keyed permutation of each epoch's samples. windowed: windows of "
        "them are permuted, and the samples in each, so that few shards are read at a time.",
    )
    window_samples: int = Field(
        65_536, ge=1, description="Samples that are shuffled together where order = windowed."
    )
    verify: Literal["digest", "size"] = Field(
        "digest",
        description="Check of the shards before training: sha256 of every shard, spread over the "
        "ranks, or file sizes only.",
    )
    mixture: MixtureConfig | None = Field(
        None,
        description="Shares of the domains; null: those of the recipe that the folder was built "
        "by, or, where it has none, all samples of the split once per epoch.",
    )
    token_weights: TokenWeights | None = Field(
        None, description="Weights of tokens in the training loss; null: all alike."
    )
    segment_documents: bool = Field(
        False,
        description="Keep the documents of a sample apart: neither attention nor recurrent state "
        "crosses from one to the next, and the first token of a document is not predicted.",
    )


class CheckpointConfig(Section):
    """When checkpoints are written and how many stay. The end of a run always writes one."""

    every_steps: int | None = Field(1_000, ge=1, description="Optimizer steps between saves.")
    every_minutes: float | None = Field(None, gt=0, description="Minutes between saves.")
    keep: int = Field(3, ge=1, description="Newest checkpoints kept (count).")
    background: bool = Field(
        True,
        description="Training waits for a copy of the state in host memory only, which takes 12 "
        "bytes per parameter of a rank's share, and goes on while it is written. "
        "false: it waits for the disk.",
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
    """What is logged, and how often."""

    log_every_steps: int = Field(10, ge=1, description="Optimizer steps between logged lines.")


class LaunchConfig(Section):
    """What `cdrmix launch` and `cdrmix slurm` prepare for the ranks."""

    environment: dict[str, str] = Field(
        {}, description="Variables of every rank on every host, such as NCCL_DEBUG: INFO."
    )

    @field_validator("environment", mode="before")
    @classmethod
    def _texts_of_one_line(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, text in value.items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"{name!r} is no name of a variable: letters, digits and _")
            if isinstance(text, bool) or not isinstance(text, str | int) or "\n" in str(text):
                raise ValueError(f"{name} = {text!r} is no text of one line. Try quotes around it")
        return {name: str(text) for name, text in value.items()}  # 1 is a text too


class SupervisionConfig(Section):
    """When a run that stands still is ended, on all hosts, so that it can be started again."""

    deadline_seconds: float = Field(
        60.0,
        ge=1,
        description="A rank that is silent for so long is lost, and one that gets no further is "
        "stuck, unless the step before took more than a quarter of it (seconds).",
    )
    phase_seconds: float = Field(
        1_800.0,
        ge=1,
        description="Longest time to start (up to the end of the first step), to save, to evaluate "
        "or to finish (seconds).",
    )


class NonFiniteConfig(Section):
    """A loss or gradient that is not finite. Its step is never taken: weights and moments stay as
    they are, whatever the action. In fp16 a lower loss scale is tried first."""

    action: Literal["skip", "rollback", "stop"] = Field(
        "skip", description="skip: go on with the next batch. rollback, stop: at the first one."
    )
    max_consecutive: int = Field(
        5, ge=1, description="Most steps skipped in a row before the run is stopped (count)."
    )


class LossSpikeConfig(Section):
    """A loss far above its recent median. Its step is taken by the time that it is known."""

    action: Literal["warn", "rollback", "stop"] = Field(
        "warn", description="rollback: as if its batch, and those since the checkpoint, were not."
    )
    window_steps: int = Field(
        128, ge=8, description="Steps that a loss is compared with; half of them must be there."
    )
    deviations: float = Field(
        10.0,
        gt=0,
        description="Height above the median from which a loss is a spike (standard deviations, "
        "as 1.4826 times the median absolute deviation; at least 1 % of the median each).",
    )


class RoutingConfig(Section):
    """Routing of logged steps, means over the layers of a mixture of experts."""

    action: Literal["warn", "rollback", "stop"] = Field(
        "warn", description="rollback: a fault of the data is passed over, one of the router not."
    )
    times: int = Field(
        3, ge=1, description="Logged steps in a row that must be so: single batches vary (count)."
    )
    min_entropy_share: float = Field(
        5 / 6, ge=0, le=1, description="Least entropy over log2(num_experts) (ratio)."
    )
    max_overflow_fraction: float = Field(
        0.05, ge=0, le=1, description="Most assignments beyond the experts' capacity (ratio)."
    )


class LoaderWaitConfig(Section):
    """Waiting for data, on the rank that waits longest, between two logged steps."""

    action: Literal["warn", "stop"] = Field("warn", description="stop: after a save.")
    max_share: float = Field(
        0.5, gt=0, le=1, description="Most of the time that may be waited for data (ratio)."
    )
    min_seconds: float = Field(
        1.0, ge=0, description="Waiting that is short of this is never a stall (seconds)."
    )


class MemoryShareConfig(Section):
    """Peak memory of the fullest rank at logged steps: of its GPU, or of its share of the host."""

    action: Literal["warn", "stop"] = Field("warn", description="stop: after a save.")
    max_share: float = Field(0.9, gt=0, le=1, description="Most of the memory (ratio).")


class HealthConfig(Section):
    """What is watched while a run trains, and what is done about it. `warn` logs it once while it
    lasts; `rollback` goes back to the newest good checkpoint and on behind the bad batch; `stop`
    ends the run with exit code 2."""

    non_finite: NonFiniteConfig = NonFiniteConfig()
    loss_spike: LossSpikeConfig = LossSpikeConfig()
    routing: RoutingConfig = RoutingConfig()
    loader: LoaderWaitConfig = LoaderWaitConfig()
    memory: MemoryShareConfig = MemoryShareConfig()
    warmup_steps: int = Field(
        100, ge=0, description="First steps, whose loss and routing are not judged (count)."
    )
    max_rollbacks: int = Field(
        3, ge=0, description="Rollbacks of a run; the next one stops it instead (count)."
    )


class AdapterConfig(Section):
    """Hebbian plasticity adapters."""

    rank: int = Field(ge=1, description="Rank of the plastic low-rank update (features).")
    alpha: float = Field(gt=0, description="Scale of the update (ratio).")
    decay: float = Field(gt=0, lt=1, description="Fast-weight decay per token (ratio).")
    clamp: float = Field(2.0, gt=0, description="Largest magnitude of a fast weight.")
    gradient_clipping: float = Field(
        2.0, ge=0, description="Largest gradient norm of adapter parameters (L2)."
    )


class PolicyConfig(Section):
    """RL memory agent, trained with GRPO."""

    max_branches: int = Field(ge=1, description="Candidates evaluated per decision (count).")
    step_budget: int = Field(ge=1, description="Memory operations per prompt (count).")
    accept_threshold: float = Field(0.0, description="Advantage from which a branch is kept.")
    horizon: int = Field(ge=1, description="Transitions kept for the return (count).")
    gamma: float = Field(gt=0, le=1, description="Discount per transition (ratio).")
    gae_lambda: float = Field(gt=0, le=1, description="Decay of the advantage estimate (ratio).")
    kl_target: float = Field(gt=0, description="KL divergence that ends a round of epochs (nats).")
    clip_ratio: float = Field(0.2, gt=0, description="Clip of the probability ratio.")
    latency_penalty: float = Field(ge=0, description="Reward taken per memory operation.")
    stability_bonus: float = Field(ge=0, description="Reward for a stable memory.")


class MemoryConfig(Section):
    """Working and episodic memory."""

    summary_dim: int = Field(ge=1, description="Width shared by the summary slots (features).")
    kv_summary_stride: int = Field(8, ge=1, description="Tokens per summary update.")
    top_k: int = Field(ge=1, description="Entries read per retrieval (count).")
    max_tokens: int = Field(ge=1, description="Capacity of the episodic memory (tokens).")


class StageBLosses(Section):
    """Weights of the Stage B losses (ratio)."""

    ce: float = Field(1.0, ge=0, description="Weight of cross-entropy.")
    rl: float = Field(1.0, ge=0, description="Weight of the policy loss.")
    hebbian: float = Field(0.01, ge=0, description="Weight of the correlation objective.")
    moe_aux: float = Field(1.0, ge=0, description="Weight of the router losses.")


class StageBTraining(Section):
    """Texts, batches, lengths and rates of Stage B.

    Four phases in this order: memory (retrieval encoder and summariser), adapters, joint (both, and
    the backbone where it is trained), policy (GRPO, on what the others have become). A lesson is a
    batch of texts that is made and learned from as a whole; lessons are what ranks share out.
    """

    window_tokens: int | None = Field(
        None, ge=8, description="Tokens read at a time; null: training.sequence_length."
    )
    length_ratios: tuple[int, ...] = Field(
        (1, 2, 4, 8),
        min_length=1,
        strict=False,
        description="Lengths of the texts, in turn (windows).",
    )
    tasks: tuple[ReasoningTask, ...] = Field(
        get_args(ReasoningTask),
        min_length=1,
        strict=False,
        description="Tasks that the texts are, in turn.",
    )
    memory_steps: int = Field(1_000, ge=0, description="Length of the memory phase (steps).")
    adapter_steps: int = Field(1_000, ge=0, description="Length of the adapters' phase (steps).")
    policy_steps: int = Field(
        150, ge=0, description="Length of the policy's phase (batches of rollouts)."
    )
    joint_steps: int = Field(500, ge=0, description="Length of the joint phase (steps).")
    lessons_per_step: int = Field(
        32, ge=1, description="Lessons of a step, all ranks; the ranks divide it (count)."
    )
    texts_per_lesson: int = Field(4, ge=1, description="Texts of a lesson (count).")
    group_size: int = Field(16, ge=2, description="Rollouts of each text in the policy's phase.")
    memory_learning_rate: float = Field(
        3e-4, gt=0, description="Peak rate of retrieval encoder and summariser (per step)."
    )
    adapter_learning_rate: float = Field(
        1e-3, gt=0, description="Peak rate of the adapters (per step)."
    )
    policy_learning_rate: float = Field(
        3e-4, gt=0, description="Peak rate of policy and value heads (per step)."
    )
    backbone_lr_scale: float = Field(
        0.0,
        ge=0,
        description="Rate of the backbone in the joint phase over training.learning_rate (ratio); "
        "0: the backbone stays as Stage A left it, bit by bit. Usual is 0.1.",
    )
    min_learning_rate_ratio: float = Field(
        0.1, ge=0, le=1, description="Rate at the end of a phase over its peak (ratio)."
    )
    warmup_steps: int = Field(20, ge=0, description="Linear warm-up of each phase (steps).")
    gradient_clipping: float = Field(
        1.0, ge=0, description="Largest gradient norm of each part but the adapters (L2); 0: none."
    )

    @field_validator("length_ratios")
    @classmethod
    def _whole_windows(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 1:
            raise ValueError(f"length_ratios = {list(value)}: a text has one window or more")
        return value

    @model_validator(mode="after")
    def _learns_something(self) -> StageBTraining:
        if self.num_steps == 0:
            raise ValueError(
                "memory_steps, adapter_steps, policy_steps and joint_steps are all 0: nothing "
                "would be learned. Try training.stage = a"
            )
        return self

    @property
    def phases(self) -> tuple[tuple[Phase, int], ...]:
        """Phases that take place, in order, with their lengths in steps."""
        lengths: tuple[tuple[Phase, int], ...] = (
            ("memory", self.memory_steps),
            ("adapters", self.adapter_steps),
            ("joint", self.joint_steps),
            ("policy", self.policy_steps),
        )
        return tuple((phase, steps) for phase, steps in lengths if steps)

    @property
    def num_steps(self) -> int:
        """Length of Stage B (steps)."""
        return sum(steps for _, steps in self.phases)


class StageBConfig(Section):
    """Reasoning enablement. A config with this section is a reasoning variant."""

    run: str | None = Field(
        None, description="Run directory of a finished Stage A to start from; null: this run's."
    )
    adapters: AdapterConfig
    policy: PolicyConfig
    memory: MemoryConfig
    losses: StageBLosses = StageBLosses()
    training: StageBTraining = StageBTraining()


class Config(Section):
    """One run: model, layout, training, data and cadences."""

    name: str = Field(description="Name of the variant, shown in logs and reports.")
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
        return self
