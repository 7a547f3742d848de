"""Training runs of a tiny model in any layout, for comparison with one process."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cdrmix import runtime
from cdrmix.config.schema import Config, TrainingConfig
from cdrmix.data.document import KINDS
from cdrmix.models import compiled
from cdrmix.parallel.topology import Topology, make_topology, own_tokens
from cdrmix.planning.cluster import processes
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import choose
from tests.harness import run_ranks
from tests.layout_faults import plant

STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY = 10, 8, 24, 304
# One process may round differently from another; what is wrong deviates by 1e-4 and more.
TOLERANCE = 1e-5
# Of AdamW. With its usual 1e-8, a weight whose gradient almost cancels out moves by rounding: one
# of -1.7e-9 was off by 3e-10, the weight by 2.8e-5 after a step and by 4e-3 after two. Choices of
# experts are then a coin toss: the closest of 20,480 (ten steps of 512 tokens) are within 5e-7, and
# router probabilities were off by 1e-6 to 5e-6, on plain data ranks too. With 1e-6 all weights
# stay within 5e-6.
EPSILON = 1e-6
# One weighs nothing. Without its share in the gradient, a wrong z-loss would not show.
OBJECTIVES = {"text": 1.0, "fim": 0.5, "prompt": 0.0, "thought": 2.0, "answer": 1.5, "z_loss": 0.1}

# torch imports its compiler with the first compilation, which each rank would pay: 4 s of CPU.
COMPILER = ("torch._inductor.compile_fx", "torch._dynamo.backends.debugging", "networkx")

# Multi-token prediction by its name in a case.
FURTHER: dict[str, dict[str, Any]] = {
    "linear": {"kind": "independent", "num_tokens": 3},
    "block": {"kind": "independent", "num_tokens": 2, "head": "block"},
    "deepseek": {"kind": "deepseek", "num_tokens": 3},
}


@dataclass(frozen=True)
class Case:
    """One layout and what is trained in it.

    Attributes:
        degrees: parallel degrees, of which the data degree is `data`.
        accumulation: micro-steps per step.
        optimizer: adamw, muon, or sgd, which shows a wrong scale of gradients.
        profile: DeepSpeed profile.
        moe: whether feed-forwards are experts.
        mixed: whether layers are listed, with SwiGLU, and experts in every other one.
        length: tokens of a sample; sequence ranks pass the state of a recurrence where it is long.
        packed: whether samples hold several documents that are kept apart.
        weighted: whether labels have weights.
        further: `model.mtp`, as kind, head and number of tokens; empty: the next token alone.
        objectives: whether the loss has parts of their own means, and a z-loss.
        broken: fault to plant, by name; see `layout_faults`.
        model: changes of the model section.
        training: changes of the training section.
        settings: changes of the optimizer section.
        zero: changes of the profile's `zero_optimization`.
        note: what these changes come to.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1
    accumulation: int = 1
    optimizer: str = "adamw"
    profile: str = "zero1"
    moe: bool = True
    mixed: bool = False
    length: int = LENGTH
    packed: bool = False
    weighted: bool = False
    further: str = ""
    objectives: bool = False
    broken: str = ""
    model: dict[str, Any] = field(default_factory=dict, hash=False)
    training: dict[str, Any] = field(default_factory=dict, hash=False)
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    zero: dict[str, Any] = field(default_factory=dict, hash=False)
    note: str = ""

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def notes(self) -> list[str]:
        """What is unlike the other cases, in words."""
        found = [f"{self.length} tokens a sample"] if self.length != LENGTH else []
        found += ["listed layers with SwiGLU"] if self.mixed else []
        found += ["documents apart"] if self.packed else []
        found += ["weighted tokens"] if self.weighted else []
        found += [f"mtp {self.further}"] if self.further else []
        found += ["objectives"] if self.objectives else []
        return found + ([self.note] if self.note else [])

    @property
    def micro_batch(self) -> int:
        return GLOBAL_BATCH * self.sequence // (self.data * self.accumulation)

    def in_one_process(self) -> Case:
        """The same micro-steps on one rank, which keeps all activations and compiles nothing."""
        alone = dict.fromkeys(("data", "tensor", "pipeline", "sequence", "expert"), 1)
        kept = {name: value for name, value in self.training.items() if "checkpoint" not in name}
        kept.pop("compile", None)
        changes = {"training": kept, "profile": "zero1", "broken": "", "zero": {}, "note": ""}
        return replace(self, **alone, **changes)

    def __str__(self) -> str:
        axes = ("pipeline", "tensor", "data", "sequence", "expert")
        spread = [f"{axis}{getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        kind = [] if self.moe else ["dense"]
        changes = self.model | self.training | self.settings
        kind += [f"{name}={value}" for name, value in changes.items()]
        made = [self.profile, *self.notes, self.optimizer, f"x{self.accumulation}"]
        return " ".join([*spread, *kind, *made])


@dataclass(frozen=True)
class Trained:
    """What a run came to.

    Attributes:
        losses: nats per token of each step.
        norms: gradient norm of each step, before clipping.
        parameters: final master weights by logical name, whole.
        averages: their averages likewise; empty where none are kept.
    """

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]


