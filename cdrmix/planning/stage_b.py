"""Plan of Stage B: tokens of a lesson, bytes per rank, number of pipeline stages.

A lesson keeps its graph until its one backward pass, so its activations follow from the tokens that
it learns from: some segments of each text, two windows with a question, and rows of the corpus.
Whole texts are read without a graph, when the agent plays.

Data ranks take different lessons. Each holds the whole backbone if it fits; a frozen backbone that
does not fit is split over pipeline stages. The embedding, which is also the head, and the parts of
Stage B are on every stage, but for the adapters, which are with their layers. The checkpoint of
Stage A is read into this layout whatever its own layout was.

Weights, gradients and optimizer are those of the trained parameters, the backbone's among them if
it has a learning rate. Blocks are not recomputed. Activations are those of a trained backbone for
the largest lesson: a frozen one saves less, its adapters about as much more
(tests/parity/test_stage_b_memory.py).

A step is timed as one of the joint phase, whose lessons are the largest that are learned from, and
one of the policy's phase as the most that its episodes may ask for: how much they do depends on
what the agent does, and episodes with the same window share what it costs.

An episode keeps a hidden state of each of its steps, counted for the longest text. The device holds
those of one lesson at a time, and then no activations of another phase: the larger of both counts.
Those of all lessons of a step wait on the host.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from cdrmix.config.reasoning import ANSWER_TOKENS, StageBConfig
from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning.activations import SavedActivations
from cdrmix.planning.cluster import GIB, Cluster, Memory
from cdrmix.planning.cost import CostModel
from cdrmix.planning.counts import parameters, stage_b_params
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import Degrees, Layout
from cdrmix.planning.lesson_sizes import (
    ADAPTER_KERNELS,
    DRILLS_PER_TASK,
    QUESTION_TOKENS,
    most_steps,
    pieces_of_rows,
    question_head,
    row_tokens,
    rows_of_text,
    segment_tokens,
    segments_of_pass,
    steps_after_question,
    trained_segments,
)
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.plan import Plan, StageBLayout
from cdrmix.planning.rules import nearest_divisors
from cdrmix.planning.stages import boundary_values, stage_layers
from cdrmix.planning.step_time import Work, memory_seconds, ring_bandwidth, seconds_of

_STATE_BYTES = 4  # fast weights are float32
# Bytes of the optimizer for each parameter that is trained (planning/state_traffic.py).
_OPTIMIZER_BYTES = 46


def stage_b_section(config: Config) -> StageBConfig:
    """Section of Stage B, of a run that has one."""
    assert config.stage_b is not None, "Stage B has its section"
    return config.stage_b


def stage_b_layout(config: Config, cluster: Cluster, *, zero_stage: int) -> StageBLayout | None:
    """Chooses the fewest stages that fit a device, or, if none do, those with the least memory.

    More stages than that help no host: of fewer data ranks, each has more episodes waiting. None
    if the run has no Stage B, which uses ZeRO-1 if Stage A does, else ZeRO-2. Raises PlanError
    if stage_b.pipeline, which fixes the number, is impossible on these ranks.
    """
    stage_b = config.stage_b
    if stage_b is None or config.training.stage == "a":
        return None
    check_stage_b(config, cluster.world_size)
    world = cluster.world_size
    share = config.resources.share
    is_frozen = stage_b.training.backbone_lr_scale == 0
    most = config.model.num_layers if is_frozen else 1
    # data ranks need equal pipelines, so stages divide the ranks
    sizes = [n for n in range(1, most + 1) if world % n == 0]
    if stage_b.pipeline is not None:
        sizes = [stage_b.pipeline]
    model = _Model(config, cluster, zero_stage)
    memories: dict[int, Memory] = {}
    for pipeline in sizes:
        memories[pipeline] = model.estimate(pipeline)
        if memories[pipeline].of_device(cluster) <= share * cluster.memory_bytes:
            break
    else:
        pipeline = min(memories, key=lambda size: memories[size].of_device(cluster))
    memory = memories[pipeline]
    return StageBLayout(
        degrees=Degrees(data=world // pipeline, pipeline=pipeline),
        memory=memory,
        fits=memory.fits(cluster, share=share),
        step_seconds=model.step_seconds(pipeline),
        policy_step_seconds=model.policy_step_seconds(pipeline),
        whole=memories[1] if 1 in memories else model.estimate(1),
    )


def stage_b_layers(config: Config, pipeline: int) -> list[range]:
    """Cuts the blocks into pipeline stages for Stage B, by the rule of Stage A."""
    window = stage_b_section(config).training.window_tokens
    return stage_layers(config.model, window or config.training.sequence_length, pipeline)


def check_stage_b(config: Config, world_size: int) -> None:
    """Raises PlanError if `stage_b.pipeline` is set to what is impossible on these ranks."""
    if config.stage_b is None or config.stage_b.pipeline is None or config.training.stage == "a":
        return
    pipeline = config.stage_b.pipeline
    layers = config.model.num_layers
    if pipeline > layers:
        raise PlanError(
            f"{config.name}: stage_b.pipeline = {pipeline} is more than model.num_layers = "
            f"{layers}, and a stage needs a block. Try at most that"
        )
    if world_size % pipeline:
        raise PlanError(
            f"{config.name}: stage_b.pipeline = {pipeline} does not divide the {world_size} ranks. "
            f"Try stage_b.pipeline = {nearest_divisors(world_size, pipeline)}, or leave it out"
        )


class _Call(NamedTuple):
    """Rows that the backbone reads together in a lesson of the joint phase."""

    rows: int
    tokens: int  # of a row
    adapter_kernels: int  # of each plastic adapter, there and back

    def turns(self, stages: int) -> int:
        """Pieces that a stage computes, with those of other stages that it waits for."""
        return self.pieces(stages) + stages - 1

    def pieces(self, stages: int) -> int:
        """Pieces that its rows are cut into."""
        return len(pieces_of_rows(self.rows, self.tokens, stages))


class _Model:
    """Memory estimates of Stage B for one configuration on one cluster."""

    def __init__(self, config: Config, cluster: Cluster, zero_stage: int) -> None:
        self._model = config.model
        self._stage_b = stage_b_section(config)
        self._cluster = cluster
        self._zero_stage = zero_stage
        training = self._stage_b.training
        self._is_frozen = training.backbone_lr_scale == 0
        self._window = training.window_tokens or config.training.sequence_length
        # upper bound of the tokens read in a lesson of the joint phase, the largest phase
        segment = segment_tokens(self._window, training.segment_tokens)
        texts = training.texts_per_lesson
        beside = QUESTION_TOKENS + training.answer_tokens - ANSWER_TOKENS
        segments = trained_segments(self._stage_b)
        window = min(self._window, segments * (segment + 1) + beside)
        row = row_tokens(self._window, config.training.sequence_length)
        plain = rows_of_text(texts) * row
        read = segment + question_head(self._window) * (training.question == "first")
        # rows and tokens of the calls: as many segments as a pass takes, both windows at once,
        # windows of a row in turn
        step = segments_of_pass(self._window, read)
        reads = [min(step, segments - at) for at in range(0, segments, step)]
        of_row = [min(self._window, row - at) for at in range(0, row, self._window)]
        writing, looking = ADAPTER_KERNELS.writing, ADAPTER_KERNELS.looking
        self._calls = [
            *(_Call(texts, count * read, writing) for count in reads),
            _Call(2 * texts, window, looking),
            *(_Call(rows_of_text(texts), tokens, writing) for tokens in of_row),
        ]
        self._num_adapters = 0
        if "plastic" in self._stage_b.memory.parts:
            numbers = stage_b_params(self._model, self._stage_b).plastic_state
            self._num_adapters = numbers // self._stage_b.adapters.rank**2
        self._read = read  # tokens of a segment with what is read before it
        self._segments_of_pass = step
        self._scored = plain  # tokens that meet the vocabulary, those of answers left out
        self._tokens = texts * (segments * read + 2 * window) + plain
        if not self._is_frozen:
            # plain text once more, so that it keeps its language, and drills without memory
            drills = _Call(texts * DRILLS_PER_TASK, window, 0)
            replay = _Call(rows_of_text(texts), row, 0)
            self._calls += drills, replay
            self._tokens += drills.rows * window + plain
            self._scored += plain
        one_window = config.training.model_copy(update={"sequence_length": self._window})
        # a lesson reads single texts, so there are no documents to separate
        data = config.data.model_copy(update={"segment_documents": False})
        lessons = config.model_copy(update={"training": one_window, "data": data})
        self._memory = MemoryModel(lessons, cluster.device)
        self._whole = self._memory.on_stage(_layout(1), 0)
        # Activations of a window outside the blocks
        saved = self._memory.activations
        assert isinstance(saved, SavedActivations), "Hugging Face models have no Stage B"
        self._saved = saved
        in_blocks = saved.of_blocks(_layout(1), 0)
        self._outside = self._whole.activations - in_blocks
        if self._is_frozen:  # the head's gradient, which the loss forms, is absent too
            self._outside -= 4 * config.model.vocab_size * config.model.hidden_size
        self._params = Counter[int | None]()  # by block; None: outside the blocks
        for parameter in parameters(config.model):
            self._params[parameter.layer] += parameter.num_elements

    def step_seconds(self, pipeline: int) -> float:
        """Time of a step of the joint phase.

        A frozen backbone has no gradients of its matrices.
        """
        training = self._stage_b.training
        cluster = self._cluster
        cost = CostModel(self._memory, cluster)
        passes = 2 if self._is_frozen else 3
        flops = self._tokens * sum(cost.layer_flops) + self._scored * cost.flops_above
        kernels = cost.moved.of_layers(range(self._model.num_layers), Degrees())
        moved = self._tokens * (kernels.forward_bytes + kernels.backward_bytes)
        outside, launches = cost.moved.outside(Degrees(), self._scored)
        # A stage starts its share of the kernels for each piece, and waits for those of the others.
        for call in self._calls:
            started = kernels.forward + kernels.backward + call.adapter_kernels * self._num_adapters
            launches += call.turns(pipeline) / pipeline * started
        share = self._share_of_time(pipeline)
        work = Work(share * passes * flops, share * (moved + outside), launches)
        lesson = seconds_of(work, cluster, cost.peak)
        data = cluster.world_size // pipeline
        trained = stage_b_params(self._model, self._stage_b).total_params
        trained += 0 if self._is_frozen else self._params.total()
        exchanged = 2 * self._memory.element_bytes * trained * (1 - 1 / data)
        once = exchanged / ring_bandwidth(cluster, data)
        once += memory_seconds(_OPTIMIZER_BYTES * trained / data, cluster)
        return -(-training.lessons_per_step // data) * lesson + once

    def policy_step_seconds(self, pipeline: int) -> float:
        """Most time that a step of the policy's phase takes once texts of all lengths are in it.

        A text is read once for its episodes, forward. Each of them looks at its window when it is
        asked and after each retrieval. Only windows of one length are read together for their
        answers; at most, each has a length of its own. What the heads compute is small beside that.
        """
        training, policy = self._stage_b.training, self._stage_b.policy
        cost = CostModel(self._memory, self._cluster)
        kernels = cost.moved.of_layers(range(self._model.num_layers), Degrees())
        flops = sum(cost.layer_flops)
        # as many as the longest text may have, in proportion
        ratios = training.length_ratios
        longest = most_steps(self._stage_b, self._window) - steps_after_question(policy)
        segments = longest * sum(ratios) / len(ratios) / max(ratios)
        episodes = training.texts_per_lesson * training.group_size

        def forward(
            tokens: float,
            calls: float,
            *,
            adapters: int = ADAPTER_KERNELS.looking_alone,
            scored: float = 0,
            share: float = 1.0,
        ) -> float:
            moved = tokens * kernels.forward_bytes
            started = calls * (kernels.forward + adapters * self._num_adapters)
            products = tokens * flops + scored * cost.flops_above
            work = Work(share * products, share * moved, started)
            return seconds_of(work, self._cluster, cost.peak)

        texts = training.texts_per_lesson
        read = texts * segments * self._read
        beside = QUESTION_TOKENS + training.answer_tokens - ANSWER_TOKENS
        width = segment_tokens(self._window, training.segment_tokens) + 1
        top_k = self._stage_b.memory.top_k
        looked = [
            min(self._window, min(retrievals * top_k, policy.max_spliced) * width + beside)
            for retrievals in range(policy.retrieval_rounds + 1)
        ]
        share = self._share_of_time(pipeline)
        one_pass = _Call(texts, self._segments_of_pass * self._read, 0)
        passes = segments / self._segments_of_pass * one_pass.turns(pipeline) / pipeline
        lesson = forward(read, passes, adapters=ADAPTER_KERNELS.writing_alone, share=share)
        for tokens in looked:
            turns = _Call(episodes, tokens, 0).turns(pipeline) / pipeline
            lesson += forward(episodes * tokens, turns, share=share)
        if training.question == "first":  # the question alone, for how near segments are to it
            lesson += forward(texts * beside, 1, adapters=0)
        # Windows are read again for their answers, which are then decoded together. Each call reads
        # the weights, of nearly all experts, one stage after the other.
        calls = episodes + training.answer_tokens - 1
        tokens = episodes * (looked[-1] + training.answer_tokens - 1)
        lesson += forward(tokens, calls, scored=episodes * training.answer_tokens)
        weights = self._memory.element_bytes * self._params.total()
        lesson += calls * memory_seconds(weights, self._cluster)
        data = self._cluster.world_size // pipeline
        return -(-training.lessons_per_step // data) * lesson

    def _share_of_time(self, stages: int) -> float:
        """Time of a lesson's calls on so many stages, as a share of that on one.

        Of a call in n pieces, a stage computes n and waits for as many as there are other stages.
        """
        alone = 0
        staged = 0.0
        for call in self._calls:
            tokens = call.rows * call.tokens
            alone += tokens
            staged += tokens * call.turns(stages) / (call.pieces(stages) * stages)
        return staged / alone

    def estimate(self, pipeline: int) -> Memory:
        """Bytes on the fullest rank of a number of stages."""
        stages = self._memory.stages(pipeline)
        boundaries = boundary_values(self._model, stages, 1)
        estimates = [
            self._on_stage(_layout(pipeline), stage, layers, entering=boundaries[stage])
            for stage, layers in enumerate(stages)
        ]
        return max(estimates, key=lambda memory: memory.total)

    def _hidden_values(self, steps: int) -> int:
        """Values of the hidden states of a lesson's episodes of so many steps."""
        training = self._stage_b.training
        return training.texts_per_lesson * training.group_size * steps * self._model.hidden_size

    def _episode_bytes(self) -> int:
        """Bytes of the played episodes of a lesson, on every stage."""
        # Twice as float32: step by step while they are played, then joined. Learning from them
        # takes less: once, and a copy in the type of the heads.
        return 2 * 4 * self._hidden_values(most_steps(self._stage_b, self._window))

    def _waiting_bytes(self, data: int) -> int:
        """Bytes of the episodes of a step on the host of a rank, of `data` pipelines."""
        steps = most_steps(self._stage_b, self._window)
        steps = min(steps, self._stage_b.policy.horizon or steps)
        lessons = -(-self._stage_b.training.lessons_per_step // data)
        return lessons * self._memory.element_bytes * self._hidden_values(steps)

    def _on_stage(self, layout: Layout, stage: int, layers: range, *, entering: int) -> Memory:
        """Bytes on a rank of one stage, which `entering` values of each token enter."""
        training = self._stage_b.training
        size = self._memory.element_bytes
        data = self._cluster.world_size // layout.degrees.pipeline
        rollouts = training.texts_per_lesson * training.group_size  # of the policy phase
        backbone = self._params[None] + sum(self._params[layer] for layer in layers)
        sizes = stage_b_params(self._model, self._stage_b, layers)
        trained = sizes.total_params + (0 if self._is_frozen else backbone)
        gradients = 4 * -(-trained // data)
        if self._zero_stage <= 1:
            # DeepSpeed accumulates half-precision gradients in float32, besides those of the
            # backward pass
            gradients = size * trained + (4 * trained if size == 2 else 0)
        # of a window: the blocks of the stage, their input, and all outside the blocks
        in_blocks = self._saved.of_blocks(layout, stage)
        of_window = int(self._outside + in_blocks) + entering * self._window * size
        saved = of_window * self._tokens // self._window
        buffers = {
            "plastic_state": _STATE_BYTES * rollouts * sizes.plastic_state,
            "episodes": max(0, self._episode_bytes() - saved),
            "workspace": self._memory.on_stage(layout, stage).buffers["workspace"],
            "logits": self._whole.buffers["logits"],  # on every stage
        }
        if self._is_frozen:
            buffers["workspace"] -= self._memory.block_gradients(layout, stage)
            buffers["logits"] = self._memory.chunk_of_logits(self._window, layout.degrees)
        buffers |= self._memory.allowances(saved + sum(buffers.values()))
        return Memory(
            weights=size * (backbone + sizes.total_params),
            gradients=gradients,
            optimizer=12 * -(-trained // data),
            activations=saved,
            buffers=buffers,
            waiting_episodes=self._waiting_bytes(data) if training.policy_steps else 0,
        )


def _layout(pipeline: int) -> Layout:
    return Layout(Degrees(pipeline=pipeline), 1, 1, 1, activation_checkpointing="none")


def stage_b_reason(config: Config, cluster: Cluster, layout: StageBLayout) -> str:
    """Describes the memory of Stage B on a device, with advice where it does not fit."""
    memory = layout.memory
    share = config.resources.share
    held = "as every rank holds the whole backbone"
    if layout.degrees.pipeline > 1:
        why = f"whole it would take {layout.whole.total / GIB:,.1f} GiB"
        if stage_b_section(config).pipeline is not None:
            why = "stage_b.pipeline as given"
        held = f"as {layout.degrees.pipeline} stages share out the frozen backbone ({why})"
    text = (
        f"Stage B: {memory.of_device(cluster) / GIB:,.1f} GiB of "
        f"{cluster.memory_bytes / GIB:.1f} GiB a device: {memory.weights / GIB:.1f} of weights, "
        f"{held}, {memory.activations / GIB:,.1f} of activations of a lesson"
    )
    if layout.fits:
        return f"{text}: within the {100 * share:g} % that a plan may fill"
    text += f": NOT within the {100 * share:g} % that a plan may fill"
    if not memory.fits_host(cluster, share=share):
        waiting = memory.waiting_episodes * cluster.gpus_per_node / GIB
        return (
            f"{text} of a host: episodes that wait for their step take {waiting:,.0f} of its "
            f"{cluster.host_memory_gib:,g} GiB. Try fewer stage_b.training.lessons_per_step or "
            "group_size, or a stage_b.policy.horizon"
        )
    if stage_b_section(config).training.backbone_lr_scale > 0:
        text += ". A frozen backbone (backbone_lr_scale = 0) can be shared out over stages"
    least = (memory.total - memory.activations) / share
    if least < cluster.memory_bytes:
        return f"{text}. Try fewer stage_b.training.texts_per_lesson or a smaller window_tokens"
    return (
        f"{text}. It takes devices of more than {least / GIB:,.0f} GiB; training.stage = a leaves "
        "it out"
    )


def stage_b_plan(config: Config, plan: Plan, *, world_size: int) -> Plan:
    """Derives the plan of Stage B from that of Stage A on the same ranks; ZeRO-3 becomes ZeRO-2."""
    lessons = stage_b_section(config).training.lessons_per_step
    pipeline = plan.stage_b.degrees.pipeline if plan.stage_b else 1
    data = world_size // pipeline
    # some micro-steps are empty where the data ranks do not divide the lessons
    slots = -(-lessons // data)
    name = "zero1" if plan.zero_stage <= 1 else "zero2"
    precision = ("bf16", "fp16", "data_types")
    settings = {key: plan.deepspeed[key] for key in precision if key in plan.deepspeed} | {
        "train_batch_size": slots * data,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": slots,
        "gradient_clipping": 0.0,  # Stage B clips each part by itself
    }
    held = f"data {data}: every rank holds the whole backbone"
    if pipeline > 1:
        held = f"data {data}, pipeline {pipeline}: a rank holds its stage's blocks of the backbone"
    empty = slots * data - lessons
    warning = (
        f"Stage B: {lessons} lessons of a step leave {empty} of {slots * data} micro-steps empty. "
        f"Try stage_b.training.lessons_per_step = {slots * data}"
    )
    return replace(
        plan,
        profile=name,
        degrees=Degrees(data=data, pipeline=pipeline),
        zero_stage=1 if name == "zero1" else 2,
        micro_batch_size=1,
        gradient_accumulation_steps=slots,
        activation_checkpointing="none",
        sequence_checkpoint_tokens=None,
        offloads_optimizer=False,
        offloads_parameters=False,
        memory=None,
        cost=None,
        fits=plan.stage_b is None or plan.stage_b.fits,
        deepspeed=read_profile(profile_path(name)) | settings,
        reasons=(f"Stage B: {name}, {held}",),
        warnings=(warning,) if empty else (),
    )
