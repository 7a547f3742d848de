"""Training reaches for no network, and its run directory keeps no secrets."""

import json
import subprocess
from pathlib import Path

import pytest

from cdrmix.config.yaml_text import dump_yaml, parse_yaml
from tests.harness import ROOT
from tests.launcher import NO_NETWORK, launch
from tests.small_run import CONFIG

TRACKERS = ("tensorboard", "wandb", "mlflow")
IN_CONFIG = "fake-key-of-a-tracker-08b1"
SECRETS = {
    "FAKE_TOKEN": "fake-token-5d1c7e",
    "HF_TOKEN": "hf_fake2b9a41",
    "AWS_SECRET_ACCESS_KEY": "fake-key-91ff03",
    "WANDB_API_KEY": "fake" * 10,
    "MLFLOW_TRACKING_PASSWORD": "fake-password-16be20",
    "PIP_INDEX_URL": "https://reader:fake-password-77aa@example.org/simple",
}


@pytest.fixture
def no_network() -> tuple[str, ...]:
    try:
        subprocess.run([*NO_NETWORK, "true"], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no program unshare")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"unshare --net is not allowed here: {error.stderr.strip()}")
    return NO_NETWORK


def test_trains_with_no_network_interface_and_keeps_no_secret(
    no_network: tuple[str, ...], run_dir: Path, small_corpus: Path, tmp_path: Path
) -> None:
    service = {"use": "tests.trackers:Service", "options": {"api_key": IN_CONFIG, "project": "x"}}
    values = parse_yaml((ROOT / CONFIG).read_text(), place=CONFIG)
    values["data"]["path"] = str(small_corpus)
    values["monitoring"] = {
        "log_every_steps": 1,
        "tracker_wait_seconds": 120,
        "trackers": [*TRACKERS, service],
    }
    config = tmp_path / "config.yaml"
    config.write_text(dump_yaml(values))
    flags = ["--run-dir", str(run_dir), "--max-steps", "3"]
    done = launch(
        ["launch/train.py", "--config", config, *flags],
        nproc=2,
        prefix=no_network,
        env={**SECRETS, "PYTHONPATH": str(ROOT), "HOME": "/dev/null"},
    )
    assert done.returncode == 0, done.stderr
    assert "warning: tracker" not in done.stderr
    for name in (*TRACKERS, "Service"):
        assert (run_dir / "tracking" / name / "last_step").read_text() == "3", name

    steps = [
        json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[-1] == 3
    assert json.loads((run_dir / "environment.json").read_text())["packages"]["torch"]

    written = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    written[Path("stdout")] = done.stdout.encode()
    written[Path("stderr")] = done.stderr.encode()
    for name, secret in {**SECRETS, "monitoring.trackers": IN_CONFIG}.items():
        assert not [path for path, text in written.items() if secret.encode() in text], name
