"""Shards: planned without reading, written with little memory."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Box, Fragment, Span
from cdrmix.config.load import load_config
from cdrmix.config.safetensors_headers import INDEX_FILE
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.errors import StateError
from cdrmix.export import weights
from cdrmix.export.hugging_face import model_config, parameter_shapes
from cdrmix.export.weights import boxes, plain_target, plan_shards, write_weights
from cdrmix.planning.counts import count
from tests.checkpoints import on_ranks, save_checkpoint, whole
from tests.harness import ROOT
from tests.made_run import made_run


def test_tensors_fill_files_in_their_order() -> None:
    sizes = {"a": 4, "b": 4, "c": 3, "d": 30, "e": 1}
    assert plan_shards(sizes, 10) == {
        "model-00001-of-00004.safetensors": ["a", "b"],
        "model-00002-of-00004.safetensors": ["c"],
        "model-00003-of-00004.safetensors": ["d"],
        "model-00004-of-00004.safetensors": ["e"],
    }


@pytest.mark.parametrize("name", ["cdrmix-core-40b", "cdrmix-core-200b"])
def test_a_large_model_is_planned_without_reading(name: str, tmp_path: Path) -> None:
    made_run(tmp_path)
    config = load_config(ROOT / "model_configs" / f"{name}.yaml")
    translated = model_config(config, load_tokenizer(tmp_path), torch.bfloat16)
    shapes = parameter_shapes(translated)
    sizes = {key: 2 * math.prod(shape) for key, shape in shapes.items()}
    assert sum(sizes.values()) == 2 * count(config.model, 1).total_params
    shards = plan_shards(sizes, 5 * 10**9)
    assert [key for keys in shards.values() for key in keys] == list(sizes)
    assert all(len(keys) == 1 or sum(map(sizes.get, keys)) <= 5e9 for keys in shards.values())


@pytest.mark.parametrize("shape", [(), (1,), (100,), (7, 9), (3, 4, 5), (2, 40), (2, 3, 30)])
def test_boxes_follow_one_another(shape: tuple[int, ...]) -> None:
    whole_tensor = torch.arange(math.prod(shape)).reshape(shape)
    parts = []
    for box in boxes(shape, 12):
        assert box.numel <= 12
        ends = [first + size for first, size in zip(box.offset, box.shape, strict=True)]
        cut = tuple(map(slice, box.offset, ends))
        parts.append(whole_tensor[cut].reshape(-1))
    assert torch.equal(torch.cat(parts), whole_tensor.reshape(-1))


def test_fragments_of_any_layout_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns on two ranks, and pieces that end inside a row."""
    monkeypatch.setattr(weights, "_READ_ELEMENTS", 7)
    tensor = torch.randn(9, 10)
    halves = [
        Fragment(
            "w", "param", (9, 10), Span.whole(Box((0, first), (9, 5))), part.reshape(-1).clone()
        )
        for first, part in zip((0, 5), tensor.split(5, dim=1), strict=True)
    ]
    on_ranks(
        2,
        lambda rank: save_checkpoint(tmp_path, 1, [halves[rank]], state={}, rank_state={}, keep=1),
    )
    out = tmp_path / "out"
    out.mkdir()
    with CheckpointFile(tmp_path / "1") as reader:
        targets = {"model.w": plain_target("w", (9, 10), torch.bfloat16)}
        write_weights(out, reader, targets, max_shard_bytes=10**9)
    written = load_file(out / "model-00001-of-00001.safetensors")
    assert torch.equal(written["model.w"], tensor.bfloat16())
    index = json.loads((out / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 180, "total_parameters": 90}


# Prints anonymous memory at the peak of writing, above that before, in MiB. Shards are those given
# by their place, all and the index by default.
_MEASURE = """
import sys, threading, time
from functools import partial
from pathlib import Path
import torch
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.errors import StateError
from cdrmix.export import weights

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024

def watch():
    while not done:
        seen.append(anonymous())
        time.sleep(0.001)

source, out, elements, limit, *places = sys.argv[1:]
out, limit = Path(out), int(limit)
weights._READ_ELEMENTS = int(elements)
done, seen = False, []
with CheckpointFile(Path(source)) as reader:
    targets = {
        f"model.{name}": weights.plain_target(name, reader.shape(name), torch.bfloat16)
        for name in reader.names()
    }
    sizes = {name: target.num_bytes for name, target in targets.items()}
    out.mkdir()
    before = anonymous()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    if places:
        reader.open_files()
        shards = list(weights.plan_shards(sizes, limit).items())
        for file, names in (shards[int(place)] for place in places):
            weights.write_shard(out / file, targets, names, partial(weights.pieces, reader))
    else:
        weights.write_weights(out, reader, targets, max_shard_bytes=limit)
    done = True
    thread.join()
print(max(seen) - before)
"""


def peak(source: Path, out: Path, *, elements: int, limit: int, places: tuple[int, ...] = ()):
    """Peak of a process that writes shards, MiB above what it had before.

    Its allocator gives each piece back when it is freed: what it would keep for later, 14 to 40 MiB
    from one process to the next, is no piece that is held.
    """
    words = [source, out, *map(str, (elements, limit, *places))]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *words],
        cwd=ROOT,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**18)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
