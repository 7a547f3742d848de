"""Checks of a base model's folder by its small files and headers alone; no torch, no transformers.

A folder may come from anywhere. Code in it runs only if the configuration lists its digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from cdrmix.config.hugging_face import CONFIG_FILE, TESTED_FAMILIES, read_model_config
from cdrmix.config.model import ModelConfig
from cdrmix.config.safetensors_headers import tensor_sizes
from cdrmix.errors import ConfigError


def check_base(model: ModelConfig) -> None:
    """Refuses a folder that no run can start from, before torch is imported.

    Raises:
        ConfigError: if its config.json is missing, of an unknown family or of a quantised model, or
            it needs code that is not allowed; or if peft is missing that its adapters need.
        DataError: if its weights are missing, in pickles, or cut off.
    """
    assert model.path is not None, "checked at construction"
    folder = Path(model.path)
    try:
        values = read_model_config(folder)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from error
    if values.get("quantization_config"):
        raise ConfigError(
            f"{folder / CONFIG_FILE}: the weights are quantised, and cannot be trained. Give the "
            "model in bfloat16, float16 or float32"
        )
    if not runs_own_code(folder, model.remote_code) and not _is_known(values["model_type"]):
        raise ConfigError(
            f"{folder / CONFIG_FILE}: model_type {values['model_type']!r} is unknown to the "
            f"installed transformers. Tested are {', '.join(TESTED_FAMILIES)}"
        )
    if model.lora is not None and find_spec("peft") is None:
        raise ConfigError(
            "model.lora: needs peft, which is missing. Try pip install 'cdrmix[lora]'"
        )
    tensor_sizes(folder)


def runs_own_code(folder: Path, allowed: Sequence[str]) -> bool:
    """Tells if a model is made by the Python files of its folder, all of which are allowed.

    A folder whose family transformers knows needs none of its own: without `allowed` it runs none.

    Args:
        folder: with config.json, whose `auto_map` names the classes of such a model.
        allowed: sha256 of each file that may run (hex).
    Raises:
        ConfigError: if it needs code that is not allowed, or that lies elsewhere.
    """
    values = read_model_config(folder)
    classes = values.get("auto_map")
    if not classes or (not allowed and values["model_type"] in TESTED_FAMILIES):
        return False
    named = classes.values() if isinstance(classes, dict) else [classes]
    for name in named:
        # `user/repository--file.Class` would be downloaded
        if not isinstance(name, str) or "--" in name:
            raise ConfigError(
                f"{folder / CONFIG_FILE}: auto_map names {name!r}, code of another place. Copy its "
                "files into this folder and name them there"
            )
    # All, not those alone that auto_map names: they import each other.
    digests = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.py"))
    }
    others = {name: digest for name, digest in digests.items() if digest not in allowed}
    if others or not digests:
        listed = ", ".join(f"{digest} ({name})" for name, digest in others.items())
        raise ConfigError(
            f"{folder}: the model is made by Python code of its folder, which runs only where "
            f"model.remote_code lists it. Read the files; if you trust them, add {listed}"
            if digests
            else f"{folder}: auto_map of {CONFIG_FILE} names code, and the folder holds none. Copy "
            "the whole folder again"
        )
    return True


def _is_known(model_type: str) -> bool:
    """Tells if the installed transformers may know a family, without importing it."""
    if model_type in TESTED_FAMILIES:
        return True
    found = find_spec("transformers")
    if found is None or found.origin is None:  # told when the ranks import it
        return True
    # Importing the mapping would import torch. A name that no file of it quotes is in none.
    mappings = (Path(found.origin).parent / "models" / "auto").glob("*.py")
    return any(f'"{model_type}"' in path.read_text(encoding="utf-8") for path in mappings)
