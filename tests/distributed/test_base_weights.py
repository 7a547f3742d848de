"""Weights of a Hugging Face folder in engines of any layout, equal to transformers' own reading."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.base_model import base_records, digest_of_base
from cdrmix.config.schema import Config
from cdrmix.errors import DataError
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


def read(root: str, cases: list[Case]) -> list[tuple[dict[Any, Any], str, dict[str, str]]]:
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
            # that of the files, however many ranks read them
            assert digest == digest_of_base(base_records(folders / case.folder))


def of_folders(folders: list[str]) -> list[str]:
    """Digest of this rank's share of all weights of each folder, or the error."""
    from cdrmix.engines.base_model import load_base
    from cdrmix.hf.names import logical_name

    runtime.initialize_distributed()
    found = []
    for folder in folders:
        config, engine = engine_of(Path(folder), Case(""))
        try:
            load_base(config, engine)
        except DataError as error:
            found.append(str(error))
            continue
        held = {each.name: each.values for each in engine_state.fragments(engine, logical_name)}
        found.append(hashlib.sha256(repr(sorted(digests(held).items())).encode()).hexdigest())
    runtime.destroy_distributed()
    return found


def digests_of_two_hosts(folders: list[list[str]]) -> list[str]:
    """Of each two folders, the digest of this rank's one, or the error: ranks on a host each."""
    from cdrmix.engines.base_model import verified_digest

    runtime.initialize_distributed()
    found = []
    with mock.patch.object(socket, "gethostname", return_value=f"host{runtime.rank()}"):
        for pair in folders:
            try:
                found.append(verified_digest(Path(pair[runtime.rank()])))
            except DataError as error:
                found.append(str(error))
    runtime.destroy_distributed()
    return found


def changed(folder: Path, out: Path, change: Mapping[str, torch.Tensor]) -> Path:
    """Copies a folder of one file, with other tensors in it."""
    shutil.copytree(folder, out)
    save_file({**load_file(folder / "model.safetensors"), **change}, out / "model.safetensors")
    return out


def test_swapped_matrices_of_an_expert_are_seen(folders: Path, tmp_path: Path) -> None:
    """A control of the comparisons above: w1 and w3 have the same shape."""
    stored = load_file(folders / "mixtral" / "model.safetensors")
    expert = "model.layers.0.block_sparse_moe.experts.1"
    swap = {f"{expert}.w1.weight": stored[f"{expert}.w3.weight"]}
    swap[f"{expert}.w3.weight"] = stored[f"{expert}.w1.weight"]
    other = changed(folders / "mixtral", tmp_path / "swapped", swap)
    ((ours, swapped),) = run_ranks(of_folders, 1, [str(folders / "mixtral"), str(other)])
    assert ours != swapped


def test_hosts_with_different_weights_are_refused(folders: Path, tmp_path: Path) -> None:
    """Headers and sizes are the same, and each file is of one host as ranks of one share them."""
    base = folders / "mixtral"
    swap = {"lm_head.weight": load_file(base / "model.safetensors")["lm_head.weight"] + 1}
    other = changed(base, tmp_path / "other", swap)
    same = Path(shutil.copytree(base, tmp_path / "same"))
    pairs = [[str(base), str(each)] for each in (same, other)]
    by_rank = run_ranks(digests_of_two_hosts, 2, pairs)
    whole = [digest_of_base(base_records(each)) for each in (base, other)]
    for digest, error in by_rank:
        assert digest == whole[0]
        assert "ranks have different weights of the base model" in error
        for rank, theirs in enumerate(whole):
            assert f"digest {theirs[:12]}: rank {rank} on host{rank}" in error


def test_tied_head_of_other_values_is_refused(folders: Path, tmp_path: Path) -> None:
    stored = load_file(folders / "llama-tied" / "model.safetensors")
    head = stored["model.embed_tokens.weight"].clone()
    same = changed(folders / "llama-tied", tmp_path / "same", {"lm_head.weight": head.clone()})
    head[-1, -1] += 1
    other = changed(folders / "llama-tied", tmp_path / "other", {"lm_head.weight": head})
    digest, error = run_ranks(of_folders, 2, [str(same), str(other)])[1]
    assert len(digest) == 64
    assert "ties lm_head.weight to model.embed_tokens.weight, and their values differ" in error


def peaks(folder: str) -> tuple[float, float]:
    """Peak of this rank's anonymous memory in a start with ZeRO-3, and its growth while weights
    are read (MiB)."""
    from cdrmix.engines.base_model import load_base

    runtime.initialize_distributed()
    with sampled_memory() as whole:
        config, engine = engine_of(Path(folder), Case("", "zero3", "bf16"))
        before = anonymous()
        with sampled_memory() as reading:
            load_base(config, engine)
    runtime.destroy_distributed()
    return max(whole), max(reading) - before


def anonymous() -> float:
    """Anonymous memory of this process (MiB)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


@contextlib.contextmanager
def sampled_memory() -> Iterator[list[float]]:
    """Samples `anonymous` every few milliseconds."""
    samples = [anonymous()]
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(0.003):
            samples.append(anonymous())

    thread = threading.Thread(target=sample)
    thread.start()
    yield samples
    is_over.set()
    thread.join()
    samples.append(anonymous())


def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "large",
        "mixtral",
        dtype="bfloat16",
        max_shard_size="20MB",
        hidden_size=512,
        intermediate_size=1536,
        num_local_experts=12,
    )
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20
    assert size > 100
    (first, first_reads), (second, second_reads) = run_ranks(peaks, 2, str(folder))
    assert first <= 1.1 * second
    # a rank's share of the largest parameter, and nothing that grows with the model
    assert max(first_reads, second_reads) < size / 2, (first_reads, second_reads)
