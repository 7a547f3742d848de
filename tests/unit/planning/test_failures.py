"""What `cdrmix plan` says of failures: published rates, measured times, and wrong input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdrmix.cli import main
from cdrmix.config.failures import FailuresConfig
from cdrmix.config.load import load_config, shipped
from cdrmix.errors import ConfigError, PlanError
from cdrmix.monitoring.goodput import WALL_TIME, WallTime
from cdrmix.planning.cluster import make_cluster
from cdrmix.planning.failures import Expectation, Measured, expectation, measured_times
from cdrmix.planning.profile import all_plans
from cdrmix.planning.search import search
from tests.unit.planning.conftest import sharing_searches

NODE = ["--nodes", "1", "--gpus-per-node", "8", "--gpu", "h100-80"]
# Llama 3 on 16,384 H100, whose file system takes 2 TB/s.
LLAMA_3 = ["failures.write_bytes_per_second=2e12", "checkpoint.every_steps=null"]


# What no search of layouts reads.
UNREAD = {"failures": True, "checkpoint": {"every_steps", "every_minutes", "auto_range"}}


@pytest.fixture(scope="module", autouse=True)
def _shared_searches() -> Iterator[None]:
    with sharing_searches(UNREAD):
        yield


def test_no_search_reads_what_tests_here_leave_out_of_equal_ones() -> None:
    tiny = shipped("model_configs") / "cdrmix-core-tiny.yaml"
    cluster = make_cluster(nodes=1, gpus_per_node=8, gpu="h100-80")
    plans = search(load_config(tiny), cluster)
    for overrides in (
        [
            *(f"failures.{key}=0.5" for key in FailuresConfig.model_fields),
            "checkpoint.every_minutes=1",
        ],
        ["checkpoint.every_steps=auto", "checkpoint.auto_range=[100, 200]"],
    ):
        assert search(load_config(tiny, overrides), cluster) == plans


def told(
    *overrides: str, name: str = "core-40b", nodes: int = 64, measured: Measured | None = None
) -> Expectation:
    config = load_config(shipped("model_configs") / f"cdrmix-{name}.yaml", overrides)
    cluster = make_cluster(nodes=nodes, gpus_per_node=8, gpu="h100-80")
    return expectation(config, cluster, all_plans(config, cluster)[0], measured)


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    config = shipped("model_configs") / "cdrmix-core-1b.yaml"
    assert main(["plan", "--config", str(config), *flags]) == 0
    return capsys.readouterr().out


def test_at_the_rate_of_llama_3_its_goodput_is_expected() -> None:
    """419 interruptions in 54 days, and more than 90 % of the time effective."""
    large = told("checkpoint.every_minutes=5", *LLAMA_3, name="core-200b", nodes=2048)
    assert 54 * 86_400 * large.times.failures_per_second == pytest.approx(419)
    assert 0.9 < large.shares.productive < large.best.productive < 0.98
    often = told(
        "failures.per_device_hour=2e-4",
        "checkpoint.every_minutes=5",
        *LLAMA_3,
        name="core-200b",
        nodes=2048,
    )
    assert often.best.productive < 0.9


def test_the_state_of_all_ranks_is_saved_once() -> None:
    """12 bytes of each parameter, however it is laid out; tiers of hosts add none."""
    from cdrmix.planning.counts import trained_params

    config = load_config(shipped("model_configs") / "cdrmix-core-40b.yaml")
    memory = "checkpoint.tiers={memory: {every_steps: 10}}"
    for made in (told(), told(nodes=128), told(memory)):
        assert made.checkpoint_bytes == 12 * trained_params(config.model)


def test_keys_come_before_an_earlier_run_and_that_before_assumptions() -> None:
    earlier = Measured(stall_seconds=3.0, write_bytes_per_second=5e9, restart_seconds=None)
    times = told("failures.write_bytes_per_second=1e9", measured=earlier).times
    sizes = told().checkpoint_bytes
    assert times.stall_seconds == 3.0
    assert times.write_seconds == pytest.approx(sizes / 1e9, rel=0.01)
    assert times.restart_seconds == pytest.approx(60 + 2 + 300 + sizes / 1e9)
    # A save for which training waits stalls until it is whole.
    waits = told("checkpoint.background=false").times
    assert waits.stall_seconds == waits.write_seconds > 10


def test_the_advice_is_the_best_interval_and_none_where_it_gains_nothing() -> None:
    seldom = told()
    assert seldom.advice == f"checkpoint.every_minutes = {seldom.best_seconds / 60:.2g}"
    assert told(f"checkpoint.every_minutes={seldom.best_seconds / 60:.2g}").advice is None
    often = told("checkpoint.every_steps=1", "failures.stall_seconds=10")
    assert often.advice is not None
    assert often.advice.endswith(" and checkpoint.every_steps = null")
    # What the run chooses itself needs none, and stays within its bounds.
    chosen = told("checkpoint.every_steps=auto", "checkpoint.auto_range=[100, 200]")
    assert chosen.advice is None
    assert chosen.interval_seconds == pytest.approx(100 * chosen.step_seconds)


def test_saves_by_steps_and_minutes_come_when_the_first_of_them_is_due() -> None:
    step = told().step_seconds
    minutes = told("checkpoint.every_minutes=1")
    assert minutes.interval_seconds == pytest.approx(step * -(-60 // step))
    assert told("checkpoint.every_minutes=100000").interval_seconds == 1_000 * step
    never = told("checkpoint.every_steps=null")
    assert never.interval_seconds == never.run_seconds
    assert never.shares.productive < told().shares.productive


def test_a_tier_of_hosts_saves_work_in_the_share_of_failures_that_leave_it() -> None:
    tier = ["checkpoint.tiers={memory: {every_steps: 20}}"]
    without, with_tier = told().shares, told(*tier).shares
    share = 1 - with_tier.lost / without.lost
    assert share == pytest.approx(0.23, rel=0.05)
    assert told(*tier, "failures.hosts_stay_share=0").shares.lost == pytest.approx(
        without.lost, rel=0.01
    )


def test_times_of_an_earlier_run_are_read_from_its_account(tmp_path: Path) -> None:
    for start_up in (20.0, 10.0):
        account = WallTime()
        account.open(tmp_path, step=0, start_up_seconds=start_up)
        with account.spent("checkpoint_stall"):
            pass
        account.saved(num_bytes=600, seconds=2.0)
        account.saved(num_bytes=600, seconds=4.0)
        account.save()
    values = json.loads((tmp_path / WALL_TIME).read_text())
    values["parts"] |= {"down": 5.0, "checkpoint_stall": 2.0}
    (tmp_path / WALL_TIME).write_text(json.dumps(values))
    assert measured_times(tmp_path) == Measured(0.5, 200.0, 5 + 15)
    # One start and no save, as of a version that did not count them.
    del values["saves"]
    (tmp_path / WALL_TIME).write_text(json.dumps(values | {"starts": 1}))
    assert measured_times(tmp_path) == Measured(None, None, None)


@pytest.mark.parametrize("text", [None, "{}", "[1]", '{"parts": 1, "starts": 2}'])
def test_a_folder_without_an_account_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / WALL_TIME).write_text(text)
    with pytest.raises(PlanError, match=r"--measured .*: wall_time.json cannot be read"):
        measured_times(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        "per_device_hour=-1e-5",
        "per_device_hour=0",
        "stall_seconds=0",
        "write_bytes_per_second=-1",
        "restart_seconds=.inf",
        "hosts_stay_share=1.5",
        "hosts_return_share=0.9",
    ],
)
def test_rates_times_and_shares_that_cannot_be_are_refused(wrong: str) -> None:
    key = wrong.partition("=")[0]
    with pytest.raises(ConfigError, match=key) as refused:
        told(f"failures.{wrong}")
    assert str(refused.value).count("\n") == 0


def test_a_run_that_cannot_get_on_is_refused() -> None:
    with pytest.raises(PlanError, match="gets nowhere"):
        told("failures.per_device_hour=1")


def test_the_page_and_the_json_say_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = printed(capsys, *NODE, "--failure-rate", "0.01", "--explain")
    for line in (
        "failures    one in 12 hours",
        "goodput     9",
        "saving      every",
        "a restart  ",
    ):
        assert f"\n  {line}" in page
    assert " in all, of which " in page and " are lost to failures and saves (" in page
    plan: dict[str, Any] = json.loads(printed(capsys, *NODE, "--json"))
    shares = plan["goodput"]["shares"]
    assert sum(shares.values()) == pytest.approx(1)
    assert plan["goodput"]["days"] == pytest.approx(plan["days"] / shares["productive"])
    assert "Llama 3" in plan["goodput"]["sources"]["rate"]


def test_a_short_run_on_processors_expects_hardly_any_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny = shipped("model_configs") / "cdrmix-core-tiny.yaml"
    assert (
        main(["plan", "--config", str(tiny), *NODE[:2], "--gpus-per-node", "2", "--gpu", "cpu"])
        == 0
    )
    page = capsys.readouterr().out
    assert "failures    hardly any: one in " in page
    assert "goodput" not in page
