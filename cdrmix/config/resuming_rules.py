"""Effect of changing each key of the configuration when a run is resumed.

The ranks check what the rules here leave to them: `engines/recovery.py` compares the model with a
checkpoint's, the loaders of both stages, in `data/loader.py` and `stage_b/engine.py`, its position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from cdrmix.config.schema import Config

# free: does not alter training. alters: does, and may change all the same. refused: cannot change.
Kind: TypeAlias = Literal["free", "alters", "refused"]


class ResumedChange(NamedTuple):
    """A change, as the conditions of the rules see it."""

    stage: str | None  # of the newest checkpoint: a or b; None without one
    old: Any
    new: Any
    config: Config  # that the run goes on with


@dataclass(frozen=True)
class Rule:
    """Effect of changing a key when a run is resumed."""

    kind: Kind
    text: str
    # Case in which a key that may change otherwise is refused.
    refused: Callable[[ResumedChange], bool] = lambda resumed: False


_FREE = Rule("free", "may change")
_ALTERS = Rule("alters", "may change, with a warning: alters training")
REFUSED = Rule("refused", "refused")


def _in_stage_b(resumed: ResumedChange) -> bool:
    return resumed.stage == "b"


_SHAPE = Rule("alters", "refused in Stage B: shapes of tensors differ", _in_stage_b)
_LESSONS = Rule("alters", "refused in Stage B: the texts would differ", _in_stage_b)
# The ranks refuse them: it takes the place in the course.
_PHASES = Rule(
    "alters", "later phases may change; refused where it changes steps of Stage B already taken"
)
# What was lowered is in the checkpoint, as a factor.
_LATER_SPIKES = Rule("alters", "may change, with a warning: counts at later spikes")

_MUON_STATES = Rule(
    "alters",
    "refused in Stage A with optimizer.kind = muon: other states are kept",
    lambda resumed: resumed.stage == "a" and resumed.config.optimizer.kind == "muon",
)

# Of a key, else of the section around it.
_RULES = {
    "name": _FREE,
    "plugins": Rule("free", "the folder may move; the record of each start has the digests"),
    "changed_plugins": _FREE,
    "model": REFUSED,
    "parallel": _FREE,
    "training": _ALTERS,
    "training.stage": Rule(
        "alters",
        "may change, but `a` is refused for a checkpoint of Stage B",
        lambda resumed: resumed.stage == "b" and resumed.new == "a",
    ),
    "training.start_from": Rule("free", "may change; not read once the run has a checkpoint"),
    "training.seed": Rule(
        "alters",
        "refused, except in Stage A with data.order = sequential",
        lambda resumed: resumed.stage == "b" or resumed.config.data.order != "sequential",
    ),
    # `total_tokens` over tokens of another step is another number of steps, those done included: a
    # run would end far from its tokens.
    "training.global_batch_size": Rule(
        "alters",
        "may change, with a warning: alters training; refused in Stage A where total_tokens gives "
        "the length, unless max_steps is given too",
        lambda resumed: resumed.stage == "a" and resumed.config.training.max_steps is None,
    ),
    "training.sequence_length": Rule(
        "alters",
        "refused in Stage A; may change in Stage B",
        lambda resumed: resumed.stage == "a",
    ),
    "training.ema_decay": Rule(
        "free",
        "may change: an average that is turned on begins at the weights of the checkpoint, one "
        "that is turned off is dropped, both with a warning",
    ),
    "training.micro_batch_size": _FREE,
    "training.deterministic": _FREE,
    "training.activation_checkpointing": _FREE,
    "training.sequence_checkpoint_tokens": _FREE,
    "training.compile": Rule("free", "may change: compiled blocks round differently"),
    "training.memory_share": _FREE,
    # Another base is told by its config.json, and that of adapters by its digest.
    "model.path": Rule("free", "the folder may move; another model is refused"),
    "model.remote_code": _FREE,
    # Another data set is told by its digest, and refused by the ranks.
    "data": _FREE,
    "data.path": Rule("free", "the data set may move; another one is refused"),
    "data.order": Rule(
        "alters",
        "refused in Stage A; has no effect in Stage B",
        lambda resumed: resumed.stage == "a",
    ),
    "data.window_samples": Rule(
        "alters",
        "refused in Stage A with data.order = windowed; else without effect",
        lambda resumed: resumed.stage == "a" and resumed.config.data.order == "windowed",
    ),
    # The ranks compare the orders, which may be equal though they are written differently.
    "data.mixture": Rule("alters", "refused in Stage A where it changes the order of the samples"),
    "data.token_weights": _ALTERS,
    "data.segment_documents": _ALTERS,
    # No position depends on them: the parts of the loss are counted anew in each step.
    "objectives": _ALTERS,
    "optimizer": _ALTERS,
    "optimizer.kind": Rule(
        "alters",
        "refused in Stage A: each optimizer keeps states of its own",
        lambda r: r.stage == "a",
    ),
    "optimizer.experts": _MUON_STATES,
    "optimizer.low_rank": _MUON_STATES,
    "optimizer.neuron_norm": _MUON_STATES,
    "checkpoint": _FREE,
    "evaluation": _FREE,
    "monitoring": _FREE,
    "supervision": _FREE,
    "failures": _FREE,
    "health": _ALTERS,
    "health.loss_spike.rate_factor": _LATER_SPIKES,
    "health.loss_spike.max_lowerings": _LATER_SPIKES,
    "launch": _FREE,
    "launch.environment": Rule(
        "free", "may change; a changed value is not logged, because it may be secret"
    ),
    "resources": _FREE,
    "hooks": _ALTERS,
    "profile": _FREE,
    # What was measured before the first step stands in the checkpoint, and the text that the model
    # wrote then in the run directory: the ranks compare both, and the order of the samples.
    "cpt": REFUSED,
    "cpt.replay": Rule("alters", "refused in Stage A where it changes the order of the samples"),
    "cpt.replay.source": Rule("free", "the data set may move; another one is refused in Stage A"),
    "cpt.replay.self_tokens": REFUSED,
    "cpt.replay.self_document_tokens": REFUSED,
    "cpt.forgetting": REFUSED,
    "cpt.forgetting.data": Rule("free", "the data sets may move; others are refused in Stage A"),
    "cpt.forgetting.every_steps": _FREE,
    "cpt.forgetting.stop_above": _FREE,
    "stage_b": Rule(
        "alters",
        "may change, but null is refused for a checkpoint of Stage B",
        lambda resumed: resumed.stage == "b" and resumed.new is None,
    ),
    "stage_b.run": _ALTERS,
    "stage_b.pipeline": _FREE,
    "stage_b.adapters": _ALTERS,
    "stage_b.policy": _ALTERS,
    "stage_b.memory": _ALTERS,
    "stage_b.losses": _ALTERS,
    "stage_b.training": _ALTERS,
    "stage_b.adapters.rank": _SHAPE,
    "stage_b.adapters.half_life_tokens": _SHAPE,
    "stage_b.policy.value_width": _SHAPE,
    "stage_b.memory.summary_dim": _SHAPE,
    "stage_b.training.tasks": _LESSONS,
    "stage_b.training.hidden_evidence_share": _LESSONS,
    "stage_b.training.length_ratios": _LESSONS,
    # The ranks refuse it: it takes the place in the course.
    "stage_b.training.curriculum": Rule(
        "alters", "may change before the policy's phase; refused in it: the texts would differ"
    ),
    "stage_b.training.window_tokens": _LESSONS,
    "stage_b.training.texts_per_lesson": _LESSONS,
    "stage_b.training.answer_tokens": _LESSONS,
    "stage_b.training.segment_tokens": _LESSONS,
    "stage_b.training.question": _LESSONS,
    "stage_b.training.task_file_share": _LESSONS,
    # Another file is told by its digest, and refused by the ranks.
    "stage_b.training.task_file": Rule(
        "free", "the file may move; another one is refused in Stage B"
    ),
    "stage_b.training.memory_steps": _PHASES,
    "stage_b.training.adapter_steps": _PHASES,
    "stage_b.training.joint_steps": _PHASES,
    "stage_b.training.policy_steps": _PHASES,
    "stage_b.training.backbone_lr_scale": Rule(
        "alters",
        "may change, but from 0 to above 0 is refused in Stage B",
        lambda resumed: resumed.stage == "b" and resumed.old == 0 and resumed.new > 0,
    ),
}


def rule_of(path: str) -> Rule:
    """Returns the rule of a dotted path: its own, or that of the nearest section around it."""
    while path:
        if path in _RULES:
            return _RULES[path]
        path = path.rpartition(".")[0]
    return _ALTERS


def when_resumed(path: str) -> str:
    """Says in a line whether the value at a dotted path may differ from the checkpoint's."""
    return rule_of(path).text
