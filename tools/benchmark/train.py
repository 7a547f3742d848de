"""`make train` without its set-up: wall time of the launcher on two ranks, and what was learnt.

The sample corpus is built before the clock starts where it is not there yet; start-up of launcher
and ranks, evaluations, checkpoints and the report are counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cdrmix.data.sample import ensure_sample
from cdrmix.network import free_port

CONFIG = Path("model_configs/cdrmix-core-tiny.yaml")


def measure() -> dict[str, Any]:
    """Seconds of the run, and its losses beside the n-gram baselines."""
    ensure_sample(4096)
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        command = [
            str(Path(sys.executable).with_name("deepspeed")),
            *("--num_gpus", "2", "--master_port", str(free_port())),
            *("--log_level", "error", "launch/train.py"),
            *("--config", str(CONFIG), "--run-dir", str(run_dir)),
        ]
        began = time.monotonic()
        subprocess.run(command, check=True, stdout=sys.stderr)
        seconds = time.monotonic() - began
        summary = json.loads((run_dir / "metrics.json").read_text(encoding="utf-8"))
    return {"rounds": 1, "seconds": seconds, "summary": summary}


def main() -> None:
    """Print a line per predictor, or JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure()
    if args.json:
        print(json.dumps(result))
        return
    summary = result["summary"]
    print(f"{summary['steps']} steps in {result['seconds']:.0f} s")
    print(f"validation {summary['evaluation']['loss']:.4f}")
    print(f"bigram     {summary['baselines']['bigram_loss']:.4f}")
    print(f"unigram    {summary['baselines']['unigram_loss']:.4f}")


if __name__ == "__main__":
    main()
