"""Greedy decoding in which a model with multi-token prediction guesses ahead and verifies itself.

A pass of the model reads the known tokens that its state does not cover yet, and the guesses after
them. It tells the likeliest token at each place: guesses that are those count, up to the first that
is not, and one more token is known from the pass in any case. So the text is that of plain greedy
decoding, but for ties within the rounding of one pass and another.

A recurrent state cannot go back. Where all guesses were right the state after the pass is kept;
otherwise the one before, and the next pass reads the accepted tokens again. That costs no pass of
its own, and reads a token twice or more often; behind `_MOST_PENDING` such tokens a pass goes
without guesses, after which the state is kept.
"""

# B rows, T prompt tokens, R rows of a group, p tokens that a state does not cover, d guesses

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix.models.backbone import Backbone
from cdrmix.models.mtp import DraftState

# Known tokens that are read again before a pass goes without guesses.
_MOST_PENDING = 16


class Speculated(NamedTuple):
    """Text of all rows, and what the guesses were worth."""

    tokens: Tensor  # new ones, [B, <= max_new_tokens]; the stop token repeated where a row ended
    passes: int  # of the model, summed over rows
    num_tokens: int  # new ones, summed over rows, each up to its stop token
    guessed: list[int]  # guesses of the token 2, 3, ... ahead that a pass verified
    accepted: list[int]  # those that were right, as were all before them

    @property
    def tokens_per_pass(self) -> float:
        """New tokens of a row for each pass; plain decoding has 1."""
        return self.num_tokens / max(1, self.passes)

    @property
    def acceptance(self) -> list[float]:
        """Share of guesses that were accepted, by place from the second token on."""
        return [right / max(1, all) for right, all in zip(self.accepted, self.guessed, strict=True)]


class _Place(NamedTuple):
    """Progress of the rows of a group."""

    known: int  # tokens
    covered: int  # of them, by the state


class _Group(NamedTuple):
    """Rows that have as many tokens each, and states after as many."""

    rows: Tensor  # numbers, [R]
    state: Any  # of the model after the tokens that it covers; None before the first
    drafts: list[DraftState]  # of the parts for further tokens after `fed` positions
    guesses: Tensor  # of the tokens behind the known ones, [R, <= n - 1]


@torch.no_grad()
def speculate(
    model: Backbone, input_ids: Tensor, *, max_new_tokens: int, stop_id: int | None = None
) -> Speculated:
    """Continues token sequences by the likeliest token, several for each pass of the model.

    Args:
        model: with multi-token prediction; used in evaluation mode, left in the mode it was in.
        input_ids: prompts of equal length >= 1, [B, T].
        stop_id: as of `generate`.
    Raises:
        ValueError: if a prompt is empty.
    """
    if input_ids.shape[1] == 0:
        raise ValueError("a prompt needs at least one token; begin with the BOS token")
    was_training = model.training
    model.eval()
    decoding = _Decoding(model, input_ids, max_new_tokens, stop_id)
    start = _Group(
        torch.arange(len(input_ids), device=input_ids.device),
        None,
        decoding.further.start_drafting(),
        input_ids[:, :0],
    )
    # The shortest rows go on, and meet others that have states of the same sizes after as many
    # tokens; blocks that let tokens pass may have kept other numbers of them.
    waiting: dict[tuple[_Place, Any], _Group] = {}
    if max_new_tokens > 0:
        waiting[_Place(input_ids.shape[1], 0), None] = start
    while waiting:
        key = min(waiting, key=lambda key: key[0])
        for place, group in decoding.go_on(key[0], waiting.pop(key)):
            reached = (place, _sizes(group.state))
            met = waiting.get(reached)
            waiting[reached] = group if met is None else _map(_joined, met, group)
    model.train(was_training)
    return decoding.result()


