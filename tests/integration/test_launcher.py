"""The launch helper: what it reports of the real deepspeed launcher, and what it leaves behind."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.launcher import Launch, launch

# The launcher ends the other ranks when one fails, so rank 1 waits until rank 0 has spoken.
RANK_SCRIPT = """
import os, pathlib, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
spoken = pathlib.Path(__file__).with_suffix(".spoken")
if os.environ["RANK"] == "0":
    spoken.touch()
while not spoken.exists():
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK_SCRIPT)
    return path


def test_exit_code_and_output_of_the_ranks_arrive(script: Path) -> None:
    done = launch(["--no_local_rank", script, "75", "0"], nproc=2, timeout=60)
    assert done.returncode == 75
    assert "rank 0 of 2" in done.stdout
    assert "rank 1 of 2" in done.stdout


def test_a_killed_rank_ends_the_run_and_the_context_leaves_no_process(script: Path) -> None:
    with Launch(["--no_local_rank", script, "0", "600"], nproc=2) as run:
        run.wait_until(lambda: len(run.rank_pids()) == 2, timeout=60)
        pids = run.rank_pids()
        os.kill(pids[1], signal.SIGKILL)
        assert run.wait(timeout=60).returncode != 0
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_the_time_limit_ends_every_process(script: Path) -> None:
    with pytest.raises(AssertionError, match="not over after 8 s"):
        launch(["--no_local_rank", script, "0", "600"], nproc=1, timeout=8)
    command_lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in command_lines if str(script) in words]
