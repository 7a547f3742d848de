"""Data and expert parallelism under ZeRO-1 and 2 against one process on the same micro-steps.

Losses and gradient norms over 20 steps, clipping on, labels masked unevenly. AdamW hides a wrong
gradient scale; the gradient norm does not. Found here: 2e-7; a wrong average gives 9e-4 and more.
"""

import functools
import os
from pathlib import Path

import pytest
import torch

from cdrmix import runtime
from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.models import generate
from cdrmix.parallel import statistics
from cdrmix.planning.profile import choose
from tests.harness import run_ranks
from tests.small_run import arguments, start

STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY = 20, 8, 24, 300
Trajectory = list[tuple[float, float]]


def make_config(*, expert: int, micro_batch: int, moe: bool = True) -> Config:
    experts = {"num_experts": 4, "expert_hidden_size": 48, "load_balance_weight": 1.0}
    return Config(
        name="parallel-test",
        model={
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 2,
            "vocab_size": VOCABULARY,
            "moe": experts if moe else None,
        },
        parallel={"expert": expert},
        training={
            "max_steps": STEPS,
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": micro_batch,
            "sequence_length": LENGTH,
            "precision": "fp32",
            "learning_rate": 3e-3,
            "min_learning_rate": 1e-3,
            "warmup_steps": 2,
            "gradient_clipping": 0.5,
        },
        data={"path": "none"},
    )


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one step, the same on every rank; the later a row, the more of it is masked."""
    source = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=source)
    labels = ids[:, 1:].clone()
    for row in range(GLOBAL_BATCH):
        labels[row, : 2 * row] = -100
    return ids[:, :-1], labels


def trajectory(
    profile: str, expert: int, micro_batch: int, moe: bool = True, broken: str = ""
) -> Trajectory:
    """Loss and gradient norm of each step, as every rank sees them."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.engines.step import train_step
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    runtime.initialize_distributed()
    config = make_config(expert=expert, micro_batch=micro_batch, moe=moe)
    choice = choose(config, world_size=runtime.world_size(), profile=profile)
    if broken == "local statistics":
        statistics._MeanOverRanks.apply = staticmethod(lambda x, _: x)
    topology = make_topology(choice.degrees)
    engine = start_engine(build_model(config, choice, topology), config, choice, topology)
    rank, world = runtime.rank(), runtime.world_size()
    found = []
    for step in range(STEPS):
        # micro-step m covers rows [m * B * W, (m + 1) * B * W), rank r the r-th part of them
        rows = [part.view(-1, world, micro_batch, LENGTH) for part in global_batch(step)]
        batch = {"input_ids": rows[0][:, rank], "labels": rows[1][:, rank]}
        tokens = int((global_batch(step)[1] != -100).sum())
        if broken == "local mean":
            tokens = int((batch["labels"] != -100).sum()) * world
        result = train_step(engine, config, topology, batch, step=step, tokens=tokens)
        loss = float(runtime.all_reduce_sum(result.nats.double()))
        loss /= int((global_batch(step)[1] != -100).sum())
        found.append((loss, float(engine.get_global_grad_norm())))
    runtime.destroy_distributed()
    return found


@functools.cache
def one_process(micro_batch: int, moe: bool = True) -> Trajectory:
    return run_ranks(trajectory, 1, "zero1", 1, micro_batch, moe)[0]


def deviation(found: Trajectory, expected: Trajectory) -> float:
    """Largest relative difference of any loss or gradient norm."""
    pairs = zip(found, expected, strict=True)
    return max(
        abs(a - b) / abs(b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize(
    ("profile", "world", "expert", "accumulation"),
    [
        ("zero1", 2, 1, 1),
        ("zero1", 2, 2, 2),
        ("zero2", 2, 1, 2),
        ("zero2", 2, 2, 1),
        ("zero1", 4, 4, 1),
        ("zero2", 4, 2, 2),
        ("zero2", 4, 4, 1),
        ("zero2", 4, 1, 1),
    ],
)
def test_losses_and_gradient_norms_equal_one_process(
    profile: str, world: int, expert: int, accumulation: int
) -> None:
    micro_batch = GLOBAL_BATCH // (world * accumulation)
    found = run_ranks(trajectory, world, profile, expert, micro_batch)
    assert all(rank == found[0] for rank in found), "every rank sees the same numbers"
    assert min(norm for _, norm in found[0]) > 0.5, "clipping must be active"
    assert deviation(found[0], one_process(micro_batch * world)) < 1e-5


@pytest.mark.parametrize("profile", ["zero1", "zero2"])
def test_dense_model_on_two_ranks_equals_one_process(profile: str) -> None:
    found = run_ranks(trajectory, 2, profile, 1, 2, False)
    assert deviation(found[0], one_process(4, False)) < 1e-5


@pytest.mark.parametrize("broken", ["local statistics", "local mean"])
def test_the_comparison_fails_when_something_is_averaged_per_rank(broken: str) -> None:
    found = run_ranks(trajectory, 2, "zero2", 2, 4, True, broken)
    assert deviation(found[0], one_process(8)) > 1e-4


def start_with_an_early_end(argv: list[str], eos_id: int) -> int:
    """A small run in which rank 1 alone finds its sample of text at an end at once."""
    if int(os.environ["RANK"]) == 1:
        generate._choose = lambda logits, *_: torch.full((len(logits),), eos_id)
    return start(argv)


def test_ranks_that_draw_different_tokens_finish_a_sample_together(
    small_corpus: Path, run_dir: Path
) -> None:
    more = ("--set", "parallel.expert=2", "--max-steps", "1")
    argv = arguments(small_corpus, run_dir, *more)
    eos_id = load_tokenizer(small_corpus).eos_id
    assert run_ranks(start_with_an_early_end, 2, argv, eos_id, timeout=60) == [0, 0]
