"""`cdrmix slurm`: plans a run, and writes a batch script that asks for what the plan needs."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cdrmix.cluster.batch_plan import BatchPlan, plan_batch
from cdrmix.cluster.handover import launch_environment, set_aside, train_arguments, write_private
from cdrmix.cluster.sbatch_options import (
    fewest_devices,
    memory_gib,
    notice_seconds,
    read_options,
    time_limit_seconds,
)
from cdrmix.cluster.slurm_site import Nodes, find_nodes, options_of_sbatch
from cdrmix.cluster.start_records import BATCH_SCRIPT
from cdrmix.cluster.starts import end_of_run, newest_saved_step
from cdrmix.config.load import new_run_dir, shipped
from cdrmix.config.redaction import redacted_text
from cdrmix.config.resuming import config_of_start
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError, StateError
from cdrmix.log import get_logger
from cdrmix.network import shell_port_of_first_step
from cdrmix.planning.cost import time_text
from cdrmix.planning.profile import check_legal

logger = get_logger(__name__)

# Values with this prefix go into a private file, not into the script or a command line.
_ENVIRONMENT = "launch.environment."
# Folders that each node has to itself.
_OF_A_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
# From the job's start to its first step: assumed, for a file server that many ranks read from.
_START_SECONDS = 300
# More starts than these wait in the queue for long, and are often a limit in the wrong unit.
_MANY_STARTS = 20
# The ranks see the signal within two seconds and finish their step to save.
_NOTICE = "B:USR1@120"
# Lines of a script that tell what is left of the run, and so change while it goes on.
_OF_PROGRESS = re.compile(rb"^# (time|jobs) .*\n", re.M)
# Options that stand in place of a line of ours, besides one of its own name.
_REPLACED_BY = {
    "mem": ("mem-per-cpu", "mem-per-gpu"),
    "cpus-per-task": ("cpus-per-gpu",),
    "gpus-per-node": ("gpus", "gpus-per-task", "gpus-per-socket"),
    "requeue": ("no-requeue",),
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Values of a command line of `cdrmix slurm`."""

    config: Path | None  # may be left out where the run directory holds a run, which goes on
    overrides: Sequence[str] = ()
    profile: str | None = None
    run_dir: Path | None = None
    nodes: int
    ranks_per_node: int
    on_cpu: bool = False
    gpu: str | None = None
    gpu_memory_gib: float | None = None
    starter: str = "srun"  # srun, one task per rank, or deepspeed, one launcher per node
    time_limit: str = "24:00:00"
    # value of sbatch's option, for a task: a rank, or all ranks of a node under deepspeed
    cpus_per_task: int | None = None
    memory: str | None = None  # of a node, as sbatch takes it; None: as the plan needs it
    max_restarts: int = 3  # requeues in a row without a newer checkpoint before it is given up
    chain: int = 1  # jobs of an array that follow each other; 1 is one job that is requeued
    options: Sequence[str] = ()  # further options of sbatch, such as partition=gpu


@dataclass(frozen=True)
class Batch:
    """Batch job of a run."""

    config: Config
    plan: BatchPlan
    run_dir: Path
    lines: Mapping[str, str]  # by a title each, for people
    warnings: Sequence[str]
    # of `--set launch.environment.NAME=VALUE`; the configuration file is read when the job starts
    environment: Mapping[str, str] = field(repr=False)
    parts: Mapping[str, Any] = field(repr=False)  # variables of the template

    @property
    def config_to_check(self) -> Config:
        """Configuration for checks on this machine: data that only the nodes have is left out."""
        data = self.config.data
        if not _is_folder(data.path) or Path(data.path).exists():
            return self.config
        # the checks leave what is at a URL to the ranks
        of_nodes = data.model_copy(update={"path": "file:///of-the-nodes"})
        # what is old is where the new is
        return self.config.model_copy(update={"data": of_nodes, "cpt": None})

    @property
    def asks(self) -> str:
        """Size, cores, memory and time, as sbatch reads them."""
        sizes = (
            "nodes ntasks-per-node gpus-per-node gpus gpus-per-task gpus-per-socket gres "
            "cpus-per-task cpus-per-gpu mem mem-per-cpu mem-per-gpu time partition constraint"
        )
        options = [option for _, option in self.parts["directives"]]
        return " ".join(f"--{o}" for o in options if o.partition("=")[0] in sizes.split())

    def to_json(self) -> dict[str, Any]:
        """Returns plan, lines of sbatch and warnings for `cdrmix slurm --json`."""
        of_device = self.plan.is_of_device
        return {
            "run_dir": str(self.run_dir),
            "plan": self.plan.compared.to_json() if of_device else None,
            "options": [option for _, option in self.parts["directives"]],
            "saved_step": self.plan.saved_step,
            "warnings": list(self.warnings),
        }


