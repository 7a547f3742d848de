"""`cdrmix slurm`: writes a batch script for a run, and queues it."""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cdrmix.cluster.handover import launch_environment, train_arguments, write_private
from cdrmix.config.load import load_config, new_run_dir, shipped
from cdrmix.config.redaction import redacted_text
from cdrmix.errors import ConfigError, StateError
from cdrmix.network import shell_port_of_first_step
from cdrmix.planning.profile import check_legal

# Values with this prefix go into a private file, not into the script or a command line.
_ENVIRONMENT = "launch.environment."


@dataclass(frozen=True)
class Batch:
    """Batch job of a run."""

    run_dir: Path
    # of `--set launch.environment.NAME=VALUE`; the configuration file is read when the job starts
    environment: Mapping[str, str] = field(repr=False)
    parts: Mapping[str, Any] = field(repr=False)  # variables of the template


def make_batch(
    *,
    config: Path,
    overrides: Sequence[str],
    profile: str | None,
    run_dir: Path | None,
    nodes: int,
    ranks_per_node: int,
    on_cpu: bool,
    starter: str,
    time_limit: str,
    max_restarts: int,
    chain: int,
    options: Sequence[str],
) -> Batch:
    """Makes a batch job from the values of a command line, checked before it waits in a queue.

    Args:
        starter: srun, one task per rank, or deepspeed, one launcher per node.
        max_restarts: requeues in a row without a newer checkpoint before the run is given up.
        chain: number of jobs of an array that follow each other; 1 is one job that is requeued.
        options: further #SBATCH options, such as partition=gpu.
    Raises:
        TrainingError: if a value is wrong, or the configuration cannot run on so many ranks.
    """
    resolved_config = load_config(config, overrides)
    _check_lines(time_limit=time_limit, options=options, run_dir=run_dir, overrides=overrides)
    device = "cpu" if on_cpu else "cuda"
    check_legal(resolved_config, world_size=nodes * ranks_per_node, profile=profile, device=device)
    run_dir = (run_dir or new_run_dir(resolved_config)).resolve()
    shown = [override for override in overrides if not override.startswith(_ENVIRONMENT)]
    arguments = train_arguments(config.resolve(), shown, profile)
    train = [str(shipped("launch") / "train.py"), *arguments, "--run-dir", str(run_dir)]
    names = {o.partition("=")[0].removeprefix(_ENVIRONMENT).strip() for o in overrides}
    values = launch_environment(resolved_config)
    parts = {
        "name": resolved_config.name,
        "job_name": re.sub(r"[^A-Za-z0-9._-]+", "-", resolved_config.name).strip("-") or "cdrmix",
        "folder": Path.cwd(),
        "python": sys.executable,
        "arguments": arguments,
        "train": [*train, "--resume", "auto"],
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "on_cpu": on_cpu,
        "starter": starter,
        "time_limit": time_limit,
        "max_restarts": max_restarts,
        "chain": chain,
        "options": options,
        "variables_of_ranks": resolved_config.launch.environment,
        "port": shell_port_of_first_step(),
    }
    return Batch(run_dir, {name: values[name] for name in values if name in names}, parts)


def _check_lines(
    *, time_limit: str, options: Sequence[str], run_dir: Path | None, overrides: Sequence[str]
) -> None:
    """Refuses values that would be more than one line or word in the script."""
    problems = []
    if not re.fullmatch(r"[0-9:-]{1,20}|UNLIMITED|INFINITE", time_limit, re.ASCII):
        problems.append(f"--time {time_limit!r}: give MINUTES, HH:MM:SS or DAYS-HH:MM:SS")
    for option in options:
        if not re.fullmatch(r"[a-z][a-z0-9-]*(=[^\x00-\x1f\x7f]*)?", option):
            problems.append(f"--option {option!r}: give NAME or NAME=VALUE, such as partition=gpu")
    if re.search(r"[\x00-\x1f\x7f]", f"{run_dir}{Path.cwd()}"):
        problems.append(f"{run_dir}: a path with control characters. Give another --run-dir")
    if "%" in str(Path(run_dir or "").resolve()):  # versions of SLURM differ on %%
        problems.append(f"{run_dir}: SLURM replaces % in the path of a log. Give another --run-dir")
    for override in overrides:
        if redacted_text(override) != override:
            problems.append(
                f"--set {redacted_text(override)}: the script would hold this password, and ps "
                "would show it. Put the URL into the configuration file"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def write_script(batch: Batch) -> Path:
    """Writes the script into the run directory, which SLURM needs for its log; returns its path."""
    script = batch.run_dir / "job.sbatch"
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
        write_private(script, template.render(batch=batch, **paths, **batch.parts))
        script.chmod(0o700)
    except OSError as error:
        raise StateError(f"{script}: cannot be written: {error.strerror}") from error
    return script


def submit(script: Path) -> str:
    """Queues a script and returns the job's number; ConfigError without SLURM or if it refuses."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", "--", str(script)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            f"no program sbatch here. Queue {script} on a login node of the cluster"
        ) from None
    if done.returncode:
        raise ConfigError(f"{script}: sbatch refuses it: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


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
