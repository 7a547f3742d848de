"""`cdrmix slurm`: writes a batch script for a run, and queues it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cdrmix.cluster.handover import launch_environment, write_private
from cdrmix.config.load import load_config, new_run_dir, shipped
from cdrmix.config.redaction import redacted_text
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError, StateError
from cdrmix.network import shell_port_of_first_step
from cdrmix.planning.profile import check_legal

STARTERS = ("srun", "deepspeed")
# Values with this prefix go into a private file, not into the script or a command line.
_ENVIRONMENT = "launch.environment."
# The ranks see the signal within two seconds and finish their step before they save.
SECONDS_TO_SAVE = 120

_REQUEUE = """\
# A start that was stopped and has saved (75) goes on from there: by USR1, or by preemption, whose
# TERM the ranks get and this script does not. So does one that was lost, or that a passing fault
# ended (69), up to @MAX_RESTARTS@ times in a row without a newer checkpoint. An error of the user's
# (2), lost state (3) and a finished run (0) do not.
goes_on=
lost=$run_dir/launch/lost-$SLURM_JOB_ID
[ "$(latest)" != "$before" ] && rm -f "$lost"
if [ "$signalled" != TERM ] && [ "$code" -eq 75 ] && [ "$(latest)" != "$before" ]; then
    goes_on=yes
elif [ "$signalled" != TERM ] && [ "$code" -ne 0 ] && [ -z "$final" ]; then
    echo "start ${SLURM_RESTART_COUNT:-0}" >>"$lost"
    [ "$(wc -l <"$lost")" -le @MAX_RESTARTS@ ] && goes_on=yes
fi
[ -n "$goes_on" ] && scontrol requeue "$SLURM_JOB_ID" && sleep 60 # it ends us on the way"""
_CHAIN = """\
# The next job of the array goes on from the newest checkpoint. After an error of the user's (2) or
# with lost state (3) it could not either.
if [ -n "$final" ]; then
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
    """Batch job of a run.

    Attributes:
        config: resolved configuration.
        arguments: flags of launch/train.py without --run-dir and --resume.
        environment: variables of `--set launch.environment.NAME=VALUE`; those of the configuration
            file are read when the job starts.
        run_dir: run directory, the same for all starts.
        nodes: number of nodes, and `ranks_per_node` devices and ranks on each.
        on_cpu: the ranks compute on CPUs, and no devices are requested.
        starter: srun, one task per rank, or deepspeed, one launcher per node.
        time_limit: as SLURM writes it, such as 24:00:00.
        max_restarts: requeues in a row without a newer checkpoint before the run is given up.
        chain: number of jobs of an array that follow each other; 1 is one job that is requeued.
        options: further #SBATCH options, such as partition=gpu.
    """

    config: Config
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
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
        """Path of the script."""
        return self.run_dir / "job.sbatch"

    @property
    def variables(self) -> Path:
        """Private file of `environment`, beside the script; exists if there are any variables."""
        return self.run_dir / "job.environment"


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

    Raises:
        TrainingError: if the configuration is wrong, or cannot run on so many ranks.
    """
    resolved_config = load_config(config, overrides)
    _check_lines(time_limit=time_limit, options=options, run_dir=run_dir, overrides=overrides)
    device = "cpu" if on_cpu else "cuda"
    check_legal(resolved_config, world_size=nodes * ranks_per_node, profile=profile, device=device)
    arguments = ["--config", str(config.resolve())]
    for override in overrides:
        if not override.startswith(_ENVIRONMENT):
            arguments += ["--set", override]
    if profile is not None:
        arguments += ["--profile", profile]
    names = {o.partition("=")[0].removeprefix(_ENVIRONMENT).strip() for o in overrides}
    values = launch_environment(resolved_config)
    return Batch(
        config=resolved_config,
        arguments=arguments,
        environment={name: value for name, value in values.items() if name in names},
        run_dir=(run_dir or new_run_dir(resolved_config)).resolve(),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        on_cpu=on_cpu,
        starter=starter,
        time_limit=time_limit,
        max_restarts=max_restarts,
        chain=chain,
        options=options,
    )


def _check_lines(
    *, time_limit: str, options: Sequence[str], run_dir: Path | None, overrides: Sequence[str]
) -> None:
    """Refuses values that would be more than one line or word in the script.

    Raises:
        ConfigError: naming every such value.
    """
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


