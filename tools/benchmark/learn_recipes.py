"""The shipped recipes of Stage B, shrunk: what their own numbers teach around a frozen backbone.

A recipe's backbone can look things up in its window before Stage B begins, and stays as it is. So
does the one here: of the tiny variant's size, it learns that once, and is frozen for all recipes.
Of a recipe all counts are kept: segments of a window and of a text, operations, segments of a
retrieval, rollouts, and all numbers of the policy. All lengths in tokens are divided by `LENGTHS`,
as sentences here are so much shorter than a segment there; steps are divided by `STEPS`, and rates
multiplied by it; and a step has `TEXTS` texts. The policy's steps are divided by `POLICY_STEPS`,
and its rate is that of the tiny variant: what an update moves an agent's preferences by is its rate
times the width of the hidden state.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from cdrmix.config.load import load_config, shipped
from cdrmix.network import free_port
from cdrmix.reasoning.tasks import TRAINED, Wording, interleaved
from cdrmix.stage_b.long_context import load_reader, score_examples, suite
from tools.benchmark.reasoning_table import LENGTH_RATIO, TASKS
from tools.benchmark.timing import report

RECIPES = ("1b", "4b", "40b", "200b")
LENGTHS = 4
STEPS = 20
POLICY_STEPS = 10
TEXTS = 16
NUM_EVALUATED = 32
TINY = "cdrmix-reason-tiny.yaml"
# Documents of statements, questions and answers, from which a backbone that copies the only code of
# its window learns to tell codes apart. At 5e-3 it still copied any of them after 1,400 steps, and
# so it did at this rate from all forms of statements at once, after 1,000: from those that name the
# key first it learned which code belongs to it, and from there the other forms.
LOOK_UP_RATE = 1e-3
LOOK_UP_TOKENS = 512  # of a row
KEY_FIRST_STEPS = 1000
ALL_FORMS_STEPS = 2000
NUM_DOCUMENTS = 60_000
# Counts of statements of a document, one drawn for each.
FEW_CODES = (2, 2, 3)
CODES = (2, 2, 2, 3, 3, 4, 5, 6, 8)
CHAINS = (1, 2, 2, 3, 4)
CODES_SHARE = 0.6  # of the documents; the others are about chains
FILLERS = 0.3  # sentences without meaning per statement
STATEMENT_WEIGHT = 0.02  # of the loss: they are drawn at random, so that nothing tells them
# Windows as a retrieval brings them, to the same backbone.
WINDOW = 256  # tokens
SEGMENT = 16
MOST_FETCHED = 8  # segments of a retrieval, of the recipes with the most
WINDOW_STEPS = 120
BACKBONE_SHARE = 0.2  # of the rate of Stage A
ADAPTER_RATE = 2.5e-3
NO_TABLE = ("evaluation.reasoning_examples=0",)


def shrunk(recipe: str, backbone: Path) -> dict[str, Any]:
    """The configuration of a recipe, shrunk, around the backbone of a run."""
    shapes = shipped("model_configs")
    config = yaml.safe_load((shapes / TINY).read_text())
    stage_b = yaml.safe_load((shapes / f"cdrmix-reason-{recipe}.yaml").read_text())["stage_b"]
    training = stage_b["training"]
    adapters = stage_b["adapters"]
    adapters["half_life_tokens"] = [each // LENGTHS for each in adapters["half_life_tokens"]]
    stage_b["memory"]["max_tokens"] //= LENGTHS
    # A width, which goes with the backbone's.
    stage_b["memory"]["summary_dim"] = config["stage_b"]["memory"]["summary_dim"]
    training["window_tokens"] //= LENGTHS
    training["segment_tokens"] = SEGMENT
    for name in ("memory_steps", "adapter_steps", "joint_steps", "warmup_steps"):
        training[name] //= STEPS
    training["policy_steps"] //= POLICY_STEPS
    for part in ("memory", "adapter"):
        training[f"{part}_learning_rate"] *= STEPS
    training["policy_learning_rate"] = config["stage_b"]["training"]["policy_learning_rate"]
    training["lessons_per_step"] = TEXTS // training["texts_per_lesson"]
    training["tasks"] = list(TASKS)
    config["name"] = f"cdrmix-reason-{recipe}-shrunk"
    config["training"]["stage"] = "b"
    config["evaluation"] = {"reasoning_examples": 0}
    config["stage_b"] = stage_b | {"run": str(backbone)}
    return config


def copying_backbone(place: Path, *, seed: int) -> Path:
    """Trains the backbone, and returns the run of a Stage A that ends with it.

    The tiny variant learns to answer first, from windows with one code or chain; then its backbone
    learns from documents to answer where there are several, and at last to do so from windows of
    256 tokens, in which up to seven segments stand beside the evidence.
    """
    reader = place / "reader"
    without_agent = (f"training.seed={seed}", "stage_b.training.policy_steps=0", *NO_TABLE)
    _train(reader, shipped("model_configs") / TINY, *without_agent)
    looking = place / "looking"
    look_up(looking, build_documents(place, reader, seed=seed), start=reader, seed=seed)
    taught = place / "taught"
    settings = {
        "window_tokens": WINDOW,
        "segment_tokens": SEGMENT,
        "joint_steps": WINDOW_STEPS,
        "backbone_lr_scale": BACKBONE_SHARE,
        "adapter_learning_rate": ADAPTER_RATE,
        "memory_steps": 0,
        "adapter_steps": 0,
        "policy_steps": 0,
    }
    _train(
        taught,
        shipped("model_configs") / TINY,
        *(f"stage_b.training.{key}={value}" for key, value in settings.items()),
        *("training.stage=b", f"stage_b.run={looking}", f"stage_b.memory.top_k={MOST_FETCHED}"),
        *(f"training.seed={seed}", *NO_TABLE),
    )
    return _as_stage_a(taught, place / "backbone", seed=seed)


def build_documents(place: Path, reader: Path, *, seed: int) -> Path:
    """Builds token shards of two domains, key_first and all_forms, with the tokenizer of a run."""
    key_first = [form for form in TRAINED.needles if form.index("{word}") < form.index("{digits}")]
    parts = {"prompt": "prompt", "thought": "thought", "answer": "answer"}
    sources = []
    rng = random.Random(seed)
    for name in ("key_first", "all_forms"):
        file = place / f"{name}.jsonl"
        with file.open("w") as lines:
            for _ in range(NUM_DOCUMENTS):
                if name == "key_first":
                    wording = TRAINED._replace(needles=tuple(key_first))
                    row = _document(*codes(rng, wording, rng.choice(FEW_CODES)))
                elif rng.random() < CODES_SHARE:
                    row = _document(*codes(rng, TRAINED, rng.choice(CODES)))
                else:
                    row = _document(*chains(rng, TRAINED, rng.choice(CHAINS)))
                lines.write(json.dumps(row) + "\n")
        source = {"name": name, "type": "local", "path": str(file), "domain": name}
        sources.append(source | {"chain_of_thought": parts})
    recipe = place / "documents.yaml"
    said = {"sources": sources, "steps": ["normalise"], "tokenizer": {"path": str(reader)}}
    recipe.write_text(yaml.safe_dump(said))
    shards = place / "documents"
    command = [str(Path(sys.executable).with_name("cdrmix")), "data", "build"]
    subprocess.run(
        [*command, "--config", str(recipe), "--out", str(shards)], check=True, stdout=sys.stderr
    )
    return shards


def codes(
    rng: random.Random, wording: Wording, num_keys: int
) -> tuple[list[str], list[tuple[str, str]]]:
    """States the codes of keys; questions draw a key each, so that none follows from the others."""
    fresh = wording.words(rng)
    form = rng.choice(wording.needles)
    ask, _ = rng.choice(wording.ask_needles)
    known = [(next(fresh), str(rng.randrange(1000, 10_000))) for _ in range(num_keys)]
    said = [form.format(word=key, digits=code) for key, code in known]
    asked = rng.choices(known, k=num_keys + 1)
    questions = [(ask.format(words=key), code) for key, code in asked]
    return _with_fillers(rng, wording, said, fresh), questions


def chains(
    rng: random.Random, wording: Wording, num_chains: int, *, hops: int = 2
) -> tuple[list[str], list[tuple[str, str]]]:
    """States chains of variables that copy a value, and asks for the names of each chain."""
    fresh = wording.words(rng, num_syllables=2)
    form = rng.choice(wording.copies)
    ask = rng.choice(wording.ask_copies)
    names = {
        str(value): [next(fresh) for _ in range(hops + 1)]
        for value in rng.sample(range(1000, 10_000), num_chains)
    }
    queues = [
        [form.format(new=b, old=a) for a, b in itertools.pairwise([value, *each])]
        for value, each in names.items()
    ]
    said = interleaved(rng, queues)
    questions = [(ask.format(value=value), " ".join(each)) for value, each in names.items()]
    rng.shuffle(questions)
    return _with_fillers(rng, wording, said, fresh), questions


def _with_fillers(
    rng: random.Random, wording: Wording, said: Sequence[str], fresh: Iterator[str]
) -> list[str]:
    text = []
    for line in said:
        text.append(line)
        if rng.random() < FILLERS:
            text.append(rng.choice(wording.fillers).format(word=next(fresh)))
    return text


def _document(said: Sequence[str], questions: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Parts of a chain of thought: the statements, all questions with their answers, the last."""
    *first, (question, answer) = questions
    thought = [f"{each} {right}." for each, right in first]
    return {"prompt": " ".join(said), "thought": " ".join([*thought, question]), "answer": answer}


