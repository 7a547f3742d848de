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
from cdrmix.verbs.flags import Verbs, add_checkpoint_flag


def add_export(verbs: Verbs) -> None:
    """`cdrmix export RUN_DIR --out DIR`, `cdrmix export --verify DIR`."""
    parser = verbs.add_parser(
        "export",
        help="write a trained model as a folder that transformers loads, or verify one",
        description="Writes weights, configuration, code, tokenizer and model card of a checkpoint "
        "as a read-only folder that AutoModelForCausalLM loads, with the digest of each file. The "
        "same checkpoint gives the same bytes.",
    )
    flag = parser.add_argument
    flag("run_dir", type=Path, nargs="?", metavar="RUN_DIR", help="run directory or checkpoint")
    flag("--out", type=Path, metavar="DIR", help="folder to make; it must not exist")
    add_checkpoint_flag(parser)
    form = "hf, for transformers (default), or peft, the adapters of model.lora alone"
    flag("--format", choices=("hf", "peft"), help=form)
    shard = "most GiB of weights in one file; default 5 GB"
    flag("--max-shard-gib", type=_gib, metavar="G", help=shard)
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
    writing = (arguments.run_dir, arguments.out, arguments.checkpoint, arguments.max_shard_gib)
    if arguments.verify is not None:
        if any(value is not None for value in (*writing, arguments.format)):
            parser.error("--verify DIR goes alone")
        from cdrmix.export.manifest import verify_export

        num_files, num_bytes = verify_export(arguments.verify)
        print(f"{arguments.verify}: {num_files} files, {num_bytes:,} bytes: as exported")
        return
    if arguments.run_dir is None or arguments.out is None:
        parser.error("give RUN_DIR and --out DIR, or --verify DIR")
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


def _write(arguments: argparse.Namespace) -> None:
    from cdrmix.export.exported_run import export_run

    limit = {} if arguments.max_shard_gib is None else {"max_shard_bytes": arguments.max_shard_gib}
    exported = export_run(
        arguments.run_dir,
        arguments.out,
        checkpoint=arguments.checkpoint or "last",
        form=arguments.format or "hf",
        **limit,
    )
    if exported.left_out:
        parts = ", ".join(exported.left_out)
        print(f"The run's parts of Stage B ({parts}) are left out: this format has no place for it")
    print(
        f"{arguments.out}: step {exported.step:,}, {exported.num_parameters:,} parameters in "
        f"{exported.dtype}, {exported.num_files} files, {exported.num_bytes:,} bytes, manifest "
        f"{exported.manifest_digest[:12]}"
    )
