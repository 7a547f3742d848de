"""A rule: a kind of combination of settings that is refused or warned of, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cdrmix.planning.deepspeed_json import profile_path
from cdrmix.planning.layout import Combination

UNAVAILABLE = "not available in this version"
# Sources of rules that no library states.
OF_RANKS = "layout of ranks"
# Sections of a DeepSpeed profile, with which a message about one begins.
_SECTIONS = ("zero_optimization.", "pipeline.")
# Source of rules that refuse what is valid but not implemented yet.
THIS_VERSION = "this version"


@dataclass(frozen=True)
class Rule:
    """A kind of combination that is refused, or warned of."""

    id: str  # short stable name for tests and documents
    applies: Callable[[Combination], object]  # function that is true of such a combination
    # settings, reason and advice, with the names `x` (the combination), `found` (what `applies`
    # returns) and `unavailable`; or a function that returns all this
    text: str | Callable[[Combination], str]
    source: str  # origin of the reason

    def message(self, combination: Combination) -> str:
        """Returns the settings of a combination that are refused, the reason and advice."""
        if not isinstance(self.text, str):
            return self.text(combination)
        found = self.applies(combination)
        return self.text.format(x=combination, found=found, unavailable=UNAVAILABLE)

    def report(self, combination: Combination) -> str:
        """Returns the message with its place: the profile if it is about DeepSpeed's settings, else
        the configuration."""
        message = self.message(combination)
        place = combination.config.name
        if message.startswith(_SECTIONS):
            place = combination.profile
            path = profile_path(place)
            if place == path.stem:
                place = f"ds_configs/{path.name}"
        return f"{place}: {message}"
