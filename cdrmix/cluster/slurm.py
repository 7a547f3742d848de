"""`cdrmix slurm`: a batch script for a run, to keep, read and queue."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cdrmix.config.load import load_config, new_run_dir, shipped
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError, StateError
from cdrmix.network import shell_port_of_first_step
from cdrmix.planning.profile import check_legal

STARTERS = ("srun", "deepspeed")
# The ranks hear of the signal within two seconds and finish their step before they save.
SECONDS_TO_SAVE = 120

_REQUEUE = """\
# A start that was stopped and has saved (75) goes on from there: by USR1, or by preemption, whose
# TERM the ranks get and this script does not. So does one that was lost, or came no further than
# the one before, up to @MAX_RESTARTS@ times. An error of the user's (2), lost state (3) and a
# finished run (0) do not.
goes_on=
if [ "$signalled" != TERM ] && [ "$code" -eq 75 ] && [ "$(latest)" != "$before" ]; then
    goes_on=yes
elif [ "$signalled" != TERM ] && [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "$code" -ne 3 ]; then
    echo "start ${SLURM_RESTART_COUNT:-0}" >>"$run_dir/launch/lost-$SLURM_JOB_ID"
    [ "$(wc -l <"$run_dir/launch/lost-$SLURM_JOB_ID")" -le @MAX_RESTARTS@ ] && goes_on=yes
fi
[ -n "$goes_on" ] && scontrol requeue "$SLURM_JOB_ID" && sleep 60 # it ends us on the way"""
_CHAIN = """\
# The next job of the array goes on from the newest checkpoint. After an error of the user's (2) or
# with lost state (3) it could not either.
if [ "$code" -eq 2 ] || [ "$code" -eq 3 ]; then
    scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"
fi"""
_SRUN = """\
# One task per rank. A rank that ends alone is dealt with by its watchdog, not by srun.
srun --kill-on-bad-exit=0 @PYTHON@ -u @ARGUMENTS@"""
_DEEPSPEED = """\
# One task per node, the deepspeed launcher, which starts that node's ranks.
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/ slots=@RANKS@/' \\
    >"$CDRMIX_LAUNCH_FOLDER/hostfile"
srun --kill-on-bad-exit=0 bash -c 'exec "$0" -m deepspeed.launcher.runner \\
    --hostfile "$CDRMIX_LAUNCH_FOLDER/hostfile" --no_ssh --node_rank "$SLURM_NODEID" \\
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --log_level critical "$@"' \\
    @PYTHON@ @ARGUMENTS@"""


@dataclass(frozen=True)
class Batch:
    """What is to be queued.

    Attributes:
        config: resolved configuration.
        arguments: flags of launch/train.py without --run-dir and --resume.
        run_dir: run directory, the same for all starts.
        nodes: number of nodes, and `ranks_per_node` devices and ranks on each.
        on_cpu: whether the ranks compute on CPUs, so that no devices are asked for.
        starter: srun, one task per rank, or deepspeed, one launcher per node.
        time_limit: as SLURM writes it, such as 24:00:00.
        max_restarts: how often a lost run is requeued.
        chain: number of jobs of an array that follow each other; 1 is one job that is requeued.
        options: further #SBATCH options, such as partition=gpu.
    """

    config: Config
    arguments: Sequence[str]
    run_dir: Path
    nodes: int
    ranks_per_node: int
    on_cpu: bool
    starter: str
    time_limit: str
    max_restarts: int
    chain: int
    options: Sequence[str]

    @property
    def script(self) -> Path:
        """Where the script is written."""
        return self.run_dir / "job.sbatch"


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
    """A batch job from what a command line gives, checked before it waits in a queue.

    Raises:
        TrainingError: if the configuration is wrong, or cannot run on so many ranks.
    """
    loaded = load_config(config, overrides)
    device = "cpu" if on_cpu else "cuda"
    check_legal(loaded, world_size=nodes * ranks_per_node, profile=profile, device=device)
    arguments = ["--config", str(config.resolve())]
    for override in overrides:
        arguments += ["--set", override]
    if profile is not None:
        arguments += ["--profile", profile]
    return Batch(
        config=loaded,
        arguments=arguments,
        run_dir=(run_dir or new_run_dir(loaded)).resolve(),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        on_cpu=on_cpu,
        starter=starter,
        time_limit=time_limit,
        max_restarts=max_restarts,
        chain=chain,
        options=options,
    )


