"""The JSON schema of a configuration, and the verb `cdrmix config`."""

import json
from pathlib import Path

import pytest

from cdrmix import cli
from cdrmix.config.load import load_config, schema_json, shipped

SHIPPED = sorted(shipped("model_configs").glob("*.yaml"))
TINY = shipped("model_configs") / "cdrmix-core-tiny.yaml"


def test_every_field_says_what_it_means() -> None:
    for name, section in json.loads(schema_json())["$defs"].items():
        assert section["description"], name
        for key, field in section["properties"].items():
            assert "$ref" in field or field.get("description", "").endswith("."), f"{name}.{key}"


def test_the_shipped_schema_is_that_of_the_code() -> None:
    path = shipped("model_configs") / "cdrmix.schema.json"
    told = f"run `cdrmix config --schema > {path}`"
    assert path.read_text(encoding="utf-8") == schema_json(), told


def test_every_shipped_file_names_the_schema_for_editors() -> None:
    for path in SHIPPED:
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first == "# yaml-language-server: $schema=cdrmix.schema.json"


def test_the_verb_config_prints_what_loads_again(tmp_path: Path, capsys) -> None:
    code = cli.main(["config", "--config", str(TINY), "--set", "training.seed=9"])
    assert code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_config(path) == load_config(TINY, ["training.seed=9"])


def test_the_verb_config_prints_the_schema(capsys) -> None:
    assert cli.main(["config", "--schema"]) == 0
    assert capsys.readouterr().out == schema_json()


def test_a_users_error_ends_a_verb_with_exit_code_2_and_no_traceback(capsys) -> None:
    assert cli.main(["config", "--config", str(TINY), "--set", "training.sead=9"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: --set training.sead: unknown key. Did you mean 'seed'?")
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("flags", [[], ["--schema", "--config", str(TINY)]])
def test_the_verb_config_wants_a_file_or_the_schema(flags: list, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["config", *flags])
    assert caught.value.code == 2
    assert "give --config FILE or --schema" in capsys.readouterr().err
