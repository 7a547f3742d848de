"""Origin of an exported model: training_metadata.json, and the model card made from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from cdrmix import __version__
from cdrmix.checkpoint.checkpoint_file import Weights
from cdrmix.checkpoint.files import MANIFEST_FILE, digest, read_json
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.config.schema import Config
from cdrmix.monitoring.sinks import read_metrics

METADATA_FILE = "training_metadata.json"
CARD_FILE = "README.md"
# Of a logged step, by the exported weights: these say something about the model, others about the
# machine.
_METRICS: dict[Weights, tuple[str, ...]] = {
    "trained": ("loss", "tokens_seen", "eval/loss", "eval/perplexity", "eval/bits_per_byte"),
    "ema": ("tokens_seen", "eval/ema_loss"),
}
_FINAL: dict[Weights, str] = {"trained": "evaluation", "ema": "ema_evaluation"}


def training_metadata(
    checkpoint: FoundCheckpoint,
    state: dict[str, Any],
    config: Config,
    *,
    tokenizer_digest: str,
    left_out: Sequence[str],
    weights: Weights = "trained",
) -> dict[str, Any]:
    """Describes the run and the checkpoint of a model, without dates and paths of the machine.

    One that was copied out of its run directory tells neither name nor metrics of the run.

    Args:
        checkpoint: of the run.
        state: content of its state.json.
        config: of the run.
        tokenizer_digest: sha256 of tokenizer.json, hex.
        left_out: parts of Stage B that the checkpoint holds and the export does not.
        weights: `ema` of an export of their average, which it then says.
    """
    path = checkpoint.path.resolve()  # its run's name, from wherever it was named
    run_dir = path.parent.parent if path.parent.name == "checkpoints" else None
    loader = state.get("loader") or {}
    environment = _json_or_nothing(run_dir, "environment.json")
    return {
        "name": config.name,
        "run": run_dir.name if run_dir else None,
        "step": checkpoint.step,
        "stage": state.get("stage"),
        "checkpoint": {"manifest_sha256": digest(path / MANIFEST_FILE)},
        "data": {
            "manifest_digest": loader.get("manifest_digest"),
            "split": loader.get("split"),
            "samples_consumed": loader.get("samples_consumed"),
            "sequence_length": loader.get("sequence_length"),
            "mixture": loader.get("mixture"),
        },
        "tokenizer": {"sha256": tokenizer_digest},  # of the run; the exported one has a prefix
        **({"ema_decay": config.training.ema_decay} if weights == "ema" else {}),
        "metrics": _metrics(run_dir, checkpoint.step, weights),
        "left_out": list(left_out),
        "trained_with": {
            "cdrmix": environment.get("cdrmix"),
            "commit": environment.get("commit"),
            "packages": environment.get("packages"),
            "precision": config.training.precision,
        },
        "exported_with": {"cdrmix": __version__},
    }


def _metrics(run_dir: Path | None, step: int, weights: Weights) -> dict[str, Any]:
    """Metrics of the last step logged up to `step`, and the final evaluation if it was of it, both
    of these weights."""
    if run_dir is None or not (run_dir / "metrics.jsonl").is_file():
        return {}
    metrics: dict[str, Any] = {}
    for record in read_metrics(run_dir / "metrics.jsonl"):
        if record.get("step", step + 1) <= step:
            metrics |= {key: record[key] for key in _METRICS[weights] if key in record}
            metrics["step"] = int(record["step"])
    summary = _json_or_nothing(run_dir, "metrics.json")
    final = summary.get(_FINAL[weights])
    if summary.get("steps") == step and isinstance(final, dict):
        names = ("loss", "perplexity", "bits_per_byte", "tokens")
        metrics["held_out"] = {name: final[name] for name in names if name in final}
    return metrics


def _json_or_nothing(run_dir: Path | None, name: str) -> dict[str, Any]:
    """Content of a description of the run; empty where a checkpoint was copied without it."""
    if run_dir is None or not (run_dir / name).is_file():
        return {}
    try:
        content = read_json(run_dir / name)
    except (OSError, ValueError):  # it describes, nothing depends on it
        return {}
    return content if isinstance(content, dict) else {}


def model_card(
    metadata: dict[str, Any],
    *,
    about: Sequence[str],
    use: Sequence[str],
    licence: str,
    library: str,
    tags: Sequence[str],
    base_model: str | None = None,
) -> str:
    """Makes the text of README.md: front matter that the Hub reads, and a page for people.

    Args:
        metadata: as `training_metadata` gives it; with `base` of a model that has one.
        about, use: lines of what it is, and of its use.
        licence: sentence on that of the weights.
        library, tags, base_model: of the front matter.
    """
    data = ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        base_model=base_model,
        tags=list(tags),
        model_name=metadata["name"],
        eval_results=_evaluations(metadata) or None,
    )
    named = "run, checkpoint, base, data" if "base" in metadata else "run, checkpoint, data"
    lines = [
        f"# {metadata['name']}, step {metadata['step']:,}",
        "",
        *about,
        *_average_lines(metadata),
        "",
        *_result_lines(metadata["metrics"]),
        "## Use",
        "",
        *use,
        "",
        "## Origin",
        "",
        f"`{METADATA_FILE}` names {named} and versions, `MANIFEST.json` all files with their "
        f"digests: `cdrmix export --verify FOLDER` compares them. {licence}",
        "",
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines)))


def _average_lines(metadata: dict[str, Any]) -> list[str]:
    """Line of a model card on an average of the weights; none of others."""
    if "ema_decay" not in metadata:
        return []
    of = f"of decay {metadata['ema_decay']:g}"
    return [f"* the weights are the exponential moving average, {of}, of those trained"]


def _evaluations(metadata: dict[str, Any]) -> list[EvalResult]:
    """The final evaluation, as the Hub's index of models has it."""
    held_out = metadata["metrics"].get("held_out", {})
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=f"manifest-{metadata['data']['manifest_digest']}",
            dataset_name="held-out part of the training data",
            metric_type=name,
            metric_value=held_out[name],
        )
        for name in ("loss", "perplexity", "bits_per_byte")
        if name in held_out
    ]


def _result_lines(metrics: dict[str, Any]) -> list[str]:
    """Lines of a model card with the final evaluation; none without one."""
    held_out = metrics.get("held_out", {})
    if "loss" not in held_out:
        return []
    return [
        "| held-out | |",
        "| --- | --- |",
        f"| loss (nats per token) | {held_out['loss']:.4f} |",
        f"| perplexity | {held_out['perplexity']:.2f} |",
        f"| bits per byte | {held_out['bits_per_byte']:.4f} |",
        f"| tokens | {held_out['tokens']:,} |",
        "",
    ]


def hub_name(folder: Path) -> str:
    """Name of a base: that on the Hub for a folder in its cache, or else the folder's."""
    for part in folder.parts[::-1]:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return folder.name


def metadata_text(metadata: dict[str, Any]) -> str:
    """JSON text of the metadata."""
    return json.dumps(metadata, indent=2) + "\n"
