"""What a run without degrees is laid out as: what `cdrmix plan` says for the same devices."""

from dataclasses import asdict

from cdrmix import runtime
from cdrmix.config.load import load_config
from cdrmix.config.schema import Config
from cdrmix.engines.devices import choose_here, seen_cluster
from cdrmix.planning.cluster import make_cluster
from cdrmix.planning.plan import plan
from cdrmix.planning.profile import choose
from tests.conftest import TINY
from tests.harness import run_ranks


def laid_out(overrides: list[str]) -> tuple[dict, float]:
    runtime.initialize_distributed()
    config = load_config(TINY, overrides)
    choice = choose_here(config, profile=None)
    memory = seen_cluster().memory_gib
    runtime.destroy_distributed()
    return choice.to_json(), memory


def planned(config: Config, ranks: int, memory_gib: float) -> dict:
    cluster = make_cluster(nodes=1, gpus_per_node=ranks, gpu="cpu", gpu_memory_gib=memory_gib)
    return plan(config, cluster).to_json()


def test_a_run_without_degrees_takes_the_plan_of_its_devices() -> None:
    # by size alone it would take as many samples at once as the batch has; they do not fit
    large = ["training.global_batch_size=4096", "training.sequence_length=2048"]
    (found, memory), other = run_ranks(laid_out, 2, large)
    assert other == (found, memory)
    expected = planned(load_config(TINY, large), 2, memory)
    for key in ("profile", "degrees", "micro_batch_size", "gradient_accumulation_steps"):
        assert found[key] == expected[key], key
    assert any("memory" in reason for reason in found["reasons"])


def test_given_degrees_stand() -> None:
    given = ["parallel.expert=2"]
    (found, _), _ = run_ranks(laid_out, 2, given)
    chosen = choose(load_config(TINY, given), world_size=2)
    assert found["degrees"] == asdict(chosen.degrees)
    assert found["micro_batch_size"] == chosen.micro_batch_size
