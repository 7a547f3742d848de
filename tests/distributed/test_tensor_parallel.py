"""What tensor ranks hold in common and in part, beyond the exactness of training (test_layouts)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cdrmix import runtime
from cdrmix.monitoring.sinks import read_metrics
from tests.harness import run_ranks
from tests.layouts import Case, make_config, reference, trained, wake_blocks
from tests.small_run import STEPS, arguments, overrides, start

DIM = 6


def shared_out(num_tokens: int) -> tuple[int, np.ndarray, np.ndarray]:
    """How many tokens this rank takes, what comes back of x * (1 + its rank), and x's gradient."""
    from cdrmix.parallel.exchange import share_tokens
    from cdrmix.parallel.topology import make_topology
    from cdrmix.planning.layout import Degrees

    runtime.initialize_distributed()
    tensor = runtime.world_size()
    topology = make_topology(Degrees(data=1, tensor=tensor, pipeline=1, sequence=1, expert=1))
    x = torch.arange(num_tokens * DIM, dtype=torch.float32).view(num_tokens, DIM).requires_grad_()
    taken = share_tokens(x, num_tokens, topology, to_share=True)
    routed = taken * (1 + topology.tensor_rank)
    out = share_tokens(routed, num_tokens, topology, to_share=False)
    weights = torch.arange(num_tokens, dtype=torch.float32).unsqueeze(1)
    (gradient,) = torch.autograd.grad((out * weights).sum(), x)
    runtime.destroy_distributed()
    return len(taken), out.detach().numpy(), gradient.numpy()


@pytest.mark.parametrize(("num_tokens", "taken"), [(6, [2, 2, 2]), (5, [2, 2, 1]), (1, [1, 0, 0])])
def test_tokens_are_shared_out_and_given_back_whole_whatever_their_number(
    num_tokens: int, taken: list[int]
) -> None:
    ranks = run_ranks(shared_out, 3, num_tokens)
    assert [rank[0] for rank in ranks] == taken
    factor = np.repeat(np.arange(1.0, 4.0), taken)[:, None]
    x = np.arange(num_tokens * DIM, dtype=np.float32).reshape(num_tokens, DIM)
    for _, out, gradient in ranks:
        np.testing.assert_array_equal(out, x * factor)
        expected = np.broadcast_to(factor * np.arange(num_tokens)[:, None], x.shape)
        np.testing.assert_array_equal(gradient, expected)


def cut_loss(tensor: int) -> list[np.ndarray]:
    """Embedded tokens, nats, gradients of hidden and of all rows, logits, on a vocabulary of 12."""
    from cdrmix.models.backbone import TokenEmbedding
    from cdrmix.parallel.exchange import gather_rows
    from cdrmix.parallel.tensor import split_embedding
    from cdrmix.parallel.topology import make_topology
    from cdrmix.parallel.zero3 import next_token_nats
    from cdrmix.planning.layout import Degrees

    runtime.initialize_distributed()
    topology = make_topology(Degrees(data=1, tensor=tensor, pipeline=1, sequence=1, expert=1))
    whole = TokenEmbedding(12, DIM)
    whole.initialize(seed=0, std=1.0)
    embedding = split_embedding(whole, topology)
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 12, (2, 1100), generator=source)  # more positions than one chunk
    labels = torch.randint(0, 12, (2, 1100), generator=source)
    labels[0, :50] = -100
    hidden = (torch.randn(2, 1100, DIM, generator=source) + embedding(ids)).detach()
    hidden.requires_grad_()
    nats = next_token_nats(embedding, hidden, labels)
    hidden_grad, rows_grad = torch.autograd.grad(0.1 * nats, [hidden, embedding.weight])
    if tensor > 1:
        rows_grad = gather_rows(rows_grad, topology)
    with torch.no_grad():
        unlearnt = next_token_nats(embedding, hidden, labels)
    found = [embedding(ids), nats, unlearnt, hidden_grad, rows_grad, embedding.logits(hidden)]
    runtime.destroy_distributed()
    return [x.detach().numpy() for x in found]


def test_a_cut_vocabulary_embeds_scores_and_learns_as_a_whole_one() -> None:
    (expected,) = run_ranks(cut_loss, 1, 1)
    for rank in run_ranks(cut_loss, 3, 3):
        for found, whole in zip(rank, expected, strict=True):
            np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)


def decoded(case: Case) -> list[list[int]]:
    """Tokens that follow two prompts, by the likeliest and by sampling."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.models.generate import generate
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology
    from cdrmix.planning.cluster import processes
    from cdrmix.planning.profile import choose

    runtime.initialize_distributed()
    wake_blocks()
    config = make_config(case)
    plan = choose(config, processes(case.world_size))
    topology = make_topology(plan.degrees)
    model = start_engine(build_model(config, plan, topology), config, plan, topology).module
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    new = [
        generate(model, prompt, max_new_tokens=12, temperature=temperature, seed=7)[0].tolist()
        for temperature in (0.0, 1.0)
    ]
    runtime.destroy_distributed()
    return new


@pytest.mark.parametrize("expert", [1, 4])
def test_one_row_is_decoded_by_four_tensor_ranks_as_by_one(expert: int) -> None:
    (expected,) = run_ranks(decoded, 1, Case())
    assert run_ranks(decoded, 4, Case(tensor=4, expert=expert)) == [expected] * 4


@pytest.mark.parametrize("profile", ["zero1", "zero2"])
def test_bf16_on_tensor_ranks_stays_near_bf16_on_one(profile: str) -> None:
    case = Case(tensor=2, expert=2, profile=profile, training={"precision": "bf16", "max_steps": 3})
    found, expected = trained(case), reference(case.in_one_process())
    np.testing.assert_allclose(found.losses, expected.losses, rtol=5e-3)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=5e-2)


def lines_of(run_dir: Path, argv: list[str], world: int, *settings: str) -> dict[int, Any]:
    """Metrics by step of a run that must end well."""
    argv = [*argv, *overrides(settings), "--run-dir", str(run_dir)]
    assert run_ranks(start, world, argv) == [0] * world
    return {int(line["step"]): line for line in read_metrics(run_dir / "metrics.jsonl")}


def test_a_run_moves_between_layouts_and_goes_on_as_if_it_had_not(
    small_corpus: Path, tmp_path: Path
) -> None:
    argv, cut = arguments(small_corpus, None), ("parallel.tensor=2", "parallel.expert=2")
    stayed = lines_of(tmp_path / "stayed", argv, 2, *cut)

    def moved(name: str, source: str, step: int, world: int, *settings: str) -> None:
        resumed = [*argv, "--resume", str(tmp_path / source / "checkpoints" / str(step))]
        lines = lines_of(tmp_path / name, resumed, world, *settings)
        assert list(lines) == list(range(step + 1, STEPS + 1))
        for line in lines.values():
            expected = stayed[int(line["step"])]
            for key in ("loss", "grad_norm", "eval/loss"):
                assert math.isclose(line.get(key, 0), expected.get(key, 0), rel_tol=1e-5), key

    moved("whole", "stayed", 3, 1)
    moved("cut again", "whole", 6, 2, *cut)
    moved("data ranks", "stayed", 3, 2, "parallel.expert=2")
    moved("both", "data ranks", 6, 4, "parallel.tensor=2", "parallel.expert=4")
