"""The verb `cdrmix track`: makes a tracker's copy of a run anew."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cdrmix.verbs.flags import Verbs


def add_track(verbs: Verbs) -> None:
    """`cdrmix track RUN_DIR --to TRACKER`: a copy of all lines of metrics.jsonl."""
    parser = verbs.add_parser(
        "track",
        help="a run's metrics for TensorBoard, W&B or MLflow, made anew",
        description="Makes the copy that a tracker has of a run's metrics anew from metrics.jsonl, "
        "of a run that is finished or still going. The copy before stays until the new one is "
        "whole.",
    )
    flag = parser.add_argument
    flag("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    name = "tensorboard, wandb, mlflow, or a class of yours as package.module:Name"
    flag("--to", dest="tracker", metavar="TRACKER", type=_tracker, required=True, help=name)
    out = "folder for the copy; default: RUN_DIR/tracking/TRACKER, with the run's options for it"
    flag("--out", type=Path, metavar="DIR", help=out)
    config = "configuration with the tracker's options and plug-ins; default: the run's own, which "
    flag("--config", type=Path, metavar="FILE", help=config + "holds no secrets")
    flag("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_track)


def _tracker(text: str) -> str:
    from cdrmix.config.plugin import is_plugin
    from cdrmix.config.tracking import TRACKERS

    if text not in TRACKERS and not is_plugin(text):
        raise argparse.ArgumentTypeError(
            f"given {text}, allowed is {', '.join(TRACKERS)} or package.module:Name"
        )
    return text


def _track(arguments: argparse.Namespace) -> None:
    from cdrmix.tracking.copies import copy_run

    copied = copy_run(
        arguments.run_dir, arguments.tracker, out=arguments.out, config_file=arguments.config
    )
    if arguments.json:
        print(json.dumps(copied._asdict()))
        return
    print(
        f"{copied.lines} lines of {arguments.run_dir}, steps {copied.first_step} to "
        f"{copied.last_step}, in {copied.folder}"
    )
    print(_to_look(copied.tracker, copied.folder))


def _to_look(tracker: str, folder: str) -> str:
    """Command that shows a copy."""
    return {
        "tensorboard": f"look at it with: tensorboard --logdir {folder}",
        "wandb": f"send it with: wandb sync {folder}/wandb/offline-run-*",
        "mlflow": f"look at it with: mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db",
    }.get(tracker, "")
