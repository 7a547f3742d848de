"""Steps, sources and validators of a user's: found beside the recipe, checked, and part of what
identifies a build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdrmix.config.plugin import plugins_of
from cdrmix.corpus.build import build_dataset
from cdrmix.corpus.recipe import load_recipe, recipe_yaml
from cdrmix.corpus.remote_jobs import pack_job
from cdrmix.corpus.task_run import TaskJob, read_record, run_task
from cdrmix.corpus.tasks import make_tasks
from cdrmix.errors import ConfigError, DataError
from cdrmix.hooks.plugin import check_code, plugin_digests
from tests.harness import ROOT

CODE = """
from pydantic import BaseModel

from cdrmix.corpus.text_source import TextSource
from cdrmix.data.document import DocumentStep
from cdrmix_words import num_words


class Words(DocumentStep):
    class Options(BaseModel, extra="forbid"):
        at_least: int = 3

    def __init__(self, options):
        self.options = options

    def judge(self, document):
        if "boom" in document.text:
            document.text = "half done"
            raise ValueError("boom in it")
        if "nothing" in document.text:
            document.text = ""
            return None
        if num_words(document.text) < self.options.at_least:
            return "few words"
        document.text = document.text.replace("colour", "color")


class NoSecret(DocumentStep):
    def judge(self, document):
        document.text = "a validator changes nothing"
        return "a secret" if "secret" in document.metadata.get("note", "") else None


class Poems(TextSource):
    class Options(BaseModel):
        rows: list
        parts: int = 2
        fails_at: int | None = None

    def __init__(self, options):
        self.options = options

    def parts(self):
        return [f"part-{n}" for n in range(self.options.parts)]

    def read(self, part):
        for number, row in enumerate(self.options.rows):
            if number == self.options.fails_at and part == "part-1":
                raise ValueError("torn page")
            yield f"{part}: {row}" if isinstance(row, str) else row


class NotAStep:
    pass