def make_config(case: Case, *, seed: int = 1234) -> Config:
    experts = {"num_experts": 4, "expert_hidden_size": 48, "load_balance_weight": 1.0}
    model = {
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": VOCABULARY,
        "schedule": "interleave-x",
        "moe": experts if case.moe else None,
        "mtp": FURTHER[case.further] if case.further else None,
    }
    if case.mixed:
        listed = ["transformer", "rwkv", "rwkv", "transformer"]
        model |= {"mixers": listed, "ffn_activation": "swiglu", "ffn_hidden_size": 96}
        model["moe"] = experts | {"layers": [1, 3]} if case.moe else None
    training = {
        "max_steps": STEPS,
        "seed": seed,
        "global_batch_size": GLOBAL_BATCH,
        "micro_batch_size": case.micro_batch,
        "sequence_length": case.length,
        "precision": "fp32",
        "learning_rate": {"adamw": 3e-3, "muon": 1e-2, "sgd": 0.3}[case.optimizer],
        "min_learning_rate": 1e-3,
        "warmup_steps": 2,
        "gradient_clipping": 0.5,
        "epsilon": EPSILON,
    }
    return Config(
        name="layout",
        model=model | case.model,
        parallel={
            axis: getattr(case, axis)
            for axis in ("data", "tensor", "pipeline", "sequence", "expert")
        },
        training=training | case.training,
        optimizer={"kind": "muon" if case.optimizer == "muon" else "adamw"} | case.settings,
        data={"path": "none"},
        objectives=OBJECTIVES if case.objectives else None,
    )


def global_batch(case: Case, step: int) -> dict[str, torch.Tensor]:
    """Rows of one step, the same on every rank; the later a row, the more of it is masked."""
    source = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, case.length + 1), generator=source)
    labels = ids[:, 1:].clone()
    for row in range(GLOBAL_BATCH):
        labels[row, : 2 * row] = -100
    batch = {"input_ids": ids[:, :-1], "labels": labels}
    if case.packed:  # borders everywhere, in some rows where a sequence rank begins
        starts = torch.rand(labels.shape, generator=source) < 4 / case.length
        starts[::2, case.length // 2] = True
        batch["segment_ids"] = starts.cumsum(1)
    if case.weighted:
        batch["weights"] = torch.rand(labels.shape, generator=source).round(decimals=1) * 2
    if case.further:
        num_targets = FURTHER[case.further]["num_tokens"]
        documents = F.pad(batch.get("segment_ids", torch.zeros_like(labels)), (0, 1), value=-1)
        documents[:, -1] = documents[:, -2]
        targets = torch.full((*labels.shape, num_targets), -100)
        targets[..., 0] = labels
        for ahead in range(2, num_targets + 1):
            same = documents[:, ahead:] == documents[:, :-ahead]
            targets[:, : case.length + 1 - ahead, ahead - 1] = torch.where(
                same, ids[:, ahead:], -100
            )
        targets[labels < 0] = -100  # unevenly, as the labels
        batch["targets"] = targets
    if case.objectives:
        # The later a row, the rarer is text, of which the last rows have none.
        others = torch.randint(1, len(KINDS), labels.shape, generator=source)
        place = torch.rand(labels.shape, generator=source) * GLOBAL_BATCH
        is_text = place > torch.arange(GLOBAL_BATCH).unsqueeze(1) + 3
        batch["kinds"] = others.masked_fill(is_text, 0).to(torch.uint8)
    return batch


def make_plan(case: Case, config: Config) -> Plan:
    """The plan of a case, with a profile of its own where it changes the shipped one."""
    settings = read_profile(profile_path(case.profile))
    settings["zero_optimization"] |= case.zero
    # DeepSpeed asks to be told that we mean an optimizer that it does not know
    settings["zero_allow_untested_optimizer"] = case.optimizer == "sgd"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(settings))
        file.flush()
        return choose(config, processes(case.world_size), profile=file.name)


