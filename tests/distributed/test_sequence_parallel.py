"""Ranks that split the tokens of a sample: what they pass, other layouts at resume, bf16.

That losses, gradients and weights are those of one process is in test_layouts.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from cdrmix import runtime
from cdrmix.models.wkv7_reference import wkv7_reference
from cdrmix.monitoring.sinks import read_metrics
from tests.distributed.test_resume import train
from tests.harness import run_ranks
from tests.layouts import Case, deviation, reference, trained
from tests.parity.test_wkv7 import NAMES, assert_equal, random_inputs
from tests.small_run import STEPS, arguments, overrides

LENGTH = "training.sequence_length=128"


def measured(run_dir: Path, name: str) -> list[float]:
    return [line[name] for line in read_metrics(run_dir / "metrics.jsonl") if name in line]


@pytest.fixture(scope="module")
def not_moved(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of an uninterrupted run on two sequence ranks."""
    run_dir = tmp_path_factory.mktemp("not-moved") / "run"
    settings = [LENGTH, "parallel.sequence=2", "training.micro_batch_size=8"]
    argv = [*arguments(small_corpus, run_dir), *overrides(settings)]
    assert run_ranks(train, 2, argv) == [0, 0]
    return run_dir


@pytest.mark.parametrize(
    ("before", "after", "ranks"), [(2, 1, 1), (2, 1, 2), (1, 2, 2)],
    ids=["to one rank", "to two data ranks", "from two data ranks"],
)  # fmt: skip
def test_a_run_goes_on_with_another_split_of_its_samples(
    before: int, after: int, ranks: int, small_corpus: Path, tmp_path: Path, not_moved: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = arguments(small_corpus, run_dir)
    first, then = (
        overrides([LENGTH, f"parallel.sequence={sequence}", f"training.micro_batch_size={micro}"])
        for sequence, micro in ((before, 4 * before), (after, 8 * after // ranks))
    )
    assert run_ranks(train, 2, [*argv, *first], "TERM", 3, 1) == [75, 75]
    assert run_ranks(train, ranks, [*argv, *then, "--resume", "auto"]) == [0] * ranks
    for name in ("loss", "grad_norm", "eval/loss"):
        assert measured(run_dir, name) == pytest.approx(measured(not_moved, name), rel=1e-5), name
    assert measured(run_dir, "tokens_seen") == [8 * 128 * step for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("length", [24, 64], ids=["by heads", "by state"])
def test_half_precision_differs_by_its_rounding_from_one_process(length: int) -> None:
    case = Case(data=2, sequence=2, length=length, training={"precision": "bf16"})
    found, expected = trained(case), reference(case.in_one_process())
    assert deviation(found.losses, expected.losses) < 1e-3  # bf16 rounds by up to 2^-9
    assert deviation(found.norms, expected.norms) < 5e-3


def exchange() -> list[list[torch.Tensor]]:
    """Tensors of different types and widths there, and back; the first of them, and both."""
    from cdrmix.parallel.sequence import Exchange, SequencePart

    runtime.initialize_distributed()
    part = SequencePart(torch.distributed.group.WORLD, runtime.world_size(), runtime.rank())
    source = torch.Generator().manual_seed(runtime.rank())
    given = [
        torch.randn(2, 3, 4, 6, generator=source).bfloat16(),
        torch.randn(2, 3, 2, 8, generator=source),
    ]
    there = Exchange.apply(part, True, *given)
    back = Exchange.apply(part, False, *there)
    runtime.destroy_distributed()
    return [[x.float().numpy() for x in tensors] for tensors in (given, there, back)]


def test_tokens_are_exchanged_for_heads_and_back_bit_by_bit() -> None:
    ranks = run_ranks(exchange, 2)
    for i in range(2):
        whole = torch.cat([torch.from_numpy(given[i]) for given, _, _ in ranks], dim=1)
        for rank, (given, there, back) in enumerate(ranks):
            own_heads = whole.chunk(2, dim=2)[rank]
            assert torch.equal(torch.from_numpy(there[i]), own_heads)
            assert (back[i] == given[i]).all()


def pass_states(length: int, fastest: bool) -> dict[str, np.ndarray]:
    """Output of this rank's tokens and the gradients of their inputs, in float32."""
    from cdrmix.parallel.sequence import PassedState, SequencePart

    runtime.initialize_distributed()
    part = SequencePart(torch.distributed.group.WORLD, runtime.world_size(), runtime.rank())
    *inputs, weight = (x.chunk(part.parts, dim=1)[part.index] for x in whole(length, fastest))
    leaves = [x.float().requires_grad_() for x in inputs]
    y, _ = PassedState(part).train()(*leaves, None)
    gradients = torch.autograd.grad(y, leaves, weight.float())
    runtime.destroy_distributed()
    values = (x.detach().numpy() for x in (y, *gradients))
    return dict(zip(("y", *NAMES[2:-1]), values, strict=True))


def whole(length: int, fastest: bool) -> list[torch.Tensor]:
    """Inputs of the recurrence over all tokens, and what its output is weighted by, in float64."""
    inputs = random_inputs(length, 32, fastest=fastest)[:-1]
    return [*inputs, torch.randn(inputs[3].shape, generator=torch.Generator().manual_seed(7))]


# segments as long as a chunk of the kernel, twice that, and nothing like it
@pytest.mark.parametrize(("length", "ranks"), [(64, 2), (64, 4), (200, 2)])
@pytest.mark.parametrize("fastest", [False, True], ids=["", "all decay at its bound"])
def test_a_passed_state_is_as_exact_as_one_run_of_the_recurrence(
    length: int, ranks: int, fastest: bool
) -> None:
    *inputs, weight = whole(length, fastest)
    leaves = [x.requires_grad_() for x in inputs]
    y, _ = wkv7_reference(leaves)
    exact = (y, *torch.autograd.grad(y, leaves, weight.double()))
    wanted = dict(zip(("y", *NAMES[2:-1]), (x.detach() for x in exact), strict=True))
    parts = run_ranks(pass_states, ranks, length, fastest)
    found = {
        name: torch.cat([torch.from_numpy(part[name]) for part in parts], dim=1) for name in wanted
    }
    assert_equal(found, wanted)
