"""Rules of recomputation: what cannot be computed again in the form that a configuration gives."""

from __future__ import annotations

from cdrmix.planning import zero
from cdrmix.planning.counts import params_by_part
from cdrmix.planning.rule import THIS_VERSION, Rule

RECOMPUTE_RULES: tuple[Rule, ...] = (
    Rule(
        "hf-in-spans",
        lambda x: x.model.kind == "hf" and x.training.activation_checkpointing == "spans",
        "training.activation_checkpointing = spans with "
        "model.kind = hf: blocks of transformers are recomputed whole, as their attention and "
        "recurrences take no state of an earlier span. Try block",
        "transformers 5.23 modeling_layers.py: GradientCheckpointingLayer",
    ),
    Rule(
        "large-without-recomputation",
        lambda x: (
            "activation_checkpointing" in x.training.model_fields_set  # else the plan decides
            and x.training.activation_checkpointing not in ("block", "spans")
            and x.training.stage != "b"  # Stage B trains little of it
            and params_by_part(x.model).total() >= zero.STAGED_PARAMS
        ),
        lambda x: (
            f"training.activation_checkpointing = {x.training.activation_checkpointing} with "
            f"{params_by_part(x.model).total() / 1e9:.3g}B "
            f"parameters: from {zero.STAGED_PARAMS / 1e9:.0f}B on every block is recomputed, as "
            f"what blocks keep outgrows the weights. Try {zero.most_recomputed(x.model)}, or leave "
            "it out"
        ),
        "rules of the model's size: planning/zero.py",
    ),
    Rule(
        "mod-in-spans-unavailable",
        lambda x: x.model.mod is not None and x.training.activation_checkpointing == "spans",
        "training.activation_checkpointing = spans with "
        "model.mod is {unavailable}: a span would choose its tokens without those of the others, "
        "and begin from a state that rows reach after different tokens. Try block",
        THIS_VERSION,
    ),
    Rule(
        "hf-selective",
        lambda x: x.model.kind == "hf" and x.training.activation_checkpointing == "selective",
        "training.activation_checkpointing = selective with "
        "model.kind = hf: layers of transformers do not tell what of them is cheap. Try block, or "
        "none",
        "transformers 5.23 modeling_layers.py: GradientCheckpointingLayer",
    ),
)
