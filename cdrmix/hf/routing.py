"""Router statistics of the MoE layers of a Hugging Face model."""

# N tokens of this rank, L MoE layers, E experts, k experts per token

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cdrmix.config.model_parts import MoEConfig
from cdrmix.models.expert_rows import exact_ratio, expert_capacity


class Routing:
    """Routers of a model, and their choices while `recorded` is entered.

    Routers are the modules that transformers itself records as `router_logits`.
    """

    def __init__(self, model: nn.Module, moe: MoEConfig | None) -> None:
        self._moe = moe
        self._choices: dict[nn.Module, list[tuple[Tensor, Tensor | None]]] | None = None
        self.routers: list[nn.Module] = []
        if moe is None:
            return
        for module, index in _routers(model):
            self.routers.append(module)
            module.register_forward_hook(self._recorder(index))

    def _recorder(self, index: int) -> Any:
        def record(module: nn.Module, _: Any, output: Any) -> None:
            # Not where a layer runs again in the backward pass: its tokens have been counted. The
            # hook computes nothing, as the second run would have to save as many tensors.
            if self._choices is None:
                return
            values = output if isinstance(output, tuple) else (output,)
            whole = (v for v in values if torch.is_tensor(v) and not v.is_floating_point())
            self._choices[module].append((values[index], next(whole, None)))

        return record

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the routers' choices in the context; ask for `statistics` before it ends."""
        self._choices = {module: [] for module in self.routers}
        try:
            yield
        finally:
            self._choices = None

    def statistics(self) -> Tensor | None:
        """Statistics [L, 2E + 3] as `MoEFeedForward.forward` gives them; None: no such layers."""
        if not self.routers:
            return None
        assert self._choices is not None, "asked for inside of `recorded`"
        layers = [
            torch.stack([self._of_call(module, *call) for call in calls]).sum(0)
            for module, calls in self._choices.items()
        ]
        return torch.stack(layers)

    def _of_call(self, module: nn.Module, logits: Tensor, chosen: Tensor | None) -> Tensor:
        moe = self._moe
        assert moe is not None, "a dense model has no routers"
        logits = logits.reshape(-1, moe.num_experts).float()  # [N, E]
        log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
        if hasattr(module, "e_score_correction_bias"):  # scores its experts one by one
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True)
        else:
            probabilities = torch.exp(logits - log_total)
        if chosen is None:
            chosen = probabilities.topk(moe.top_k, dim=-1).indices
        every = torch.arange(moe.num_experts, device=logits.device)
        counts = (chosen.reshape(-1, 1) == every).sum(0).float()  # [E]
        ratio = exact_ratio(moe.capacity_factor)
        capacity = expert_capacity(len(logits), moe.top_k, moe.num_experts, ratio)
        excess = (counts - capacity).clamp(min=0).sum()
        totals = torch.stack([log_total.square().sum(), excess, torch.zeros_like(excess)])
        return torch.cat([counts, probabilities.sum(0), totals])


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yields routers in the order of the layers, each with the place of the logits it gives."""
    recorders = getattr(model, "_can_record_outputs", None) or {}
    found = recorders.get("router_logits", ())
    for recorder in found if isinstance(found, list | tuple) else (found,):
        kind = getattr(recorder, "target_class", None) or recorder
        place = getattr(recorder, "index", 0)
        for module in model.modules():
            if isinstance(kind, type) and isinstance(module, kind):
                yield module, place
