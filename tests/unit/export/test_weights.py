"""Shards: planned without reading, written with little memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Box, Fragment, Span
from cdrmix.config.load import load_config
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.export import weights
from cdrmix.export.hugging_face import model_config, parameter_shapes
from cdrmix.export.weights import INDEX_FILE, boxes, plan_shards, write_weights
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
        write_weights(out, reader, {"model.w": "w"}, dtype=torch.bfloat16, max_shard_bytes=10**9)
    written = load_file(out / "model-00001-of-00001.safetensors")
    assert torch.equal(written["model.w"], tensor.bfloat16())
    index = json.loads((out / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 180, "total_parameters": 90}


# Prints anonymous memory at the peak of writing, above that before, in MiB.
_MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.export import weights

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024

def watch():
    while not done:
        seen.append(anonymous())
        time.sleep(0.001)

source, out, elements = sys.argv[1:]
weights._READ_ELEMENTS = int(elements)
done, seen = False, []
with CheckpointFile(Path(source)) as reader:
    names = {f"model.{name}": name for name in reader.names()}
    arguments = {"dtype": torch.bfloat16, "max_shard_bytes": 40 * 2**20}
    Path(out).mkdir()
    before = anonymous()
    thread = threading.Thread(target=watch)
    thread.start()
    weights.write_weights(Path(out), reader, names, **arguments)
    done = True
    thread.join()
print(max(seen) - before)
"""


@pytest.mark.slow
def test_writing_takes_little_memory(tmp_path: Path) -> None:
    """A checkpoint of 192 MiB, in three tensors of 64: pieces of 4 MiB are all that is held."""
    tensors = [whole(name, torch.full((4096, 4096), 1.5)) for name in "abc"]
    save_checkpoint(tmp_path, 1, tensors, state={}, rank_state={}, keep=1)

    def peak(elements: int) -> float:
        out = tmp_path / f"out-{elements}"
        command = [sys.executable, "-c", _MEASURE, tmp_path / "1", out, str(elements)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert len(list(out.glob("*.safetensors"))) == 3
        return float(done.stdout)

    assert peak(2**20) < 40
    # a control: held whole, one tensor takes 64 MiB and its rounded copy 32
    assert peak(2**24) > 64