class _Decoding:
    """Texts and counts of one call of `speculate`."""

    def __init__(
        self, model: Backbone, input_ids: Tensor, max_new_tokens: int, stop_id: int | None
    ) -> None:
        assert model.mtp is not None, "callers refuse a model without it"
        self.model = model
        self.further = model.mtp
        self.prompt = input_ids.shape[1]
        self.length = self.prompt + max_new_tokens
        self.stop_id = stop_id
        self.texts = torch.nn.functional.pad(input_ids, (0, max_new_tokens))  # [B, length]
        self.passes = 0
        self.guessed = [0] * len(model.mtp)
        self.accepted = [0] * len(model.mtp)

    def choose(self, scored: Tensor) -> Tensor:
        """Likeliest tokens, [..., D] -> [...]."""
        return self.model.logits(scored).float().argmax(-1)

    def go_on(self, place: _Place, group: _Group) -> list[tuple[_Place, _Group]]:
        """Runs one pass of a group; gives its rows that go on, by the places that they reach."""
        known, covered = place
        # The last token of a pass is known without a guess.
        guesses = group.guesses[:, : self.length - known - 1]
        if group.state is not None and known - covered > _MOST_PENDING:
            guesses = guesses[:, :0]
        ahead = guesses.shape[1]
        inputs = torch.cat([self.texts[group.rows, covered:known], guesses], dim=1)
        output = self.model(inputs, state=group.state, return_state=True)
        last = known - covered - 1  # place of the last known token in this pass
        best = self.choose(output.hidden[:, last:])  # [R, d + 1]
        right = (best[:, :ahead] == guesses).long().cumprod(1).sum(1)  # [R]
        self.passes += len(right)
        for number in range(ahead):
            self.guessed[number] += len(right)
            self.accepted[number] += int((right > number).sum())
        found = []
        for number in right.unique().tolist():
            new = best[:, : number + 1]
            goes_on = (right == number) & (known + number + 1 < self.length)
            if self.stop_id is not None:
                goes_on &= ~(new == self.stop_id).any(1)
            written = slice(known, known + number + 1)
            self.texts[group.rows[right == number], written] = new[right == number]
            kept = goes_on.nonzero().squeeze(1)
            if not len(kept):
                continue
            whole = number == ahead
            state = output.state if whole else group.state
            chosen = _map(
                lambda x, kept=kept: x[kept], _Group(group.rows, state, group.drafts, new)
            )
            # Positions that the parts have not read: all of a prompt, then from the last one on.
            first = 0 if group.state is None else last
            hidden = output.hidden[kept, first : last + number + 1]
            behind = self.texts[chosen.rows, covered + first + 1 : known + number + 1]
            ahead_of, drafts = self.further.draft(
                hidden, behind, chosen.drafts, self.choose, self.model.embedding
            )
            reached = _Place(known + number + 1, known + number if whole else covered)
            found.append((reached, chosen._replace(drafts=drafts, guesses=ahead_of)))
        return found

    def result(self) -> Speculated:
        """Cuts each row behind its stop token."""
        tokens = self.texts[:, self.prompt :]
        num_tokens = tokens.numel()
        if self.stop_id is not None:
            # Of the tokens before, as plain decoding writes the first one.
            stopped = (tokens == self.stop_id).long().cumsum(1)
            ended = (stopped > 1) | ((stopped == 1) & (tokens != self.stop_id))
            tokens = tokens.masked_fill(ended, self.stop_id)
            num_tokens -= int(ended.sum())
            longest = int((~ended).sum(1).max()) if len(ended) else 0
            tokens = tokens[:, :longest]
        return Speculated(tokens, self.passes, num_tokens, self.guessed, self.accepted)


def _sizes(tree: Any) -> Any:
    """Sizes of the tensors of a state without that of the rows, and its numbers."""
    if tree is None or isinstance(tree, int):
        return tree
    if isinstance(tree, Tensor):
        return tuple(tree.shape[1:])
    if dataclasses.is_dataclass(tree):
        tree = [getattr(tree, each.name) for each in dataclasses.fields(tree)]
    return tuple(_sizes(part) for part in tree)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second])


def _map(change: Callable[..., Tensor], *trees: Any) -> Any:
    """Applies `change` to the tensors of nested tuples, lists and dataclasses of one structure."""
    first = trees[0]
    if first is None or isinstance(first, int):  # a count of tokens, which rows of a group share
        return first
    if isinstance(first, Tensor):
        return change(*trees)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        parts = [[getattr(tree, each.name) for each in dataclasses.fields(tree)] for tree in trees]
        return type(first)(*(_map(change, *each) for each in zip(*parts, strict=True)))
    changed = [_map(change, *each) for each in zip(*trees, strict=True)]
    return changed if isinstance(first, list) else type(first)(*changed)
