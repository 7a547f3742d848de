"""The recipes that ship, built whole on small stand-ins of their sources.

A stand-in is a folder of JSON lines; `datasets` streams one of each recipe as it streams the hub.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from cdrmix.config.load import load_config
from cdrmix.config.yaml_text import dump_yaml, parse_yaml
from cdrmix.corpus.build import build_dataset
from cdrmix.corpus.inspection import inspect_folder
from cdrmix.engines.training_data import open_corpus
from tests.harness import ROOT

for package in ("datasets", "fasttext", "rensa", "w3lib"):
    pytest.importorskip(package, reason="the [data] extra is not installed")

FOLDER = ROOT / "model_configs" / "data"
STREAMED = ("standard", "extended", "reasoning", "dolma")
CODE = sorted(Path(sysconfig.get_path("stdlib"), "json").glob("*.py"))
# English words as often as English has them; a random row of them repeats no phrase.
WORDS = re.findall(r"\b[a-z]{1,12}\b", " ".join(pydoc_data.topics.topics.values()))


def prose(generator: random.Random, num_lines: int) -> str:
    """Lines of two sentences of English words."""

    def sentence() -> str:
        words = ["the", *generator.choices(WORDS, k=generator.randrange(9, 16)), "and", "to"]
        return " ".join([words[0].title(), *words[1:], generator.choice(WORDS)]) + "."

    return "\n".join(f"{sentence()} {sentence()}" for _ in range(num_lines))


def rows_of(domain: str, generator: random.Random) -> list[dict[str, Any]]:
    """Documents of a source, one of them twice."""
    if domain == "code":
        texts = [path.read_text(encoding="utf-8") for path in CODE]
    else:
        lengths = {"long": (250, 260), "tasks": (2, 4)}.get(domain, (8, 14))
        number = 3 if domain == "long" else 6
        texts = [prose(generator, generator.randrange(*lengths)) for _ in range(number)]
    host = generator.randrange(1000)
    rows = [
        {"text": text, "url": f"https://host{host}.example/{number}"}
        for number, text in enumerate(texts)
    ]
    return [*rows, {"text": texts[0], "url": f"{rows[0]['url']}?utm_source=x"}]


def stand_in(recipe: dict[str, Any], folder: Path) -> Path:
    """A recipe whose sources are local, small and of the same names and domains."""
    generator = random.Random(5)
    sources = []
    for source in recipe["sources"]:
        place = folder / source["name"]
        place.mkdir()
        lines = [json.dumps(row) + "\n" for row in rows_of(source["domain"], generator)]
        (place / "train.jsonl").write_text("".join(lines), encoding="utf-8")
        local = {key: value for key, value in source.items() if key not in ("subset", "revision")}
        # One is streamed as the hub is; `datasets` needs half a second to look at each folder.
        kind = "local" if sources else source["type"]
        sources.append(local | {"path": str(place), "type": kind})
    small = {
        "sources": sources,
        "tokenizer": {"vocab_size": 400},
        "shards": {"validation_share": 0.2},
    }
    file = folder / "mine.yaml"
    file.write_text(dump_yaml(recipe | small))
    return file


@pytest.mark.parametrize("name", STREAMED)
def test_a_shipped_recipe_builds(name: str, tmp_path: Path) -> None:
    recipe = parse_yaml((FOLDER / f"{name}.yaml").read_text(), place=name)
    build_dataset(stand_in(recipe, tmp_path), tmp_path / "out", workers=1)
    inspected = inspect_folder(tmp_path / "out", sequence_length=8)
    domains = {source["domain"] for source in recipe["sources"]}
    assert inspected["tokens"].keys() == domains
    assert not inspected["set_aside"]
    dropped = [step["dropped"] for step in inspected["steps"]]
    num_copies = sum(d.get("exact duplicate", 0) + d.get("same url", 0) for d in dropped)
    assert num_copies >= sum(source["domain"] != "tasks" for source in recipe["sources"])
    kept = sum(source["documents"] for source in inspected["source"]["sources"].values())
    assert kept > 0.6 * inspected["read"]["documents"], "the steps throw good text away"
    assert inspected["source"]["recipe"] == "mine"
    course = inspected["mixture"]
    for shares in course["whole"]["domains"].values():
        assert shares["drawn"] == pytest.approx(shares["asked"], abs=2e-4)
    assert course["samples"] * 8 == (3 if name == "standard" else 20) * 10**11


def test_thresholds_are_stricter_with_scale() -> None:
    def strictness(name: str) -> float:
        recipe = parse_yaml((FOLDER / f"{name}.yaml").read_text(), place=name)
        (filters,) = (
            [step["filter"] for step in recipe["steps"] if "filter" in step]
            if "steps" in recipe
            else [{}]
        )
        return float(filters.get("strictness", 0))

    assert strictness("standard") < strictness("extended") < strictness("reasoning") <= 1


def weights(text: str, *sections: str) -> list[dict[str, float]]:
    """Weights of each phase of a mixture in a YAML file."""
    values = parse_yaml(text, place="mixture")
    for section in sections:
        values = values[section]
    return [dict(phase["weights"]) for phase in values["phases"]]


def test_a_quarter_of_the_reasoning_mixture_is_added_long_documents_and_tasks() -> None:
    extended, reasoning = (
        weights((FOLDER / f"{name}.yaml").read_text(), "mixture")
        for name in ("extended", "reasoning")
    )
    for base, phase in zip(extended, reasoning, strict=True):
        rest = {name: weight - 0.75 * base.get(name, 0) for name, weight in phase.items()}
        assert rest.pop("long") == rest.pop("tasks") == 12.5
        assert not any(rest.values())
    for size in ("1b", "4b"):  # the same shares, over fewer tokens
        variant = (FOLDER.parent / f"cdrmix-reason-{size}.yaml").read_text()
        assert weights(variant, "data", "mixture") == reasoning


def test_a_run_on_another_recipes_data_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(40):
        text = prose(random.Random(number), 8)
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    source = {"name": "a", "type": "local", "path": str(tmp_path / "texts"), "domain": "prose"}
    small = {"tokenizer": {"vocab_size": 300}, "shards": {"validation_share": 0.2}, "steps": []}
    file = tmp_path / "mine.yaml"
    file.write_text(dump_yaml({"sources": [source]} | small))
    build_dataset(file, tmp_path / "out", workers=1)

    def messages(recipe: str) -> list[str]:
        values = [f"data.path={tmp_path / 'out'}", f"data.recipe={recipe}", "model.vocab_size=300"]
        config = load_config(FOLDER.parent / "cdrmix-core-tiny.yaml", values)
        caplog.clear()
        for _ in range(2):  # as Stage A and Stage B do
            open_corpus(config)
        return [record.getMessage() for record in caplog.records if "recipe" in record.getMessage()]

    assert messages("mine") == messages("null") == []
    (message,) = messages("extended")
    assert "was built by the recipe 'mine', and data.recipe = 'extended'" in message