def test_writing_takes_little_memory(tmp_path: Path) -> None:
    """A checkpoint of 192 MiB, in three tensors of 64: pieces of 4 MiB are all that is held."""
    tensors = [whole(name, torch.full((4096, 4096), 1.5)) for name in "abc"]
    save_checkpoint(tmp_path, 1, tensors, state={}, rank_state={}, keep=1)

    def peak_of(elements: int) -> float:
        out = tmp_path / f"out-{elements}"
        taken = peak(tmp_path / "1", out, elements=elements, limit=40 * 2**20)
        assert len(list(out.glob("*.safetensors"))) == 3
        return taken

    assert peak_of(2**20) < 16
    # a control: held whole, one tensor takes 64 MiB and its rounded copy 32
    assert peak_of(2**24) > 64


_FILES = 64  # of 7 GB: torch maps no file that is larger than the memory of the machine
_CUTS = 8


def sparse_checkpoint(
    folder: Path, shapes: dict[str, tuple[int, ...]], *, files: int = _FILES
) -> int:
    """A checkpoint of files that are holes, each tensor in flat pieces of several; its bytes."""
    folder.mkdir()
    index = {}
    headers: list[dict[str, Any]] = [{} for _ in range(files)]
    ends = [0] * files
    for place, (name, shape) in enumerate(shapes.items()):
        numel = math.prod(shape) // _CUTS
        assert numel * _CUTS == math.prod(shape)
        fragments = []
        for cut in range(_CUTS):
            rank = (place * _CUTS + cut) % files
            key = f"param/{name}/{cut}"
            offsets = [ends[rank], ends[rank] + 4 * numel]
            headers[rank][key] = {"dtype": "F32", "shape": [numel], "data_offsets": offsets}
            ends[rank] = offsets[1]
            fragments.append(
                {
                    "file": f"rank-{rank:05d}.safetensors",
                    "key": key,
                    "block_offset": [0] * len(shape),
                    "block_shape": list(shape),
                    "start": cut * numel,
                    "numel": numel,
                }
            )
        index[name] = {"param": {"shape": list(shape), "dtype": "float32", "fragments": fragments}}
    (folder / "index.json").write_text(json.dumps({"tensors": index}))
    (folder / "state.json").write_text("{}")
    for rank, header in enumerate(headers):
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"rank-{rank:05d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + ends[rank])
    return sum(ends)


@pytest.mark.slow
def test_shards_of_a_large_model_take_as_little(tmp_path: Path) -> None:
    """114 billion parameters, of which the first and the last file are written: 0.6 of 227 GB."""
    made_run(tmp_path / "run")
    config = load_config(ROOT / "model_configs" / "cdrmix-core-40b.yaml")
    shapes = parameter_shapes(
        model_config(config, load_tokenizer(tmp_path / "run"), torch.bfloat16)
    )
    source = tmp_path / "sparse"
    assert sparse_checkpoint(source, shapes) == 4 * count(config.model, 1).total_params
    used = sum(512 * path.stat().st_blocks for path in source.iterdir())
    assert used < 20 * 2**20, "holes"
    out = tmp_path / "out"
    taken = peak(source, out, elements=2**20, limit=650 * 10**6, places=(0, -1))
    first, last = sorted(out.iterdir())
    with safe_open(first, framework="pt") as file:
        assert file.get_slice("model.embedding.weight").get_shape() == [50272, 6144]
    with safe_open(last, framework="pt") as file:
        assert "model.final_norm.weight" in file.keys()  # noqa: SIM118
    assert first.stat().st_size > 600 * 10**6
    assert taken < 64, "pieces of 4 MiB, where the embedding alone has 1178"


def test_a_file_that_is_larger_than_memory_is_refused(tmp_path: Path) -> None:
    """Torch maps it privately and for writing, which counts as memory that may be needed."""
    rows = 2**31 // 4 // _CUTS
    sparse_checkpoint(tmp_path / "sparse", {"w": (rows, _CUTS)}, files=1)
    size = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert size is not None
    before = resource.getrlimit(resource.RLIMIT_AS)
    # Room for 1 GiB more, where the file has 2: a limit of the process, as how much a machine maps
    # is a setting of its kernel.
    resource.setrlimit(resource.RLIMIT_AS, (int(size[1]) * 1024 + 2**30, before[1]))
    try:
        with (
            CheckpointFile(tmp_path / "sparse") as reader,
            pytest.raises(StateError, match="may not be larger than memory and swap together"),
        ):
            reader.open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