def make_batch(asked: Request) -> Batch:
    """Makes a batch job, planned and checked before it waits in a queue.

    Raises TrainingError if a value is wrong, the run is at its end, or it cannot be laid out on so
    many ranks or does not fit their devices.
    """
    config = _config_of_job(asked)
    options, problems, warnings = read_options(asked.options, of_site=options_of_sbatch())
    problems += _unsafe(asked)
    site, limit, memory = None, None, None
    try:
        site = find_nodes(options.get("partition") or None, for_gpus=not asked.on_cpu)
        limit = time_limit_seconds(options.get("time") or asked.time_limit)
        warnings += _time_warnings(limit, options, site)
        memory = memory_gib(options.get("mem") or asked.memory or "0")
        _check_nodes(asked, memory, options, site)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    device = "cpu" if asked.on_cpu else "cuda"
    world_size = asked.nodes * asked.ranks_per_node
    check_legal(config, world_size=world_size, profile=asked.profile, device=device)
    plan = plan_batch(
        config,
        nodes=asked.nodes,
        ranks_per_node=asked.ranks_per_node,
        on_cpu=asked.on_cpu,
        profile=asked.profile,
        gpu=asked.gpu,
        gpu_memory_gib=asked.gpu_memory_gib,
        host_memory_gib=memory or None,
        options=options,
        site=site,
        saved_step=newest_saved_step(asked.run_dir) if asked.run_dir else 0,
    )
    if not plan.is_of_device:
        warnings.append(
            f"{plan.source}: memory and time were not checked for the device. Give --gpu PRESET or "
            "--gpu-memory-gib M"
        )
    run_dir = (asked.run_dir or new_run_dir(config)).resolve()
    warnings += _path_warnings(config, asked, run_dir)
    lines, of_time = _lines(asked, plan, options, limit)
    return Batch(
        config=config,
        plan=plan,
        run_dir=run_dir,
        lines=lines,
        warnings=warnings + of_time,
        environment=_environment_of_flags(config, asked.overrides),
        parts=_parts(asked, config, plan, run_dir, options, lines),
    )


def _config_of_job(asked: Request) -> Config:
    """Configuration of a job; refuses a run that is at its end, as its job would do nothing."""
    # A run that this directory holds goes on with its own configuration, as its ranks will.
    resume = "never" if asked.run_dir is None else "auto"
    config = config_of_start(
        asked.config,
        asked.overrides,
        run_dir=asked.run_dir,
        resume=resume,
        check=partial(end_of_run, run_dir=asked.run_dir, resume=resume),
    )
    end = end_of_run(config, run_dir=asked.run_dir, resume=resume)
    if end is not None:
        raise ConfigError(end)
    return config


def _unsafe(asked: Request) -> list[str]:
    """Problems of values that contradict, or would be more than a line or word of the script."""
    problems = []
    if asked.gpu is not None and asked.on_cpu != (asked.gpu == "cpu"):
        problems.append(f"--gpu {asked.gpu}: give --cpu for ranks on CPUs, and else a kind of GPU")
    if re.search(r"[\x00-\x1f\x7f]", f"{asked.run_dir}{Path.cwd()}"):
        problems.append(f"{asked.run_dir}: a path with control characters. Give another --run-dir")
    if "%" in str(Path(asked.run_dir or "").resolve()):  # versions of SLURM differ on %%
        problems.append(
            f"{asked.run_dir}: SLURM replaces % in the path of a log. Give another --run-dir"
        )
    for override in asked.overrides:
        if redacted_text(override) != override:
            problems.append(
                f"--set {redacted_text(override)}: the script would hold this password, and ps "
                "would show it. Put the URL into the configuration file"
            )
    return problems


