"""Arguments and variables on their way to the ranks of other hosts, through the real pdsh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cluster.host_lab import host_lab
from tests.harness import ROOT

HOSTILE = (
    "a b",
    "$(touch ran)",
    "`touch ran`",
    ";touch ran;",
    "\n touch ran\n",
    'it\'s "quoted" \\ $HOME %n %% & | > ran',
    "--resume=never",
    "",
)
# Tells what a rank was given, and which command lines any user of the machine sees meanwhile.
TELL = """
import json, os, pathlib, sys
from cdrmix.cluster.handover import arguments_of
folder = pathlib.Path(arguments_of(sys.argv[1:])[0])
lines = []
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        lines.append((process / "cmdline").read_bytes().decode(errors="replace"))
    except OSError:
        continue
told = {
    "arguments": arguments_of(sys.argv[1:]),
    "variables": dict(os.environ),
    "is_shown": any("hunter2" in line for line in lines),
    "sees_launcher": any("pdsh" in line for line in lines),
}
(folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))
"""
START = """
import json, pathlib, sys
from cdrmix.cluster.hosts import read_hostfile
from cdrmix.cluster.handover import LauncherStart
folder = pathlib.Path(sys.argv[1])
order = json.loads((folder / "order.json").read_text())
hosts = read_hostfile(folder / "hosts")
here = folder / "it's 100%n; touch ran"
here.mkdir()
with LauncherStart(hosts, order["arguments"], ranks_per_host=1, folder=here,
           variables=order["variables"], script=folder / "tell.py") as start:
    start.wait_for_launcher(150)
modes = {path.name: path.stat().st_mode & 0o777 for path in here.iterdir()}
(folder / "modes.json").write_text(json.dumps(modes))
"""


def test_values_reach_other_hosts_as_they_are_and_nobody_else(tmp_path: Path) -> None:
    variables = {f"VALUE_{n}": value for n, value in enumerate(HOSTILE) if "\n" not in value}
    variables |= {"NCCL_TOKEN": "hunter2", "MASTER_PORT": "1"}
    order = {"arguments": [str(tmp_path), *HOSTILE, "hunter2"], "variables": variables}
    (tmp_path / "order.json").write_text(json.dumps(order))
    (tmp_path / "tell.py").write_text(TELL)
    lab_folder = tmp_path / "lab"
    lab_folder.mkdir()
    with host_lab(lab_folder, "cdrmix-a", "cdrmix-b") as lab:
        lab.hostfile(tmp_path / "hosts")
        command = [*lab.command("cdrmix-a"), sys.executable, "-c", START, str(tmp_path)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
        )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        path = tmp_path / f"rank{rank}.json"
        assert path.exists(), done.stdout + done.stderr
        told = json.loads(path.read_text())
        assert told["arguments"][1 : len(HOSTILE) + 1] == [*HOSTILE]
        assert told["arguments"][-1] == "--local_rank=0"
        wanted = {n: value for n, value in variables.items() if n != "MASTER_PORT"}
        assert {n: told["variables"].get(n) for n in wanted} == wanted
        assert told["variables"]["MASTER_PORT"] != "1", "the launcher's own"
        assert told["sees_launcher"]
        assert not told["is_shown"], "a value stands in a command line"
    assert not list(ROOT.glob("ran")) and not list(tmp_path.rglob("ran"))
    modes = json.loads((tmp_path / "modes.json").read_text())
    assert modes["ranks.json"] == modes["deepspeed_env"] == 0o600
