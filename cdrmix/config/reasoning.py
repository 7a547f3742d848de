"""The `stage_b` section: reasoning enablement."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from cdrmix.config.section import Section

Phase = Literal["memory", "adapters", "policy", "joint"]
Baseline = Literal["group", "leave_one_out", "critic"]
Credit = Literal["segment", "episode"]
ReasoningTask = Literal[
    "needle_keys",
    "needle_values",
    "needle_queries",
    "variable_tracking",
    "common_words",
    "look_up",
    "arithmetic",
    "logic",
    "needle_decoys",
    "needle_haystack",
    "registers",
    "recall",
]
# Of a run that names none; what came later is asked for by name.
_DEFAULT_TASKS: tuple[ReasoningTask, ...] = get_args(ReasoningTask)[:8]

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
    decay: float | None = Field(None, gt=0, lt=1)
    """Fast-weight decay per token (ratio), the same in all adapters; instead of
    half_life_tokens."""
    half_life_tokens: tuple[float, float] | None = Field(None, strict=False)
    """Shortest and longest half-life of the fast weights, between which each adapter learns its own
    (tokens); best from a segment to eight windows."""
    # Up to half of it a fast weight is what was stored, so that a clamp every 16 tokens does not
    # make it fade.
    clamp: float = Field(2.0, gt=0, description="Largest magnitude of a fast weight.")
    gradient_clipping: float = Field(2.0, ge=0)
    """Largest gradient norm of adapter parameters (L2)."""
    decorrelation_weight: float = Field(1e-2, ge=0)
    """Weight of the decorrelation of an adapter's features in the correlation objective (ratio)."""

    @model_validator(mode="after")
    def _fades_in_one_way(self) -> AdapterConfig:
        if (self.decay is None) == (self.half_life_tokens is None):
            raise ValueError(
                "give decay, one for all adapters, or half_life_tokens, between which each learns "
                "its own: one of the two"
            )
        if self.half_life_tokens is not None:
            shortest, longest = self.half_life_tokens
            if not 1 <= shortest < longest < float("inf"):
                raise ValueError(
                    f"half_life_tokens = {list(self.half_life_tokens)}: give a shortest from 1 and "
                    "a longer one (tokens)"
                )
        return self


class PolicyConfig(Section):
    """RL memory agent, trained with GRPO."""

    max_branches: int = Field(ge=1)
    """Actions of a decision that --branches tries in parallel (count)."""
    step_budget: int = Field(ge=2)
    """Memory operations per prompt, of which the last is kept for the question (count)."""
    # Where the budget holds every text of training whole, an agent learns to write as much as it
    # likes, and has none left in longer ones.
    smallest_budget: float = Field(0.125, gt=0, le=1)
    """Smallest budget of a text in training, as a share of step_budget; each text has its own,
    drawn evenly by its logarithm (ratio); 1: all have step_budget."""
    # The advantage of the right action is near zero, so that at 0 the error of the value head
    # decides; agents that succeed by themselves do so by branches from -0.05 on.
    accept_threshold: float = 0.0
    """Smallest advantage of an action that --branches accepts (return)."""
    # Not a limit of episodes, which have a step per segment: all are played to their answer.
    horizon: int | None = Field(None, ge=1)
    """Last transitions of an episode, up to its answer, to train on (count); null: all of them."""
    # What an answer takes: a round for each piece of evidence that leads to the next.
    retrieval_rounds: int = Field(4, ge=1)
    """Rounds of retrieve and splice that there is time for once the question is asked (count)."""
    max_spliced: int = Field(8, ge=1)
    """Most fetched segments in a window (count)."""
    value_width: int = Field(64, ge=1)
    """Inner width of the value head (features)."""
    # By an ablation: docs/benchmarks.md, "Stage B: choices of the agent's learning".
    baseline: Baseline = "group"
    """Subtracted from a return: group, the mean of its group; leave_one_out, that of the others
    in its group; critic, the value head, by generalised advantage estimation."""
    # Of hundreds of segments that are read few can change the answer; what the episode earned is
    # noise to the others, and an agent that learns from it writes whatever it reads.
    credit: Credit = "segment"
    """Steps that learn from what the episode earned: segment, those that can have changed its
    answer, while the others learn from what their operations cost; episode, all."""
    gamma: float = Field(gt=0, le=1, description="Discount per transition (ratio).")
    gae_lambda: float = Field(gt=0, le=1, description="Decay of the advantage estimate (ratio).")
    kl_target: float = Field(gt=0, description="KL divergence that a batch may come to (nats).")
    kl_margin: float = Field(1.5, gt=0)
    """KL divergence from which on a batch has no further epoch, over kl_target (ratio)."""
    epochs: int = Field(4, ge=1)
    """Most optimizer steps on one batch of rollouts (count)."""
    clip_ratio: float = Field(0.2, gt=0)
    """Distance below 1, and above it unless clip_ratio_high is given, from which on a change of the
    probability ratio earns nothing (ratio)."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """The same above 1, where unlikely actions become likelier (ratio); null: clip_ratio."""
    dual_clip: float | None = Field(None, gt=1)
    """Probability ratio up to which an action worse than the baseline is pushed down (ratio); null:
    any."""
    value_clip: float | None = Field(None, gt=0)
    """Distance from the value at play from which on a change of the value earns nothing (return);
    null: any."""
    value_gradient_clipping: float = Field(1.0, ge=0)
    """Largest gradient norm of the value head, apart from the policy's (L2); 0: none."""
    # An operation that changes nothing loses latency_penalty, and is taken with odds of
    # exp(-latency_penalty / entropy_weight) by a policy that maximises both.
    entropy_weight: float = Field(0.003, ge=0)
    """Weight of the policy's entropy in its loss (ratio); well below latency_penalty, or operations
    that change nothing go on being taken."""
    value_weight: float = Field(0.5, ge=0)
    """Weight of the value head's error in the policy's loss (ratio)."""
    latency_penalty: float = Field(ge=0, description="Reward taken per memory operation.")
    stability_bonus: float = Field(ge=0, description="Reward for a stable memory.")


