"""Settings of a batch job when it starts: variables of its ranks, or that the run is at its end.

python -m cdrmix.cluster.batch_settings RUN_DIR SCRIPT --config FILE [--set PATH=VALUE]
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cdrmix.cluster.handover import launch_environment
from cdrmix.cluster.starts import MARKER, is_at_its_end
from cdrmix.config.load import load_config
from cdrmix.errors import TrainingError


def main(words: Sequence[str]) -> int:
    """Prints lines for bash to evaluate, a comment first; nothing if the run is at its end."""
    parser = argparse.ArgumentParser(description="Settings of a batch job.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("script", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--profile")  # of launch/train.py, and of no meaning here
    args = parser.parse_args(words)
    try:
        config = load_config(args.config, args.overrides)
        variables = launch_environment(config)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    marker = args.run_dir / MARKER
    # a script written after the run's end asks for more training, such as of more steps
    is_newer = marker.is_file() and args.script.stat().st_mtime > marker.stat().st_mtime
    if is_at_its_end(args.run_dir, config) and not is_newer:
        return 0
    print("# variables of the ranks")
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
