"""Options of sbatch, as it reads them."""

from __future__ import annotations

import pytest

from cdrmix.cluster.sbatch_options import (
    fewest_devices,
    memory_gib,
    notice_seconds,
    read_options,
    time_limit_seconds,
)
from cdrmix.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5_400),
        ("90:30", 5_430),
        ("36:00:00", 129_600),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("2-12:30:15", 217_815),
        ("0-00:05", 300),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_a_time_limit_is_read_in_every_form_of_sbatch(text: str, seconds: int | None) -> None:
    assert time_limit_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2days", "such as 2-00:00:00"),
        ("36h", "such as 36:00:00"),
        ("90 minutes", "such as 90"),
        ("tomorrow", "such as 24:00:00"),
        ("", "such as 24:00:00"),
        ("1:00\n#SBATCH --uid=0", "give MINUTES"),
        ("1:2:3:4", "give MINUTES"),
        ("24:60:00", "60 minutes, allowed are 0 to 59"),
        ("24:00:60", "60 seconds, allowed are 0 to 59"),
        ("5:75", "75 seconds, allowed are 0 to 59"),
        ("1-24", "24 hours, allowed are 0 to 23"),
        ("1-23:60", "60 minutes, allowed are 0 to 59"),
        ("0", "0 for no limit"),
        ("00:00:00", "0 for no limit"),
        ("-5", "give MINUTES"),
        ("\u0663\u0660", "give MINUTES"),  # digits that sbatch does not read
    ],
)
def test_a_time_limit_that_sbatch_reads_otherwise_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        time_limit_seconds(text)
    assert said in str(error.value)


def test_a_size_of_memory_is_read_as_sbatch_does() -> None:
    assert memory_gib("64G") == 64
    assert memory_gib("2048") == 2, "MiB without a unit"
    assert memory_gib("1T") == 1024
    assert memory_gib("0") == 0
    for text in ("64 G", "1.5G", "lots", "-1G", ""):
        with pytest.raises(ConfigError, match="such as 64G"):
            memory_gib(text)


def test_the_signal_must_be_the_one_that_the_script_waits_for() -> None:
    assert notice_seconds("B:USR1@300") == 300
    assert notice_seconds("B:SIGUSR1") == 60
    for signal in ("USR1@120", "B:TERM@60", "B:USR1@"):
        with pytest.raises(ConfigError, match="signal=B:USR1@SECONDS"):
            notice_seconds(signal)


def test_names_of_options_are_known_without_a_sbatch_here() -> None:
    given = ["job-name=x", "cpus-per-gpu=8", "use-min-nodes", "kill-on-invalid-dep=yes"]
    assert read_options(given, of_site=())[1:] == ([], [])


def test_an_option_that_the_plan_reads_needs_a_value() -> None:
    _, problems, _ = read_options(["time", "mem=", "exclusive"], of_site=())
    assert problems == [
        "--option time: give a value, time=VALUE",
        "--option mem=: give a value, mem=VALUE",
    ]


@pytest.mark.parametrize(
    ("options", "fewest"),
    [
        ({"gres": "gpu:4"}, ("gres=gpu:4", 4)),
        ({"gres": "gpu:a100_3g.20gb:2,gpu:h100:4,lustre:1"}, 6),
        ({"gres": "gpu"}, 1),
        ({"gres": "mps:100"}, None),
        ({"gpus": "h100:16"}, 8),
        ({"gpus": "3"}, 1),
        ({"gpus-per-node": "8", "gres": "gpu:h100:4"}, ("gres=gpu:h100:4", 4)),
        ({"gpus-per-task": "1", "partition": "gpu"}, None),
    ],
)
def test_devices_of_a_node_are_counted(options: dict[str, str | None], fewest: object) -> None:
    found = fewest_devices(options, nodes=2)
    assert fewest in (found, found and found[1])


def test_names_of_options_are_those_of_sbatch() -> None:
    read, problems, warnings = read_options(
        ["partition=a", "partiton=b", "nodes=4", "container-image=x.sqsh", "partition=c", "p=d"],
        of_site=(),
    )
    assert read["partition"] == "c", "the last one"
    assert [each.rpartition(". ")[2] for each in problems[:1]] == ["Did you mean partition?"]
    assert problems[1] == "--option nodes=4: give --nodes"
    assert problems[2].endswith("no long option --p; see sbatch --help")
    assert len(warnings) == 1 and "container-image" in warnings[0], "a plugin's, of pyxis"
    assert read_options(["container-image=x"], of_site=["container-image"])[1:] == ([], [])
    assert "Did you mean" not in read_options(["foobar=1"], of_site=["account"])[1][0]
