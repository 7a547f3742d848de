"""The verbs `cdrmix train`, `launch`, `slurm` and `doctor`, for runs on one or many hosts.

The modules that do the work are imported when a verb runs: the help must not wait for them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cdrmix import __version__
from cdrmix.errors import EXIT_DONE, EXIT_USER_ERROR
from cdrmix.log import columns, get_logger, styled, wrapped
from cdrmix.verbs.flags import Verbs, add_config_flags, at_least

if TYPE_CHECKING:
    from cdrmix.cluster.findings import Finding

logger = get_logger(__name__)

# Of the longest name of a check, .deepspeed_env.
_CHECK_WIDTH = 14
_WIDTH_WITHOUT_TERMINAL = 80
_STYLES = {"ok": "ok", "warn": "warning", "FAIL": "fail"}


def add_launch(verbs: Verbs) -> None:
    """Adds `cdrmix launch`: trains, and restarts a lost run."""
    parser = verbs.add_parser(
        "launch",
        help="train on one or many hosts, restarted where it is lost",
        description="Checks and plans a run, starts the deepspeed launcher on this machine or on "
        "the hosts of a hostfile, watches it, and starts a lost run again from its newest "
        "checkpoint. TERM, INT and USR1 save and stop.",
    )
    flag = parser.add_argument
    flag("--hostfile", type=Path, metavar="HOSTS", help="lines NAME slots=N; default this machine")
    _add_launch_flags(parser, "ranks on each host; default one per device")


def add_train(verbs: Verbs) -> None:
    """Adds `cdrmix train`: `cdrmix launch` on this machine."""
    parser = verbs.add_parser(
        "train",
        help="train on this machine, restarted where it is lost",
        description="Checks and plans a run, trains it on the devices of this machine, watches it, "
        "and starts a lost run again from its newest checkpoint. TERM, INT and USR1 save and stop. "
        "The same as `cdrmix launch` without a hostfile.",
    )
    _add_launch_flags(parser, "ranks; default one per device")


def _add_launch_flags(parser: argparse.ArgumentParser, ranks: str) -> None:
    """Adds the flags of `launch` and `train`, and what both do; `ranks` is the help of --nproc."""
    add_config_flags(parser, required=False)
    flag = parser.add_argument
    flag("--nproc", type=at_least(1), metavar="N", help=ranks)
    preset = "devices to plan for, such as h100-80, as of `cdrmix plan`; default those found here"
    flag("--gpu", metavar="PRESET", help=preset)
    memory = "memory of a device to plan for, as torch reports it"
    flag("--gpu-memory-gib", type=float, metavar="M", help=memory)
    _add_run_flags(parser, restarts="restarts; default 3")
    resume = (
        "of the first start; auto: newest good checkpoint in --run-dir; PATH: a run directory or "
        "checkpoint. A run that is resumed has its configuration, and needs no --config"
    )
    flag("--resume", default="never", metavar="auto|never|PATH", help=resume)
    flag("--max-steps", type=at_least(1), help="short for training.max_steps=N")
    parser.set_defaults(run=_launch, hostfile=None, command=parser.prog.split())


def _launch(arguments: argparse.Namespace) -> None:
    from cdrmix.cluster.launch import launch, make_job

    overrides = list(arguments.overrides)
    if arguments.max_steps is not None:
        # Last, so that the flag wins over --set.
        overrides.append(f"training.max_steps={arguments.max_steps}")
    job = make_job(
        config=Path(arguments.config) if arguments.config else None,
        overrides=overrides,
        hostfile=arguments.hostfile,
        ranks_per_host=arguments.nproc,
        max_restarts=arguments.max_restarts,
        profile=arguments.profile,
        run_dir=arguments.run_dir,
        resume=arguments.resume,
    )
    command = list(arguments.command)
    for name, value in (("--hostfile", arguments.hostfile), ("--nproc", arguments.nproc)):
        command += [name, str(value)] if value is not None else []

    def check() -> None:
        # A sign of life before the imports of the checks.
        name = job.config.name
        logger.info("cdrmix %s: %s: checking layout, data and memory", __version__, name)
        from cdrmix.sessions.launch_plan import check_launch

        check_launch(
            job,
            run_dir=arguments.run_dir,
            gpu=arguments.gpu,
            gpu_memory_gib=arguments.gpu_memory_gib,
            command=command,
        )

    # Exit codes of a run pass through: batch scripts decide by them.
    code = launch(job, check=check)
    if code != EXIT_DONE:
        raise SystemExit(code)


def add_slurm(verbs: Verbs) -> None:
    """Adds `cdrmix slurm`: writes a batch script for a run, and submits it."""
    parser = verbs.add_parser(
        "slurm",
        help="write a batch script for a run, and queue it with --submit",
        description="Plans the run on the devices, refuses what does not fit, and writes "
        "RUN_DIR/job.sbatch: the run saves before its time limit, returns to the queue and "
        "continues. Prints the script's path, or with --submit the job's number; the plan goes to "
        "stderr.",
    )
    add_config_flags(parser, required=False)
    flag = parser.add_argument
    flag("--nodes", type=at_least(1), metavar="N", required=True, help="nodes")
    devices = "devices, and ranks, of each"
    flag("--gpus-per-node", type=at_least(1), metavar="G", default=8, help=devices)
    preset = (
        "kind of devices, as of `cdrmix plan`; default: as SLURM names them, such as gpu:h100:8, "
        "in the options or in the partition's nodes"
    )
    flag("--gpu", metavar="PRESET", help=preset)
    flag(
        "--gpu-memory-gib", type=float, metavar="M", help="memory of a device, as torch reports it"
    )
    flag("--cpu", action="store_true", help="ranks on CPUs: ask for no devices")
    starters = "srun: a task per rank; deepspeed: its launcher on each node; default srun"
    flag("--starter", choices=("srun", "deepspeed"), default="srun", help=starters)
    flag("--time", default="24:00:00", help="time limit; default 24:00:00")
    cores = (
        "cores of a task, which is a rank (srun) or all ranks of a node (deepspeed); default: as "
        "the plan needs"
    )
    flag("--cpus-per-task", type=at_least(1), metavar="N", help=cores)
    memory = "memory of a node, such as 200G; 0 is all of it; default: as the plan needs"
    flag("--mem", metavar="SIZE", help=memory)
    # For sites that forbid a job to requeue itself.
    array = "an array of K jobs, one after the other, in place of requeueing at the time limit"
    flag("--chain", type=at_least(1), default=1, metavar="K", help=array)
    flag(
        "--option",
        dest="options",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="further option of sbatch, such as partition=gpu, which wins over lines of ours; may "
        "be repeated",
    )
    _add_run_flags(parser, restarts="requeues of a lost run; default 3")
    submit = "have sbatch check it, queue it, and print its number"
    flag("--submit", action="store_true", help=submit)
    flag("--json", action="store_true", help="print one JSON object, with the plan")
    parser.set_defaults(run=_slurm)


def _slurm(arguments: argparse.Namespace) -> None:
    from cdrmix.cluster.slurm import Request, make_batch, write_script
    from cdrmix.cluster.slurm_site import submit, would_start
    from cdrmix.sessions.preflight import check_start

    batch = make_batch(
        Request(
            config=Path(arguments.config) if arguments.config else None,
            overrides=arguments.overrides,
            profile=arguments.profile,
            run_dir=arguments.run_dir,
            nodes=arguments.nodes,
            ranks_per_node=arguments.gpus_per_node,
            on_cpu=arguments.cpu,
            gpu=arguments.gpu,
            gpu_memory_gib=arguments.gpu_memory_gib,
            starter=arguments.starter,
            time_limit=arguments.time,
            cpus_per_task=arguments.cpus_per_task,
            memory=arguments.mem,
            max_restarts=arguments.max_restarts,
            chain=arguments.chain,
            options=arguments.options,
        )
    )
    check_start(
        batch.config_to_check,
        world_size=arguments.nodes * arguments.gpus_per_node,
        profile=arguments.profile,
        device="cpu" if arguments.cpu else "cuda",
        run_dir=batch.run_dir,
        resume="auto",
    )
    # Written in any case: it stays in the run directory as the record of what was submitted.
    script = write_script(batch)
    # stdout holds the one line that a script reads.
    for warning in batch.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for title, line in {**batch.lines, "asks": batch.asks}.items():
        print(f"{title:8} {line}", file=sys.stderr)
    job = None
    if arguments.submit:
        print(f"{'sbatch':8} {would_start(str(script))}", file=sys.stderr)
        job = submit(str(script))
        print(f"{'queued':8} {script} as job {job}", file=sys.stderr)
    else:
        print(f"{'next':8} sbatch {shlex.quote(str(script))}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"script": str(script), "job": job, **batch.to_json()}))
    else:
        print(job or script)


def _add_run_flags(parser: argparse.ArgumentParser, *, restarts: str) -> None:
    """Adds the flags of every way to start a run; `restarts` is the help of --max-restarts."""
    parser.add_argument("--max-restarts", type=at_least(0), default=3, metavar="R", help=restarts)
    parser.add_argument("--profile", help="DeepSpeed profile by name or JSON file; else chosen")
    parser.add_argument("--run-dir", type=Path, help="default: experiments/<UTC time>-<hash>")


def add_doctor(verbs: Verbs) -> None:
    """Adds `cdrmix doctor`: checks that this machine, or each host of a hostfile, can run."""
    parser = verbs.add_parser(
        "doctor",
        help="check this machine, or every host of a hostfile, before a run",
        description="pdsh and ssh, versions, devices, clocks, network, shared folder, free space, "
        "limits, leftovers of earlier runs, and an all-reduce of 100 MB. Each line that is not ok "
        "says what to try. Ends with 2 where something fails.",
    )
    flag = parser.add_argument
    flag("--hostfile", type=Path, metavar="HOSTS", help="lines NAME slots=N; default this machine")
    folder = "where runs are written, which all hosts must see; default experiments"
    flag("--folder", type=Path, metavar="DIR", help=folder)
    flag("--nproc", type=at_least(1), metavar="N", help="ranks of the all-reduce on each host")
    flag("--no-all-reduce", action="store_true", help="start no ranks")
    leftovers = "first end and delete what earlier runs of yours left"
    flag("--remove-leftovers", action="store_true", help=leftovers)
    flag("--json", action="store_true", help="print one JSON list")

    def run(arguments: argparse.Namespace) -> None:
        from cdrmix.cluster.doctor import examine, remove_leftovers_on_hosts
        from cdrmix.cluster.hosts import read_hostfile

        hosts = read_hostfile(arguments.hostfile) if arguments.hostfile else []
        # Before the checks: the leftovers hold the ports and the memory that these look at.
        if arguments.remove_leftovers:
            for removed in remove_leftovers_on_hosts(hosts):
                print(f"removed {removed}", file=sys.stderr)
        findings = []
        for finding in examine(
            hosts,
            folder=arguments.folder,
            ranks_per_host=arguments.nproc,
            with_all_reduce=not arguments.no_all_reduce,
        ):
            findings.append(finding)
            if not arguments.json:  # at once: the next one may take minutes
                print(_finding_lines(finding), flush=True)
        if arguments.json:
            print(json.dumps([asdict(finding) for finding in findings]))
        # As a wrong configuration: a start on these hosts, and any restart, would fail.
        if any(finding.status == "FAIL" for finding in findings):
            raise SystemExit(EXIT_USER_ERROR)

    parser.set_defaults(run=run)


def _finding_lines(finding: Finding) -> str:
    """A finding in lines as wide as the terminal, or 80 columns, with its remedy under it."""
    name = f"  {finding.check:{_CHECK_WIDTH}}  "
    status = styled(f"{finding.status:4}", _STYLES[finding.status], sys.stdout)
    indent = 4 + len(name)
    # a terminal of a few columns still gets words
    width = max(20, (columns(sys.stdout) or _WIDTH_WITHOUT_TERMINAL) - indent)
    lines = wrapped(finding.detail, width=width)
    if finding.remedy:
        lines += wrapped(f"try: {finding.remedy}", width=width, hang=2)
    return status + name + f"\n{' ' * indent}".join(lines)
