"""Mistakes that users make, and the messages that keep them from making them twice.

Each row is a command line, and parts that the message must have: where, what was given, what is
allowed or what to try. All of them end with exit code 2, without a traceback, on stderr alone.
`TINY` stands for the shipped configuration of cdrmix-core-tiny.
"""

from __future__ import annotations

import shlex

import pytest

from cdrmix.cli import main
from tests.harness import ROOT

TINY = ROOT / "model_configs" / "cdrmix-core-tiny.yaml"
H100 = "--nodes 1 --gpus-per-node 2 --gpu h100-80"

PLAN = [
    ("--nodes 1 --gpus-per-node 2 --gpu h100", "--gpu h100: unknown", "Did you mean 'h100-80'?"),
    ("--nodes 0 --gpus-per-node 2 --gpu h100-80", "--nodes 0: allowed is a number from 1"),
    ("--nodes two --gpus-per-node 2 --gpu h100-80", "--nodes", "'two'"),
    ("--nodes 1 --gpus-per-node 2", "give --gpu PRESET", "--gpu-memory-gib"),
    ("--gpus-per-node 2 --gpu h100-80", "required: --nodes"),
    (f"{H100} --set parallel.pipeline=9", "parallel.pipeline = 9", "model.num_layers = 4"),
    (f"{H100} --set training.global_batch_size=7", "= 7 is no multiple", "Try", "= 6 or 8"),
    (f"{H100} --set training.micro_batch_size=3", "= 8 is no multiple of 3 * 2", "= 2 or 4"),
    (
        f"{H100} --set parallel.sequence=2 --set training.sequence_length=255",
        "parallel.sequence = 2 does not divide training.sequence_length = 255",
    ),
    (
        "--nodes 1 --gpus-per-node 3 --gpu h100-80 --set parallel.tensor=3",
        "parallel.tensor = 3 does not divide model.num_heads = 4",
        "Try parallel.tensor = 2 or 4",
    ),
    (
        "--nodes 1 --gpus-per-node 3 --gpu h100-80 --set parallel.expert=3",
        "parallel.expert = 3 does not divide model.moe.num_experts = 8",
    ),
]

# Of `cdrmix config`, which reads a configuration as every verb does.
CONFIG = [
    ("--set training.lr=1", "unknown key", "Did you mean 'training.learning_rate'?"),
    ("--set training.batch_size=8", "unknown key", "'training.global_batch_size'?"),
    ("--set model.n_layer=8", "unknown key", "'model.num_layers'?"),
    ("--set checkpoint.every_step=10", "unknown key", "Did you mean 'every_steps'?"),
    ("--set optimiser.lr=1", "optimiser: unknown key"),
    ("--set training.learning_rate=fast", "given 'fast', allowed is a number above 0"),
    ("--set training.learning_rate=-1", "given -1, allowed is a number above 0"),
    ("--set training.precision=fp8", "given 'fp8', allowed is one of bf16, fp16, fp32"),
    ("--set training.max_steps=0", "given 0, allowed is a whole number from 1"),
    ("--set training.max_steps=1.5", "given 1.5", "whole number"),
    ("--set training.warmup_steps=-1", "given -1, allowed is a whole number from 0"),
    ("--set training.min_learning_rate=1", "min_learning_rate = 1.0 is above learning_rate"),
    ("--set training.max_steps=null", "give max_steps or total_tokens"),
    ("--set model.num_heads=5", "hidden_size / num_heads = 128 / 5", "Try num_heads = 4"),
    ("--set model.moe.top_k=9", "top_k = 9 is more than num_experts = 8"),
    ("--set model.transformer_fraction=1.5", "given 1.5, allowed is a number from 0"),
    ("--set model.vocab_size=abc", "given 'abc', allowed is a whole number from 256"),
    ("--set parallel=2", "given 2, allowed is a section with the keys data, tensor"),
    ("--set training", "not an override. Give PATH=VALUE"),
    ("--set training.seed", "not an override. Give PATH=VALUE"),
    ("--set =3", "not an override. Give PATH=VALUE"),
    ("--set training.seed.value=3", "training.seed: given a section, allowed is a whole"),
    ("--set 'data.mixture={temperature:2}'", "Put a blank behind the colon: {temperature: 2}"),
    ("--set 'data.mixture=[1,'", "data.mixture", "expected"),
    ("--set training.stage=c", "given 'c', allowed is one of"),
    ("--set evaluation.every_steps=often", "given 'often'", "whole number"),
]

