"""Origin of an exported model: training_metadata.json, and the model card made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from cdrmix import __version__
from cdrmix.checkpoint.files import read_json
from cdrmix.config.schema import Config
from cdrmix.monitoring.sinks import read_metrics

# Of a logged step: these say something about the model, others about the machine.
_METRICS = ("loss", "tokens_seen", "eval/loss", "eval/perplexity", "eval/bits_per_byte")


def training_metadata(
    run_dir: Path | None,
    *,
    step: int,
    state: dict[str, Any],
    config: Config,
    tokenizer_digest: str,
    manifest_digest: str,
    left_out: list[str],
) -> dict[str, Any]:
    """Describes the run and the checkpoint of a model, without dates and paths of the machine.

    Args:
        run_dir: run directory around the checkpoint; None: there is none, so no name and metrics.
        step: optimizer steps of the checkpoint.
        state: content of its state.json.
        tokenizer_digest: sha256 of tokenizer.json, hex.
        manifest_digest: sha256 of the checkpoint's manifest, hex.
        left_out: parts of Stage B that the checkpoint holds and the export does not.
    """
    loader = state.get("loader") or {}
    environment = _json_or_nothing(run_dir, "environment.json")
    return {
        "name": config.name,
        "run": run_dir.resolve().name if run_dir else None,
        "step": step,
        "stage": state.get("stage"),
        "checkpoint": {"manifest_sha256": manifest_digest},
        "data": {
            "manifest_digest": loader.get("manifest_digest"),
            "split": loader.get("split"),
            "samples_consumed": loader.get("samples_consumed"),
            "sequence_length": loader.get("sequence_length"),
            "mixture": loader.get("mixture"),
        },
        "tokenizer": {"sha256": tokenizer_digest},  # of the run; the exported one has a prefix
        "metrics": _metrics(run_dir, step),
        "left_out": left_out,
        "trained_with": {
            "cdrmix": environment.get("cdrmix"),
            "commit": environment.get("commit"),
            "packages": environment.get("packages"),
            "precision": config.training.precision,
        },
        "exported_with": {"cdrmix": __version__},
    }


def _metrics(run_dir: Path | None, step: int) -> dict[str, Any]:
    """Metrics of the last step logged up to `step`, and the final evaluation if it was of it."""
    if run_dir is None or not (run_dir / "metrics.jsonl").is_file():
        return {}
    metrics: dict[str, Any] = {}
    for record in read_metrics(run_dir / "metrics.jsonl"):
        if record.get("step", step + 1) <= step:
            metrics |= {key: record[key] for key in _METRICS if key in record}
            metrics["step"] = int(record["step"])
    summary = _json_or_nothing(run_dir, "metrics.json")
    if summary.get("steps") == step and isinstance(summary.get("evaluation"), dict):
        final = summary["evaluation"]
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


def model_card(metadata: dict[str, Any], config: Config, *, num_parameters: int, dtype: str) -> str:
    """Makes the text of README.md: front matter that the Hub reads, and a page for people."""
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["custom_code", "rwkv", "cdrmix"],
        model_name=metadata["name"],
        eval_results=evaluations(metadata) or None,
    )
    model = config.model
    kinds = model.layer_kinds()
    experts = "one dense feed-forward in each"
    if model.moe is not None:
        experts = f"{model.moe.num_experts} experts in each, {model.moe.top_k} for each token"
    lines = [
        f"# {metadata['name']}, step {metadata['step']:,}",
        "",
        "A language model trained with CDRmix and exported for transformers.",
        "",
        f"* {num_parameters:,} parameters in {dtype}, embedding and head tied",
        f"* {kinds.count('rwkv')} RWKV-7 and {kinds.count('transformer')} Transformer blocks of "
        f"width {model.hidden_size}; {experts}",
        f"* trained on sequences of {config.training.sequence_length:,} tokens, vocabulary "
        f"{model.vocab_size:,}",
        "",
        *result_lines(metadata["metrics"]),
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)',
        'model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)',
        'inputs = tokenizer("def", return_tensors="pt")',
        "tokens = model.generate(**inputs, max_new_tokens=64)",
        "print(tokenizer.decode(tokens[0], skip_special_tokens=True))",
        "```",
        "",
        "`trust_remote_code` runs `modeling_cdrmix.py` of this folder, which needs torch and "
        "transformers alone. The tokenizer begins each text with its `bos_token`, as documents "
        "in training do. Pad on either side; padding changes nothing if `attention_mask` is given.",
        "",
        *_left_out_lines(metadata["left_out"]),
        "## Origin",
        "",
        "`training_metadata.json` names run, checkpoint, data and versions, `MANIFEST.json` all "
        "files with their digests: `cdrmix export --verify FOLDER` compares them. The licence of "
        "the weights is for whoever publishes them to state.",
        "",
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines)))


def evaluations(metadata: dict[str, Any]) -> list[EvalResult]:
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


def result_lines(metrics: dict[str, Any]) -> list[str]:
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


def _left_out_lines(left_out: list[str]) -> list[str]:
    if not left_out:
        return []
    return [
        f"The run has been through Stage B. Its parts ({', '.join(left_out)}) are not here: this "
        "format holds the backbone alone.",
        "",
    ]


def metadata_text(metadata: dict[str, Any]) -> str:
    """JSON text of the metadata."""
    return json.dumps(metadata, indent=2) + "\n"
