"""Windows with their answers behind them, as the answers are learned and scored."""

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
