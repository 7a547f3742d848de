"""Rules of Mixture of Depths: what routed blocks cannot run with yet."""

from __future__ import annotations

from cdrmix.planning.rule import THIS_VERSION, Rule

DEPTH_RULES: tuple[Rule, ...] = (
    Rule(
        "mod-with-sequence-unavailable",
        lambda x: x.model.mod is not None and x.degrees.sequence > 1,
        "parallel.sequence = {x.degrees.sequence} with model.mod is {unavailable}: sequence ranks "
        "exchange equally many tokens, and a routed block takes another number of each rank's. Try "
        "parallel.sequence = 1",
        THIS_VERSION,
    ),
    Rule(
        "mod-in-stage-b-unavailable",
        lambda x: (
            x.model.mod is not None and x.config.stage_b is not None and x.training.stage != "a"
        ),
        "training.stage = {x.training.stage} with model.mod is {unavailable}: plastic adapters "
        "learn from every token that passes their layer, and memory reads its state. Try "
        "training.stage = a, or model.mod = null",
        THIS_VERSION,
    ),
)
