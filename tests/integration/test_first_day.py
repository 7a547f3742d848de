"""A user's first day: own texts, a plan, a batch script, a run that is stopped and goes on.

The commands run as a user types them, in a folder of the user's own, one after the other; each
test needs what the ones before it made.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import RANK_ENVIRONMENT, ROOT
from tests.small_run import SMALL, overrides

pytestmark = pytest.mark.usefixtures("leaves_nothing")

CONFIGS = ROOT / "model_configs"
TINY = f"--config {CONFIGS / 'cdrmix-core-tiny.yaml'}"
STEPS = 400
# where the stopped run ends instead: a busy machine takes many steps from the signal to its stop
LAST_STEP = 200
RECIPE = """\
sources:
  - {name: notes, type: local, path: notes, domain: notes}
  - {name: letters, type: local, path: letters.csv, domain: letters, text_field: FIELD}
steps: [normalise]
tokenizer: {vocab_size: 512}
mixture:
  phases:
    - weights: {notes: 2, letters: 1}
"""
WORDS = [
    "river",
    "carries",
    "stones",
    "and",
    "sand",
    "to",
    "a",
    "slow",
    "wide",
    "bay",
    "of",
    "boats",
]
# The small model of the tests, on the day's own texts.
MODEL = shlex.join(
    overrides(
        [
            *SMALL,
            "model.vocab_size=512",
            "data.path=corpus",
            "checkpoint.every_steps=20",
            "evaluation.every_steps=30",
        ]
    )
)


class Day:
    """The user's folder and shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "home").mkdir()
        programs = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            **RANK_ENVIRONMENT,
            "HOME": str(folder / "home"),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        }

    def start(self, command: str, *, folder: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            shlex.split(command),
            cwd=folder or self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str, *, code: int = 0, folder: Path | None = None) -> tuple[str, str]:
        """Stdout and stderr of a command, which must end with `code` and without a traceback."""
        process = self.start(command, folder=folder)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, f"{command}: {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err, err
        return out, err


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Day:
    return Day(tmp_path_factory.mktemp("day"))


