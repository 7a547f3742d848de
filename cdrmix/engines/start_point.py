"""Weights that a new run begins with, `training.start_from`: found, described and compared with its
configuration. No torch: a start is checked by these before it is made."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from cdrmix.checkpoint.candidates import candidates
from cdrmix.checkpoint.files import MANIFEST_FILE, read_json, retried
from cdrmix.config.model import ModelConfig
from cdrmix.config.safetensors_headers import tensor_sizes
from cdrmix.data.shards import Manifest, read_manifest
from cdrmix.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from cdrmix.data.tokenizer_files import content_digest
from cdrmix.errors import DataError, StateError
from cdrmix.export.manifest import MANIFEST_FILE as EXPORT_MANIFEST
from cdrmix.log import get_logger
from cdrmix.planning.counts import further_parameters, is_further, parameters

logger = get_logger(__name__)

Kind = Literal["checkpoint", "export"]
EXPORT_PREFIX = "model."  # of a tensor's name in an export, before the logical one
_STAGE_B = "stage_b."  # of the names of what is not of the backbone
_MODEL_TYPE = "cdrmix"
_GIVE = "Give a run directory, one of its checkpoints/<step>, or a folder of `cdrmix export`"
# Keys that change the meaning of a tensor and not its shape.
_MEANINGS = ("num_heads", "num_kv_heads", "schedule")
# Keys of an exported configuration, by ours.
_EXPORTED = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "ffn_hidden_size": "intermediate_size",
    "moe.num_experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.expert_hidden_size": "moe_intermediate_size",
}


class StartPoint(NamedTuple):
    """Weights of an earlier run, as its files describe them."""

    path: Path  # checkpoint or exported folder
    kind: Kind
    run: str  # for messages
    step: int  # optimizer steps of that run
    manifest: str  # sha256 of the manifest, hex
    shapes: dict[str, tuple[int, ...]]  # of the backbone's tensors, by logical name
    others: tuple[str, ...]  # names of tensors that are not of the backbone
    tokenizer: str | None  # sha256 of its file, hex; early versions recorded none
    model: dict[str, Any]  # settings of the model, by key

    @property
    def num_parameters(self) -> int:
        """Elements of the backbone's tensors, and of those that predict further tokens."""
        return sum(map(math.prod, self.shapes.values()))

    def as_json(self) -> dict[str, Any]:
        """Description for the record of a start."""
        return {
            "path": str(self.path.absolute()),
            "kind": self.kind,
            "run": self.run,
            "step": self.step,
            "manifest_sha256": self.manifest,
            "tensors": len(self.shapes),
            "parameters": self.num_parameters,
            "not_taken": list(self.others),
        }


def kind_of(path: Path) -> Kind:
    """Tells a run or checkpoint from an export. Raises StateError for anything else."""
    if not path.is_dir():
        raise _wrong(path, "there is no such folder")
    if (path / EXPORT_MANIFEST).is_file() or (path / "config.json").is_file():
        model_type = _content(path / "config.json").get("model_type")
        if model_type != _MODEL_TYPE:
            raise _wrong(
                path,
                f"is a model of type {model_type}, and weights are taken from exports of CDRmix "
                "in the format hf alone",
            )
        return "export"
    try:
        read_manifest(path)
    except DataError:
        if candidates(path):
            return "checkpoint"
        raise _wrong(path, "is neither a run nor a checkpoint nor an export") from None
    raise _wrong(path, "is a data set, not a trained model")


