"""The verb `cdrmix export`: writes a trained model for other programs, and verifies such folders.

The modules that do the work are imported when the verb runs: the help must not wait for them.
"""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

from cdrmix.errors import EXIT_STOPPED_BY_SIGNAL
from cdrmix.verbs.flags import (
    Verbs,
    add_base_flag,
    add_checkpoint_flag,
    add_weights_flag,
    check_run,
)


def add_export(verbs: Verbs) -> None:
    """`cdrmix export RUN_DIR --out DIR`, `cdrmix export --verify DIR`."""
    parser = verbs.add_parser(
        "export",
        help="write a trained model as a folder that other programs load, or verify one",
        description="Writes weights, configuration, code, tokenizer and model card of a checkpoint "
        "as a read-only folder that AutoModelForCausalLM loads, with the digest of each file, or "
        "as other formats have them. The same checkpoint gives the same bytes.",
    )
    flag = parser.add_argument
    flag("run_dir", type=Path, nargs="?", metavar="RUN_DIR", help="run directory or checkpoint")
    flag("--out", type=Path, metavar="DIR", help="folder to make; it must not exist")
    add_checkpoint_flag(parser)
    formats = "hf: Hugging Face transformers (default); fla: flash-linear-attention; gguf: GGUF; "
    formats += "peft: the adapters of model.lora alone"
    flag("--format", choices=("hf", "fla", "gguf", "peft"), help=formats)
    add_weights_flag(parser)
    shard = "most GiB of weights in one file; default 5 GB"
    flag("--max-shard-gib", type=_gib, metavar="G", help=shard)
    add_base_flag(parser)
    verify = "compare every file of an exported folder with its manifest"
    flag("--verify", type=Path, metavar="DIR", help=verify)
    parser.set_defaults(run=partial(_export, parser))


def _gib(text: str) -> int:
    """Bytes of so many GiB."""
    try:
        num_bytes = int(float(text) * 2**30)
    except (ValueError, OverflowError):
        num_bytes = 0
    if num_bytes <= 0:
        raise argparse.ArgumentTypeError(f"given {text}, allowed is a number above 0")
    return num_bytes


def _export(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    writing = ("run_dir", "out", "checkpoint", "max_shard_gib", "format", "weights", "base")
    if arguments.verify is not None:
        if any(getattr(arguments, name) is not None for name in writing):
            parser.error("--verify DIR goes alone")
        from cdrmix.export.manifest import verify_export

        num_files, num_bytes = verify_export(arguments.verify)
        print(f"{arguments.verify}: {num_files} files, {num_bytes:,} bytes: as exported")
        return
    if arguments.run_dir is None or arguments.out is None:
        parser.error("give RUN_DIR and --out DIR, or --verify DIR")
    if arguments.format == "gguf" and arguments.max_shard_gib is not None:
        parser.error("--format gguf writes one file: leave out --max-shard-gib")
    if arguments.base is not None and (arguments.format or "hf") != "hf":
        parser.error("--base goes with --format hf, which merges adapters into it")
    _check_places(arguments)
    # TERM stops as Ctrl-C does, which clears what is half written.
    stops = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, signal.default_int_handler) for number in stops}
    try:
        _write(arguments)
    except KeyboardInterrupt:
        print(f"stopped; {arguments.out} was not written", file=sys.stderr)
        raise SystemExit(EXIT_STOPPED_BY_SIGNAL) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_places(arguments: argparse.Namespace) -> None:
    """Refuses what needs no torch to be refused, whose import takes seconds."""
    from cdrmix.export.format_check import check_saved
    from cdrmix.export.manifest import refuse_existing

    check_run(arguments.run_dir)
    refuse_existing(arguments.out)
    check_saved(arguments.run_dir, arguments.checkpoint or "last", arguments.format or "hf")


def _write(arguments: argparse.Namespace) -> None:
    from cdrmix.export.exported_run import export_run
    from cdrmix.export.rwkx_run import FURTHER

    limit = {} if arguments.max_shard_gib is None else {"max_shard_bytes": arguments.max_shard_gib}
    exported = export_run(
        arguments.run_dir,
        arguments.out,
        checkpoint=arguments.checkpoint or "last",
        format=arguments.format or "hf",
        weights=arguments.weights or "trained",
        base=arguments.base,
        **limit,
    )
    stage_b = [part for part in exported.left_out if part != FURTHER]
    if stage_b:
        parts = ", ".join(stage_b)
        print(f"The run's parts of Stage B ({parts}) are left out: this format has no place for it")
    if FURTHER in exported.left_out:
        print("The parts for further tokens (model.mtp) are left out: this format has none")
    if exported.is_widened:
        print("Written at twice the width: LayerNorm then gives RMSNorm (docs/models.md, Formats)")
    print(
        f"{arguments.out}: step {exported.step:,}, {exported.num_parameters:,} parameters in "
        f"{exported.dtype}, {exported.num_files} files, {exported.num_bytes:,} bytes, manifest "
        f"{exported.manifest_digest[:12]}"
    )
