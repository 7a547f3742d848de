"""The page of a data build: written by the build, named by inspect, whole without a network."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest

from cdrmix import cli
from cdrmix.corpus.inspection import inspect_folder
from cdrmix.corpus.inspection_page import write_data_page
from tests.unit.data.token_folder import write_counting_folder
from tests.unit.monitoring.test_report import Page, kinds_of_tables

pytest.importorskip("rensa", reason="the [data] extra is not installed")

WORDS = ("the", "reader", "of", "that", "part", "finds", "with", "every", "page", "be", "to")
HOSTILE = "<script>alert('\x07')</script> "


def text_of(number: int) -> str:
    """200 words, the same for a number."""
    generator = random.Random(number)
    return " ".join(generator.choice(WORDS) + str(generator.randrange(20)) for _ in range(200))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder built at the command line: two domains, a mixture of two phases, drops."""
    folder = tmp_path_factory.mktemp("data-page")
    for place, domain in enumerate(("prose", "code")):
        (folder / domain).mkdir()
        for number in range(20):
            (folder / domain / f"{number}.txt").write_text(text_of(20 * place + number))
    (folder / "prose" / "copy.txt").write_text(text_of(3))
    (folder / "prose" / "near.txt").write_text(f"{text_of(4)} and more")
    (folder / "prose" / "short.txt").write_text(HOSTILE)
    (folder / "prose" / "binary.txt").write_bytes(b"\0")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""
sources:
- {{name: texts, type: local, path: {folder}/prose, domain: prose}}
- {{name: own, type: local, path: {folder}/code, domain: code}}
steps:
- {{language: {{languages: null, skip_domains: []}}}}
- {{filter: {{domains: [prose], profile: reference}}}}
- dedup
tokenizer: {{vocab_size: 300}}
shards: {{validation_share: 0.2}}
mixture:
  phases:
  - {{weights: {{prose: 3, code: 1}}, samples: 40}}
  - {{weights: {{prose: 1, code: 1}}, samples: 200, change: linear}}
