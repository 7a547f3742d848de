"""Learning rate at which a base ended, against the one that it is trained on with."""

from __future__ import annotations

import contextlib

from cdrmix.checkpoint.files import read_json
from cdrmix.config.problems import validate
from cdrmix.config.schema import Config, TrainingConfig
from cdrmix.engines.start_point import StartPoint
from cdrmix.log import get_logger
from cdrmix.optimizers.schedule import learning_rate

logger = get_logger(__name__)


def base_learning_rate(point: StartPoint) -> float | None:
    """Learning rate of the last step of a base (per step); None where its files do not tell it, as
    those of an export and of Stage B."""
    if point.kind != "checkpoint" or point.step < 1:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state = read_json(point.path / "state.json")
        if state.get("stage", "a") == "a":
            training, _ = validate(state["config"]["training"], TrainingConfig)
            if training is None:
                return None
            # Lowered at spikes of the loss; early versions saved nothing of it.
            scale = state.get("health", {}).get("timeline", {}).get("rate_scale", 1.0)
            return learning_rate(point.step - 1, training) * scale
    return None


def warn_of_rewarming(config: Config, point: StartPoint) -> None:
    """Warns of a peak above the rate at which the base ended, without replay."""
    rate = base_learning_rate(point)
    peak = config.training.learning_rate
    if rate is None or peak <= rate or (config.cpt is not None and config.cpt.replays):
        return
    logger.warning(
        "warning: training.learning_rate = %g is above %.3g, at which %s ended, and no old data "
        "are replayed: much of what was learned may be forgotten. Try cpt.replay or a lower rate",
        *(peak, rate, point.run),
    )