def test_own_texts_become_a_data_set_that_says_what_became_of_them(day: Day) -> None:
    notes = day.folder / "notes"
    notes.mkdir()
    for number in range(60):
        turned = WORDS[number % 7 :] + WORDS[: number % 7]
        (notes / f"{number}.txt").write_text(f"Note {number}. " + " ".join(turned * 12))
    with (day.folder / "letters.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "letter"])
        rows.writerows(
            [number, f"Dear {WORDS[number % 11]}, " + "thank you for the boat. " * (number % 9 + 8)]
            for number in range(80)
        )
    recipe = day.folder / "recipe.yaml"
    build = "cdrmix data build --config recipe.yaml --out corpus --workers 1"

    recipe.write_text(RECIPE.replace("FIELD", "text"))  # as if the column had this name
    _, told = day.run(build, code=2)
    assert "source 'letters'" in told
    assert "its columns: id, letter" in told
    assert "Set text_field of the source" in told

    recipe.write_text(RECIPE.replace("FIELD", "letter"))
    out, told = day.run(build)
    assert out == "corpus\n"
    assert "source letters: 1 file, 80 documents read, 0 set aside, 0 dropped, 80 out" in told
    assert "held out 2 documents (1.43 %)" in told

    page, _ = day.run("cdrmix data inspect corpus")
    assert re.search(r"^notes +60 +60 +0 +0 +60 +[\d,]+$", page, re.M)
    assert max(map(len, page.splitlines())) <= 80
    assert "as written" in day.run("cdrmix data verify corpus")[0]


def test_what_cannot_run_is_refused_before_it_is_queued(day: Day) -> None:
    large = f"--config {CONFIGS / 'cdrmix-core-200b.yaml'} --nodes 1 --gpus-per-node 1"
    page, told = day.run(f"cdrmix plan {large} --gpu h100-80", code=2)
    assert "does NOT fit" in page
    assert "would fit on 32 nodes of 8 such devices" in told
    _, told = day.run(f"cdrmix slurm {large} --run-dir jobs/large", code=2)
    assert "no layout fits" in told
    assert not (day.folder / "jobs").exists()
    _, told = day.run(f"cdrmix train {TINY} --nproc 3", code=2)
    assert "training.global_batch_size = 8 is no multiple of" in told
    assert not (day.folder / "experiments").exists()


def test_a_batch_script_is_ready_to_submit(day: Day) -> None:
    job = f"cdrmix slurm --config {CONFIGS / 'cdrmix-core-1b.yaml'} --nodes 2 --gpus-per-node 8"
    job += " --gpu h100-80 --run-dir jobs/first"
    _, told = day.run(f"{job} --time 2days", code=2)
    assert "--time '2days': give" in told
    assert "2-00:00:00" in told
    out, told = day.run(f"{job} --set data.path=/data/not-here --time 2-00:00:00")
    script = Path(out.strip())
    assert script == day.folder / "jobs" / "first" / "job.sbatch"
    assert "data.path = /data/not-here: not on this machine" in told
    for line in (r"layout +\w+, data 16", r"memory +[\d.]+ GiB of 79.1 GiB", r"time +\d.* days"):
        assert re.search(f"^{line}", told, re.M), line
    assert f"sbatch {script}" in told
    text = script.read_text()
    assert re.search(r"^#SBATCH --cpus-per-task=\d+$", text, re.M)
    assert re.search(r"^#SBATCH --mem=\d+G$", text, re.M)
    assert re.search(r"^#SBATCH --time=2-00:00:00$", text, re.M)
    day.run(f"bash -n {script}")


def test_a_run_is_stopped_and_the_printed_command_goes_on(day: Day) -> None:
    began = time.monotonic()
    process = day.start(f"cdrmix train {TINY} {MODEL} --nproc 1 --run-dir run --max-steps {STEPS}")
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if len(lines) == 1:
            first_line_after = time.monotonic() - began
        if line.startswith("step  30/"):
            process.send_signal(signal.SIGINT)
    process.communicate()  # closes its streams
    assert process.returncode == 75, "".join(lines)
    told = "".join(lines)
    assert lines[0].startswith("cdrmix ")
    assert first_line_after < 20  # hung, not slow
    assert re.search(r"^layout +zero1, one rank", told, re.M)
    assert "notes 66.7%, letters 33.3% of the mixture" in told
    stopped = re.search(
        r"^stopped by an interrupt \(SIGINT\) after step (\d+), .*Go on with: (.*)$", told, re.M
    )
    assert stopped, told
    assert "SIGUSR1" not in told
    assert stopped[2] == "cdrmix train --nproc 1 --run-dir run --resume auto"

    _, told = day.run(f"{stopped[2]} --max-steps {LAST_STEP} --set training.learning_rate=2e-3")
    step = int(stopped[1])
    assert f"resumed from run/checkpoints/{step}" in told
    assert "warning: changed since the run's last start: training.learning_rate: 0.003" in told
    assert re.search(r"^validation loss by domain: letters [\d.]+, notes [\d.]+$", told, re.M)

    first, second = (
        json.loads((day.folder / "run" / "starts" / f"000{number}.json").read_text())
        for number in (1, 2)
    )
    assert (first["from_step"], second["from_step"]) == (0, step)
    assert first["command"][:2] == ["cdrmix", "train"]
    assert first["data"]["folder"] == str(day.folder / "corpus")
    assert first["data"]["domains"][0]["weight"] == pytest.approx(1 / 3, abs=0.01)
    assert {change["key"] for change in second["changes"]} == {
        "training.learning_rate",
        "training.max_steps",
    }
    starts = (day.folder / "run" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["resumed_at"] for line in starts] == [0, step]
    assert [json.loads(line)["step"] for line in starts] == [step, LAST_STEP]


def test_a_finished_run_stays_as_it_is(day: Day) -> None:
    def content() -> dict[str, str]:
        files = (path for path in (day.folder / "run").rglob("*") if path.is_file())
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = content()
    again = "cdrmix train --nproc 1 --run-dir run --resume auto"
    _, told = day.run(again)
    assert f"the run is at its end (step {LAST_STEP} of {LAST_STEP})" in told
    _, told = day.run(f"{again} --set training.learning_rate=1e-3", code=2)
    assert "To train on, give --set training.max_steps=N" in told
    _, told = day.run(f"{again} --set model.num_layers=4 --max-steps {STEPS}", code=2)
    assert "model.num_layers: 2 -> 4: cannot change when the run" in told
    _, told = day.run(f"cdrmix train {TINY} --nproc 1 --run-dir run", code=2)
    assert "is never overwritten. Give --resume auto" in told
    _, told = day.run("cdrmix train --nproc 1 --resume auto", code=2)
    assert "--resume auto: needs --run-dir" in told
    assert content() == before


def test_a_model_is_evaluated_from_any_folder_and_nothing_is_built_unasked(day: Day) -> None:
    elsewhere = day.folder / "elsewhere"
    elsewhere.mkdir()
    out, _ = day.run("cdrmix evaluate ../run --json", folder=elsewhere)
    domains = {each["domain"]: each["loss"] for each in json.loads(out)["domains"]}
    assert domains.keys() == {"letters", "notes"}
    assert not any(elsewhere.iterdir())
    (day.folder / "corpus").rename(day.folder / "moved")
    _, told = day.run("cdrmix evaluate ../run", folder=elsewhere, code=2)
    assert str(day.folder / "corpus") in told
    assert "--data" in told
    day.run("cdrmix evaluate ../run --data ../moved", folder=elsewhere)
    assert not any(elsewhere.iterdir())
    page = (day.folder / "run" / "report.html").read_text()
    for shown in ("training.learning_rate", "Loss by domain", "letters", "cdrmix train"):
        assert shown in page, shown


def test_the_machine_is_looked_at_first(day: Day) -> None:
    out, _ = day.run("cdrmix doctor --no-all-reduce --folder runs")
    assert max(map(len, out.splitlines())) <= 80
    checks = {line.split()[1] for line in out.splitlines() if line[:4].strip() in ("ok", "warn")}
    assert {"devices", "packages", "ports", "/dev/shm", "disk"} <= checks