"""
HELPER = "def num_words(text):\n    return len(text.split())\n"
ROWS = [f"a poem of a colour, the {n}th of all" for n in range(8)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "cdrmix_poems.py").write_text(CODE)
    (plugins / "cdrmix_words.py").write_text(HELPER)
    return tmp_path


def recipe(
    folder: Path,
    *,
    rows: list[object] = ROWS,  # type: ignore[assignment]
    options: str = "",
    steps: str = "[{use: cdrmix_poems:Words}]",
    more: str = "",
) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(
        "sources:\n- {name: poems, type: cdrmix_poems:Poems, domain: prose, "
        f"metadata_fields: [note], options: {{rows: {json.dumps(rows)}{options}}}}}\n"
        f"steps: {steps}\ntokenizer: {{vocab_size: 300}}\nshards: {{validation_share: 0.3}}\n{more}"
    )
    return file


def report(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


def set_aside(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "set_aside.jsonl").read_text().splitlines()]


def test_a_build_with_a_source_and_a_step_of_a_users(folder: Path) -> None:
    build_dataset(recipe(folder, rows=[*ROWS, {"text": ""}, "two"]), folder / "out", workers=1)
    told = report(folder / "out")
    assert told["read"] == {"documents": 18, "set_aside": {"empty text": 2}, "other_kinds": {}}
    [step] = told["steps"]
    assert (step["name"], step["dropped"]) == ("cdrmix_poems:Words", {"few words": 2})
    assert step["out"] == 16


def test_a_document_that_a_step_fails_on_is_set_aside_by_name(folder: Path) -> None:
    rows = [*ROWS, "boom in this one", "nothing of this one"]
    build_dataset(recipe(folder, rows=rows), folder / "out", workers=1)
    told = set_aside(folder / "out")
    assert [(each["source"], each["file"], each["row"], each["reason"]) for each in told] == [
        ("poems", part, *rest)
        for part in ("part-0", "part-1")
        for rest in ((8, "ValueError in cdrmix_poems:Words"),)
    ]
    assert [each["count"] for each in told] == [2, 2]
    assert told[0]["detail"] == "boom in it"
    # The others are what they are without it.
    assert report(folder / "out")["steps"][0]["out"] == 16


def test_the_rest_of_a_part_that_cannot_be_read_is_set_aside(folder: Path) -> None:
    build_dataset(recipe(folder, options=", fails_at: 3"), folder / "out", workers=1)
    [told] = set_aside(folder / "out")
    assert (told["file"], told["row"]) == ("part-1", 3)
    assert told["reason"] == "ValueError in cdrmix_poems:Poems"
    assert report(folder / "out")["steps"][0]["out"] == 8 + 3


@pytest.mark.parametrize("action", ["drop", "stop"])
def test_a_validator_drops_or_stops(folder: Path, action: str) -> None:
    rows = [*ROWS, {"text": "a poem with a note", "note": "a secret"}]
    checks = f"validators: [{{use: cdrmix_poems:NoSecret, action: {action}}}]\n"
    file = recipe(folder, rows=rows, more=checks)
    if action == "stop":
        with pytest.raises(DataError, match=r"NoSecret: document poems/part-0#8: a secret. .*stop"):
            build_dataset(file, folder / "out", workers=1)
        return
    build_dataset(file, folder / "out", workers=1)
    step, check = report(folder / "out")["steps"]
    assert (check["name"], check["dropped"]) == ("cdrmix_poems:NoSecret", {"a secret": 2})
    assert step["out"] - check["out"] == 2
    tokens = report(folder / "out")["sources"][0]["tokens"]
    assert tokens > 16 * 10, "the text of the validator's copy was taken"


@pytest.mark.parametrize("changed", ["cdrmix_poems.py", "cdrmix_words.py", "another.py"])
def test_a_changed_file_is_another_recipe(folder: Path, changed: str) -> None:
    file = recipe(folder)
    build_dataset(file, folder / "out", workers=1)
    build_dataset(file, folder / "out", workers=1)  # as it is: finished already
    with (folder / "plugins" / changed).open("a") as code:
        code.write("\n# changed\n")
    if changed == "another.py":  # control: no part of the code that the recipe names
        build_dataset(file, folder / "out", workers=1)
        return
    with pytest.raises(DataError, match="a finished data set of another recipe"):
        build_dataset(file, folder / "out", workers=1)


def test_other_options_are_another_recipe(folder: Path) -> None:
    build_dataset(recipe(folder), folder / "out", workers=1)
    steps = "[{use: cdrmix_poems:Words, options: {at_least: 2}}]"
    with pytest.raises(DataError, match="a finished data set of another recipe"):
        build_dataset(recipe(folder, steps=steps), folder / "out", workers=1)


def test_a_recipe_written_out_finds_its_plugins_from_elsewhere(folder: Path) -> None:
    checks = "validators: [{use: cdrmix_poems:NoSecret}]\n"
    loaded = load_recipe(recipe(folder, more=checks))
    written = folder / "elsewhere" / "recipe.yaml"
    written.parent.mkdir()
    written.write_text(recipe_yaml(loaded))
    assert load_recipe(written) == loaded
    assert loaded.plugins == str(folder / "plugins")


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("[{use: cdrmix_poem:Words}]", "cdrmix_poem cannot be imported: ModuleNotFoundError"),
        ("[{use: cdrmix_poems:Word}]", "has no Word. Did you mean Words?"),
        ("[{use: cdrmix_poems:NotAStep}]", "is no class made of cdrmix.data.document.DocumentStep"),
        ("[{use: cdrmix_poems:Words, options: {least: 2}}]", "options.least: Extra inputs"),
        ("[{use: cdrmix_poems:NoSecret, options: {a: 2}}]", "options: cdrmix_poems:NoSecret"),
        ("[{use: cdrmix_poems:NoSecret, domain: [a]}]", "unknown key. Did you mean 'domains'?"),
        ("[{use: cdrmix_poems.Words}]", "use"),
    ],
)
def test_wrong_steps_are_told_before_the_build(folder: Path, steps: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe(folder, steps=steps))
    [line] = str(error.value).splitlines()
    assert "recipe.yaml: steps.0" in line and message in line


def test_wrong_sources_are_told_before_the_build(folder: Path) -> None:
    file = recipe(folder)
    file.write_text(file.read_text().replace("domain: prose", "domain: prose, path: texts"))
    with pytest.raises(ConfigError, match="path: not for a source of yours"):
        load_recipe(file)
    with pytest.raises(ConfigError, match="source 'poems'.options.rows: Input should be"):
        load_recipe(recipe(folder, rows=3))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="Poems: gives no parts, so that there is nothing to read"):
        build_dataset(recipe(folder, options=", parts: 0"), folder / "out", workers=1)
    with pytest.raises(DataError, match="Poems\\): no document is left .* It gives no rows"):
        build_dataset(recipe(folder, rows=[]), folder / "out", workers=1)


def test_a_file_named_like_another_module_is_refused(folder: Path) -> None:
    (folder / "plugins" / "json.py").write_text("")
    with pytest.raises(ConfigError, match=r"plugins/json.py: there is another module named json"):
        load_recipe(recipe(folder))


def test_a_folder_of_plugins_takes_the_place_of_the_one_before(folder: Path) -> None:
    assert load_recipe(recipe(folder)).plugins
    other = folder / "other"
    (other / "plugins").mkdir(parents=True)
    (other / "plugins" / "cdrmix_poems.py").write_text(CODE.replace("Words", "Others"))
    (other / "plugins" / "cdrmix_words.py").write_text(HELPER)
    assert load_recipe(recipe(other, steps="[{use: cdrmix_poems:Others}]"))
    with pytest.raises(ConfigError, match="has no Words"):
        load_recipe(recipe(other))


def test_code_that_changes_during_a_build_is_refused(folder: Path) -> None:
    code = tuple(plugin_digests(plugins_of(load_recipe(recipe(folder)))).items())
    check_code(code)
    (folder / "plugins" / "cdrmix_words.py").write_text("# changed\n" + HELPER)
    with pytest.raises(DataError, match="cdrmix_poems:Poems: its code has changed since the build"):
        check_code(code)


def test_a_job_on_another_machine_finds_the_plugins(folder: Path) -> None:
    loaded = load_recipe(recipe(folder))
    [task, _], _ = make_tasks(loaded, out=folder / "out")
    step = (0, loaded.steps[0])
    out = folder / "result" / "job"
    job = TaskJob(
        task,
        None,
        None,
        (step,),
        None,
        out,
        False,
        tuple(plugin_digests(plugins_of(loaded)).items()),
    )
    (folder / "packed").write_bytes(pack_job(run_task, job))
    code = "from cdrmix.corpus.remote_jobs import *; run_packed(open('../packed', 'rb').read())"
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=elsewhere, env=environment)
    assert read_record(out)["documents"] == len(ROWS)