def of_checkpoint(path: Path) -> StartPoint:
    """Describes a checkpoint. Raises StateError if it is not one that this version reads, or of a
    Hugging Face model, which a run begins with by model.path."""
    state = _content(path / "state.json")
    tensors = _content(path / "index.json").get("tensors", {})
    try:
        if state["config"]["model"].get("kind") == "hf":
            raise _wrong(
                path,
                "is of a run of a Hugging Face model",
                "Export it (cdrmix export), and give that folder as model.path",
            )
        model = _settings(ModelConfig.model_validate(state["config"]["model"]))
        shapes = {
            str(name): tuple(map(int, kinds["buffer" if "buffer" in kinds else "param"]["shape"]))
            for name, kinds in tensors.items()
        }
        step = int(state["step"])
    except (ValidationError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise _wrong(path, f"is no checkpoint of this version ({error})") from error
    is_in_run = path.resolve().parent.name == "checkpoints"
    run = path.resolve().parent.parent if is_in_run else path
    return StartPoint(
        path=path,
        kind="checkpoint",
        run=str(run),
        step=step,
        manifest=_sha256(path / MANIFEST_FILE),
        shapes={name: shape for name, shape in shapes.items() if not name.startswith(_STAGE_B)},
        others=tuple(sorted(name for name in shapes if name.startswith(_STAGE_B))),
        tokenizer=state.get("tokenizer"),
        model=model,
    )


def of_export(path: Path) -> StartPoint:
    """Describes an exported folder. Raises StateError if its files do not, DataError if those of
    its weights are damaged."""
    config = _content(path / "config.json")
    metadata = _content(path / "training_metadata.json")
    sizes = retried(partial(tensor_sizes, path), path)
    try:
        model = {ours: config[theirs] for ours, theirs in _EXPORTED.items()}
        model["schedule"] = _initials(config["layer_kinds"])
        step = int(metadata["step"])
        tokenizer = str(metadata["tokenizer"]["sha256"])
        name = metadata["run"] or metadata["name"]
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong(path, f"is no export of this version ({error})") from error
    return StartPoint(
        path=path,
        kind="export",
        run=f"{name}, exported to {path}",
        step=step,
        manifest=_sha256(path / EXPORT_MANIFEST),
        shapes={key.removeprefix(EXPORT_PREFIX): size.shape for key, size in sizes.items()},
        others=(),
        tokenizer=tokenizer,
        model=_used(model),
    )


def check_fits(point: StartPoint, model: ModelConfig, *, data: Manifest | None) -> None:
    """Refuses weights of another model or tokenizer, and warns of settings that differ otherwise.

    Args:
        point: the weights.
        model: of the new run.
        data: its data set; None: not known yet.
    Raises:
        StateError: with all that differs.
    """
    ours = _settings(model)
    keys = sorted({*ours, *point.model})
    changes = [(key, point.model.get(key), ours.get(key)) for key in keys]
    changes = [(key, there, here) for key, there, here in changes if there != here]
    told = "; ".join(f"model.{key}: {there} there, {here} here" for key, there, here in changes)
    expected = {each.name: each.shape for each in parameters(model)}
    left = fresh_and_left(point, model)
    differing = [
        f"{name}: {point.shapes.get(name, 'missing')} there, {expected.get(name, 'missing')} here"
        for name in sorted({*expected, *point.shapes})
        if point.shapes.get(name) != expected.get(name) and name not in left
    ]
    if differing or any(key in _MEANINGS for key, _, _ in changes):
        tensors = f" ({len(differing)} tensors differ, such as {differing[0]})" if differing else ""
        raise _wrong(
            point.path,
            f"holds another model. {told or 'Its settings are the same'}{tensors}",
            "Configure the model there, or give weights of the one here",
        )
    if data is not None and point.tokenizer is not None:
        _check_tokenizer(point, point.tokenizer, data)
    if point.tokenizer is None:
        logger.warning(
            "warning: start_from: %s does not tell its tokenizer. Make sure that data.path was "
            "built with the same one",
            point.path,
        )
    if changes:
        logger.warning("warning: start_from: %s was trained with %s", point.path, told)


def fresh_and_left(point: StartPoint, model: ModelConfig) -> frozenset[str]:
    """Names of tensors that predict further tokens, here or there, unless both models have the same
    ones: those here begin with initial values, and those there are not taken."""
    here = {each.name: each.shape for each in further_parameters(model)}
    there = {name: shape for name, shape in point.shapes.items() if is_further(name)}
    return frozenset() if here == there else frozenset({*here, *there})


def _check_tokenizer(point: StartPoint, digest: str, data: Manifest) -> None:
    """Refuses data of another tokenizer than the one with this digest, of the weights.

    Where its run has kept the files, they may differ in parts that do not decide the ids, and the
    tokens around documents are compared too.
    """
    path = Path(point.run) / TOKENIZER_FILE
    kept = path.parent if path.is_file() and _sha256(path) == digest else None
    content = data.tokenizer.content_sha256
    is_same = digest == data.tokenizer.sha256 or (
        kept is not None and content is not None and content_digest(path.read_bytes()) == content
    )
    if not is_same:
        raise _wrong(
            point.path,
            f"was trained with another tokenizer than that of data.path: sha256 {digest[:12]} "
            f"there, {data.tokenizer.sha256[:12]} here. Its weights know other tokens",
            "Build the data with the tokenizer.json there",
        )
    if kept is None:  # an export, or a checkpoint that was moved out of its run
        return
    tokenizer = load_tokenizer(kept)
    there = (tokenizer.eos_id, tokenizer.document_prefix)
    here = (data.eos_id, data.tokenizer.document_prefix)
    if there != here:
        told = "; ".join(
            f"{name} {theirs} there, {ours} here"
            for name, theirs, ours in zip(("eos_id", "document_prefix"), there, here, strict=True)
            if theirs != ours
        )
        raise _wrong(
            point.path,
            f"was trained with other tokens around documents than those of data.path: {told}",
            f"Build the data with tokenizer.path: {kept} in its recipe",
        )


def _settings(model: ModelConfig) -> dict[str, Any]:
    """Settings that tensors follow from, or that change what they compute."""
    values: dict[str, Any] = {"moe": {"num_experts": 0}, **model.model_dump(exclude_none=True)}
    values |= {f"moe.{key}": value for key, value in values["moe"].items()}
    found = {key: values[key] for key in _EXPORTED if key in values}
    found["schedule"] = _initials(model.layer_kinds())
    return _used(found)


def _initials(kinds: Sequence[str]) -> str:
    """Kinds of the blocks in short: rrrt for three of RWKV and a Transformer block.

    A kind of several words has an initial of each, in capitals.
    """
    initials = ("".join(word[0] for word in kind.split("_")) for kind in kinds)
    return "".join(each.upper() if len(each) > 1 else each for each in initials)


def _used(settings: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what this kind of model does not use."""
    unused = [] if "t" in settings["schedule"] else ["num_kv_heads", "rope_theta"]
    experts = [key for key in settings if key.startswith("moe.")]
    unused += ["ffn_hidden_size"] if settings["moe.num_experts"] else experts
    return {key: value for key, value in settings.items() if key not in unused}


def _content(path: Path) -> Mapping[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _wrong(path.parent, f"its {path.name} cannot be read ({reason})") from error
    if not isinstance(content, dict):
        raise _wrong(path.parent, f"its {path.name} holds no JSON object")
    return content


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise _wrong(path.parent, f"its {path.name} cannot be read ({error.strerror})") from error


def all_damaged(path: Path, why: str) -> StateError:
    """Error of a place whose checkpoints are all damaged; not that of a run that lost its own."""
    return _wrong(path, f"no checkpoint there is whole: {why}", "Give another one")


def _wrong(path: Path, why: str, advice: str = _GIVE) -> StateError:
    return StateError(f"training.start_from = {path}: {why}. {advice}")
