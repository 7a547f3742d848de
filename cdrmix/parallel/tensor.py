"""Tensor parallelism: blocks, embedding and head cut over the tensor ranks.

A block is cut by heads and by the inner features of a dense feed-forward, the vocabulary by rows.
A region is the part of a block between a column part, which gives a rank its heads of
[B, T, D / P], and a row part, which takes them to [B, T, D] again. It reads tokens whole, so their
gradient is summed over the ranks on the way back; its row parts' products are summed on the way
out. Parameters that stay whole inside a region (token-shift mixes, low-rank downs, the router) get
partial gradients, which are summed too; parameters outside see whole activations, and get whole
gradients.

Every local parameter is marked, for `checkpoint`, as a box of its logical tensor or as a copy that
another rank saves. DeepSpeed reads a mark of its own, `tensor_model_parallel`: with it, each tensor
rank's part counts in the gradient norm; without it, the first tensor rank's copy stands for all.
"""

# B batch, T tokens, D hidden, R low-rank size, V vocabulary, P tensor ranks

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.models.backbone import TokenEmbedding
from cdrmix.models.block import Block
from cdrmix.models.moe import MoEFeedForward
from cdrmix.objectives.language_model import (
    HeadLoss,
    LabelWeights,
    VocabularyPart,
    linear_losses,
    score_labels,
)
from cdrmix.parallel.exchange import (
    enter_region,
    gather_rows,
    share_tokens,
    sum_gradients,
    sum_over_ranks,
)
from cdrmix.parallel.topology import Topology
from cdrmix.planning.counts import block_parameters
from cdrmix.planning.parameter import Parameter


@dataclass(frozen=True)
class Shard:
    """Box of a logical tensor: offset of its first element, and the whole tensor's shape."""

    offset: tuple[int, ...]
    logical_shape: tuple[int, ...]


def mark_copy(parameter: Tensor) -> None:
    """Marks a parameter or buffer that a rank outside the data group holds and saves too."""
    parameter.is_copy = True  # type: ignore[attr-defined]


def shard_of(parameter: Tensor) -> Shard | None:
    """Returns the box that a parameter holds; None for a whole one."""
    return getattr(parameter, "shard", None)


def is_copy(parameter: Tensor) -> bool:
    """Returns True if another rank saves the same values."""
    return getattr(parameter, "is_copy", False)


def split_block(block: Block, topology: Topology) -> None:
    """Cuts an initialised whole block to this rank's part of heads and features, in place."""
    if topology.tensor_group is None:
        return
    parameters = list(block_parameters(block.config, block.layer))
    _split_region(block.mixer, _inside(parameters, "mixer."), topology)
    if isinstance(block.ffn, MoEFeedForward):
        # experts stay whole: each tensor rank routes its share of the tokens that all of them hold
        layer = block.ffn.deepspeed_moe
        layer.share_tokens = partial(share_tokens, topology=topology)
        _sum_gradients_of(layer.gate, ["weight"], topology)
        _count_in_norm(layer.experts.parameters())
    else:
        _split_region(block.ffn, _inside(parameters, "ffn."), topology)
    mark_copies(block, topology)


def _inside(parameters: Iterable[Parameter], prefix: str) -> list[Parameter]:
    """Parameters of a part of a block, named from the part on."""
    return [
        each._replace(name=each.name.removeprefix(prefix))
        for each in parameters
        if each.name.startswith(prefix)
    ]


def mark_copies(module: nn.Module, topology: Topology) -> None:
    """Marks what is equal on all tensor ranks as copies, on all ranks but the first."""
    if topology.tensor_rank == 0:
        return
    for parameter in (*module.parameters(), *module.buffers()):
        # Experts are no copies: the expert group may lie on the tensor ranks, which then hold other
        # experts, and `checkpoint` takes who saves them from DeepSpeed's expert groups.
        is_expert = not getattr(parameter, "allreduce", True)
        if shard_of(parameter) is None and not is_expert:
            mark_copy(parameter)


def cut_block(parameter: Tensor, topology: Topology, *, dim: int) -> nn.Parameter:
    """Copies this rank's equal part of a whole parameter along `dim`, and marks it as a box."""
    assert parameter.shape[dim] % topology.degrees.tensor == 0, "rules refuse it"
    view = parameter.detach().chunk(topology.degrees.tensor, dim)[topology.tensor_rank]
    # a copy, so that the whole block's memory is freed
    part = nn.Parameter(view.clone(memory_format=torch.contiguous_format))
    offset = [0] * part.dim()
    offset[dim] = topology.tensor_rank * part.shape[dim]
    part.shard = Shard(tuple(offset), tuple(parameter.shape))  # type: ignore[attr-defined]
    # DeepSpeed adds such a parameter's norm on every tensor rank, not on the first alone
    part.tensor_model_parallel = True  # type: ignore[attr-defined]
    return part