def _time_warnings(
    limit: int | None, options: Mapping[str, str | None], site: Nodes | None
) -> list[str]:
    """Refuses a time limit (seconds) that nothing can be done in, or that no partition allows."""
    notice = notice_seconds(options.get("signal") or _NOTICE)
    longest = site.longest_seconds if site else None
    if site and longest is not None and (limit is None or limit > longest):
        wanted = "without a limit" if limit is None else time_text(limit)
        raise ConfigError(
            f"--time is {wanted}, and partition {site.partitions} allows "
            f"{time_text(longest)}. Give that; the run goes on in its next start"
        )
    if limit is None:
        return []
    if limit <= notice:
        raise ConfigError(
            f"--time is {time_text(limit)}, and the signal to save comes {time_text(notice)} "
            f"before its end. Give more than {time_text(notice + _START_SECONDS)}"
        )
    if limit < notice + _START_SECONDS:
        left = time_text(limit - notice)
        return [f"--time leaves {left} to start up and train, before the signal to save"]
    return []


def _check_nodes(
    asked: Request, memory: float, options: Mapping[str, str | None], site: Nodes | None
) -> None:
    """Refuses cores or memory (GiB) that no node has, and fewer devices than ranks."""
    ranks = asked.ranks_per_node
    fewest = None if asked.on_cpu else fewest_devices(options, nodes=asked.nodes)
    if fewest and fewest[1] < ranks:
        raise ConfigError(
            f"--option {fewest[0]}: {fewest[1]} devices of a node for its {ranks} ranks. Give "
            f"--gpus-per-node {max(1, fewest[1])}, or ask for {ranks}"
        )
    if site and site.most_memory_gib and memory > site.most_memory_gib:
        raise ConfigError(
            f"--mem: {memory:g} GiB, and a node of partition {site.partitions} has "
            f"{site.most_memory_gib:.1f} GiB at most. Give no more, or 0 for all of it"
        )
    given = options.get("cpus-per-task") or str(asked.cpus_per_task or 1)
    if not re.fullmatch(r"[1-9]\d{0,5}", given, re.ASCII):
        raise ConfigError(f"--option cpus-per-task={given}: give a whole number from 1 on")
    tasks = ranks if asked.starter == "srun" else 1
    if site and site.most_cores and tasks * int(given) > site.most_cores:
        raise ConfigError(
            f"{tasks} tasks of {given} cores: a node of partition {site.partitions} has "
            f"{site.most_cores} at most. Give fewer with --cpus-per-task"
        )


def _is_folder(data_path: str) -> bool:
    return data_path != "sample" and "://" not in data_path


def _path_warnings(config: Config, asked: Request, run_dir: Path) -> list[str]:
    """Warnings of paths that nodes may not see as this machine does.

    None of them is refused: a login node need not mount what the nodes have.
    """
    paths = {
        "the run directory": run_dir,
        "the present folder": Path.cwd(),
        "Python": Path(sys.executable),
        "CDRmix": shipped("launch"),
    }
    if asked.config is not None:
        paths["--config"] = asked.config.resolve()
    if asked.profile is not None and Path(asked.profile).is_file():
        paths["--profile"] = Path(asked.profile).resolve()
    data = config.data.path
    if _is_folder(data):
        paths["data.path"] = Path(data).resolve()
    warnings = [
        f"{what} is at {path}, and each node has a {folder} of its own: use a shared folder"
        for what, path in paths.items()
        for folder in _OF_A_NODE
        if path.is_relative_to(folder)
    ]
    if _is_folder(data) and not Path(data).exists():
        warnings.append(
            f"data.path = {data}: not on this machine, so it was not looked at. The job ends with "
            "code 2 if the nodes lack it too"
        )
    return warnings


