"""Trains a variant: one process per rank, started by deepspeed, torchrun, mpirun or srun.

deepspeed launch/train.py --config model_configs/cdrmix-core-tiny.yaml
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cdrmix import log, runtime
from cdrmix.cluster.devices import device_kind
from cdrmix.cluster.handover import arguments_of
from cdrmix.cluster.messages import Outcome, write_outcome
from cdrmix.cluster.probe import unusable_devices
from cdrmix.cluster.start_records import command_of_user
from cdrmix.cluster.starts import StartUp, end_of_run
from cdrmix.config.resuming import config_of_start
from cdrmix.config.schema import Config
from cdrmix.errors import EXIT_DONE, EXIT_FAULT, TrainingError
from cdrmix.sessions.preflight import check_start
from cdrmix.verbs.flags import RankParser, add_config_flags


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line of one rank.

    Raises:
        ConfigError: if a flag is unknown, missing or has a wrong value.
    """
    parser = RankParser(description="Train a CDRmix variant.", allow_abbrev=False)
    add_config_flags(parser, required=False)
    parser.add_argument("--profile", help="DeepSpeed profile by name or JSON file; else chosen")
    parser.add_argument("--run-dir", type=Path, help="default: experiments/<UTC time>-<hash>")
    parser.add_argument(
        "--resume",
        default="never",
        metavar="auto|never|PATH",
        help="auto: newest good checkpoint in --run-dir; PATH: a run directory or checkpoint, or "
        "the URL of an archived one",
    )
    parser.add_argument("--max-steps", type=int, help="short for --set training.max_steps=N")
    return parser.parse_args(arguments)


def configuration(args: argparse.Namespace) -> Config:
    """Configuration of the start that a command line asks for.

    Raises:
        ConfigError: if a file or an override is wrong, or does not go with the run to resume.
    """
    overrides = list(args.overrides)
    if args.max_steps is not None:
        overrides.append(f"training.max_steps={args.max_steps}")
    return config_of_start(
        args.config,
        overrides,
        run_dir=args.run_dir,
        resume=args.resume,
        check=partial(end_of_run, run_dir=args.run_dir, resume=args.resume),
        # `cdrmix launch` has told of changes; the record of the start tells of them too.
        is_quiet=runtime.environment_rank() != 0 or runtime.launch_folder() is not None,
    )


def set_up_processor() -> None:
    """Set the threads of this rank and, on CPUs, how it frees memory; warn of devices left idle."""
    if runtime.use_cpu():
        warning = unusable_devices(0)
        if warning and runtime.local_rank() == 0:
            log.get_logger(__name__).warning("warning: %s", warning)
        runtime.keep_freed_memory()
    runtime.set_threads()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For imports of torch and DeepSpeed: they leave 340,000 objects, none of them garbage, and a
    tenth of the time goes into looking for some."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main(arguments: list[str]) -> int:
    """Plan and run on this rank; returns its exit code."""
    code = EXIT_FAULT
    start_up = StartUp()
    try:
        runtime.map_environment()
        log.configure(rank=runtime.environment_rank())
        words = arguments_of(arguments)
        args = parse(words)
        config = configuration(args)
        end = end_of_run(config, run_dir=args.run_dir, resume=args.resume)
        if end is not None:
            log.get_logger(__name__).info("%s", end)
            code = EXIT_DONE
            return code
        device = device_kind()
        if device == "cuda":
            runtime.expand_segments()
        # On every rank, so that each ends by itself: not all launchers end the others. Before torch
        # is imported, which takes longer.
        check_start(
            config,
            world_size=runtime.environment_world_size(),
            profile=args.profile,
            device=device,
            run_dir=args.run_dir,
            resume=args.resume,
        )
        with no_garbage_collection():
            set_up_processor()
            start_up.done("imports")
            runtime.initialize_distributed()
            start_up.done("process_group")
            # Imports DeepSpeed, whose ops depend on the accelerator that is set by now.
            from cdrmix.sessions.session import choose_here, run_training

        plan = choose_here(config, profile=args.profile)
        start_up.done("imports")
        code = run_training(
            config,
            plan,
            run_dir=args.run_dir,
            resume=args.resume,
            start_up=start_up,
            command=command_of_user(words),
        )
    except TrainingError as error:
        code = error.exit_code
        if runtime.speaks_for_errors():
            log.get_logger(__name__).error("error: %s", error)
    finally:
        folder = runtime.launch_folder()
        # Once the ranks have met, the head writes the outcome.
        if folder is not None and not runtime.have_met():
            rank = runtime.environment_rank()
            write_outcome(folder, Outcome(code, f"rank {rank} ended before the ranks met", 0))
        if runtime.have_met():
            runtime.destroy_distributed()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
