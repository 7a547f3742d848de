"""Windows with their answers behind them, and labels of either."""

# n windows of T tokens

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdrmix.objectives.language_model import IGNORED_LABEL


def rows_with_answers(
    windows: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tokens of windows with their answers behind them, and labels at the answers alone, [n, T]."""
    width = max(len(ids) + len(answer) for ids, answer in zip(windows, answers, strict=True)) - 1
    # The last token of an answer is only a label: nothing is predicted from it.
    tokens = torch.zeros(len(windows), width, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED_LABEL)
    for row, (ids, answer) in enumerate(zip(windows, answers, strict=True)):
        end = len(ids) + len(answer) - 1
        tokens[row, :end] = torch.tensor([*ids, *answer[:-1]])
        labels[row, len(ids) - 1 : end] = torch.tensor(answer)
    return tokens.to(device), labels.to(device)


def labels_of_windows(tokens: Tensor, labels: Tensor) -> Tensor:
    """Labels of the text before the answers of `rows_with_answers`, [n, T]: its next tokens."""
    # The first label stands on the last token of a window, which the answer alone follows.
    last = (labels != IGNORED_LABEL).int().argmax(1, keepdim=True)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens.roll(-1, dims=1).masked_fill(places >= last, IGNORED_LABEL)
