"""What `cdrmix evaluate`, `generate` and `export` take for a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cdrmix import cli
from cdrmix.config.load import load_config
from tests.conftest import TINY
from tests.unit.data.token_folder import write_counting_folder


@pytest.mark.parametrize("verb", ["evaluate", "generate", "export --out {out}"])
def test_a_data_set_in_place_of_a_run_is_told_as_such(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_counting_folder(tmp_path / "shards", 64)
    words = verb.format(out=tmp_path / "out").split()
    assert cli.main([*words, str(folder)]) == 2
    told = capsys.readouterr().err
    assert f"{folder}: is a data set, not a run" in told
    assert "damaged" not in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("generate nothing", "nothing: there is no such folder"),
        ("generate empty", "empty: holds no checkpoint. Give a run directory"),
        ("generate exported", "holds no checkpoint: it is a model for transformers"),
        ("generate exported --checkpoint best", "it is a model for transformers"),
        ("generate exported --memory --question why", "it is a model for transformers"),
        ("generate gguf", "holds no checkpoint: it is an export for other programs"),
        ("export nothing --out out", "nothing: there is no such folder"),
        ("export empty --out out", "empty: holds no checkpoint"),
        ("export run --out empty", "empty: exists, and an export is never written over"),
        ("export run --out out --checkpoint 9", "it has checkpoints of steps 7"),
        ("export run --out out --format peft", "is of a run without adapters"),
        ("export run --out out --format fla", "holds dense models of RWKV blocks alone"),
        ("evaluate run --data nothing", "nothing/manifest.json: not found. --data must be"),
    ],
)
def test_what_needs_no_torch_to_be_refused_is_refused_without(
    words: str, told: str, tmp_path: Path
) -> None:
    for folder in ("empty", "exported", "gguf", "run/checkpoints/7"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "exported" / "config.json").write_text("{}")
    (tmp_path / "gguf" / "MANIFEST.json").write_text("{}")
    state = json.dumps({"config": load_config(TINY).model_dump(mode="json")})
    (tmp_path / "run" / "checkpoints" / "7" / "state.json").write_text(state)
    program = "import sys; sys.modules['torch'] = None; from cdrmix import cli; "
    done = subprocess.run(
        [sys.executable, "-c", f"{program}sys.exit(cli.main(sys.argv[1:]))", *words.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and told in line
    assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "out").exists()
