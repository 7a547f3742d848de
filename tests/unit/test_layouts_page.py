"""docs/layouts.md says what the tables of tests and rules say."""

from tests.layouts_page import PAGE, rewritten


def test_the_page_is_generated_from_the_tables_as_they_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "run: python -m tests.layouts_page"
