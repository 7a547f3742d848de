"""Evaluates a trained model laid out over ranks, started by deepspeed, torchrun, mpirun or srun.

deepspeed launch/evaluate.py RUN_DIR --suite zero-shot --tasks TASKS --set parallel.tensor=2
"""

from __future__ import annotations

import sys
from dataclasses import replace

from cdrmix import log, runtime
from cdrmix.cluster.probe import unusable_devices
from cdrmix.errors import EXIT_DONE, EXIT_FAULT, TrainingError
from cdrmix.sessions.evaluation import Asked, checked_suite, evaluate_in_layout, keep
from cdrmix.verbs.evaluate_verb import add_evaluation_flags, asked_of, print_result
from cdrmix.verbs.flags import RankParser


def parse(arguments: list[str]) -> tuple[Asked, bool]:
    """Parses the command line of one rank: what is asked for, and if the result is to be JSON.

    Raises:
        ConfigError: if a flag is unknown, missing or has a wrong value.
    """
    parser = RankParser(description="Evaluate a trained model on many ranks.", allow_abbrev=False)
    add_evaluation_flags(parser)
    layout = (
        "part of the layout, such as parallel.pipeline=2 or training.precision=bf16; repeatable"
    )
    parser.add_argument(
        "--set", metavar="PATH=VALUE", dest="overrides", action="append", default=[], help=layout
    )
    parser.add_argument("--profile", help="DeepSpeed profile, such as zero3; else chosen")
    args = parser.parse_args(arguments)
    asked = asked_of(parser, args)
    return replace(asked, overrides=tuple(args.overrides), profile=args.profile), args.json


def main(arguments: list[str]) -> int:
    """Evaluates on this rank; returns its exit code."""
    code = EXIT_FAULT
    try:
        runtime.map_environment()
        log.configure(rank=runtime.environment_rank())
        asked, as_json = parse(arguments)
        # On every rank, so that each ends by itself, and before torch is imported.
        suite = checked_suite(asked)
        if runtime.use_cpu():
            warning = unusable_devices(0)
            if warning and runtime.local_rank() == 0:
                log.get_logger(__name__).warning("warning: %s", warning)
            runtime.keep_freed_memory()
        runtime.set_threads()
        runtime.initialize_distributed()
        measured = evaluate_in_layout(asked, suite)

        def tell() -> None:
            print_result(measured.result, as_json=as_json)
            keep(measured, asked.out)

        runtime.first_rank_does(tell)
        code = EXIT_DONE
    except TrainingError as error:
        code = error.exit_code
        if runtime.speaks_for_errors():
            log.get_logger(__name__).error("error: %s", error)
    finally:
        if runtime.have_met():
            runtime.destroy_distributed()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
