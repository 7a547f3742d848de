"""Full training or adapters of a Hugging Face model: plans, advice, and room on a host."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdrmix import cli
from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning.cluster import make_cluster, processes
from cdrmix.planning.comparison import check_fits, compare, plan_text
from cdrmix.planning.fine_tuning import check_host, warnings_of
from cdrmix.planning.layout import Degrees
from cdrmix.planning.profile import all_plans, check_legal, choose
from cdrmix.planning.shrink import rehearsals
from cdrmix.sessions import launch_plan
from tests.unit.planning.test_folder_model import only_config, write_sparse

EIGHT_BILLION = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def make_config(folder: Path, *, lora: dict[str, Any] | None = None, **training: Any) -> Config:
    return Config.model_validate(
        {
            "name": "tuned",
            "model": {"kind": "hf", "path": str(folder), "lora": lora},
            "data": {"path": "none"},
            "training": {
                "max_steps": 100,
                "sequence_length": 4096,
                "global_batch_size": 64,
                "precision": "bf16",
                "learning_rate": 1e-5,
                "min_learning_rate": 1e-6,
                "warmup_steps": 10,
                **training,
            },
        }
    )


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """An 8B llama whose weights are a hole in a file."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(EIGHT_BILLION))
    write_sparse(folder)
    return folder


def test_only_data_ranks_are_searched_and_zero3_with_experts_too(tmp_path: Path) -> None:
    config = make_config(only_config(tmp_path, "mixtral"))
    plans = all_plans(config, make_cluster(nodes=2, gpus_per_node=4, gpu="a100-80"))
    assert {plan.degrees for plan in plans} == {Degrees(data=8)}
    assert {plan.zero_stage for plan in plans} == {1, 2, 3}
    assert any(plan.offloads_parameters for plan in plans)
    assert not any(plan.missing for plan in plans)
    for profile in ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"):
        check_legal(config, world_size=4, profile=profile, device="cpu")


def test_documents_that_see_each_other_by_default_are_told(tmp_path: Path) -> None:
    config = make_config(only_config(tmp_path, "llama"))
    (told,) = choose(config, make_cluster(nodes=1, gpus_per_node=1, gpu="a100-80")).warnings
    assert "data.segment_documents is false" in told and "\n" not in told
    for given in (True, False):
        data = {"path": "none", "segment_documents": given}
        values = config.model_dump(exclude_unset=True) | {"data": data}
        assert not warnings_of(Config.model_validate(values))


def test_experts_of_a_layer_are_gathered_at_once(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 32_768, "num_local_experts": 8}
    config = make_config(only_config(tmp_path, "mixtral", **sizes))
    cluster = make_cluster(nodes=1, gpus_per_node=8, gpu="h100-80")
    buffers = choose(config, cluster, profile="zero3").estimates()[0].buffers
    experts = 8 * 3 * 32_768 * 1024  # of one layer
    assert buffers["gathered_weights"] == 2 * (experts + 500_000_000 + 50_000_000)


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "sequence", "expert"])
def test_other_degrees_are_refused_with_their_reason(axis: str, tmp_path: Path) -> None:
    config = make_config(only_config(tmp_path, "mixtral"))
    split = config.model_copy(update={"parallel": type(config.parallel).model_validate({axis: 2})})
    with pytest.raises(PlanError, match=rf"parallel\.{axis} = 2 with model\.kind = hf: .* as "):
        check_legal(split, world_size=4)
    with pytest.raises(PlanError, match=rf"parallel\.{axis} = 2 with model\.kind = hf"):
        choose(split, processes(4))


def test_a_rehearsal_is_refused(tmp_path: Path) -> None:
    config = make_config(only_config(tmp_path, "llama"))
    with pytest.raises(PlanError, match="only RWKX-V is made smaller for a rehearsal"):
        rehearsals(config, choose(config, processes(1)))


def test_spans_are_refused(tmp_path: Path) -> None:
    config = make_config(
        only_config(tmp_path, "llama"),
        sequence_checkpoint_tokens=512,
        activation_checkpointing="spans",
    )
    with pytest.raises(PlanError, match=r"blocks of transformers are recomputed whole"):
        check_legal(config, world_size=1)


def test_a_plan_says_what_is_trained(large: Path) -> None:
    cluster = make_cluster(nodes=1, gpus_per_node=8, gpu="h100-80")
    full = plan_text(compare(make_config(large), cluster))
    assert "training full: all 8.03B parameters; weights, gradients, masters" in full
    assert "expert 1" not in full
    lora = compare(make_config(large, lora={}, max_steps=5_000), cluster)
    assert lora.plan.zero_stage == 1
    page = plan_text(lora)
    assert (
        "LoRA of rank 16: 41.9M of 8.07B parameters (0.52 %), in adapters of q_proj, k_proj,"
        in page
    )
    assert "model.lora with 1.31e9 tokens: beyond 1e9 tokens" in page
    few = plan_text(compare(make_config(large, lora={}), cluster))
    assert "beyond 1e9 tokens" not in few


def test_states_in_bf16_take_16_to_20_bytes_a_parameter(large: Path) -> None:
    plan = choose(
        make_config(large), make_cluster(nodes=1, gpus_per_node=8, gpu="h100-80"), profile="zero3"
    )
    memory = plan.estimates()[0]
    states = 8 * (memory.weights + memory.gradients + memory.optimizer)
    assert 16 <= states / 8.03e9 <= 20


def test_what_does_not_fit_names_adapters_and_more_ranks(large: Path) -> None:
    cluster = make_cluster(nodes=1, gpus_per_node=1, gpu="rtx4090-24", host_memory_gib=24)
    with pytest.raises(PlanError) as caught:
        check_fits(compare(make_config(large), cluster))
    message = str(caught.value)
    assert "too much for a host (all of the 164.5 GiB is offloaded states)" in message
    assert "it would fit with model.lora = {}, adapters of rank 16 beside frozen" in message
    assert "it would fit on 8 such nodes: zero3_offload" in message
    # Adapters take no more of a model that has them.
    assert all(
        "model.lora" not in each
        for each in compare(make_config(large, lora={}), replace(cluster, memory_gib=4.0)).changes
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_states_beyond_a_hosts_memory_are_refused(device: str, large: Path) -> None:
    cluster = processes(2)
    if device == "cuda":
        cluster = make_cluster(nodes=1, gpus_per_node=2, gpu="rtx4090-24")
    config = make_config(large)
    plan = choose(config, cluster, profile="zero3_offload")
    with pytest.raises(PlanError, match=r"take 164\.5 GiB of each host, and 24\.0 GiB are avail"):
        check_host(plan, config, cluster, available_gib=24.0)
    check_host(plan, config, cluster, available_gib=200.0)
    if device == "cuda":  # states on the devices are not the host's
        check_host(choose(config, cluster, profile="zero3"), config, cluster, available_gib=24.0)


def test_a_start_is_refused_within_seconds(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(launch_plan, "available_memory_gib", lambda: 24.0)
    path = tmp_path / "run.yaml"
    path.write_text(make_config(large).model_copy().model_dump_json(exclude_unset=True))
    settings = ["--config", str(path), "--set", "data.path=https://data.invalid/tokens"]
    on_cpu = ["--gpu", "cpu", "--gpu-memory-gib", "24"]
    for words in (
        ["train", *settings, "--run-dir", str(tmp_path / "run")],
        ["plan", *settings, "--nodes", "1", "--gpus-per-node", "1", *on_cpu],
    ):
        started = time.monotonic()
        assert cli.main(words) == 2
        assert time.monotonic() - started < 5
        assert "model.lora = {}" in capsys.readouterr().err