def script_of(batch: Batch) -> str:
    """The text of the script."""
    name = batch.config.name
    words = [
        str(shipped("launch") / "train.py"),
        *batch.arguments,
        *("--run-dir", str(batch.run_dir), "--resume", "auto"),
    ]
    parts = {
        "START": _SRUN if batch.starter == "srun" else _DEEPSPEED,
        "AFTERWARDS": _REQUEUE if batch.chain == 1 else _CHAIN,
        "TITLE": f"{name}, nodes: {batch.nodes}, ranks on each: {batch.ranks_per_node}",
        "SCRIPT": shlex.quote(str(batch.script)),
        "OPTIONS": "\n".join(f"#SBATCH --{option}" for option in _options(batch)),
        "FOLDER": shlex.quote(str(Path.cwd())),
        "RUN_DIR": shlex.quote(str(batch.run_dir)),
        "ENVIRONMENT": "\n".join(_environment(batch)),
        "PYTHON": shlex.quote(sys.executable),
        "RANKS": str(batch.ranks_per_node),
        "ARGUMENTS": shlex.join(words),
        "MAX_RESTARTS": str(batch.max_restarts),
    }
    text = (shipped("launch") / "slurm" / "train.sbatch").read_text(encoding="utf-8")
    for part, value in parts.items():
        text = text.replace(f"@{part}@", value)
    return text


def _options(batch: Batch) -> list[str]:
    tasks = batch.ranks_per_node if batch.starter == "srun" else 1
    log = "slurm-%A_%a.log" if batch.chain > 1 else "slurm-%j.log"
    found = [
        f"job-name={batch.config.name}",
        f"nodes={batch.nodes}",
        f"ntasks-per-node={tasks}",
        f"time={batch.time_limit}",
        f"signal=B:USR1@{SECONDS_TO_SAVE}",
        "requeue",
        "open-mode=append",
        f"output={batch.run_dir / log}",
    ]
    if not batch.on_cpu:
        found.insert(3, f"gpus-per-node={batch.ranks_per_node}")
    if batch.chain > 1:
        found.append(f"array=1-{batch.chain}%1")
    return [*found, *batch.options]


def _environment(batch: Batch) -> list[str]:
    """Lines that export what the ranks need."""
    variables = dict(batch.config.launch.environment)
    if batch.on_cpu:
        variables.setdefault("DS_ACCELERATOR", "cpu")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if "MASTER_ADDR" not in variables:
        first = 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'
        lines.append(f"export MASTER_ADDR=$({first})")
    if "MASTER_PORT" not in variables:
        lines.append(f"export MASTER_PORT={shell_port_of_first_step()}")
    return lines


def write_script(batch: Batch) -> Path:
    """Write the script into the run directory, which SLURM needs for its log; returns its path.

    Raises:
        StateError: if it cannot be written.
    """
    try:
        batch.run_dir.mkdir(parents=True, exist_ok=True)
        batch.script.write_text(script_of(batch), encoding="utf-8")
        batch.script.chmod(0o755)
    except OSError as error:
        raise StateError(f"{batch.script}: cannot be written: {error.strerror}") from error
    return batch.script


def submit(script: Path) -> str:
    """Queue a script; returns the number of the job.

    Raises:
        ConfigError: if there is no SLURM here, or it refuses the job.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            f"no program sbatch here. Queue {script} on a login node of the cluster"
        ) from None
    if done.returncode:
        raise ConfigError(f"{script}: sbatch refuses it: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
