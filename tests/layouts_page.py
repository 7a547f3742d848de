"""The tables of docs/layouts.md, from the table of tests and the table of rules.

python -m tests.layouts_page    writes them anew
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from cdrmix.planning.rules import RULES
from tests.distributed import test_hugging_face
from tests.distributed.test_layouts import FAULTS, LAYOUTS
from tests.harness import ROOT
from tests.layouts import Case
from tests.unit.planning.test_rules import CASES

PAGE = ROOT / "docs" / "layouts.md"
_AXES = ("pipeline", "tensor", "data", "sequence", "expert")


def rewritten(page: str) -> str:
    """The page with its generated tables as they are today."""
    for name, lines in (
        ("supported", supported()),
        ("faults", faults()),
        ("hugging-face", hugging_face()),
        ("refused", refused()),
    ):
        begin, end = f"<!-- {name}: generated -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        assert pattern.search(page), f"{PAGE} has no place for {name}"
        block = "\n".join([begin, *lines, end])
        page = pattern.sub(lambda _, block=block: block, page)
    return page


def supported() -> list[str]:
    """One row for each layout that a test holds against one process."""
    heads = [*_AXES, "ranks", "profile", "model", "optimizer", "accumulation", "with"]
    return _table(heads, (_row(case) for case in LAYOUTS))


def _row(case: Case) -> list[str]:
    degrees = [str(getattr(case, axis)) for axis in _AXES]
    kind = "experts" if case.moe else "dense"
    settings = {**case.model, **case.training, **case.settings}
    changes = ", ".join([f"`{name} = {value}`" for name, value in settings.items()] + case.notes)
    optimizer = {"adamw": "AdamW", "muon": "Muon", "sgd": "SGD"}[case.optimizer]
    return [
        *degrees,
        str(case.world_size),
        case.profile,
        kind,
        optimizer,
        str(case.accumulation),
        changes,
    ]


def faults() -> list[str]:
    """One row for each planted fault that the comparison notices."""
    return _table(["fault", "layout"], ([case.broken, str(case)] for case in FAULTS))


def hugging_face() -> list[str]:
    """One row for each family: profiles under which two ranks are held against plain torch."""
    kinds: dict[str, list[str]] = {}
    for case in test_hugging_face.CASES:
        kinds.setdefault(case.family, []).append(str(case).removeprefix(f"{case.family} "))
    rows = ([f"`{family}`", ", ".join(profiles)] for family, profiles in kinds.items())
    return _table(["family", "profiles"], rows)


def refused() -> list[str]:
    """One row for each rule: its message for the layout that its test breaks it with."""
    examples = {name: illegal for name, illegal, _ in CASES}
    rows = []
    for rule in RULES:
        # a pipe would end the cell
        message = rule.message(examples[rule.id]).replace("|", "\\|")
        rows.append([f"`{rule.id}`", message, rule.source])
    return _table(["rule", "said of an example", "source"], rows)


def _table(heads: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE.relative_to(ROOT), file=sys.stderr)
