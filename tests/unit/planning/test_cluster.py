"""Clusters from presets and sizes."""

from dataclasses import replace

import pytest

from cdrmix.errors import PlanError
from cdrmix.planning.cluster import GIB, PRESETS, make_cluster


def told(**sizes: object) -> str:
    with pytest.raises(PlanError) as caught:
        make_cluster(**({"nodes": 1, "gpus_per_node": 8} | sizes))  # type: ignore[arg-type]
    return str(caught.value)


def test_presets_have_less_memory_than_their_name_says_and_faster_links_inside_a_node() -> None:
    assert list(PRESETS) == [
        "a100-80", "h100-80", "h200-141", "mi300x-192", "mi250x-64", "rtx4090-24", "cpu"
    ]  # fmt: skip
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert preset.intra_bandwidth > preset.inter_bandwidth > 0
        assert preset.peak_flops["bf16"] == preset.peak_flops["fp16"]
        assert preset.memory_bandwidth > preset.intra_bandwidth
        assert 0 < preset.efficiency < 1 and preset.efficiency_source
        if "-" in name:
            gigabytes = int(name.rsplit("-", 1)[1])
            # the name counts 10^9 bytes or GiB; torch sees a little less than either
            assert 0.92 * gigabytes < preset.memory_gib < gigabytes


def test_a_preset_is_taken_as_many_times_as_asked() -> None:
    cluster = make_cluster(nodes=4, gpus_per_node=8, gpu="h100-80")
    assert (cluster.world_size, cluster.device) == (32, "cuda")
    assert cluster.memory_bytes == int(79.1 * GIB)
    assert str(cluster) == "4 x 8 h100-80 (79.1 GiB)"


def test_given_memory_replaces_that_of_the_preset() -> None:
    cluster = make_cluster(nodes=1, gpus_per_node=8, gpu="a100-80", gpu_memory_gib=40)
    assert (cluster.memory_gib, cluster.name) == (40, "a100-80 at 40 GiB")
    assert cluster.peak_flops == PRESETS["a100-80"].peak_flops


@pytest.mark.parametrize(
    ("memory", "like"),
    [(16, "rtx4090-24"), (24, "rtx4090-24"), (40, "a100-80"), (80, "a100-80"), (141, "h200-141"),
     (500, "mi300x-192")],
)  # fmt: skip
def test_memory_alone_takes_the_speed_of_the_smallest_preset_that_has_as_much(
    memory: float, like: str
) -> None:
    cluster = make_cluster(nodes=1, gpus_per_node=1, gpu_memory_gib=memory)
    assert cluster.memory_gib == memory
    assert cluster.intra_bandwidth == PRESETS[like].intra_bandwidth
    assert str(cluster) == f"1 x 1 devices assumed as fast as {like} ({memory} GiB)"


def test_an_unknown_preset_is_told_with_the_nearest() -> None:
    assert told(gpu="H100").startswith(
        "--gpu H100: unknown preset. Did you mean 'h100-80'? Known: a100-80, "
    )


def test_a_preset_without_memory_bandwidth_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = replace(PRESETS["a100-80"], name="new-48", memory_gib=47.5, memory_bandwidth=0)
    monkeypatch.setitem(PRESETS, "new-48", made)
    assert told(gpu="new-48").startswith("--gpu new-48: the preset has no memory bandwidth")
    # also where a memory size chooses it
    assert told(gpu_memory_gib=48).startswith("--gpu new-48: ")


def test_everything_wrong_with_a_cluster_is_in_one_report() -> None:
    lines = told(nodes=0, gpus_per_node=-1, gpu_memory_gib=float("nan")).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "--nodes 0", "--gpus-per-node -1", "--gpu-memory-gib nan"
    ]  # fmt: skip
    assert told().startswith("give --gpu PRESET (a100-80, ")
