"""Measures what docs/benchmarks.md says of a GPU, and which predictions were wrong.

    make gpu-day                                     all stages by priority, then the page
    make gpu-day ARGS='--stages check wkv --seconds 560 --out DIR'
    make gpu-day ARGS=--smoke                        all of them in small, on the CPU

Each stage has a process and a time limit of its own and writes DIR/STAGE.json row by row: one that
fails, or is ended by its limit, costs only itself. A later call with the same --out adds stages.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.benchmark.run import PAGE, ROOT, place
from tools.gpu_day.predictions import judge, prediction_rows, read_predictions

# By priority, with the seconds that each may take.
STAGES = {
    "environment": 60,
    "check": 240,
    "gemm": 90,
    "wkv": 200,
    "step": 540,
    "block": 240,
    "triton": 90,
    "loss": 60,
    "attention": 60,
    "tests": 240,
}
_SECONDS_TO_BEGIN = 15.0  # less than this is not worth a start
_ON_CPU = ("DS_ACCELERATOR=cpu", "CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=1")


def run_stage(
    name: str, out: Path, *, seconds: float, command: Sequence[str], smoke: bool
) -> dict[str, Any]:
    """Runs one stage to its end or its limit; returns its outcome and rows, as OUT/NAME.json.

    Args:
        seconds: limit, after which the stage and all that it has started are killed.
        command: program that takes the name, --out and --smoke, and writes OUT/NAME.rows.jsonl.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows_file = out / f"{name}.rows.jsonl"
    rows_file.unlink(missing_ok=True)
    variables = ["PYTHONUNBUFFERED=1", *(_ON_CPU if smoke else ())]
    began = time.monotonic()
    process = subprocess.Popen(
        ["env", *variables, *command, name, "--out", str(out), *(["--smoke"] if smoke else [])],
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        code = process.wait(seconds)
        outcome = "done" if code == 0 else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        outcome = f"ended by its limit of {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    rows: list[dict[str, Any]] = []
    if rows_file.exists():
        for line in rows_file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a line that was being written
                rows.append(json.loads(line))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    spent = time.monotonic() - began
    result = {"stage": name, "outcome": outcome, "date": today, "seconds": spent, "rows": rows}
    (out / f"{name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def read_results(out: Path) -> dict[str, dict[str, Any]]:
    """Results of the stages that a folder holds, of this call and earlier ones."""
    files = {name: out / f"{name}.json" for name in STAGES}
    return {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if file.exists()
    }


def section(results: Mapping[str, Mapping[str, Any]], predictions: list[dict[str, Any]]) -> str:
    """The GPU section of the page: predictions beside figures, then each stage."""
    lines = ["## GPU", "", "`make gpu-day`. What has no figure was not measured.", ""]
    lines += prediction_rows(judge(results, predictions))
    for name in STAGES:
        if name not in results:
            continue
        result = results[name]
        lines += ["", f"### {name}", "", f"{result['date']}, {result['seconds']:.0f} s: "]
        lines[-1] += f"{result['outcome']}."
        if result["rows"]:
            lines += ["", "| what | figures |", "|---|---|"]
        for row in result["rows"]:
            figures = ", ".join(
                f"{key.replace('_', ' ')} {value:.4g}"
                if isinstance(value, float)
                else f"{key.replace('_', ' ')} {value}"
                for key, value in row.items()
                if key != "name" and not isinstance(value, (list, dict))
            )
            lines.append(f"| {row['name']} | {figures.replace('|', '/')} |")
    missing = [name for name in STAGES if name not in results]
    lines += ["", f"Stages not measured: {', '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the stages within the seconds, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "gpu_day")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--seconds", type=float, default=1800, help="for all stages of this call")
    parser.add_argument("--smoke", action="store_true", help="all in small on the CPU, no page")
    parser.add_argument("--page", type=Path, help="default: docs/benchmarks.md")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    command = [sys.executable, "-m", "tools.gpu_day.stages"]
    for name in args.stages:
        left = deadline - time.monotonic()
        if left < _SECONDS_TO_BEGIN:
            print(f"{name}: not begun, {left:.0f} s are left", file=sys.stderr)
            continue
        limit = min(STAGES[name], left)
        print(f"{name}: at most {limit:.0f} s", file=sys.stderr)
        result = run_stage(name, args.out, seconds=limit, command=command, smoke=args.smoke)
        print(f"{name}: {result['outcome']}", file=sys.stderr)
    text = section(read_results(args.out), read_predictions())
    page = args.page or (None if args.smoke else PAGE)
    if page is not None:
        page.write_text(place(page.read_text(encoding="utf-8"), "gpu", text), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
