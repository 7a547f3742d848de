"""Training runs of a tiny model in any layout, for comparison with one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from cdrmix import runtime
from cdrmix.config.schema import Config, TrainingConfig
from tests.harness import run_ranks

STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY = 10, 8, 24, 304
# One process may round differently from another; what is wrong deviates by 1e-4 and more.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One layout and what is trained in it.

    Attributes:
        degrees: parallel degrees, of which the data degree is `data`.
        accumulation: micro-steps per step.
        optimizer: adamw or sgd, which shows a wrong scale of gradients.
        profile: DeepSpeed profile.
        moe: whether feed-forwards are experts.
        packed: whether a sample holds documents that are kept apart.
        broken: fault to plant, by name; see `plant`.
        model: changes of the model section.
        training: changes of the training section.
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
    packed: bool = False
    broken: str = ""
    model: dict[str, Any] = field(default_factory=dict, hash=False)
    training: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def micro_batch(self) -> int:
        return GLOBAL_BATCH * self.sequence // (self.data * self.accumulation)

    def in_one_process(self) -> Case:
        """The same micro-steps on one rank."""
        alone = dict.fromkeys(("data", "tensor", "pipeline", "sequence", "expert"), 1)
        return replace(self, **alone, profile="zero1", broken="")

    def __str__(self) -> str:
        axes = ("pipeline", "tensor", "data", "sequence", "expert")
        spread = [f"{axis}{getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        kind = ([] if self.moe else ["dense"]) + ["packed"] * self.packed
        kind += ["recomputed"] * bool(self.training.get("activation_checkpointing"))
        return " ".join([*spread, *kind, self.profile, self.optimizer, f"x{self.accumulation}"])


@dataclass(frozen=True)
class Trained:
    """What a run came to.

    Attributes:
        losses: nats per token of each step.
        norms: gradient norm of each step, before clipping.
        parameters: final master weights by logical name, whole.
    """

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def make_config(case: Case) -> Config:
    experts = {"num_experts": 4, "expert_hidden_size": 48, "load_balance_weight": 1.0}
    model = {
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": VOCABULARY,
        "schedule": "interleave-x",
        "moe": experts if case.moe else None,
    }
    training = {
        "max_steps": STEPS,
        "global_batch_size": GLOBAL_BATCH,
        "micro_batch_size": case.micro_batch,
        "sequence_length": LENGTH,
        "precision": "fp32",
        "learning_rate": 3e-3 if case.optimizer == "adamw" else 0.3,
        "min_learning_rate": 1e-3,
        "warmup_steps": 2,
        "gradient_clipping": 0.5,
    }
    return Config(
        name="layout",
        model=model | case.model,
        parallel={
            axis: getattr(case, axis)
            for axis in ("data", "tensor", "pipeline", "sequence", "expert")
        },
        training=training | case.training,
        data={"path": "none"},
    )


def global_batch(step: int, *, packed: bool = False) -> dict[str, torch.Tensor]:
    """Rows of one step, the same on every rank; the later a row, the more of it is masked.

    Documents that are kept apart begin anywhere.
    """
    source = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=source)
    labels = ids[:, 1:].clone()
    for row in range(GLOBAL_BATCH):
        labels[row, : 2 * row] = -100
    batch = {"input_ids": ids[:, :-1], "labels": labels}
    if packed:
        begins = torch.rand(GLOBAL_BATCH, LENGTH, generator=source) < 0.15
        batch["segment_ids"] = begins.cumsum(1)
    return batch


def sgd(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    from cdrmix.engines.optim import parameter_groups

    return torch.optim.SGD(parameter_groups(model, weight_decay=0.0), lr=training.learning_rate)


def train(case: Case) -> tuple[list[float], list[float], list[Any]]:
    """Losses, gradient norms and master weights as this rank sees them."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.engines.optim import adamw
    from cdrmix.engines.step import train_step
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology, own_tokens
    from cdrmix.planning.profile import choose

    runtime.initialize_distributed()
    plant(case.broken)
    config = make_config(case)
    choice = choose(config, world_size=case.world_size, profile=case.profile)
    topology = make_topology(choice.degrees)
    made = {"adamw": adamw, "sgd": sgd}[case.optimizer]
    if case.optimizer == "sgd":  # DeepSpeed asks to be told that we mean it
        allowed = {"zero_allow_untested_optimizer": True}
        choice = replace(choice, deepspeed=choice.deepspeed | allowed)
    model = build_model(config, choice, topology)
    engine = start_engine(model, config, choice, optimizer=made)
    losses, norms = [], []
    for step in range(STEPS):
        rows, batch = global_batch(step, packed=case.packed), {}
        valid = int((rows["labels"] != -100).sum())
        for name, values in rows.items():
            # micro-step m covers rows [m * B * W, (m + 1) * B * W), reader r the r-th part of them
            by_reader = values.view(-1, choice.degrees.sample_ranks, case.micro_batch, LENGTH)
            batch[name] = by_reader[:, topology.sample_rank]
        batch = own_tokens(batch, topology)
        counted = int((batch["labels"] != -100).sum()) * topology.degrees.data
        tokens = counted if case.broken == "local mean" else valid
        result = train_step(engine, config, topology, batch, step=step, tokens=tokens)
        losses.append(float(runtime.all_reduce_sum(result.nats.double())) / valid)
        norms.append(float(engine.get_global_grad_norm()))
    held = _masters(engine)
    runtime.destroy_distributed()
    return losses, norms, held


def plant(broken: str) -> None:
    """Put a fault into this process that the comparison must notice."""
    from cdrmix.parallel import stages, statistics

    def without(part: int, value: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
        """Change what a stage makes of the part-th tensor that crossed the border before it."""
        original = stages.Stage._enter

        def enter(*args: Any) -> Any:
            found = list(original(*args))
            found[part] = value(found[part])
            return found

        return lambda: setattr(stages.Stage, "_enter", enter)

    faults: dict[str, Callable[[], None]] = {
        "": lambda: None,
        "local mean": lambda: None,  # planted in `train`
        "local statistics": lambda: setattr(
            statistics._MeanOverRanks, "apply", staticmethod(lambda x, _: x)
        ),
        "v_first does not cross": without(1, torch.zeros_like),
        "v_first without gradient": without(1, torch.Tensor.detach),
        "statistics of the last stage": without(2, lambda _: None),
        "tied gradients apart": lambda: setattr(
            stages.Pipeline, "get_tied_weights_and_groups", lambda _: []
        ),
    }
    faults[broken]()


def _masters(engine: Any) -> list[Any]:
    """This rank's share of the master weights, in numpy, which pickles without shared memory."""
    from cdrmix.checkpoint import engine_state
    from cdrmix.models.backbone import logical_name

    return [
        (part.name, part.shape, part.span, part.values.numpy().copy())
        for part in engine_state.fragments(engine, logical_name)
        if part.kind == "param"
    ]


def _whole(held: list[list[Any]]) -> dict[str, torch.Tensor]:
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
    ranks = run_ranks(train, case.world_size, case, timeout=timeout)
    losses, norms, _ = ranks[0]
    for rank, (its_losses, its_norms, _) in enumerate(ranks):
        assert (its_losses, its_norms) == (losses, norms), f"rank {rank} sees other numbers"
    return Trained(losses, norms, _whole([held for *_, held in ranks]))


@functools.cache
def reference(case: Case) -> Trained:
    """The same micro-steps in one process; `case` must be `in_one_process()`."""
    return trained(case)


def deviation(found: list[float], expected: list[float]) -> float:
    """Largest relative difference of any step."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of a parameter, relative to the norm of what it should be."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-3))
        for name in expected
    )
