"""Decoding with the recurrent state and the key/value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cdrmix.models.backbone import LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stop_id: int | None = None,
) -> Tensor:
    """Continues token sequences.

    Args:
        model: used in evaluation mode, left in the mode it was in.
        input_ids: prompts of equal length >= 1, [B, T].
        temperature: 0 takes the most likely token; above, samples from logits / temperature.
        stop_id: a row that produced this id repeats it; when all rows did, decoding ends.
    Returns:
        The new tokens, [B, <= max_new_tokens].
    Raises:
        ValueError: if a prompt is empty or the temperature negative.
    """
    if input_ids.shape[1] == 0:
        raise ValueError("a prompt needs at least one token; begin with the BOS token")
    if temperature < 0:
        raise ValueError(f"temperature = {temperature}: give 0 or more")
    was_training = model.training
    model.eval()
    source = torch.Generator(input_ids.device).manual_seed(seed)
    new: list[Tensor] = []
    finished = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    tokens = input_ids
    state = None
    for _ in range(max_new_tokens):
        output = model(tokens, state=state, return_state=True)
        state = output.state
        logits = model.logits(output.hidden[:, -1]).float()  # [B, V]
        if temperature == 0:
            next_tokens = logits.argmax(-1)
        else:
            probabilities = torch.softmax(logits / temperature, dim=-1)
            next_tokens = torch.multinomial(probabilities, 1, generator=source).squeeze(1)
        if stop_id is not None:
            next_tokens = torch.where(finished, stop_id, next_tokens)
            finished |= next_tokens == stop_id
        new.append(next_tokens)
        # all ranks of a pipeline have the same logits, and so end at the same token
        if stop_id is not None and bool(finished.all()):
            break
        tokens = next_tokens.unsqueeze(1)
    model.train(was_training)
    return torch.stack(new, dim=1) if new else input_ids[:, :0]