def look_up(run_dir: Path, shards: Path, *, start: Path, seed: int) -> None:
    """Trains a backbone on the documents, first on those that name the key before its code."""
    config = shipped("model_configs") / TINY
    samples = KEY_FIRST_STEPS * load_config(config).training.global_batch_size
    phases = [{"samples": samples, "weights": {"key_first": 1}}, {"weights": {"all_forms": 1}}]
    weights = {"prompt": STATEMENT_WEIGHT, "thought": 1, "answer": 1}
    _train(
        run_dir,
        config,
        *("training.stage=a", f"training.max_steps={KEY_FIRST_STEPS + ALL_FORMS_STEPS}"),
        *(f"training.sequence_length={LOOK_UP_TOKENS}", f"training.learning_rate={LOOK_UP_RATE}"),
        *(f"training.start_from={start}", f"training.seed={seed}", f"data.path={shards}"),
        f"data.mixture={json.dumps({'phases': phases})}",
        f"data.token_weights={json.dumps(weights)}",
        "evaluation.baselines=false",
    )


def _as_stage_a(run: Path, place: Path, *, seed: int) -> Path:
    """A finished Stage A with the backbone of `run`, which is what Stage B begins from.

    It takes a single step from there, at a rate that leaves the weights as they are.
    """
    _train(
        place,
        shipped("model_configs") / TINY,
        *("training.stage=a", "training.max_steps=1", "training.warmup_steps=0"),
        *("training.learning_rate=1.0e-12", "training.min_learning_rate=1.0e-12"),
        *(f"training.start_from={run}", f"training.seed={seed}", "evaluation.baselines=false"),
    )
    return place


