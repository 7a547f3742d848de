"""docs/layouts.md says what the tables of tests and rules say."""

from dataclasses import replace

import pytest

from cdrmix.errors import PlanError
from tests.distributed.test_layouts import COMPILED, LAYOUTS
from tests.layouts import Case, make_config, make_plan
from tests.layouts_page import PAGE, rewritten

# Why blocks are not compiled in a layout, by what it has.
REFUSED = {
    "zero3": "DeepSpeed's hooks gather them, which no graph can hold",
    "tensor": "hooks sum over ranks in place inside a block",
    "sequence": "token shift, recurrence and attention exchange tokens inside a block",
}


def kind_of(case: Case) -> tuple[str, ...]:
    """Profile and axes of a layout, whatever is trained in it."""
    axes = ("data", "tensor", "pipeline", "sequence", "expert")
    return case.profile, *(axis for axis in axes if getattr(case, axis) > 1)


def is_compiled(case: Case) -> bool:
    return COMPILED.items() <= case.training.items()


KINDS = {kind_of(case): case for case in LAYOUTS if case.world_size == 2}
RAN = {kind_of(case) for case in LAYOUTS if is_compiled(case)}


def test_the_page_is_generated_from_the_tables_as_they_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "run: python -m tests.layouts_page"


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_every_layout_of_two_ranks_has_a_compiled_row_or_is_refused_with_the_reason(
    kind: tuple[str, ...],
) -> None:
    case = replace(KINDS[kind], model={}, training=COMPILED, settings={}, zero={})
    reasons = [why for what, why in REFUSED.items() if any(part.startswith(what) for part in kind)]
    if not reasons:
        assert kind in RAN
        make_plan(case, make_config(case))
        return
    assert kind not in RAN
    with pytest.raises(PlanError) as caught:
        make_plan(case, make_config(case))
    # under ZeRO-3 the axes are not asked about any more
    assert "training.compile = blocks" in str(caught.value)
    assert reasons[0] in str(caught.value)
