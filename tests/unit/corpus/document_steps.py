"""Runs one step over a few texts, for the tests of the steps."""

from collections.abc import Iterable

from cdrmix.data.document import Document, Step


def document(text: str, domain: str = "web", **metadata: object) -> Document:
    return Document(text=text, id="a/b#1", source="a", domain=domain, metadata=metadata)


def run(step: Step, documents: Iterable[Document]) -> tuple[list[Document], list[str]]:
    """(documents passed on, reasons of those dropped, in order)."""
    reasons: list[str] = []
    passed = list(step(documents, lambda _, reason: reasons.append(reason)))
    return passed, reasons


def text_after(step: Step, text: str, domain: str = "web") -> str:
    """What a step makes of a text that it passes on."""
    passed, reasons = run(step, [document(text, domain)])
    assert not reasons, reasons
    return passed[0].text


def reason_for(step: Step, text: str, domain: str = "web", **metadata: object) -> str | None:
    """Why a step drops a text, or None."""
    _, reasons = run(step, [document(text, domain, **metadata)])
    return reasons[0] if reasons else None