def _split_region(region: nn.Module, parameters: list[Parameter], topology: Topology) -> None:
    """Cuts a region as planning lists its parameters: the maps into it by outputs and the one out
    of it by inputs, what acts on heads or inner features by these."""
    partial_ones: dict[nn.Module, list[str]] = {}  # names by module
    for each in parameters:
        path, _, name = each.name.rpartition(".")
        module = region.get_submodule(path)
        if each.cut is not None:
            setattr(module, name, cut_block(getattr(module, name), topology, dim=each.cut))
        elif each.is_partial:
            partial_ones.setdefault(module, []).append(name)
    region.register_forward_pre_hook(lambda _, args: (enter_region(args[0], topology), *args[1:]))
    for module in region.modules():
        if isinstance(module, nn.Linear):
            whole_inputs = module.in_features
            module.out_features, module.in_features = module.weight.shape
            if module.in_features < whole_inputs:
                # without a bias, which the sum over the ranks would count P times
                assert module.bias is None, "a map out of a region has no bias"
                module.register_forward_hook(
                    lambda _, args, part: sum_over_ranks(part, topology.tensor_group)
                )
        elif isinstance(module, nn.GroupNorm):  # one group is one head
            module.num_groups //= topology.degrees.tensor
            module.num_channels = module.weight.numel()
    for module, names in partial_ones.items():
        _sum_gradients_of(module, names, topology)


def _sum_gradients_of(module: nn.Module, names: Iterable[str], topology: Topology) -> None:
    """Sums the partial gradients of a module's whole parameters, all in one message.

    While the module computes, the parameters' names stand for aliases, whose gradients meet in one
    autograd node before they reach the parameters, and DeepSpeed's hooks on them.
    """
    names = list(names)

    def alias(module: nn.Module, _: Any) -> None:
        aliases = sum_gradients([getattr(module, name) for name in names], topology)
        # Python looks into `vars` before it asks nn.Module for the parameter of that name, which
        # stays registered: optimizer and checkpoint see the parameter, the module the alias
        vars(module).update(zip(names, aliases, strict=True))

    def restore(module: nn.Module, *_: Any) -> None:
        for name in names:
            vars(module).pop(name, None)

    module.register_forward_pre_hook(alias)
    # always_call: recomputation for the backward pass ends a forward pass halfway, by an exception
    module.register_forward_hook(restore, always_call=True)


def _count_in_norm(experts: Iterable[nn.Parameter]) -> None:
    """Marks experts, so that DeepSpeed counts them in the gradient norm on every tensor rank.

    Without the mark it takes them for copies of the first tensor rank's (0.19.8,
    runtime/zero/stage_1_and_2.py: get_grad_norm_direct). But each of these ranks holds other
    experts, or another part of the optimizer's share of the same ones.
    """
    for parameter in experts:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


class VocabularyEmbedding(TokenEmbedding):
    """Token embedding and head with this rank's rows of the vocabulary, [V / P, D]."""

    def __init__(self, weight: nn.Parameter, topology: Topology) -> None:
        super().__init__(weight.shape[0], weight.shape[1], device="meta")
        self.weight = weight
        self.topology = topology
        self.first_id = topology.tensor_rank * weight.shape[0]

    def forward(self, input_ids: Tensor) -> Tensor:
        """Looks up tokens, [...] -> [..., D], whole on every rank."""
        local = input_ids - self.first_id
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        # a token of another rank reads row 0 here; its output is zeroed, and with it the gradient
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        return sum_over_ranks(rows, self.topology.tensor_group)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores the next token over the whole vocabulary, [..., D] -> [..., V], for decoding."""
        # no gradient passes
        part = super().logits(hidden).detach()
        return torch.cat(gather_rows(part.unsqueeze(0), self.topology).unbind(0), dim=-1)

    def losses(self, hidden: Tensor, labels: Tensor, weights: LabelWeights) -> HeadLoss:
        """Computes `zero3.next_token_losses` with the vocabulary in parts."""
        part = VocabularyPart(self.first_id, lambda x: gather_rows(x.unsqueeze(0), self.topology))
        # each rank's logits give a part of the gradient of the same hidden states
        whole = enter_region(hidden, self.topology)
        score = partial(score_labels, part=part)
        return linear_losses(whole, self.weight, labels, weights, score)


def split_embedding(embedding: TokenEmbedding, topology: Topology) -> TokenEmbedding:
    """Returns this rank's part of an initialised embedding; the whole without tensor ranks."""
    if topology.tensor_group is None:
        return embedding
    return VocabularyEmbedding(cut_block(embedding.weight, topology, dim=0), topology)
