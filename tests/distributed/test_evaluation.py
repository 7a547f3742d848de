"""Held-out loss and routing on several ranks against one, and against their definition."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cdrmix import runtime
from cdrmix.config.load import load_config
from cdrmix.data.shards import TokenDataset
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.evaluation.perplexity import evaluate, held_out_rows
from cdrmix.models import generate
from cdrmix.models.backbone import Backbone
from cdrmix.models.initialize import normal_
from cdrmix.planning.profile import choose
from tests.harness import run_ranks
from tests.small_run import CONFIG, SMALL, arguments, start

ROWS, LENGTH = 5, 64  # three batches of two: on two ranks one pass is not counted


def evaluated(data: str, expert: int, tensor: int = 1) -> tuple[dict[str, Any], float]:
    """What each rank finds, and the loss by its definition where one rank has all experts."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    runtime.initialize_distributed()
    spread = [f"parallel.expert={expert}", f"parallel.tensor={tensor}"]
    settings = [*spread, "training.max_steps=1", f"data.path={data}"]
    config = load_config(CONFIG, [*SMALL, *settings])
    choice = choose(config, world_size=runtime.world_size())
    topology = make_topology(choice.degrees)
    model = build_model(config, choice, topology)
    _wake_experts(model, first=runtime.rank() % expert * (8 // expert))
    module = start_engine(model, config, choice, topology).module
    dataset = TokenDataset(Path(data), "validation", LENGTH)
    found = evaluate(module, dataset, max_tokens=ROWS * LENGTH, batch_size=2, topology=topology)
    assert module.training, "evaluation leaves the mode as it was"
    plain = _plain_loss(module, dataset) if expert == 1 else found.loss
    runtime.destroy_distributed()
    return found.as_json(), plain


@torch.no_grad()
def _wake_experts(model: Backbone, *, first: int) -> None:
    """Numbers for the down projections, which start at zero, by each expert's global number."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.down"):
            for i, down in enumerate(parameter):
                normal_(down, 0.1, seed=1, name=f"{name}.{first + i}")


@torch.no_grad()
def _plain_loss(model: Backbone, dataset: TokenDataset) -> float:
    rows = torch.from_numpy(dataset.rows(held_out_rows(dataset, ROWS * LENGTH)))
    logits = model.logits(model.eval()(rows[:, :-1]).hidden)
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def flat(evaluation: dict[str, Any], *, overflow: bool) -> np.ndarray:
    layers = [
        [
            *layer["utilisation"],
            overflow * layer["overflow_fraction"],
            layer["routing_entropy_bits"],
        ]
        for layer in evaluation["layers"]
    ]
    return np.array([evaluation["loss"], evaluation["bits_per_byte"], *sum(layers, [])])


@pytest.mark.parametrize(
    ("world", "expert", "tensor"), [(2, 1, 1), (2, 2, 1), (4, 2, 1), (2, 1, 2), (4, 4, 2)]
)
def test_evaluation_is_the_same_on_any_number_of_ranks(
    world: int, expert: int, tensor: int, small_corpus: Path
) -> None:
    ((one, plain),) = run_ranks(evaluated, 1, str(small_corpus), 1)
    assert one["loss"] == pytest.approx(plain, rel=1e-5)
    assert one["tokens"] == ROWS * LENGTH
    ranks = run_ranks(evaluated, world, str(small_corpus), expert, tensor)
    found = [evaluation for evaluation, _ in ranks]
    assert all(evaluation == found[0] for evaluation in found), "every rank has the same result"
    assert found[0]["tokens"] == one["tokens"]
    # the capacity is that of the tokens that a rank routes, which tensor ranks share
    ours, theirs = (flat(result, overflow=tensor == 1) for result in (found[0], one))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


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
