"""The `stage_b` section: reasoning enablement."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from cdrmix.config.section import Section

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
    "recall",
]
# Without `recall`, which needs text with names and numbers that come back.
MADE_UP_TASKS: tuple[ReasoningTask, ...] = tuple(
    task for task in get_args(ReasoningTask) if task != "recall"
)

# A segment is a quarter of a window and must hold a sentence of any task; besides the question and
# its answer, a window must hold one segment (tokens).
# With 512 byte pairs, of 70 tasks with evidence 5 have it in a segment of a window of 32, 37 at 48,
# and all at 64.
SMALLEST_WINDOW = 64
SEGMENTS_PER_WINDOW = 4
# Room of a window for an answer: three made-up words of four tokens, and the stop.
ANSWER_TOKENS = 14


class AdapterConfig(Section):
    """Hebbian plasticity adapters."""

    rank: int = Field(ge=1, description="Rank of the plastic low-rank update (features).")
    alpha: float = Field(gt=0, description="Scale of the update (ratio).")
    decay: float = Field(gt=0, lt=1, description="Fast-weight decay per token (ratio).")
    clamp: float = Field(2.0, gt=0, description="Largest magnitude of a fast weight.")
    gradient_clipping: float = Field(2.0, ge=0)
    """Largest gradient norm of adapter parameters (L2)."""
    decorrelation_weight: float = Field(1e-2, ge=0)
    """Weight of the decorrelation of an adapter's features in the correlation objective (ratio)."""


class PolicyConfig(Section):
    """RL memory agent, trained with GRPO."""

    max_branches: int = Field(ge=1)
    """Actions of a decision that --branches tries in parallel (count)."""
    step_budget: int = Field(ge=1, description="Memory operations per prompt (count).")
    # The advantage of the right action is near zero, so that at 0 the error of the value head
    # decides; agents that succeed by themselves do so by branches from -0.05 on.
    accept_threshold: float = 0.0
    """Smallest advantage of an action that --branches accepts (return)."""
    # Not a limit of episodes, which have a step per segment: all are played to their answer.
    horizon: int = Field(ge=1)
    """Last transitions of an episode, up to its answer, to train on (count)."""
    gamma: float = Field(gt=0, le=1, description="Discount per transition (ratio).")
    gae_lambda: float = Field(gt=0, le=1, description="Decay of the advantage estimate (ratio).")
    kl_target: float = Field(gt=0, description="KL divergence that ends a round of epochs (nats).")
    kl_margin: float = Field(1.5, gt=0)
    """KL divergence that ends a round of epochs, over kl_target (ratio)."""
    epochs: int = Field(4, ge=1)
    """Most optimizer steps on one batch of rollouts (count)."""
    clip_ratio: float = Field(0.2, gt=0, description="Clip of the probability ratio.")
    entropy_weight: float = Field(0.003, ge=0)
    """Weight of the policy's entropy in its loss (ratio)."""
    value_weight: float = Field(0.5, ge=0)
    """Weight of the value head's error in the policy's loss (ratio)."""
    latency_penalty: float = Field(ge=0, description="Reward taken per memory operation.")
    stability_bonus: float = Field(ge=0, description="Reward for a stable memory.")


class EvictionConfig(Section):
    """Utility of an entry of episodic memory; a full memory evicts the least useful entry."""

    score_weight: float = Field(0.5, ge=0)
    """Weight of the value at which the agent wrote the entry (ratio)."""
    recency_weight: float = Field(0.3, ge=0)
    """Weight of the time since the entry was used last (ratio)."""
    reads_weight: float = Field(0.2, ge=0)
    """Weight of the number of reads of the entry (ratio)."""
    half_life_actions: int = Field(1024, ge=1)
    """Actions after which the recency term halves (count)."""


class MemoryConfig(Section):
    """Working and episodic memory."""

    # A multiple, because all slots have the same width.
    summary_dim: int = Field(ge=1, multiple_of=8)
    """Width shared by the 8 summary slots (features)."""
    kv_summary_stride: int = Field(8, ge=1, description="Tokens per summary update.")
    top_k: int = Field(ge=1, description="Entries read per retrieval (count).")
    max_tokens: int = Field(ge=1, description="Capacity of the episodic memory (tokens).")
    contrastive_temperature: float = Field(0.07, gt=0)
    """Temperature of the retrieval loss (InfoNCE): lower weighs the nearest segments more
    (ratio)."""
    eviction: EvictionConfig = EvictionConfig()