def _lines(
    asked: Request, plan: BatchPlan, options: Mapping[str, str | None], limit: int | None
) -> tuple[dict[str, str], list[str]]:
    """Lines about a batch job, by a title each, and warnings about its time."""
    lines = plan.lines()
    if limit is None:
        lines["jobs"] = "one, without a time limit"
    shown = options.get("time") or asked.time_limit
    if shown.isdecimal():  # sbatch's unit of a bare number, which is easily taken for hours
        shown += " (minutes)"
    warnings: list[str] = []
    if plan.is_of_device and limit is not None:
        notice = notice_seconds(options.get("signal") or _NOTICE)
        # a limit that leaves less was warned about
        useful = max(1, limit - notice - _START_SECONDS)
        jobs = max(1, math.ceil(plan.run_seconds / useful))
        if jobs > 1 and asked.chain > 1:
            lines["jobs"] = f"{jobs:,} of --time {shown}, one after the other"
        elif jobs > 1:
            lines["jobs"] = f"{jobs:,} starts of --time {shown}: SLURM puts the job back each time"
        else:
            lines["jobs"] = f"one of --time {shown}"
        if jobs > _MANY_STARTS:
            warnings.append(
                f"the run takes {jobs:,} starts of --time {shown}, each after its turn in the "
                "queue. Give a longer --time, or more --nodes"
            )
        if 1 < asked.chain < jobs:
            warnings.append(f"--chain {asked.chain} ends before the run: give --chain {jobs}")
        if plan.save_seconds > notice:
            warnings.append(
                f"a checkpoint may take {time_text(plan.save_seconds)} to write, at 1 GB/s a node, "
                f"and the signal to save comes {time_text(notice)} before the end. Try --option "
                f"signal=B:USR1@{60 * math.ceil(plan.save_seconds / 60 + 1)}"
            )
    return lines, warnings


def _environment_of_flags(config: Config, overrides: Sequence[str]) -> dict[str, str]:
    """Variables of the ranks that --set gives."""
    names = {o.partition("=")[0].removeprefix(_ENVIRONMENT).strip() for o in overrides}
    values = launch_environment(config)
    return {name: values[name] for name in values if name in names}


def _parts(
    asked: Request,
    config: Config,
    plan: BatchPlan,
    run_dir: Path,
    options: Mapping[str, str | None],
    lines: Mapping[str, str],
) -> dict[str, Any]:
    """Variables of the template."""
    shown = [override for override in asked.overrides if not override.startswith(_ENVIRONMENT)]
    file = asked.config and asked.config.resolve()
    arguments = train_arguments(file, shown, asked.profile)
    train = [str(shipped("launch") / "train.py"), *arguments, "--run-dir", str(run_dir)]
    return {
        "name": config.name,
        "lines": lines,
        "folder": Path.cwd(),
        "python": sys.executable,
        "arguments": arguments,
        "train": [*train, "--resume", "auto"],
        "nodes": asked.nodes,
        "ranks_per_node": asked.ranks_per_node,
        "on_cpu": asked.on_cpu,
        "starter": asked.starter,
        "max_restarts": asked.max_restarts,
        "chain": asked.chain,
        "directives": list(_directives(_our_options(asked, config.name, plan, run_dir), options)),
        "variables_of_ranks": config.launch.environment,
        "port": shell_port_of_first_step(),
    }


def _directives(
    ours: Mapping[str, tuple[str, str | None]], options: Mapping[str, str | None]
) -> Iterator[tuple[str, str]]:
    """Comment and option of each #SBATCH line; those of --option stand in place of ours."""
    has_gpu_gres = "gpu" in (options.get("gres") or "")
    for name, (why, value) in ours.items():
        replaced = any(other in options for other in (name, *_REPLACED_BY.get(name, ())))
        if not replaced and not (name == "gpus-per-node" and has_gpu_gres):
            yield why, name if value is None else f"{name}={value}"
    why = "As given with --option."
    for name, value in options.items():
        yield why, name if value is None else f"{name}={value}"
        why = ""


