"""Hugging Face data sets, read from disk by the code path that streams them from the hub."""

import json
from pathlib import Path
from typing import Any

import pytest

from cdrmix.corpus.recipe import load_recipe
from cdrmix.corpus.source import SourceConfig
from cdrmix.corpus.steps.read import count_shards, read_shard
from cdrmix.corpus.task_run import Task
from cdrmix.corpus.tasks import make_tasks
from cdrmix.errors import DataError

datasets = pytest.importorskip("datasets", reason="the [data] extra is not installed")

ROWS = [
    {"text": f"text {number}", "url": f"http://u/{number}", "n": number} for number in range(90)
]
EXPECTED = [(row["text"], row["url"]) for row in ROWS]


def source_of(path: Path, **options: Any) -> SourceConfig:
    return SourceConfig(name="h", type="huggingface", path=str(path), domain="prose", **options)


def write(folder: Path, kind: str) -> None:
    """The rows as a data set of three files."""
    folder.mkdir()
    for number in range(3):
        rows = ROWS[number * 30 : number * 30 + 30]
        path = folder / f"train-{number:05d}-of-00003.{kind}"
        if kind == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tasks_of(path: Path, tmp_path: Path, **options: Any) -> list[Task]:
    recipe_file = tmp_path / "recipe.yaml"
    entry = {"name": "h", "type": "huggingface", "path": str(path), "domain": "prose"} | options
    recipe_file.write_text(json.dumps({"sources": [entry], "steps": []}))
    return make_tasks(load_recipe(recipe_file), out=tmp_path / "out", task_bytes=1)[0]


def read(tasks: list[Task]) -> tuple[list[tuple[str, str]], list[tuple[str, int | None, str]]]:
    aside: list[tuple[str, int | None, str]] = []
    documents = [
        document
        for task in tasks
        for document in task.read(lambda file, row, why, _: aside.append((file, row, why)))
    ]
    assert len({document.id for document in documents}) == len(documents)
    return [(document.text, document.metadata["url"]) for document in documents], aside


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_folder_is_streamed_in_shards(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "set", kind)
    tasks = tasks_of(tmp_path / "set", tmp_path)
    assert [task.shard for task in tasks] == [(0, 3), (1, 3), (2, 3)]
    assert read(tasks) == (EXPECTED, [])
    assert read(tasks[1:2])[0] == EXPECTED[30:60]


def test_a_data_set_saved_to_disk_is_read_file_by_file(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"held": whole}).save_to_disk(tmp_path / "splits")
    tasks = tasks_of(tmp_path / "one", tmp_path)
    assert [task.shard for task in tasks] == [None, None]
    assert read(tasks) == (EXPECTED, [])
    assert read(tasks_of(tmp_path / "splits", tmp_path, split="held")) == (EXPECTED, [])
    with pytest.raises(DataError, match="without the split 'train'. It has: held"):
        tasks_of(tmp_path / "splits", tmp_path)


def test_a_changed_folder_gives_other_tasks(tmp_path: Path) -> None:
    write(tmp_path / "set", "jsonl")
    before = [task.key for task in tasks_of(tmp_path / "set", tmp_path)]
    assert before == [task.key for task in tasks_of(tmp_path / "set", tmp_path)]
    with (tmp_path / "set" / "train-00002-of-00003.jsonl").open("a") as file:
        file.write('{"text": "new"}\n')
    assert not set(before) & {task.key for task in tasks_of(tmp_path / "set", tmp_path)}


def test_a_damaged_shard_is_set_aside_and_the_others_are_read(tmp_path: Path) -> None:
    write(tmp_path / "set", "parquet")
    damaged = tmp_path / "set" / "train-00001-of-00003.parquet"
    content = bytearray(damaged.read_bytes())
    content[10:60] = bytes(50)  # a page of data; the footer, which opening reads, is whole
    damaged.write_bytes(content)
    texts, aside = read(tasks_of(tmp_path / "set", tmp_path))
    assert texts == EXPECTED[:30] + EXPECTED[60:]
    assert aside == [("shard-00001", None, "damaged shard")]


def test_a_text_field_that_no_row_has_is_named(tmp_path: Path) -> None:
    write(tmp_path / "set", "parquet")
    source = source_of(tmp_path / "set", text_field="content")
    aside: list[str] = []
    assert not list(read_shard(source, 0, 3, lambda file, row, why, _: aside.append(why)))
    assert aside == 30 * ["no text in field 'content'"]


def test_a_data_set_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="source 'h': .*none.*See path, subset, split"):
        count_shards(source_of(tmp_path / "none"))
    write(tmp_path / "set", "jsonl")
    with pytest.raises(DataError, match="Available splits: .*'train'.*See path, subset, split"):
        count_shards(source_of(tmp_path / "set", split="test"))