class StageBLosses(Section):
    """Weights of the Stage B losses (ratio)."""

    ce: float = Field(1.0, ge=0, description="Weight of cross-entropy.")
    rl: float = Field(1.0, ge=0, description="Weight of the policy loss.")
    hebbian: float = Field(0.01, ge=0, description="Weight of the correlation objective.")
    moe_aux: float = Field(1.0, ge=0, description="Weight of the router losses.")


class StageBTraining(Section):
    """Texts, batches, lengths and rates of Stage B.

    Four phases in this order: memory (retrieval encoder and summariser), adapters, joint (both, and
    the backbone if it is trained), policy (GRPO, after the others). A lesson is a batch of
    texts that a data rank generates and trains on as a whole.
    """

    window_tokens: int | None = Field(None, ge=SMALLEST_WINDOW)
    """Tokens read at a time; null: training.sequence_length."""
    length_ratios: tuple[int, ...] = Field((1, 2, 4, 8), min_length=1, strict=False)
    """Lengths of the texts, used in turn (windows)."""
    tasks: tuple[ReasoningTask, ...] = Field(MADE_UP_TASKS, min_length=1, strict=False)
    """Tasks of the texts, used in turn; recall is made from text of the corpus."""
    task_file: str | None = None
    """Tasks of your own beside these: a file with a JSON object per line (docs/reasoning.md); a
    tenth of its rows is held out for the evaluation. null: none."""
    task_file_share: float = Field(0.5, gt=0, le=1)
    """Share of the texts that are rows of task_file (ratio); 1: no other tasks."""
    answer_tokens: int = Field(ANSWER_TOKENS, ge=2)
    """Room of a window for an answer and its stop (tokens)."""
    segment_tokens: int | None = Field(None, ge=8)
    """Longest segment of a text, at most a quarter of the window (tokens); null: a quarter of the
    window, at most 64."""
    question: Literal["last", "first"] = "last"
    """Place of the question: last, asked once all is read; first, also before each segment, so that
    what is stored and under which key follows from it."""
    memory_steps: int = Field(1_000, ge=0, description="Length of the memory phase (steps).")
    adapter_steps: int = Field(1_000, ge=0, description="Length of the adapters' phase (steps).")
    policy_steps: int = Field(150, ge=0)
    """Length of the policy's phase (batches of rollouts)."""
    joint_steps: int = Field(500, ge=0, description="Length of the joint phase (steps).")
    lessons_per_step: int = Field(32, ge=1)
    """Lessons of a step, all ranks, best a multiple of them (count)."""
    texts_per_lesson: int = Field(4, ge=1, description="Texts of a lesson (count).")
    # A return counts by its distance from the mean of its group: one alone has none.
    group_size: int = Field(16, ge=2, description="Rollouts of each text in the policy's phase.")
    memory_learning_rate: float = Field(3e-4, gt=0)
    """Peak rate of retrieval encoder and summariser (per step)."""
    adapter_learning_rate: float = Field(1e-3, gt=0)
    """Peak rate of the adapters (per step)."""
    policy_learning_rate: float = Field(3e-4, gt=0)
    """Peak rate of policy and value heads (per step)."""
    backbone_lr_scale: float = Field(0.0, ge=0)
    """Rate of the backbone in the joint phase over training.learning_rate (ratio); 0: the backbone
    does not change, bit by bit. Usual is 0.1."""
    min_learning_rate_ratio: float = Field(0.1, ge=0, le=1)
    """Rate at the end of a phase over its peak (ratio)."""
    warmup_steps: int = Field(20, ge=0, description="Linear warm-up of each phase (steps).")
    gradient_clipping: float = Field(1.0, ge=0)
    """Largest gradient norm of each part but the adapters (L2); 0: none."""

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
        # The policy comes last: it is rewarded for answers, which the others must be able to give.
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

    run: str | None = None
    """Run directory of a finished Stage A to start from; null: this one."""
    pipeline: int | None = Field(None, ge=1)
    """Pipeline stages of a frozen backbone (ranks); null: the fewest that fit."""
    adapters: AdapterConfig
    policy: PolicyConfig
    memory: MemoryConfig
    losses: StageBLosses = StageBLosses()
    training: StageBTraining = StageBTraining()

    @model_validator(mode="after")
    def _only_frozen_is_cut(self) -> StageBConfig:
        scale = self.training.backbone_lr_scale
        if (self.pipeline or 1) > 1 and scale > 0:
            raise ValueError(
                f"pipeline = {self.pipeline} with training.backbone_lr_scale = {scale}: in Stage B "
                "only a frozen backbone is shared out over stages, a trained one is whole on every "
                "rank. Try training.backbone_lr_scale = 0, or leave pipeline out"
            )
        return self
