"""Scores of labels against float64, and the bytes that a loss moves and holds."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdrmix.config.load import load_config, shipped
from cdrmix.hf.model import head_losses
from cdrmix.models import softmax_cpu
from cdrmix.objectives import language_model
from cdrmix.objectives.language_model import ALL_ALIKE, LabelWeights, linear_losses, score_labels
from cdrmix.planning.layout import Degrees
from cdrmix.planning.memory import LOGIT_BYTES, LOGITS_BYTES, MemoryModel

FORMS = ["pytorch", pytest.param("cpp", marks=pytest.mark.compiler)]


def scored(form: str, logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    score = softmax_cpu.score_labels if form == "cpp" else score_labels
    return score(logits.clone(), *rest, logits.dtype)


def defined(
    logits: Tensor, labels: Tensor, worth: Tensor, squares: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Nats, logarithms of denominators, and the gradient, in float64 by autograd."""
    exact = logits.double().requires_grad_()
    log_total = torch.logsumexp(exact, 1)
    nats = log_total - exact.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    loss = (nats * worth + log_total.square() * squares).sum()
    return nats.detach(), log_total.detach(), torch.autograd.grad(loss, exact)[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vocab_size", [1, 7, 63, 1027, 20_011])
def test_scores_and_their_gradient_are_those_of_float64(form: str, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, vocab_size, generator=generator) * 4
    logits[1] -= 200  # far from 0 altogether
    logits[2] += 200
    labels = torch.randint(0, vocab_size, (9,), generator=generator)
    logits[3, labels[3]] += 25  # nearly certain
    logits[4, labels[4]] -= 120  # impossible in float32
    worth, squares = torch.rand(2, 9, generator=generator)
    labels[5], worth[5], squares[5] = -100, 0.0, 0.0
    for strength in (squares, None):
        expected = defined(logits, labels, worth, squares if strength is not None else 0 * worth)
        found = scored(form, logits, labels, worth, strength)
        for ours, exact, scale in zip(found, expected, (30.0, 200.0, 1.0), strict=True):
            assert ours is not None and ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-7 * scale)
        assert found[2] is not None and not found[2][5].any()
        without = scored(form, logits, labels, None, strength)
        assert without[2] is None
        assert all(torch.equal(a, b) for a, b in zip(without[:2], found[:2], strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_logit_that_is_no_number_is_noticed(form: str) -> None:
    for bad in (math.nan, math.inf):
        for place in (0, 40, 70):
            logits = torch.zeros(3, 71)
            logits[1, place] = bad
            nats, _, error = scored(form, logits, torch.ones(3).long(), torch.ones(3), None)
            assert error is not None
            assert nats.isfinite().tolist() == [True, False, True]
            assert error.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.compiler
def test_scores_do_not_depend_on_the_number_of_threads_nor_on_the_run() -> None:
    logits, labels = torch.randn(64, 5000), torch.randint(0, 5000, (64,))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            found.append(scored("cpp", logits, labels, torch.rand(64).fill_(0.7), None))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.compiler
def test_the_kernel_takes_what_it_can_and_leaves_the_rest() -> None:
    hidden, weight = torch.zeros(4, 8), torch.nn.Parameter(torch.zeros(5, 8))
    assert softmax_cpu.label_scorer(hidden, weight) is softmax_cpu.score_labels
    assert softmax_cpu.label_scorer(hidden.double(), weight.double()) is None
    assert softmax_cpu.label_scorer(hidden.bfloat16(), weight.bfloat16()) is None
    assert softmax_cpu.label_scorer(hidden.to("meta"), weight.to("meta")) is None


@pytest.mark.compiler
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_is_the_same_with_and_without_the_kernel(weighted: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 50, 16, requires_grad=True)
    weight = torch.randn(301, 16, requires_grad=True)
    labels = torch.randint(0, 301, (3, 50))
    labels[0, :9] = -100
    weights = ALL_ALIKE
    if weighted:
        weights = LabelWeights(torch.rand(3, 50), torch.rand(3, 50), torch.rand(3, 50, 2))
    found = []
    for losses in (head_losses, linear_losses):
        of_form = losses(hidden, weight, labels, weights)
        found.append((*of_form, *torch.autograd.grad(of_form.loss, [hidden, weight])))
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max() if b.numel() else a.numel() == 0


class Moved(TorchDispatchMode):
    """Bytes that each operator reads and writes, one kernel each, as eager PyTorch runs them.

    Of a tensor that is gathered from or scattered into only those elements count.
    """

    _VIEWS = (
        *("view", "_unsafe_view", "_reshape_alias", "t", "transpose", "unsqueeze", "squeeze"),
        *("expand", "select", "slice", "unbind", "detach", "alias"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.products = self.others = self.largest = 0
        self.made = collections.Counter[tuple[int, ...]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        for result in results:
            if all(result is not x for x in (*given, kwargs.get("out"))):
                self.made[tuple(result.shape)] += name not in self._VIEWS
                self.largest = max(self.largest, result.numel())
        if name in self._VIEWS:
            return out
        if name in ("gather", "scatter_"):
            given, results = given[1:], 2 * given[-1:]
        size = sum(x.numel() * x.element_size() for x in (*given, *results))
        if name in ("mm", "addmm"):
            self.products += size
        else:
            self.others += size
        return out


def moved_on_meta(vocab_size: int, tokens: tuple[int, int], hidden_size: int) -> Moved:
    """What the loss of a micro-batch in bf16 moves."""
    with torch.device("meta"):
        hidden = torch.empty(*tokens, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(tokens, dtype=torch.int64)
    with Moved() as moved:
        (head_losses(hidden, weight, labels, ALL_ALIKE).loss * 0.1).backward()
    return moved


def test_the_loss_of_core_1b_moves_few_bytes_a_token() -> None:
    config = load_config(shipped("model_configs") / "cdrmix-core-1b.yaml")
    tokens = (2, config.training.sequence_length)
    sizes = config.model.vocab_size, config.model.hidden_size
    moved = moved_on_meta(sizes[0], tokens, sizes[1])
    of_token = math.prod(tokens)
    assert 500e3 < moved.others / of_token < 1200e3, moved.others / of_token
    # Sums of the head's gradient are taken inside of its products: once zeroed, once scaled.
    assert moved.made[sizes] == 1, moved.made
    assert moved.products / of_token < 1700e3, moved.products / of_token


@pytest.mark.parametrize("vocab_size", [4096, 50_272, 151_936, 262_144])
def test_logits_stay_within_their_budget(vocab_size: int) -> None:
    moved = moved_on_meta(vocab_size, (4, 4096), 8)
    budget = LOGITS_BYTES["cuda"]
    assert 0.99 * budget < LOGIT_BYTES * moved.largest <= budget or moved.largest == 4 * 4096 * 4096


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["cdrmix-core-tiny", "cdrmix-core-1b", "cdrmix-core-40b"])
def test_the_plan_counts_the_logits_that_the_loss_makes(name: str, device: Any) -> None:
    config = load_config(shipped("model_configs") / f"{name}.yaml")
    memory = MemoryModel(config, device)
    for tensor in (1, 2):
        rows = config.model.vocab_size // tensor
        most = language_model.chunk_positions(rows, device)
        for tokens in (1, 100, 10**6):
            made = LOGIT_BYTES * rows * min(most, tokens)
            assert memory.chunk_of_logits(tokens, Degrees(tensor=tensor)) == made