class EvictionConfig(Section):
    """Utility of an entry of an index; a full one evicts the least useful entry. While a text is
    read, the oldest segment gives way."""

    score_weight: float = Field(0.5, ge=0)
    """Weight of the value at which the agent wrote the entry (ratio)."""
    recency_weight: float = Field(0.3, ge=0)
    """Weight of the time since the entry was used last (ratio)."""
    reads_weight: float = Field(0.2, ge=0)
    """Weight of the number of reads of the entry (ratio)."""
    half_life_actions: int = Field(1024, ge=1)
    """Actions after which the recency term halves (count)."""


MemoryPart = Literal["plastic", "slots", "episodic", "state"]


class MemoryConfig(Section):
    """Memory of a reader: what remains of a segment that was read."""

    parts: tuple[MemoryPart, ...] = Field(("plastic", "slots", "episodic"), strict=False)
    """Memories that a reader has: fast weights, summary slots, segments written, and the recurrent
    state of segments that are summarised, which then goes on into the window."""
    # A multiple, because all slots have the same width.
    summary_dim: int = Field(ge=1, multiple_of=8)
    """Width shared by the 8 summary slots (features)."""
    kv_summary_stride: int = Field(8, ge=1, description="Tokens per summary update.")
    top_k: int = Field(ge=1, description="Entries read per retrieval (count).")
    words_share: float = Field(0.5, ge=0, le=1)
    """Part of the words that a segment shares with question and window in what a retrieval goes by,
    beside the cosine of its key (ratio); 0: keys alone."""
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
    tasks: tuple[ReasoningTask, ...] = Field(_DEFAULT_TASKS, min_length=1, strict=False)
    """Tasks of the texts, used in turn. Asked for by name alone are needle_decoys, needle_haystack,
    registers, and recall, which is made from text of the corpus."""
    hidden_evidence_share: float | None = Field(None, ge=0, le=1)
    """Share of the answers asked for without their evidence in the window: segments with it are
    summarised, so that slots, fast weights or the recurrent state have to hold it (ratio). null: 0
    where memory.parts has episodic, else 1."""
    # By an ablation: docs/benchmarks.md, "Stage B: choices of the agent's learning".
    curriculum: float = Field(0.5, ge=0, le=1)
    """Share of the policy's phase over which the lengths enter, evenly, the shortest being there
    from the start (ratio); 0: all are."""
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

    def lengths_at(self, step: int, length: int) -> tuple[int, ...]:
        """Lengths of the texts at a step, from 0, of a policy's phase of `length` steps.

        The shortest length is there from the start, the longest from `curriculum` of the phase on.
        """
        every = sorted(set(self.length_ratios))
        if self.curriculum == 0 or len(every) == 1:
            return self.length_ratios
        gap = self.curriculum * length / (len(every) - 1)
        longest = every[min(len(every) - 1, int(step / gap))]
        return tuple(ratio for ratio in self.length_ratios if ratio <= longest)

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
    def _phases_have_parts(self) -> StageBConfig:
        parts, training = self.memory.parts, self.training
        if not parts:
            raise ValueError("memory.parts is empty: a reader needs a memory. Try [plastic]")
        if training.adapter_steps and "plastic" not in parts:
            raise ValueError(
                f"training.adapter_steps = {training.adapter_steps}, and memory.parts has no "
                "plastic: nothing would be learned. Try training.adapter_steps = 0"
            )
        if training.memory_steps and not {"slots", "episodic"} & {*parts}:
            raise ValueError(
                f"training.memory_steps = {training.memory_steps}, and memory.parts has neither "
                "slots nor episodic: nothing would be learned. Try training.memory_steps = 0"
            )
        return self

    @model_validator(mode="after")
    def _only_frozen_is_cut(self) -> StageBConfig:
        scale = self.training.backbone_lr_scale
        if (self.pipeline or 1) > 1 and scale > 0:
            raise ValueError(
                f"pipeline = {self.pipeline} with training.backbone_lr_scale = {scale}: stages of "
                "Stage B give gradients of what enters a block and of its adapters, not of the "
                "backbone's weights and its routers' losses, so that a trained one is whole on "
                "every rank. Try training.backbone_lr_scale = 0, or leave pipeline out"
            )
        return self
