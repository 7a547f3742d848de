"""Rules of a user's optimizers and terms of the loss: the layouts that they cannot run in."""

from __future__ import annotations

from cdrmix.planning.layout import Combination
from cdrmix.planning.plugins import optimizer_of, terms_of
from cdrmix.planning.rule import THIS_VERSION, Rule


def _reads_neighbours(combination: Combination) -> bool:
    """True if ranks, or ZeRO-3's sub-groups, would cut vectors whose elements are read together."""
    of_user = optimizer_of(combination.config.optimizer)
    is_cut = combination.degrees.world_size > 1 or combination.zero_stage == 3
    return is_cut and of_user is not None and not of_user.elementwise


def _terms(combination: Combination, *, each_token: bool = False) -> list[str]:
    """Terms of the loss, or those that read several tokens together."""
    terms = terms_of(combination.config.objectives)
    return [each.use for each, term in terms if not (each_token and term.each_token)]


PLUGIN_RULES = (
    Rule(
        "optimizer-of-whole-vectors",
        _reads_neighbours,
        "optimizer.kind = {x.config.optimizer.kind} with {x.degrees.world_size} ranks and "
        "ZeRO-{x.zero_stage}: it does not declare `elementwise`, and its vectors would be cut "
        "where shares of ranks end. Try one rank with profile 'zero1', or one that declares it",
        "DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py: flat partitions of a group",
    ),
    Rule(
        "terms-with-tensor-unavailable",
        lambda x: _terms(x) if x.degrees.tensor > 1 else [],
        "objectives.plugins with {found[0]} and parallel.tensor = {x.degrees.tensor} is "
        "{unavailable}: each tensor rank has logits of a part of the vocabulary. Try "
        "parallel.tensor = 1",
        THIS_VERSION,
    ),
    Rule(
        "terms-of-several-tokens-with-sequence",
        lambda x: _terms(x, each_token=True) if x.degrees.sequence > 1 else [],
        "objectives.plugins with {found[0]} and parallel.sequence = {x.degrees.sequence}: it does "
        "not declare `each_token`, and each sequence rank has a part of the tokens. Try "
        "parallel.sequence = 1",
        "a sequence rank has its own tokens alone",
    ),
)
