"""Settings of a batch job when it starts: variables of its ranks, or that the run is at its end.

A run that goes on takes its own configuration, from its directory, and --set alone changes it.

python -m cdrmix.cluster.batch_settings RUN_DIR SCRIPT [--config FILE] [--set PATH=VALUE]
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cdrmix.cluster.handover import launch_environment
from cdrmix.cluster.starts import MARKER, is_at_its_end
from cdrmix.config.resuming import config_of_start
from cdrmix.errors import TrainingError


def main(words: Sequence[str]) -> int:
    """Prints lines for bash to evaluate, a comment first; nothing if the run is at its end."""
    parser = argparse.ArgumentParser(description="Settings of a batch job.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("script", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--profile")  # of launch/train.py, and of no meaning here
    args = parser.parse_args(words)
    # the ranks tell what of a configuration is not taken when they resume
    logging.getLogger("cdrmix").setLevel(logging.ERROR)
    try:
        config = config_of_start(args.config, args.overrides, run_dir=args.run_dir, resume="auto")
        before = config_of_start(args.config, (), run_dir=args.run_dir, resume="auto")
        variables = launch_environment(config)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    marker = args.run_dir / MARKER
    # a script written after the run's end may ask for more training, such as lessons of Stage B
    is_newer = marker.is_file() and args.script.stat().st_mtime > marker.stat().st_mtime
    if is_at_its_end(args.run_dir, config) and not (is_newer and config != before):
        return 0
    print("# variables of the ranks")
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
