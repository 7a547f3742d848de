"""What of its layout a run leaves open: as `cdrmix plan` says for the same devices."""

import pytest

from cdrmix import runtime
from cdrmix.config.load import load_config
from cdrmix.planning.cluster import make_cluster
from cdrmix.planning.comparison import compare
from cdrmix.sessions.session import choose_here
from tests.conftest import TINY
from tests.harness import run_ranks


def laid_out(overrides: list[str], profile: str | None = None) -> tuple[dict, float]:
    runtime.initialize_distributed()
    plan = choose_here(load_config(TINY, overrides), profile=profile)
    memory = runtime.device_memory_gib()
    runtime.destroy_distributed()
    return plan.to_json(), memory


# by size alone it would take as many samples at once as the batch has; they do not fit
LARGE = ["training.global_batch_size=4096", "training.sequence_length=2048"]


@pytest.mark.parametrize("given", [[], ["parallel.expert=2"], ["parallel.tensor=2"]], ids=str)
def test_what_is_left_open_is_laid_out_as_the_plan_of_these_devices(given: list[str]) -> None:
    (found, memory), other = run_ranks(laid_out, 2, [*LARGE, *given])
    assert other == (found, memory)
    cluster = make_cluster(nodes=1, gpus_per_node=2, gpu="cpu", gpu_memory_gib=memory)
    expected = compare(load_config(TINY, [*LARGE, *given]), cluster).to_json()
    for key in ("profile", "degrees", "micro_batch_size", "gradient_accumulation_steps"):
        assert found[key] == expected[key], key
    for path in given:
        axis, degree = path.removeprefix("parallel.").split("=")
        assert found["degrees"][axis] == int(degree)
    assert found["memory_per_rank_bytes"]["total"] <= 0.9 * memory * 2**30
    assert not found["warnings"]


def test_what_does_not_fit_is_laid_out_with_a_warning() -> None:
    given = ["parallel.data=1", "training.micro_batch_size=4096", *LARGE]
    ((found, _),) = run_ranks(laid_out, 1, given, "zero1")
    assert found["profile"] == "zero1"
    assert "NOT within the 90 % that a plan may fill" in found["warnings"][-1]
