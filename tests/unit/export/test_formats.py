"""Formats of other programs: the same outputs from them, values read back, and refusals."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from cdrmix.data.tokenizer import SPECIAL_TOKENS, load_tokenizer
from cdrmix.errors import StateError
from cdrmix.export import formats, weights
from cdrmix.export.exported_run import export_run
from cdrmix.export.gguf_file import check_tokenizer, vocabulary_of
from cdrmix.export.manifest import verify_export
from cdrmix.models.backbone import Backbone
from tests.made_run import made_run
from tests.unit.export.rwkv7_reader import logits_of

DENSE_RWKV = (
    "model.transformer_fraction=0",
    "model.moe=null",
    "model.ffn_hidden_size=96",
)
TOKENS = [0, *(17 * i % 300 + 10 for i in range(40))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Backbone]:
    run_dir = tmp_path_factory.mktemp("dense") / "run"
    return run_dir, made_run(run_dir, *DENSE_RWKV)


@pytest.fixture(scope="module")
def folders(run: tuple[Path, Backbone], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for name in ("fla", "gguf"):
        export_run(run[0], root / name, format=name)
    return root


def ours(model: Backbone, tokens: list[int] = TOKENS) -> Tensor:
    with torch.no_grad():
        return model.logits(model(torch.tensor([tokens])).hidden)[0]


def read_fla(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return config, tensors


def logits_of_fla(folder: Path, **other: float) -> Tensor:
    config, tensors = read_fla(folder)
    assert (config["norm_first"], config["norm_bias"], config["fuse_norm"]) == (True, True, False)
    assert not config["tie_word_embeddings"]
    return logits_of(
        tensors,
        TOKENS,
        head_dim=config["head_dim"],
        norm_eps=other.get("norm_eps", config["norm_eps"]),
        group_norm_eps=other.get("group_norm_eps", config["head_dim"] * config["norm_eps"]),
    )


def test_a_reader_with_layer_norms_computes_our_logits(
    run: tuple[Path, Backbone], folders: Path
) -> None:
    theirs = logits_of_fla(folders / "fla")
    expected = ours(run[1])
    assert expected.std() > 0.1
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-5)
    # controls: an eps of ours, or one ten times as large, would be seen
    for other in ({"group_norm_eps": 32e-5}, {"norm_eps": 1e-5}):
        assert (logits_of_fla(folders / "fla", **other) - expected).abs().max() > 3e-5, other


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("model.layers.0.pre_norm.weight", 1.001),
        ("model.layers.1.attn.r_k", 1.01),
        ("model.layers.2.attn.r_proj.weight", 1.01),
        ("model.layers.3.attn.v_lora.lora.2.bias", 1.1),
    ],
)
def test_a_changed_tensor_changes_the_logits(
    name: str, factor: float, run: tuple[Path, Backbone], folders: Path
) -> None:
    config, tensors = read_fla(folders / "fla")
    eps = config["norm_eps"]
    sizes = {"head_dim": config["head_dim"], "norm_eps": eps}
    sizes["group_norm_eps"] = config["head_dim"] * eps
    tensors[name] = tensors[name] * factor
    assert (logits_of(tensors, TOKENS, **sizes) - ours(run[1])).abs().max() > 1e-5


def test_the_names_and_shapes_are_those_of_its_modules(
    run: tuple[Path, Backbone], folders: Path
) -> None:
    """The list of flash-linear-attention's RWKV7ForCausalLM of these sizes, with its biases."""
    config, tensors = read_fla(folders / "fla")
    wide, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_heads"]
    assert (wide, heads * config["head_dim"]) == (2 * run[1].config.hidden_size, wide)
    ranks = {letter: config[f"{letter}_low_rank_dim"] for letter in ("a", "v")}
    ranks |= {"w": config["decay_low_rank_dim"], "g": config["gate_low_rank_dim"]}
    expected = {"model.embeddings.weight": (config["vocab_size"], wide)}
    expected |= {"lm_head.weight": (config["vocab_size"], wide)}
    norms = ["model.norm", "model.layers.0.pre_norm"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norms += [f"{layer}.attn_norm", f"{layer}.ffn_norm", f"{layer}.attn.g_norm"]
        expected |= {f"{layer}.attn.x_{mix}": (1, 1, wide) for mix in "rwkvag"}
        expected |= {f"{layer}.attn.{name}": (wide,) for name in ("k_k", "k_a")}
        expected |= {f"{layer}.attn.r_k": (heads, wide // heads), f"{layer}.ffn.x_k": (wide,)}
        expected |= {f"{layer}.attn.{name}_proj.weight": (wide, wide) for name in "rkvo"}
        expected |= {f"{layer}.ffn.key.weight": (inner, wide)}
        expected |= {f"{layer}.ffn.value.weight": (wide, inner)}
        for letter in "wavg" if i else "wag":
            lora = f"{layer}.attn.{letter}_lora.lora"
            expected |= {f"{lora}.0.weight": (ranks[letter], wide)}
            expected |= {f"{lora}.2.weight": (wide, ranks[letter])}
            if letter != "g":
                expected |= {f"{lora}.2.bias": (wide,)}
    expected |= {f"{norm}.{kind}": (wide,) for norm in norms for kind in ("weight", "bias")}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected


def test_weights_of_bfloat16_are_those_of_training(tmp_path: Path) -> None:
    """Rounded once; what is multiplied afterwards is in float32."""
    model = made_run(tmp_path / "run", *DENSE_RWKV, "training.precision=bf16")
    export_run(tmp_path / "run", tmp_path / "fla", format="fla")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    theirs = logits_of_fla(tmp_path / "fla")
    torch.testing.assert_close(theirs, ours(model), rtol=0, atol=1e-5)
    _, tensors = read_fla(tmp_path / "fla")
    kinds = {name.split(".attn.")[-1] for name in tensors if tensors[name].dtype == torch.float32}
    assert kinds == {"r_k", "r_proj.weight"}
    assert tensors["model.embeddings.weight"].dtype == torch.bfloat16


def test_small_pieces_and_shards_change_nothing(
    run: tuple[Path, Backbone], folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_READ_ELEMENTS", 700)
    export_run(run[0], tmp_path / "fla", format="fla", max_shard_bytes=200_000)
    assert len(list((tmp_path / "fla").glob("*.safetensors"))) > 3
    _, one = read_fla(folders / "fla")
    _, many = read_fla(tmp_path / "fla")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    export_run(run[0], tmp_path / "gguf", format="gguf")
    same = [(root / "gguf" / "model.gguf").read_bytes() for root in (folders, tmp_path)]
    assert same[0] == same[1], "and no file holds a date"


# The file's names by those of flash-linear-attention, written out beside llama.cpp's list.
_GGUF_NAMES = {
    "token_embd.weight": "model.embeddings.weight",
    "token_embd_norm": "model.layers.0.pre_norm",
    "output_norm": "model.norm",
    "output.weight": "lm_head.weight",
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "time_mix_k_k.weight": "attn.k_k",
    "time_mix_k_a.weight": "attn.k_a",
    "time_mix_r_k.weight": "attn.r_k",
    "time_mix_receptance.weight": "attn.r_proj.weight",
    "time_mix_key.weight": "attn.k_proj.weight",
    "time_mix_value.weight": "attn.v_proj.weight",
    "time_mix_output.weight": "attn.o_proj.weight",
    "time_mix_ln": "attn.g_norm",
    "channel_mix_lerp_k.weight": "ffn.x_k",
    "channel_mix_key.weight": "ffn.key.weight",
    "channel_mix_value.weight": "ffn.value.weight",
}


def read_gguf(path: Path) -> tuple[gguf.GGUFReader, dict[str, Tensor]]:
    """Reader, and tensors by flash-linear-attention's names; the lerps are taken apart."""
    reader = gguf.GGUFReader(path)
    tensors = {}
    for each in reader.tensors:
        shape = tuple(int(size) for size in reversed(each.shape))
        values = np.array(each.data)
        if each.tensor_type == gguf.GGMLQuantizationType.BF16:
            tensor = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).reshape(shape)
        else:
            tensor = torch.from_numpy(values).reshape(shape)
        block = re.fullmatch(r"blk\.(\d+)\.(.*)", each.name)
        inner = block[2] if block else each.name
        prefix = f"model.layers.{block[1]}." if block else ""
        if inner == "time_mix_lerp_fused.weight":
            assert shape[:3] == (6, 1, 1)
            tensors |= {f"{prefix}attn.x_{m}": tensor[i, 0, 0] for i, m in enumerate("rwkvag")}
        elif lora := re.fullmatch(r"time_mix_([wavg])([012])\.weight", inner):
            part = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[lora[2]]
            tensors[f"{prefix}attn.{lora[1]}_lora.lora.{part}"] = tensor
        elif inner in _GGUF_NAMES:
            tensors[prefix + _GGUF_NAMES[inner]] = tensor
        else:
            stem, _, kind = inner.rpartition(".")
            tensors[f"{prefix}{_GGUF_NAMES[stem]}.{kind}"] = tensor
    return reader, tensors


def test_a_gguf_file_holds_the_same_values(run: tuple[Path, Backbone], folders: Path) -> None:
    reader, tensors = read_gguf(folders / "gguf" / "model.gguf")
    config, expected = read_fla(folders / "fla")
    # read and not used, as large as those of the learning rate
    for part in ("0.weight", "2.weight", "2.bias"):
        unused = tensors.pop(f"model.layers.0.attn.v_lora.lora.{part}")
        assert torch.equal(unused, tensors[f"model.layers.0.attn.a_lora.lora.{part}"])
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        if not name.endswith((".r_k", ".r_proj.weight")):
            assert torch.equal(tensor.flatten(), expected[name].flatten()), name
            assert tensor.shape == expected[name].squeeze().shape, name
    logits = logits_of(
        tensors,
        TOKENS,
        head_dim=reader.fields["rwkv7.wkv.head_size"].contents(),
        norm_eps=reader.fields["rwkv7.attention.layer_norm_epsilon"].contents(),
        group_norm_eps=64e-5,
    )
    torch.testing.assert_close(logits, ours(run[1]), rtol=0, atol=1e-5)
    known = {
        gguf.TENSOR_NAMES[each].replace("{bid}.", "")
        for each in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.RWKV7]
    }
    names = {re.sub(r"\.(weight|bias)$", "", each.name) for each in reader.tensors}
    assert {re.sub(r"blk\.\d+\.", "blk.", name) for name in names} == known


def test_a_gguf_file_has_the_keys_of_its_architecture(folders: Path) -> None:
    reader = gguf.GGUFReader(folders / "gguf" / "model.gguf")
    config, _ = read_fla(folders / "fla")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.architecture"] == "rwkv7"
    assert keys["general.file_type"] == gguf.LlamaFileType.ALL_F32
    expected = {
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": 0,
        "wkv.head_size": config["head_dim"],
        "token_shift_count": 2,
        "attention.decay_lora_rank": config["decay_low_rank_dim"],
        "attention.iclr_lora_rank": config["a_low_rank_dim"],
        "attention.value_residual_mix_lora_rank": config["v_low_rank_dim"],
        "attention.gate_lora_rank": config["gate_low_rank_dim"],
    }
    assert {name: keys[f"rwkv7.{name}"] for name in expected} == expected


def test_a_gguf_file_holds_the_vocabulary(run: tuple[Path, Backbone], folders: Path) -> None:
    reader = gguf.GGUFReader(folders / "gguf" / "model.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders / "fla", local_files_only=True)
    assert keys["tokenizer.ggml.model"] == "gpt2"
    tokens, kinds = (keys[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    used = len(tokenizer)
    assert tokens[:used] == tokenizer.convert_ids_to_tokens(range(used))
    assert len(tokens) == len(set(tokens)) == 320
    assert set(kinds[used:]) == {gguf.TokenType.UNUSED}
    special = [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS]
    assert [i for i, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL] == special
    ids = {name: keys[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")}
    trained = load_tokenizer(run[0])
    assert ids == {"bos": trained.eos_id, "eos": trained.eos_id, "padding": trained.pad_id}
    assert keys["tokenizer.ggml.add_bos_token"] is True
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    merged = json.loads((folders / "fla" / "tokenizer.json").read_text())["model"]["merges"]
    assert merges == [tuple(merge) for merge in merged]
    whole = (folders / "fla" / "tokenizer.json").read_text()
    assert keys["tokenizer.huggingface.json"] == whole
    assert keys["tokenizer.ggml.pre"] == "cdrmix", "no pattern of llama.cpp is ours"


def foreign(kind: str) -> str:
    """A tokenizer.json whose special tokens stand beside the vocabulary of its model."""
    if kind == "byte-level BPE":
        tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
        split = pre_tokenizers.Split(tokenizers.Regex(" "), behavior="isolated")
        by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_byte])
    elif kind == "Unigram":
        tokenizer = tokenizers.Tokenizer(models.Unigram([("a", -1.0)], None, byte_fallback=False))
    elif kind == "WordPiece":
        tokenizer = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer.to_str()


def test_tokens_beside_the_vocabulary_are_in_a_gguf_file() -> None:
    text = foreign("byte-level BPE")
    check_tokenizer(text, Path("folder"))
    tokens, kinds = vocabulary_of(text, 6)
    assert tokens == ["a", "b", "ab", "<s>", "<tool>", "[unused 5]"]
    types = gguf.TokenType
    assert kinds == [*[types.NORMAL] * 3, types.CONTROL, types.USER_DEFINED, types.UNUSED]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Unigram", "is a Unigram model"),
        ("WordPiece", "is a WordPiece model"),
        ("BPE", "is a BPE of characters"),
    ],
)
def test_other_tokenizers_have_no_place_in_a_gguf_file(kind: str, reason: str) -> None:
    with pytest.raises(StateError, match=f"tokenizer.json: {reason}.*byte-level BPE alone"):
        check_tokenizer(foreign(kind), Path("folder"))


def test_a_tokenizer_is_refused_before_anything_is_written(
    run: tuple[Path, Backbone], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "tokenizer_text", lambda folder: foreign("Unigram"))
    with pytest.raises(StateError, match="is a Unigram model"):
        export_run(run[0], tmp_path / "out", format="gguf")
    assert not list(tmp_path.iterdir())


def test_matrices_of_a_gguf_file_have_the_type_of_training(tmp_path: Path) -> None:
    made_run(tmp_path / "run", *DENSE_RWKV, "training.precision=bf16", "model.num_heads=1")
    for name in ("gguf", "fla"):
        export_run(tmp_path / "run", tmp_path / name, format=name)
    reader, tensors = read_gguf(tmp_path / "gguf" / "model.gguf")
    _, expected = read_fla(tmp_path / "fla")
    kinds = {each.name.removeprefix("blk.1."): each.tensor_type.name for each in reader.tensors}
    floats = ("output_norm.weight", "attn_norm.bias", "time_mix_lerp_fused.weight")
    assert {kinds[name] for name in (*floats, "time_mix_w1.weight")} == {"F32"}
    # heads of 64 features have the eps of the graph: nothing is multiplied
    matrices = ("output.weight", "time_mix_receptance.weight", "time_mix_a1.weight")
    assert {kinds[name] for name in matrices} == {"BF16"}
    key = "model.layers.2.attn.k_proj.weight"
    assert torch.equal(tensors[key], expected[key])


def test_all_files_are_in_the_manifest(folders: Path) -> None:
    assert verify_export(folders / "fla")[0] == 8
    assert verify_export(folders / "gguf")[0] == 3
    for name in ("fla", "gguf"):
        assert "128 features wide" in (folders / name / "README.md").read_text()


@pytest.mark.parametrize("name", ["fla", "gguf"])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            ("model.transformer_fraction=0",),
            r"and here each feed-forward has \d+ experts \(model.moe\)",
        ),
        (("model.moe=null", "model.ffn_hidden_size=96"), "and here Transformer blocks are 2 of 4"),
        ((), r"are 2 of 4 \(.*\), and each feed-forward has \d+ experts"),
        (
            ("model.moe=null", "model.transformer_fraction=0", "model.ffn_activation=swiglu"),
            "and here model.ffn_activation is swiglu",
        ),
    ],
)
def test_other_models_are_refused_before_anything_is_written(
    name: str, settings: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    made_run(tmp_path / "run", *settings)
    with pytest.raises(StateError, match=f"--format {name} holds dense models .*{reason}"):
        export_run(tmp_path / "run", tmp_path / "out", format=name)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_single_block_is_refused_where_its_reader_divides_by_zero(tmp_path: Path) -> None:
    made_run(tmp_path / "run", *DENSE_RWKV, "model.num_layers=1")
    with pytest.raises(StateError, match="there is one block"):
        export_run(tmp_path / "run", tmp_path / "out", format="fla")
    export_run(tmp_path / "run", tmp_path / "out", format="gguf")


def test_without_the_package_gguf_is_refused(
    run: tuple[Path, Backbone], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(StateError, match=r"pip install 'cdrmix\[gguf\]'"):
        export_run(run[0], tmp_path / "out", format="gguf")
    assert not list(tmp_path.iterdir())


def test_an_average_that_the_run_has_not_is_refused(
    run: tuple[Path, Backbone], tmp_path: Path
) -> None:
    for name in ("hf", "fla", "gguf"):
        with pytest.raises(StateError, match="holds no average of the weights"):
            export_run(run[0], tmp_path / "out", format=name, weights="ema")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            ("model.transformer_fraction=0.25", "model.mixers=[mamba, transformer*3]"),
            "it has no blocks of the type mamba",
        ),
        (("model.ffn_activation=swiglu",), "know no model.ffn_activation = swiglu"),
        (("model.moe.layers=[1]",), "all its feed-forwards are of experts or none is"),
    ],
)
def test_what_its_own_code_does_not_know_is_refused(
    settings: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    made_run(tmp_path / "run", *settings)
    with pytest.raises(StateError, match=f"--format hf writes its own code .*{reason}"):
        export_run(tmp_path / "run", tmp_path / "out", format="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