OTHERS = [
    ("config", "give --config FILE or --schema or --reference or --explain KEY"),
    ("config --schema --reference", "give --config FILE or --schema or --reference"),
    ("config --explain training.lr", "Did you mean training.learning_rate?"),
    ("config --explain warmup", "no such key", "training.warmup_steps"),
    ("config --config cdrmix-core-2b.yaml", "no such file", "Shipped in", "cdrmix-core-1b"),
    ("config --config model_configs", "model_configs: cannot be read: Is a directory"),
    ("config --config README.md", "README.md: line", "could not find expected"),
    (
        f"plan --config model_configs/cdrmix-core-40b.yaml {H100}",
        "no layout fits",
        "too much",
        "What to try",
    ),
    ("evalute RUN", "invalid choice: 'evalute'", "Did you mean 'evaluate'?"),
    ("traim --config TINY", "invalid choice: 'traim'", "Did you mean"),
    ("data biuld --config R --out O", "invalid choice: 'biuld'", "Did you mean 'build'?"),
    ("data build --config nope.yaml --out O", "nope.yaml: no such file", "standard"),
    ("data build --config TINY --out O", "is the configuration of a model, not a data recipe"),
    ("data build --out O", "required: --config"),
    ("data inspect /nowhere", "/nowhere", "not found"),
    ("data verify docs", "docs/manifest.json: not found"),
    ("evaluate /nowhere", "/nowhere: there is no such folder. Give a run directory"),
    ("evaluate docs --suite reason", "'reason'", "Did you mean 'reasoning'?"),
    ("evaluate docs --max-tokens 0", "given 0, allowed is a number from 1"),
    ("evaluate docs --examples 3", "--examples goes with --suite infill and reasoning"),
    ("generate docs --temperature -1", "given -1, allowed is a number from 0"),
    ("generate docs --memory --seed 3", "--seed and --speculate go without --memory"),
    ("generate docs --speculate --seed 3", "goes without --base and --seed"),
    ("evaluate docs --suite infill --examples 1", "needs --examples 2 or more"),
    ("generate docs --question what", "go with --memory"),
    ("report docs", "docs/metrics.jsonl: not found", "run directory"),
    ("rehearse --config TINY --nodes 1 --gpus-per-node 2 --gpu gtx", "--gpu gtx: unknown preset"),
    ("doctor --hostfile /nowhere", "/nowhere: cannot be read: No such file"),
]


def check(command: str, parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(TINY) if word == "TINY" else word for word in shlex.split(command)]
    try:
        code = main(words)
    except SystemExit as ending:  # of argparse
        code = ending.code
    printed = capsys.readouterr()
    assert code == 2, printed.err
    told = printed.err[printed.err.index("error: ") :]
    for part in parts:
        assert part in told
    assert "Traceback" not in told
    assert printed.out == "" or command.startswith("plan ")  # a page may say why nothing fits


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("row", PLAN, ids=lambda row: row[0][:60])
def test_a_plan_that_cannot_be(row: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    check(f"plan --config TINY {row[0]}", row[1:], capsys)


@pytest.mark.parametrize("row", CONFIG, ids=lambda row: row[0][:60])
def test_a_wrong_value(row: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    check(f"config --config TINY {row[0]}", row[1:], capsys)


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row[0][:60])
def test_a_wrong_command(row: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    check(row[0], row[1:], capsys)