"""
    )
    out = folder / "out"
    assert cli.main(["data", "build", "--config", str(recipe), "--out", str(out)]) == 0
    return out


def test_the_page_is_whole_and_loads_nothing(built: Path) -> None:
    source = (built / "report.html").read_text(encoding="utf-8")
    page = Page(source)
    assert len(page.ids) == len(set(page.ids))
    assert {"table", "svg", "details"} <= page.tags and "script" not in page.tags
    assert "http:" not in source and "https:" not in source and "\x07" not in source
    assert kinds_of_tables(source) == {"counts", "stack"}
    assert set(re.findall(r"url\((#?)", source)) <= {"#"}


def test_the_page_shows_what_inspect_knows(built: Path) -> None:
    inspected = inspect_folder(built)
    text = Page((built / "report.html").read_text(encoding="utf-8")).text
    for section in (
        "Documents, step by step",
        "Tokens per domain",
        "Mixture: asked for and drawn",
        "Lengths and languages",
        "Duplicate clusters",
        "Entropy of n-grams",
        "Examples of what was dropped",
        "Set aside",
        "Lineage",
    ):
        assert section in text
    dropped = {reason for step in inspected["steps"] for reason in step["dropped"]}
    assert dropped == {"too short", "exact duplicate", "near duplicate"}
    for reason in (*dropped, "NUL characters", "texts/copy.txt#0", "<script>alert"):
        assert reason in text
    assert "filter prose only 23" in text, "a step that some domains take says so"
    kept = sum(source["documents"] for source in inspected["source"]["sources"].values())
    assert f"Documents kept {kept} of {inspected['read']['documents']}" in text
    for shard in inspected["shards"]:
        assert f"{shard['stem']} {shard['tokens']:,} {shard['documents']:,} " in text
    assert text.count(inspected["source"]["recipe_hash"]) == 1 + len(inspected["shards"])
    for values in inspected["ngrams"].values():
        assert f"{values['entropy_bits']['1']:.2f}" in text
    for name, share in inspected["mixture"]["whole"]["domains"].items():
        assert f"{name} {share['asked']:.2%} {share['drawn']:.2%} {share['samples']:,}" in text


def test_inspect_shows_mixture_clusters_lineage_and_names_the_page(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "inspect", str(built), "--sequence-length", "16"]) == 0
    table = capsys.readouterr().out
    assert cli.main(["data", "inspect", str(built), "--sequence-length", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == str(built / "report.html")
    assert table.endswith(f"As a page: {built}/report.html\n")
    first, second = found["mixture"]["phases"]
    assert (first["stop"], second["stop"]) == (40, 240)
    for phase, prose in ((first, 0.75), (second, 0.625)):
        assert phase["domains"]["prose"]["asked"] == pytest.approx(prose, abs=1e-3)
        assert phase["domains"]["prose"]["drawn"] == pytest.approx(prose, abs=0.03)
        assert f"{phase['domains']['prose']['samples']:,}" in table
    assert sum(d["samples"] for d in found["mixture"]["whole"]["domains"].values()) == 240
    *_, dedup = found["steps"]
    assert dedup["found"]["exact"]["largest"][0]["first"] == "texts/3.txt#0"
    assert dedup["found"]["near"]["largest"] == [{"documents": 2, "first": "texts/4.txt#0"}]
    assert "dedup, clusters of near duplicates: 1" in table
    assert "  2 documents, first texts/4.txt#0" in table
    assert "train-prose-00000: texts" in table and found["source"]["recipe_hash"] in table


def test_phases_are_told_in_words(built: Path) -> None:
    text = Page((built / "report.html").read_text(encoding="utf-8")).text
    assert "Phase 1: samples 1 to 40, the same shares throughout" in text
    assert "shares change in a straight line from those of phase 1" in text
    assert "Means over the phase." in text and "linear change" not in text


def test_the_way_of_each_source_is_shown_with_its_losses(built: Path, tmp_path: Path) -> None:
    sources = [
        {
            "name": "texts", "domain": "prose", "files": 21, "rows": 24, "bytes": 3 * 2**20,
            "set_aside": {"NUL characters": 1}, "dropped": {"filter": 1, "dedup": 2},
            "documents": 20, "tokens": 98_765,
        },
        {
            "name": "rows", "domain": "code", "files": 1, "rows": 1_988, "bytes": None,
            "set_aside": {"no text in field 'text'": 1_988}, "dropped": {"filter": 0},
            "documents": 0, "tokens": 0,
        },
    ]  # fmt: skip
    held_out = {"validation_share": 0.02, "documents": 1, "tokens": 5_000}
    held_out |= {"share_of_documents": 0.025, "share_of_tokens": 0.057}
    inspected = inspect_folder(built) | {"sources": sources, "held_out": held_out}
    source = write_data_page(tmp_path, inspected).read_text(encoding="utf-8")
    text = Page(source).text
    assert "texts 21 24 3 MiB 1 3 20 98,765" in text
    assert "rows 1 1,988 – 1,988 0 0 0" in text
    assert "set aside: no text in field 'text' 1,988" in text
    assert "dropped by dedup 2 dropped by filter 1" in text and "dropped by filter 0" not in text
    assert 'data-label="documents" class="bad">0<' in source, "a source of which nothing is left"
    assert "2.0% of the documents was asked for; 1 document (2.5%) with 5.7% of the tokens" in text


def test_a_build_of_a_version_without_counts_by_source_has_a_page(
    built: Path, tmp_path: Path
) -> None:
    inspected = inspect_folder(built) | {"sources": [], "held_out": None}
    source = write_data_page(tmp_path, inspected).read_text(encoding="utf-8")
    assert "<h2>Sources</h2>" not in source and "Held out: " not in source


def test_a_mixture_that_cannot_be_drawn_is_told(
    built: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    inspected = inspect_folder(built, sequence_length=10**6)
    assert "too few tokens for one sample" in inspected["mixture"]["problem"]
    assert cli.main(["data", "inspect", str(built), "--sequence-length", "1000000"]) == 0
    assert "cannot be drawn: data.mixture: phases[0]" in capsys.readouterr().out
    folder = tmp_path / "copy"
    shutil.copytree(built, folder)
    page = write_data_page(folder, inspected).read_text(encoding="utf-8")
    assert "It cannot be drawn" in page


def test_a_folder_without_a_build_report_has_a_page(tmp_path: Path) -> None:
    folder = write_counting_folder(tmp_path / "counting", 1000)
    text = Page(write_data_page(folder, inspect_folder(folder)).read_text(encoding="utf-8")).text
    assert "This folder has no report of a build" in text and "1,000" in text


def test_equal_builds_have_equal_pages(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / built.name
    shutil.copytree(built, folder)
    page = write_data_page(folder, inspect_folder(folder))
    assert page.read_bytes() == (built / "report.html").read_bytes()