def _our_options(
    asked: Request, name: str, plan: BatchPlan, run_dir: Path
) -> dict[str, tuple[str, str | None]]:
    """Comment and value of each option of ours; one without a comment goes with that before it."""
    ranks = asked.ranks_per_node
    tasks, task, of_whom = ranks, "A task is a rank.", "a rank"
    if asked.starter != "srun":
        tasks, of_whom = 1, f"the launcher and its {ranks} ranks"
        task = "A task is DeepSpeed's launcher, which starts the ranks of its node."
    cores = asked.cpus_per_task or plan.cores * ranks // tasks
    log = f"slurm-{'%A_%a' if asked.chain > 1 else '%j'}.log"
    job_name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "cdrmix"
    limit = "The run saves before this limit, and goes on in its next start."
    notice = "SLURM sends USR1 to this script so many seconds before the limit, and the run saves."
    memory = "Memory of a node: offloaded states, a checkpoint's copy, and the processes."
    array = "Jobs that follow each other, one at a time."
    ours: dict[str, tuple[str, str | None]] = {
        "job-name": ("Name and size of the job.", job_name),
        "nodes": ("", str(asked.nodes)),
        "ntasks-per-node": (task, str(tasks)),
        "gpus-per-node": ("A device for each rank.", str(ranks)),
        "cpus-per-task": (
            f"Cores of {of_whom}. A task that asks for none gets one on many sites.",
            str(cores),
        ),
        "mem": (memory, asked.memory or f"{plan.memory_gib}G"),
        "time": (limit, asked.time_limit),
        "signal": (notice, _NOTICE),
        "requeue": ("A job that is stopped may go back to the queue.", None),
        "open-mode": ("Every start adds to one log.", "append"),
        "output": ("", f"{run_dir}/{log}"),
        "array": (array, f"1-{asked.chain}%1"),
    }
    if asked.on_cpu:
        del ours["gpus-per-node"]
    if asked.chain == 1:
        del ours["array"]
    return ours


def write_script(batch: Batch) -> Path:
    """Writes the script into the run directory, which SLURM needs for its log; returns its path.

    Another script that is there, such as one that was changed by hand, is kept beside it.
    """
    script = batch.run_dir / BATCH_SCRIPT
    variables = batch.run_dir / "job.environment"  # private; exists if there are any
    try:
        batch.run_dir.mkdir(parents=True, exist_ok=True)
        exports = [f"export {n}={shlex.quote(v)}\n" for n, v in batch.environment.items()]
        # written even when empty, so that no values of an earlier script stay behind
        write_private(variables, "".join(exports))
        if not exports:
            variables.unlink()
        template = _templates.get_template("train.sbatch")
        paths = {"script": script, "variables": variables}
        text = template.render(batch=batch, **paths, **batch.parts)
        if _says_else(script, text):
            logger.warning(
                "warning: %s: was another script, which is kept as %s. What was changed in it by "
                "hand is not in the new one",
                *(script, set_aside(script).name),
            )
        write_private(script, text)
        script.chmod(0o700)
    except OSError as error:
        raise StateError(f"{script}: cannot be written: {error.strerror}") from error
    return script


def _says_else(script: Path, text: str) -> bool:
    """Tells if there is a script with more than its progress unlike `text`."""
    old = script.read_bytes() if script.exists() else text.encode()
    return _OF_PROGRESS.sub(b"", old) != _OF_PROGRESS.sub(b"", text.encode())


def _sbatch_option(option: str) -> str:
    """Quotes the value of NAME=VALUE for a line of #SBATCH, where a quote, # or space counts."""
    name, separator, value = option.partition("=")
    if not re.fullmatch(r"[\w@%+=:,./\[\]-]*", value, re.ASCII):
        text = re.sub(r'(["\\])', r"\\\1", value)
        value = f'"{text}"'
    return f"{name}{separator}{value}"


# StrictUndefined: a misspelt name in the template fails, where Jinja2 would print an empty text.
_templates = Environment(
    loader=FileSystemLoader(shipped("launch") / "slurm"),
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
_templates.filters |= {
    "sh": lambda word: shlex.quote(str(word)),
    "sh_words": shlex.join,
    "sbatch_option": _sbatch_option,
}