def _train(run_dir: Path, config: Path, *settings: str) -> float:
    """Runs the launcher on two ranks; returns the seconds of wall time."""
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--num_gpus", "2", "--master_port", str(free_port())),
        *("--log_level", "error", "launch/train.py"),
        *("--config", str(config), "--run-dir", str(run_dir)),
    ]
    for setting in settings:
        command += ["--set", setting]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=sys.stderr)
    return time.monotonic() - began


def learn(recipe: str, backbone: Path, place: Path, *, seed: int) -> dict[str, Any]:
    """Trains a recipe, shrunk, and scores it on texts of eight windows beside its controls."""
    file = place / f"{recipe}.yaml"
    file.write_text(yaml.safe_dump(shrunk(recipe, backbone)))
    seconds = _train(place / recipe, file, f"training.seed={seed}")
    return {"recipe": recipe, "seconds": seconds, "scores": scores(place / recipe)}


def scores(run: Path, *, num_evaluated: int = NUM_EVALUATED) -> dict[str, Any]:
    """Task -> column -> score, interval and operations of a text, at eight windows."""
    loaded = load_reader(run)
    ratios = (LENGTH_RATIO,)
    examples = suite(loaded.lessons, TASKS, length_ratios=ratios, num_examples=num_evaluated)
    rows = score_examples(loaded.reader, loaded.lessons, examples, controls=True).rows
    return {row.task: row.as_json()["controls"] for row in rows}


def measure(rounds: int) -> dict[str, Any]:
    """All recipes, around one backbone; `rounds` is the number of seeds."""
    found = []
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            backbone = copying_backbone(Path(name), seed=seed)
            found += [learn(each, backbone, Path(name), seed=seed) for each in RECIPES]
    return {"rounds": rounds, "recipes": found}


def show(result: dict[str, Any]) -> None:
    """Print the scores."""
    for row in result["recipes"]:
        print(row["recipe"], f"{row['seconds']:.0f} s")
        for task, columns in row["scores"].items():
            said: Sequence[str] = [f"{name} {each['score']:.2f}" for name, each in columns.items()]
            print(" ", task, ", ".join(said))


if __name__ == "__main__":
    report(measure, show, rounds=1, description=__doc__)