def sgd(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    from cdrmix.optimizers.adamw import parameter_groups

    return torch.optim.SGD(parameter_groups(model, weight_decay=0.0), lr=training.learning_rate)


@dataclass(frozen=True)
class Started:
    """An engine of a case on this rank."""

    case: Case
    config: Config
    topology: Topology
    engine: Any


def start(case: Case, *, seed: int = 1234) -> Started:
    """This rank's engine, with the initial values of `seed`; its process group is there."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.optimizers.average import keep_average
    from cdrmix.parallel.apply import build_model

    config = make_config(case, seed=seed)
    plan = make_plan(case, config)
    topology = make_topology(plan.degrees)
    model = build_model(config, plan, topology)
    made = sgd if case.optimizer == "sgd" else None
    engine = start_engine(model, config, plan, topology, optimizer=made)
    if config.training.ema_decay is not None:
        keep_average(engine, config.training.ema_decay)
    return Started(case, config, topology, engine)


def run_steps(started: Started, *, first: int = 0, count: int = STEPS) -> tuple[list[float], ...]:
    """Losses and gradient norms of some steps, over all ranks."""
    from cdrmix.engines import training_step
    from cdrmix.engines.combination import Combination, own_weights, with_further_labels
    from cdrmix.engines.further_labels import further_names

    case, topology, engine = started.case, started.topology, started.engine
    losses, norms = [], []
    for step in range(first, first + count):
        rows, batch = with_further_labels(global_batch(case, step), started.config), {}
        weights = own_weights(rows, started.config)
        valid = sum(weights[: len(weights) - len(further_names(started.config))])
        for name, values in rows.items():
            # micro-step m covers rows [m * B * W, (m + 1) * B * W), reader r the r-th part of them
            readers = topology.degrees.sample_ranks
            by_reader = values.view(-1, readers, case.micro_batch, *values.shape[1:])
            batch[name] = by_reader[:, topology.sample_rank]
        batch = own_tokens(batch, topology)
        own = [topology.degrees.data * count for count in own_weights(batch, started.config)]
        if case.broken == "local mean":
            weights = own
        if case.broken == "local further mean":
            weights = [weights[0], *own[1:]]
        if case.broken == "local z":

            def with_local_z(
                config: Config, weights: Any, step: int, own: Any = own
            ) -> Combination:
                combination = Combination(config, weights, step=step)
                combination._worth = Combination(config, own, step=step)._worth
                return combination

            training_step.Combination = with_local_z  # type: ignore[misc, assignment]
        result = training_step.train_step(
            *(engine, started.config, topology, batch), step=step, weights=weights
        )
        # Nats of further tokens are behind those of the kinds, squares behind both.
        end = len(result.parts) // 2
        further = result.parts[end - len(further_names(started.config)) : end]
        nats = runtime.all_reduce_sum(result.nats.double() + further.double().sum())
        losses.append(float(nats) / valid)
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def train(case: Case) -> tuple[list[float], list[float], list[Any], list[Any]]:
    """Losses, gradient norms, master weights and their averages as this rank sees them."""
    runtime.initialize_distributed()
    wake_blocks()
    plant(case.broken)
    # the graphs alone: kernels of inductor's would take minutes (tests/parity/test_compiled.py)
    compiled._BACKEND = "aot_eager"
    started = start(case)
    losses, norms = run_steps(started)
    held = [_held(started.engine, kind) for kind in ("param", "ema")]
    runtime.destroy_distributed()
    return losses, norms, *held


def wake_blocks() -> None:
    """Let blocks of this process start with numbers where they have zeros.

    Behind output projections of zero, gradients are so small for ten steps that the norm of all
    would hardly show what is wrong with them.
    """
    from cdrmix.models.block import Block
    from cdrmix.models.initialize import normal_
    from cdrmix.models.mtp import LinearHead

    asleep = Block.initialize

    def initialize(block: Block, *, expert_parallel_rank: int = 0, **settings: Any) -> None:
        asleep(block, expert_parallel_rank=expert_parallel_rank, **settings)
        for name, parameter in block.named_parameters():
            if parameter.any():
                continue
            first, parts = 0, [parameter]
            if name.endswith("experts.down"):  # each by its expert's global number
                first, parts = expert_parallel_rank * len(parameter), list(parameter)
            for number, part in enumerate(parts, first):
                normal_(part, 0.1, seed=1, name=f"{block.layer}.{name}.{number}")

    def initialize_map(head: LinearHead, *, seed: int, name: str, std: float) -> None:
        normal_(head.map.weight, 0.1, seed=seed, name=name)

    Block.initialize = initialize  # type: ignore[method-assign]
    LinearHead.initialize = initialize_map  # type: ignore[method-assign]


def _held(engine: Any, kind: str) -> list[Any]:
    """This rank's share of the master weights, or of what a checkpoint holds of another kind, in
    numpy, which pickles without shared memory."""
    from cdrmix.checkpoint import engine_state
    from cdrmix.models.backbone import logical_name

    return [
        (part.name, part.shape, part.span, part.values.numpy().copy())
        for part in engine_state.fragments(engine, logical_name)
        if part.kind == kind
    ]


def _whole(held: Sequence[list[Any]]) -> dict[str, torch.Tensor]:
    """Logical tensors from every rank's share; each element must be held once."""
    found: dict[str, torch.Tensor] = {}
    for name, shape, span, values in (part for rank in held for part in rank):
        whole = found.setdefault(name, torch.full(shape, float("nan")))
        box = tuple(
            slice(a, a + n) for a, n in zip(span.block.offset, span.block.shape, strict=True)
        )
        flat = whole[box].reshape(-1).clone()
        taken = slice(span.start, span.start + span.numel)
        assert flat[taken].isnan().all(), f"{name}: held twice"
        flat[taken] = torch.from_numpy(values)
        whole[box] = flat.view(span.block.shape)
    assert not any(whole.isnan().any() for whole in found.values()), "held by nobody"
    return found


def trained(case: Case, *, timeout: float = 120) -> Trained:
    """Train in the case's layout; every rank must see the same numbers."""
    preloaded = COMPILER if "compile" in case.training else ()
    ranks = run_ranks(train, case.world_size, case, timeout=timeout, preloaded=preloaded)
    losses, norms, *_ = ranks[0]
    for rank, (its_losses, its_norms, *_) in enumerate(ranks):
        assert (its_losses, its_norms) == (losses, norms), f"rank {rank} sees other numbers"
    *_, masters, averages = zip(*ranks, strict=True)
    return Trained(losses, norms, _whole(masters), _whole(averages))


@functools.cache
def reference(case: Case) -> Trained:
    """The same micro-steps in one process; `case` must be `in_one_process()`."""
    return trained(case)


def unlike(found: Trained, expected: Trained) -> float:
    """Largest relative difference of a gradient norm or of an average."""
    norms = deviation(found.norms, expected.norms)
    return max(norms, distance(found.averages, expected.averages))


def deviation(found: list[float], expected: list[float]) -> float:
    """Largest relative difference of any step."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of a parameter, relative to the norm of what it should be."""
    assert found.keys() == expected.keys()
    return max(
        (
            float((found[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-3))
            for name in expected
        ),
        default=0.0,
    )
