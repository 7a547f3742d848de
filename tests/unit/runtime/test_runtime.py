"""What launchers tell a rank is understood, and an error of one rank is everybody's."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from torch.nn.attention import SDPBackend

from cdrmix import runtime
from cdrmix.errors import ConfigError, DataError
from cdrmix.runtime.environment import allocator_settings, device_index, take_only_device

ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


def mapped(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> dict[str, str]:
    """The environment that a rank goes on with, started with these variables and no others."""
    environment = dict(variables)
    monkeypatch.setattr(os, "environ", environment)
    runtime.map_environment()
    return environment


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},  # torchrun
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"},  # deepspeed
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        },
        {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
        SLURM | {"SLURM_STEP_ID": "0"},
        SLURM | {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "4,3,1"},
        # srun with its own PMI names neither the local rank nor their number there
        SLURM | {"SLURM_STEP_ID": "0", "PMI_RANK": "5", "PMI_SIZE": "8"},
        # the deepspeed launcher inside a step that started one launcher per node
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
        | SLURM
        | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
    ],
)
def test_each_launcher_s_names_are_understood(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped(monkeypatch, variables | ADDRESS)
    assert runtime.environment_rank() == 5
    assert runtime.environment_world_size() == 8
    assert runtime.local_rank() == 1
    assert runtime.local_world_size() == 4


@pytest.mark.parametrize("variables", [{}, SLURM], ids=["shell", "batch script without srun"])
def test_a_process_that_no_launcher_started_is_rank_0_of_1(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = mapped(monkeypatch, variables)
    assert (runtime.environment_rank(), runtime.environment_world_size()) == (0, 1)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "0")


@pytest.mark.parametrize("missing", ADDRESS)
def test_ranks_without_a_place_to_meet_are_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = {name: value for name, value in ADDRESS.items() if name != missing}
    with pytest.raises(ConfigError, match="8 ranks were started without MASTER_ADDR.*export both"):
        mapped(monkeypatch, {"PMI_RANK": "5", "PMI_SIZE": "8"} | address)


def test_ranks_of_srun_meet_on_the_first_host_at_a_port_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = SLURM | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "5"}
    ports = set()
    for attempt in (
        {},
        {"SLURM_STEP_ID": "1"},
        {"SLURM_JOB_ID": "6"},
        {"SLURM_RESTART_COUNT": "1"},
    ):
        environment = mapped(monkeypatch, step | attempt)
        assert environment["MASTER_ADDR"] == "gpu07"
        ports.add(environment["MASTER_PORT"])
    assert len(ports) == 4
    assert all(20_000 <= int(port) < 32_768 for port in ports)


def test_a_rank_that_sees_its_own_device_alone_keeps_its_number_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "3"})
    assert (runtime.local_rank(), device_index()) == (3, 3)
    for _ in range(2):
        take_only_device()
        assert (runtime.local_rank(), device_index()) == (3, 0)
        assert os.environ["LOCAL_RANK"] == "0", "which DeepSpeed reads"


def test_together_gives_the_result_and_raises_the_error() -> None:
    def fail() -> None:
        raise DataError("shard 3 is gone")

    assert runtime.together(lambda: 7) == 7
    assert runtime.first_rank_does(lambda: 7) == 7
    assert runtime.first_answer("chunk", "7") == "7"
    for way in (runtime.together, runtime.first_rank_does):
        with pytest.raises(DataError, match=r"^shard 3 is gone$"):
            way(fail)


def test_segments_of_gpu_memory_grow_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        for given in ("max_split_size_mb:64", ""):
            monkeypatch.setattr(os, "environ", {name: given})
            runtime.expand_segments()
            assert os.environ == {name: given}
    monkeypatch.setattr(os, "environ", {})
    assert allocator_settings() is None
    runtime.expand_segments()
    assert os.environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_settings() == "expandable_segments:True"


def test_every_name_is_found_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("device", "rank"):  # as before their first use
        monkeypatch.delitem(vars(runtime), name, raising=False)
    assert all(callable(getattr(runtime, name)) for name in runtime.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'torch'"):
        _ = runtime.torch  # type: ignore[attr-defined]


@pytest.mark.parametrize("deterministic", [True, False])
def test_cudnns_attention_comes_first_where_a_run_need_not_repeat(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    try:
        runtime.seed_everything(0, deterministic=False)
        first, *_ = torch._C._get_sdp_priority_order()
    finally:
        torch._C._set_sdp_priority_order(before)
    cudnn, flash = (int(each) for each in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION))
    assert first == (flash if deterministic else cudnn)


def test_frozen_objects_are_not_visited_and_garbage_is_still_collected() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    before = Cycle()
    kept = weakref.ref(before)
    with runtime.frozen_objects():
        num_visited = len(gc.get_objects())
        freed = weakref.ref(Cycle())
        del before
        gc.collect()
        assert freed() is None and kept() is not None
    assert len(gc.get_objects()) > 10 * num_visited
    gc.collect()
    assert kept() is None
