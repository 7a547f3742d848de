"""Effect of each key of the configuration when a run is resumed, for its reference.

A checkpoint's configuration is compared in `engines/recovery.py`, its position by the loaders of
both stages, in `data/loader.py` and `stage_b/engine.py`.
"""

from __future__ import annotations

MAY_CHANGE = "may change"
REFUSED = "refused"
_STAGE_A = "refused in Stage A; has no effect in Stage B"
_SHAPE = "refused in Stage B: shapes of tensors differ"
_LESSONS = "refused in Stage B: the texts would differ"
_PHASES = "later phases may change; refused where it changes steps of Stage B already taken"

# Of a key, else of the section around it.
_RULES = {
    "model": REFUSED,
    "training.stage": "may change, but `a` is refused for a checkpoint of Stage B",
    "training.seed": "refused, except in Stage A with data.order = sequential",
    "training.sequence_length": "refused in Stage A; may change in Stage B",
    "data.path": "the data set may move; another one is refused",
    "data.order": _STAGE_A,
    "data.window_samples": "refused in Stage A with data.order = windowed; else without effect",
    "data.mixture": "refused in Stage A where it changes the order of the samples",
    "launch.environment": "may change; a changed value is not logged, because it may be secret",
    "stage_b": "may change, but null is refused for a checkpoint of Stage B",
    "stage_b.run": MAY_CHANGE,
    "stage_b.pipeline": MAY_CHANGE,
    "stage_b.adapters": MAY_CHANGE,
    "stage_b.policy": MAY_CHANGE,
    "stage_b.memory": MAY_CHANGE,
    "stage_b.losses": MAY_CHANGE,
    "stage_b.training": MAY_CHANGE,
    "stage_b.adapters.rank": _SHAPE,
    "stage_b.memory.summary_dim": _SHAPE,
    "stage_b.training.tasks": _LESSONS,
    "stage_b.training.length_ratios": _LESSONS,
    "stage_b.training.window_tokens": _LESSONS,
    "stage_b.training.texts_per_lesson": _LESSONS,
    "stage_b.training.memory_steps": _PHASES,
    "stage_b.training.adapter_steps": _PHASES,
    "stage_b.training.joint_steps": _PHASES,
    "stage_b.training.policy_steps": _PHASES,
    "stage_b.training.backbone_lr_scale": "may change, but from 0 to above 0 is refused in Stage B",
}


def when_resumed(path: str) -> str:
    """Says in a line whether the value at a dotted path may differ from the checkpoint's."""
    while path:
        if path in _RULES:
            return _RULES[path]
        path = path.rpartition(".")[0]
    return MAY_CHANGE
