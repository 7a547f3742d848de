"""A frozen backbone on two pipeline stages: rows of a call in pieces, against all at once.

Lessons of the joint phase, forward and backward, by ranks of one thread. One rank reads each lesson
alone; two stages read it with all rows of a call at once, so that one of them always waits, and
with rows in pieces that follow each other. The three take turns. Wall time, as waiting is what it
is about: two cores have to be free.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from cdrmix import runtime
from cdrmix.checkpoint.fragments import part_of
from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.models.backbone import Backbone
from cdrmix.planning import lesson_sizes, stage_b
from cdrmix.planning.layout import Degrees
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.sessions.rehearse import run_ranks
from tools.benchmark.learn_system import SMALL_VOCABULARY, small_tokenizer
from tools.benchmark.timing import report

STAGES = 2
WINDOW_TOKENS = 256
# Fewest tokens of a piece: more than a call has, and few enough that rows go one by one
ALL_AT_ONCE, IN_PIECES = 10**9, 1


def make_config() -> Config:
    """The tiny reasoning variant, wider and frozen: a call's rows are work enough to share out."""
    changes = {
        "model.hidden_size": 256,
        "model.num_layers": 8,
        "model.vocab_size": SMALL_VOCABULARY,
        "model.moe.expert_hidden_size": 384,
        "stage_b.training.window_tokens": WINDOW_TOKENS,
        "stage_b.training.segment_tokens": 64,
        "stage_b.training.backbone_lr_scale": 0.0,
    }
    overrides = [f"{path}={value}" for path, value in changes.items()]
    return load_config(shipped("model_configs") / "cdrmix-reason-tiny.yaml", overrides)


def time_lessons(out: Path, rounds: int) -> int:
    """Work of one rank; rank 0 writes the seconds of each way."""
    # DeepSpeed comes with them, and a plan of this benchmark does without it
    from cdrmix.parallel.frozen_stages import FrozenStages
    from cdrmix.parallel.topology import make_topology
    from cdrmix.stage_b.phases import Course

    torch.set_num_threads(1)
    runtime.keep_freed_memory()
    runtime.initialize_distributed()
    config = make_config()
    section = stage_b.stage_b_section(config)
    lessons = Lessons(section.training, 0, WINDOW_TOKENS, small_tokenizer())
    topology = make_topology(Degrees(pipeline=STAGES))
    layers = stage_b.stage_b_layers(config, STAGES)[topology.stage]
    whole = Backbone(config.model)
    whole.initialize(seed=0)
    staged = FrozenStages(config.model, topology, layers)
    staged.load_state_dict({name: whole.state_dict()[name] for name in staged.state_dict()})

    def course_of(backbone: Backbone) -> Course:
        reader = MemoryReader(backbone, section, window_tokens=WINDOW_TOKENS, marks=lessons.marks)
        reader.initialize(seed=0)
        course = Course(reader, lessons, config)
        learning = course.learning("joint")
        for name, parameter in reader.named_parameters():
            parameter.requires_grad_(part_of(name) in learning)
        return course

    of_stages = course_of(staged)
    ways = {
        "one rank": (course_of(whole), ALL_AT_ONCE),
        "two stages, all at once": (of_stages, ALL_AT_ONCE),
        "two stages, in pieces": (of_stages, IN_PIECES),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with runtime.frozen_objects():
        for turn in range(1 + rounds):
            for name, (course, fewest) in ways.items():
                lesson_sizes._PIECE_TOKENS = fewest
                runtime.barrier()
                began = time.perf_counter()
                # the whole one is read by the first rank alone, as the other would share its caches
                if course is of_stages or runtime.rank() == 0:
                    loss, _ = course.loss("joint", course.lesson("joint", turn))
                    loss.backward()
                runtime.barrier()
                if turn:  # the first warms up
                    seconds[name].append(time.perf_counter() - began)
    if runtime.rank() == 0:
        out.write_text(json.dumps(seconds), encoding="utf-8")
    runtime.destroy_distributed()
    return 0


def measure(rounds: int) -> dict[str, Any]:
    """Median seconds of a lesson, and by how much pieces are faster in the same round."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        log = Path(folder) / "log"
        run_ranks(time_lessons, STAGES, out, rounds, log=log, timeout=600)
        seconds = json.loads(out.read_text(encoding="utf-8"))
    pieces = seconds["two stages, in pieces"]
    return {
        "rounds": rounds,
        "texts": stage_b.stage_b_section(make_config()).training.texts_per_lesson,
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "faster_than": {
            name: statistics.median(a / b for a, b in zip(each, pieces, strict=True))
            for name, each in seconds.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print the rows."""
    for name, seconds in result["seconds"].items():
        faster = result["faster_than"][name]
        print(f"{name:24}  {seconds:6.2f} s a lesson of {result['texts']} texts  {faster:.2f}x")


if __name__ == "__main__":
    report(measure, show, rounds=5, description=__doc__)
