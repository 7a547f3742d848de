"""Check of a family that has no tests here, on a few tokens before training."""

# B rows, T time, V vocabulary

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.config.hugging_face import TESTED_FAMILIES
from cdrmix.errors import ConfigError
from cdrmix.hf.model import HuggingFaceModel
from cdrmix.hf.packing import document_spans
from cdrmix.log import get_logger
from cdrmix.objectives.language_model import ALL_ALIKE

logger = get_logger(__name__)

# Documents of two rows: borders at other places, and other numbers of them.
_LENGTHS = ((7, 12, 5), (15, 9))
# Largest difference of scores, root mean square relative to the scores: a single token may go to
# another expert where numbers are coarse. What is wrong is off by 0.1 and more.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_Check = Callable[[HuggingFaceModel], str | None]


def check_family(model: HuggingFaceModel, *, trains: bool = True) -> None:
    """Warns of a family that is not tested here, once it has passed a check; collective.

    Args:
        model: with its weights; its mode is restored.
        trains: check gradients too.
    Raises:
        ConfigError: on every rank, if hidden states times the head are not the model's own scores,
            documents of one row see each other, or gradients are not finite.
    """
    family = model.family
    if family in TESTED_FAMILIES:
        return
    was_training = model.training
    model.eval()
    checks = _CHECKS if trains else (_scores_are_own, _documents_are_apart)
    own = [text for check in checks if (text := _outcome(check, model))]
    model.train(was_training)
    failed = next(filter(None, runtime.all_gather_object(own)), [])
    if failed:
        raise ConfigError(
            f"model.path: the family {family!r} is not among those that are tested here, and "
            f"cannot be {'trained' if trains else 'evaluated'}: {'; '.join(failed)}. Tested are "
            f"{', '.join(TESTED_FAMILIES)}"
        )
    if runtime.rank() == 0:
        logger.warning(
            "warning: model.path: the family %r is not tested here. On %d tokens its %s are as "
            "they should be",
            *(family, sum(map(sum, _LENGTHS))),
            "loss, packed documents and gradients" if trains else "scores and packed documents",
        )


def _outcome(
    check: Callable[[HuggingFaceModel], str | None], model: HuggingFaceModel
) -> str | None:
    try:
        return check(model)
    except Exception as error:  # code of a foreign family may raise anything
        return f"{type(error).__name__}: {error}"


def _inputs(model: HuggingFaceModel) -> tuple[Tensor, Tensor]:
    """Tokens and documents, [B, T], the same on every rank."""
    source = torch.Generator().manual_seed(0)
    shape = (len(_LENGTHS), sum(_LENGTHS[0]))
    ids = torch.randint(model.config.vocab_size, shape, generator=source)
    documents = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in _LENGTHS]
    return ids.to(model.device), torch.stack(documents).to(model.device)


def _difference(found: Tensor, expected: Tensor) -> float | None:
    """Difference relative to what is expected; None where it is within the tolerance."""
    error = (found.float() - expected.float()).square().mean()
    off = float((error / expected.float().square().mean()).sqrt())
    # not a number is no match either
    return None if off <= _TOLERANCE[found.dtype] else off


@torch.no_grad()
def _scores_are_own(model: HuggingFaceModel) -> str | None:
    ids, _ = _inputs(model)
    found = model.logits(model(ids).hidden)
    off = _difference(found, model.causal(ids, use_cache=False).logits)
    if off is None:
        return None
    return (
        f"hidden states times its head are not its scores (off by {off:.1%}): it scales or caps "
        "them, or its head has a bias, which the loss here would leave out"
    )


@torch.no_grad()
def _documents_are_apart(model: HuggingFaceModel) -> str | None:
    ids, segment_ids = _inputs(model)
    packed = model.logits(model(ids, segment_ids=segment_ids).hidden)
    positions = torch.cat([torch.cat([torch.arange(n) for n in row]) for row in _LENGTHS])
    spans = document_spans(positions.view(ids.shape))
    alone = [model(ids[row : row + 1, start:stop]).hidden[0] for row, start, stop in spans]
    off = _difference(packed, model.logits(torch.cat(alone).view(*ids.shape, -1)))
    if off is None:
        return None
    return f"documents packed into one row see each other (scores are off by {off:.1%})"


def _gradients_are_finite(model: HuggingFaceModel) -> str | None:
    ids, segment_ids = _inputs(model)
    embedded: list[Tensor] = []

    def keep(_module: object, _inputs: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    # Of the embedded tokens: gradients of parameters belong to the engine, which reduces them.
    hook = model.causal.get_input_embeddings().register_forward_hook(keep)
    try:
        hidden = model(ids, segment_ids=segment_ids).hidden
    finally:
        hook.remove()
    loss = model.embedding.losses(hidden, ids, ALL_ALIKE).loss
    (gradient,) = torch.autograd.grad(loss, embedded[:1])
    if bool(loss.isfinite()) and bool(gradient.isfinite().all()):
        return None
    return "its loss or gradients are not finite"


def _routers_are_known(model: HuggingFaceModel) -> str | None:
    if model.config.moe is None or model.num_routers:
        return None
    return "transformers does not tell the scores of its routers, which cannot be watched"


_CHECKS: tuple[_Check, ...] = (
    _routers_are_known,
    _scores_are_own,
    _documents_are_apart,
    _gradients_are_finite,
)
