"""Fast weights in chunks against the recurrence token by token, and their bounds."""

import math
from typing import Any

import pytest
import torch

from cdrmix.models.clamped_recurrence import clamped
from cdrmix.reasoning.fast_weights import (
    CLAMP_EVERY_TOKENS,
    LARGEST_WRITE,
    RULES,
    Rule,
    Writes,
    chunks_of,
    limited,
    scan_chunks,
    traces,
)

DECAY = 0.98
LARGEST = 0.75  # some weights exceed half of it, most do not
# tokens, and tokens of the episode before them
CASES = [(1, 0), (15, 0), (16, 7), (53, 0), (53, 30), (3, 14)]


def scan_tokens(
    weights: torch.Tensor,
    lookups: torch.Tensor,
    writes: Writes,
    *,
    rule: Rule,
    decay: float,
    start: int,
    largest: float,
    passes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as it is defined, token by token."""
    read = []
    for t in range(lookups.shape[1]):
        read.append(lookups[:, t] @ weights.transpose(1, 2))  # [B, J, r]
        q = writes.post[:, t].unsqueeze(2)
        e = writes.trace[:, t].unsqueeze(2)  # [B, r, 1]
        if rule == "delta":
            q = q - weights @ e
        elif rule == "oja":
            e = e - weights.transpose(1, 2) @ q
        m = writes.strength[:, t, None, None]
        faded = decay * weights
        if passes is not None:
            faded = torch.where(passes[:, t, None, None], faded, weights)
        weights = faded + m * q @ e.transpose(1, 2)
        if (start + t + 1) % CLAMP_EVERY_TOKENS == 0:
            weights = clamped(weights, largest=largest)
    return torch.stack(read, dim=1), weights


def in_chunks(
    weights: torch.Tensor,
    lookups: torch.Tensor,
    writes: Writes,
    *,
    start: int,
    passes: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scan_chunks`, with the arguments of `scan_tokens`."""
    chunks = chunks_of(lookups.shape[1], start=start, passes=passes, device=lookups.device)
    return scan_chunks(weights, lookups, writes, chunks, **settings)


def unit(*shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def inputs(length: int, rank: int, *, lookups: int = 1) -> list[torch.Tensor]:
    """H, lookups, q, e and m of three sequences, all of which take gradients."""
    trace = traces(unit(3, length, rank), unit(3, rank), torch.tensor(0.4))[:, :-1]
    post = unit(3, length, rank)
    strength = limited(torch.rand(3, length), post, trace)
    given = [torch.randn(3, rank, rank) / 4, unit(3, length, lookups, rank), post, trace, strength]
    return [x.detach().requires_grad_() for x in given]


def scanned(scan, given: list[torch.Tensor], rule: str, start: int) -> list[torch.Tensor]:
    """What a form reads and leaves, then its gradients."""
    weights, lookups, *writes = given
    read, after = scan(
        weights, lookups, Writes(*writes), rule=rule, decay=DECAY, start=start, largest=LARGEST
    )
    generator = torch.Generator().manual_seed(1)
    probes = [torch.randn(x.shape, generator=generator) for x in (read, after)]
    loss = (read * probes[0]).sum() + (after * probes[1]).sum()
    return [read, after, *torch.autograd.grad(loss, given)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("length", "start"), CASES)
def test_chunks_equal_the_recurrence_with_all_gradients(rule: str, length: int, start: int) -> None:
    given = inputs(length, 8, lookups=2)
    for ours, plain in zip(
        scanned(in_chunks, given, rule, start),
        scanned(scan_tokens, given, rule, start),
        strict=True,
    ):
        # float32 sums in another order; values and gradients are of the order of 1
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("length", "start"), CASES)
def test_a_learned_decay_and_filling_equal_the_recurrence_with_all_gradients(
    rule: str, length: int, start: int
) -> None:
    weights, lookups, *writes = inputs(length, 8, lookups=2)
    passes = torch.rand(3, length) < 0.6
    results = []
    for scan in (in_chunks, scan_tokens):
        stored = Writes(*writes)
        stored = stored._replace(strength=torch.where(passes, stored.strength, 0))
        decay = torch.tensor([0.93], requires_grad=True)
        settings = {"rule": rule, "decay": decay, "start": start, "largest": LARGEST}
        read, after = scan(weights, lookups, stored, passes=passes, **settings)
        loss = (read * read.detach().cos()).sum() + (after * after.detach().sin()).sum()
        gradients = torch.autograd.grad(loss, [weights, lookups, *writes, decay], allow_unused=True)
        results.append([read, after, *gradients])
    for ours, plain in zip(*results, strict=True):
        # the gradient of the decay sums over all tokens, sequences and fast weights
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_filling_neither_stores_nor_fades() -> None:
    weights, lookups, *writes = (x.detach() for x in inputs(40, 8))
    passes = torch.zeros(3, 40, dtype=torch.bool)
    stored = Writes(*writes)._replace(strength=torch.zeros(3, 40))
    settings = {"rule": "hebb", "decay": 0.5, "start": 0, "largest": 100.0}
    read, after = in_chunks(weights, lookups, stored, passes=passes, **settings)
    torch.testing.assert_close(after, weights)
    torch.testing.assert_close(read, lookups @ weights.transpose(1, 2).unsqueeze(1))


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_read_in_pieces_equals_it_read_at_once(rule: str) -> None:
    weights, lookups, *writes = (x.detach() for x in inputs(50, 8))
    settings = {"rule": rule, "decay": DECAY, "largest": LARGEST}
    whole, after = in_chunks(weights, lookups, Writes(*writes), start=0, **settings)
    pieces, begin = [], 0
    for length in (1, 15, 20, 1, 13):
        part = slice(begin, begin + length)
        piece = Writes(*(x[:, part] for x in writes))
        read, weights = in_chunks(weights, lookups[:, part], piece, start=begin, **settings)
        pieces.append(read)
        begin += length
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights, after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_what_was_stored_is_read_and_fades(rule: str) -> None:
    axes = torch.eye(4)
    post = axes[[1, 2, 2, 2]].unsqueeze(0)  # tokens 1 to 3 store nothing
    trace, strength = axes[[0, 3, 3, 3]].unsqueeze(0), torch.tensor([[1.0, 0, 0, 0]])
    read, _ = in_chunks(
        torch.zeros(1, 4, 4),
        axes[[0, 0, 0, 3]].view(1, 4, 1, 4),
        Writes(post, trace, strength),
        rule=rule,
        decay=0.5,
        start=0,
        largest=LARGEST,
    )
    expected = torch.stack([0 * axes[1], axes[1], axes[1] / 2, 0 * axes[1]])
    torch.testing.assert_close(read[0, :, 0], expected)


def test_delta_replaces_what_hebb_adds_up() -> None:
    post = torch.eye(2)[[0, 1]].unsqueeze(0)  # two values for one key
    key = torch.tensor([1.0, 0.0]).expand(1, 2, 2)
    after = {
        rule: in_chunks(
            torch.zeros(1, 2, 2),
            key.unsqueeze(2),
            Writes(post, key, torch.ones(1, 2)),
            rule=rule,
            decay=1.0,
            start=0,
            largest=LARGEST,
        )[1][0, :, 0]
        for rule in RULES
    }
    torch.testing.assert_close(after["hebb"], torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(after["delta"], torch.tensor([0.0, 1.0]))


def test_traces_are_a_geometric_sum_carried_over_calls() -> None:
    pre, before, decay = unit(2, 70, 4), unit(2, 4), torch.tensor(0.5)
    found, trace = traces(pre, before, decay), before
    torch.testing.assert_close(found[:, 0], before)
    for t in range(70):
        trace = pre[:, t] + decay * trace
        torch.testing.assert_close(found[:, t + 1], trace, rtol=1e-5, atol=1e-6)
    again = traces(pre[:, 30:], found[:, 30], decay)
    torch.testing.assert_close(again, found[:, 30:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_writes_stay_bounded_however_strong_the_modulator(rule: str) -> None:
    length = 40 * CLAMP_EVERY_TOKENS
    same = unit(1, 1, 8).expand(1, length, 8)  # the worst case: one pattern over and over
    trace = traces(same, torch.zeros(1, 8), torch.tensor(0.5))[:, :-1]
    strength = limited(torch.ones(1, length), same, trace)
    written = strength * torch.linalg.vector_norm(trace, dim=-1)
    assert written.max().item() <= LARGEST_WRITE + 1e-6
    writes = Writes(same, trace, strength)
    _, after = in_chunks(
        torch.zeros(1, 8, 8),
        same.unsqueeze(2),
        writes,
        rule=rule,
        decay=0.999,
        start=0,
        largest=LARGEST,
    )
    assert after.abs().max().item() <= LARGEST
    assert math.isfinite(after.sum().item())
