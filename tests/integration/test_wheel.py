"""A built wheel carries what the package reads beside its code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cdrmix import __version__
from tests.harness import ROOT

SHOW_WHAT_SHIPPED = """
import cdrmix
from cdrmix.config.load import load_config, shipped

variants = sorted(shipped("model_configs").glob("*.yaml"))
for path in variants:
    load_config(path)
profiles = sorted(shipped("ds_configs").glob("*.json"))
assert (shipped("launch") / "train.py").is_file()
print(cdrmix.__file__, len(variants), len(profiles), sep="\\n")
"""


def run(*command: str | Path, folder: Path, site: Path | None = None) -> str:
    """Output of a command that sees no package but those installed, and those in `site`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if site:
        environment["PYTHONPATH"] = str(site)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder into which the wheel of this checkout is unpacked, as pip would install it."""
    folder = tmp_path_factory.mktemp("wheel")
    # In a copy: setuptools writes build/ and *.egg-info beside setup.py.
    copy = folder / "checkout"
    for name in ("cdrmix", "model_configs", "ds_configs", "launch"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    options = ("--no-deps", "--no-index")
    run(*pip, "wheel", *options, "--no-build-isolation", "--wheel-dir", folder, copy, folder=folder)
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", *options, "--target", folder / "site", wheel, folder=folder)
    return folder / "site"


def test_the_installed_package_finds_its_settings(installed: Path, tmp_path: Path) -> None:
    shown = run(sys.executable, "-c", SHOW_WHAT_SHIPPED, folder=tmp_path, site=installed)
    package, variants, profiles = shown.split()
    assert Path(package).is_relative_to(installed)
    assert int(variants) == len(list((ROOT / "model_configs").glob("*.yaml"))) > 0
    assert int(profiles) == len(list((ROOT / "ds_configs").glob("*.json"))) > 0


def test_everything_beside_the_sources_ships(installed: Path) -> None:
    def files(package: Path, folder: Path) -> set[Path]:
        paths = (path.relative_to(folder) for path in package.rglob("*") if path.is_file())
        return {path for path in paths if "__pycache__" not in path.parts}

    assert files(ROOT / "cdrmix", ROOT) <= files(installed / "cdrmix", installed)


def test_the_console_script_runs(installed: Path, tmp_path: Path) -> None:
    program = installed / "bin" / "cdrmix"
    shown = run(sys.executable, program, "--version", folder=tmp_path, site=installed)
    assert shown.split() == ["cdrmix", __version__]