def script_of(batch: Batch) -> str:
    """Text of the script."""
    python = shlex.quote(sys.executable)
    settings = [str(batch.run_dir), str(batch.script), *batch.arguments]
    words = [
        str(shipped("launch") / "train.py"),
        *batch.arguments,
        *("--run-dir", str(batch.run_dir), "--resume", "auto"),
    ]
    # of the ranks, without the values of `launch.environment`, which are read when the job starts
    exports = []
    if batch.environment:
        exports.append(f". {shlex.quote(str(batch.variables))} || exit 2")
    if batch.on_cpu:
        exports.append('export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"')
    if "MASTER_ADDR" not in batch.config.launch.environment:
        first = 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'
        exports.append(f"export MASTER_ADDR=$({first})")
    if "MASTER_PORT" not in batch.config.launch.environment:
        exports.append(f"export MASTER_PORT={shell_port_of_first_step()}")
    parts = {
        "START": _SRUN if batch.starter == "srun" else _DEEPSPEED,
        "AFTERWARDS": _REQUEUE if batch.chain == 1 else _CHAIN,
        "TITLE": f"{batch.config.name}, nodes: {batch.nodes}, ranks on each: "
        f"{batch.ranks_per_node}",
        "SCRIPT": shlex.quote(str(batch.script)),
        "OPTIONS": "\n".join(_option_lines(batch)),
        "FOLDER": shlex.quote(str(Path.cwd())),
        "RUN_DIR": shlex.quote(str(batch.run_dir)),
        "ENVIRONMENT": "\n".join(exports),
        "SETTINGS": f"{python} -m cdrmix.cluster.batch_settings {shlex.join(settings)}",
        "PYTHON": python,
        "RANKS": str(batch.ranks_per_node),
        "ARGUMENTS": shlex.join(words),
        "MAX_RESTARTS": str(batch.max_restarts),
    }
    text = (shipped("launch") / "slurm" / "train.sbatch").read_text(encoding="utf-8")
    # First the parts that are templates themselves; then all values at once, so that no value is
    # searched for further parts.
    for part in ("START", "AFTERWARDS"):
        text = text.replace(f"@{part}@", parts.pop(part))
    return re.sub(r"@([A-Z_]+)@", lambda match: parts[match[1]], text)


def _option_lines(batch: Batch) -> list[str]:
    log = "slurm-%A_%a.log" if batch.chain > 1 else "slurm-%j.log"
    options = [
        f"job-name={re.sub(r'[^A-Za-z0-9._-]+', '-', batch.config.name).strip('-') or 'cdrmix'}",
        f"nodes={batch.nodes}",
        f"ntasks-per-node={batch.ranks_per_node if batch.starter == 'srun' else 1}",
        *([] if batch.on_cpu else [f"gpus-per-node={batch.ranks_per_node}"]),
        f"time={batch.time_limit}",
        f"signal=B:USR1@{SECONDS_TO_SAVE}",
        "requeue",
        "open-mode=append",
        f"output={batch.run_dir / log}",
        *([f"array=1-{batch.chain}%1"] if batch.chain > 1 else []),
        *batch.options,
    ]
    lines = []
    for option in options:
        name, separator, value = option.partition("=")
        # in a line of #SBATCH a quote, # or space would have a meaning
        if not re.fullmatch(r"[\w@%+=:,./\[\]-]*", value, re.ASCII):
            text = re.sub(r'(["\\])', r"\\\1", value)
            value = f'"{text}"'
        lines.append(f"#SBATCH --{name}{separator}{value}")
    return lines


def write_script(batch: Batch) -> Path:
    """Writes the script into the run directory, which SLURM needs for its log; returns its path.

    Raises:
        StateError: if it cannot be written.
    """
    try:
        batch.run_dir.mkdir(parents=True, exist_ok=True)
        exports = [f"export {n}={shlex.quote(v)}\n" for n, v in batch.environment.items()]
        # written even when empty, so that no values of an earlier script stay behind
        write_private(batch.variables, "".join(exports))
        if not exports:
            batch.variables.unlink()
        write_private(batch.script, script_of(batch))
        batch.script.chmod(0o700)
    except OSError as error:
        raise StateError(f"{batch.script}: cannot be written: {error.strerror}") from error
    return batch.script


def submit(script: Path) -> str:
    """Queues a script; returns the number of the job.

    Raises:
        ConfigError: if there is no SLURM here, or it refuses the job.
    """
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
