"""Weights of a Hugging Face folder in engines of any layout, equal to transformers' own reading."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.config.schema import Config
from cdrmix.planning.cluster import processes
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import choose
from tests.harness import run_ranks
from tests.hf_models import make_folder


class Case(NamedTuple):
    """A folder, by name, in one layout."""

    folder: str
    profile: str = "zero2"
    precision: str = "fp32"


# Number of ranks -> cases, which share these ranks.
CASES = {
    1: [Case("llama", "zero1"), Case("mixtral-shards", "zero3")],
    2: [
        *(Case(folder, "zero3") for folder in ("llama", "llama-tied", "mixtral", "nemotron_h")),
        *(Case(folder) for folder in ("llama-tied", "mixtral-bf16", "nemotron_h")),
        Case("mixtral-shards", "zero1"),
        Case("mixtral-bf16", "zero3", "bf16"),
        Case("nemotron_h", "zero2", "bf16"),
    ],
    4: [Case("mixtral", "zero3"), Case("llama-tied-bf16", "zero2", "bf16")],
}
MADE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {},
    "llama-tied-bf16": {"dtype": "bfloat16"},
    "mixtral": {},
    "mixtral-shards": {"max_shard_size": "40KB"},
    "mixtral-bf16": {"dtype": "bfloat16"},
    "nemotron_h": {},
}


def made(root: Path, name: str) -> Path:
    """Makes a folder by its name in MADE."""
    family = name.removesuffix("-bf16").removesuffix("-shards")
    return make_folder(root / name, family, **MADE[name])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all folders of MADE."""
    root = tmp_path_factory.mktemp("models")
    for name in MADE:
        made(root, name)
    return root


def configured(folder: Path, precision: str) -> Config:
    training = {
        "max_steps": 1,
        "global_batch_size": 4,
        "sequence_length": 16,
        "learning_rate": 1e-3,
        "min_learning_rate": 1e-4,
        "warmup_steps": 0,
        "precision": precision,
    }
    model = {"kind": "hf", "path": str(folder)}
    return Config(name="base", model=model, training=training, data={"path": "none"})


def planned(config: Config, profile: str) -> Plan:
    settings = read_profile(profile_path(profile))
    if profile == "zero3":  # small parameters partitioned as well
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(settings))
        file.flush()
        return choose(config, processes(runtime.world_size()), profile=file.name)


def engine_of(folder: Path, case: Case) -> tuple[Config, Any]:
    """This rank's engine without weights."""
    from cdrmix.engines.loop import start_engine
    from cdrmix.parallel.apply import build_model
    from cdrmix.parallel.topology import make_topology

    config = configured(folder, case.precision)
    plan = planned(config, case.profile)
    topology = make_topology(plan.degrees)
    return config, start_engine(build_model(config, plan, topology), config, plan, topology)


def read(root: str, cases: list[Case]) -> list[tuple[dict[str, Any], str, dict[str, str]]]:
    """Of each case: this rank's fragments of the masters, digest of the base, and digests of the
    weights in use."""
    from cdrmix.engines.base_model import load_base
    from cdrmix.hf.names import logical_name

    runtime.initialize_distributed()
    found = []
    for case in cases:
        config, engine = engine_of(Path(root) / case.folder, case)
        record = load_base(config, engine)
        held = {
            (each.name, each.span.start): each.values.clone()
            for each in engine_state.fragments(engine, logical_name)
        }
        zero = runtime.import_deepspeed().zero
        in_use = {}
        for name, values in engine.module.named_parameters():
            with zero.GatheredParameters([values], enabled=case.profile == "zero3"):
                in_use[logical_name(name)] = of(values)
        found.append((held, record["digest"], in_use))
    runtime.destroy_distributed()
    return found


def of(values: torch.Tensor) -> str:
    """sha256 of the values of a tensor, as float32."""
    return hashlib.sha256(values.detach().float().contiguous().numpy().tobytes()).hexdigest()


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: of(values) for name, values in tensors.items()}


def expected_of(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers as transformers reads them, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    saved = model.state_dict()
    buffers = {name: values for name, values in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


@pytest.mark.parametrize("world_size", CASES)
def test_weights_are_those_of_transformers(folders: Path, world_size: int) -> None:
    cases = CASES[world_size]
    by_rank = run_ranks(read, world_size, str(folders), cases)
    for case, *found in zip(cases, *by_rank, strict=True):
        expected = expected_of(folders / case.folder)
        whole: dict[str, dict[int, torch.Tensor]] = {}
        for fragments, *_ in found:
            for (name, start), values in fragments.items():
                whole.setdefault(name, {})[start] = values
        held = {
            name: torch.cat([parts[at] for at in sorted(parts)]) for name, parts in whole.items()
        }
        assert digests(held) == digests(expected), case
        dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
        parameters = {name for name in expected if "e_score_correction" not in name}
        rounded = {name: expected[name].to(dtype) for name in parameters}
        for _, digest, in_use in found:
            assert in_use == digests(rounded), case
            assert digest == found[0][1]
    # a digest is that of the files, however many ranks read them
    assert len({found[0][1] for found in by_rank[:1]}) == 1
