"""Table of all metrics: name, unit, reduction over ranks and denominator.

A record is one logged step, a line of metrics.jsonl. A name that is not in the table is refused
when a record is made, so that a typo cannot start a second series. A row whose name holds `*` is a
family: a metric for each domain, or folder, of the data, whose key `member_name` makes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from typing import Literal
from urllib.parse import quote, unquote

Reduction = Literal["sum", "mean", "max", "min", "none"]


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    The reduction is over the ranks. "none": every rank has the same global value already, or rank
    0's clock stands for all, because a step ends together. A denominator is the unit whose global
    count divides the sum, so that no mean of per-rank means arises.
    """

    name: str  # key in metrics.jsonl; a group stands before the slash. `*` is any one part of it
    unit: str
    reduction: Reduction
    denominator: str = ""  # empty for a value that is no ratio
    deterministic: bool = True  # two equal runs give the same value bit by bit


METRICS: tuple[Metric, ...] = (
    Metric("step", "completed optimizer steps", "none"),
    Metric("loss", "nats", "sum", "valid token"),
    # Under `objectives`: nats of each objective over its own labels, and fim_middle, of the middles
    # of documents rearranged for infilling, which are a part of fim. `loss` is then over all
    # labels, whatever they weigh. One of which a step had no label is left out of its line.
    # With `model.mtp` also mtp_2 to mtp_n: nats of the token so many ahead, over its labels. With
    # `objectives.plugins` also terms of a user's, over what they count, in their units.
    Metric("objective/*/loss", "nats", "sum", "label of the objective"),
    Metric("objective/z_loss", "squared logarithm, unweighted", "sum", "label, by its weight"),
    Metric("objective/total", "weighted sum of these, without the routers' losses", "none"),
    Metric("learning_rate", "per step", "none"),
    Metric("grad_norm", "L2 norm before clipping", "none"),
    Metric("loss_scale", "factor, fp16 only", "none"),
    # Of Muon: their gradients were left out of the momentum of matrices.
    Metric("optimizer/spikes", "steps, since the start of the run", "none"),
    Metric("tokens_seen", "tokens", "none"),
    Metric("tokens_per_second", "tokens", "none", "second", deterministic=False),
    Metric("step_seconds", "seconds", "none", "step", deterministic=False),
    Metric("memory_peak_bytes", "bytes since the line before", "max", deterministic=False),
    # Overflow and entropy are not additive: they are computed from expert counts, and the router
    # losses from means, that were added up over the data ranks first.
    Metric("moe/overflow_fraction", "assignments over capacity", "none", "token assignment"),
    Metric("moe/routing_entropy_bits", "bits, mean over layers", "none"),
    Metric("moe/load_balance_loss", "unweighted, mean over layers", "none"),
    Metric("moe/z_loss", "unweighted, mean over layers", "none"),
    Metric("routing_mamba/routing_entropy_bits", "bits, mean over such mixers", "none"),
    Metric("routing_mamba/load_balance_loss", "unweighted, mean over such mixers", "none"),
    Metric("routing_mamba/z_loss", "unweighted, mean over such mixers", "none"),
    # Mixture of Depths: means over routed blocks of shares of all tokens of a step.
    Metric("mod/fraction", "share of tokens that a block takes", "sum", "token"),
    Metric("mod/threshold", "router score, mean over blocks", "none"),
    Metric("mod/predictor_accuracy", "share of tokens told rightly", "sum", "token"),
    Metric("mod/predictor_loss", "nats, unweighted", "sum", "token"),
    Metric("mod/position_correlation", "of being taken with the place in the row", "sum", "token"),
    Metric("mod/compute_share", "FLOPs over those of all tokens in every block", "none"),
    Metric("health/skipped_steps", "steps not taken, since the start of the run", "none"),
    Metric("health/rollbacks", "times, since the start of the run", "none"),
    Metric("health/passed_over_samples", "samples, since the start of the run", "none"),
    Metric("health/lowerings", "times the learning rate was lowered", "none"),
    # Stage B: means over a step's lessons; the denominator is that of the mean within a lesson.
    Metric("stage_b/loss", "weighted sum of the losses below", "sum", "lesson"),
    Metric("stage_b/retrieval_loss", "nats", "sum", "segment sought"),
    Metric("stage_b/answer_loss", "nats", "sum", "answer token"),
    Metric("stage_b/text_loss", "nats", "sum", "token read in windows"),
    Metric("stage_b/drill_loss", "nats", "sum", "answer token without memory"),
    Metric("stage_b/replay_loss", "nats", "sum", "token read without memory"),
    Metric("stage_b/router_loss", "weighted, mean over layers", "sum", "lesson"),
    Metric("stage_b/correlation_loss", "weighted, mean over adapters", "sum", "text"),
    Metric("stage_b/recall", "share found first", "sum", "segment sought"),
    Metric(
        "stage_b/agreement",
        "share whose likeliest segment is nearest",
        "sum",
        "text without evidence",
    ),
    Metric("stage_b/answered", "share right in every token", "sum", "question"),
    Metric("policy/loss", "weighted", "sum", "memory operation"),
    Metric("policy/return", "reward", "sum", "rollout"),
    Metric("policy/return_std", "reward, standard deviation", "sum", "rollout"),
    Metric("policy/success", "score of the answers", "sum", "rollout"),
    Metric("policy/entropy", "nats", "sum", "memory operation"),
    Metric("policy/kl", "nats, from the policy that acted", "sum", "memory operation"),
    Metric("policy/clip_fraction", "share of ratios clipped", "sum", "memory operation"),
    Metric("policy/value_loss", "half the squared error", "sum", "memory operation"),
    Metric("policy/explained_variance", "share explained by the value head", "sum", "lesson"),
    Metric("policy/zero_variance_groups", "share that teaches nothing", "sum", "group"),
    Metric("policy/memory_fill", "share of the entries", "sum", "rollout"),
    Metric("policy/epochs", "optimizer steps on the rollouts", "none"),
    Metric("policy/operations/summarize", "times taken", "sum", "rollout"),
    Metric("policy/operations/retrieve", "times taken", "sum", "rollout"),
    Metric("policy/operations/splice_window", "times taken", "sum", "rollout"),
    Metric("policy/operations/cache_write", "times taken", "sum", "rollout"),
    Metric("policy/retrieval_milliseconds", "ms", "sum", "retrieval", deterministic=False),
    Metric("eval/loss", "nats", "sum", "valid token"),
    Metric("eval/ema_loss", "nats, average of the weights", "sum", "valid token"),
    Metric("eval/perplexity", "exp(nats per token)", "none"),
    Metric("eval/bits_per_byte", "bits", "sum", "byte of text"),
    Metric("eval/seconds", "seconds", "none", deterministic=False),
    # By domain, for data sets of more than one. A domain of which nothing was evaluated, or drawn,
    # is left out of a line.
    Metric("eval/domain/*/loss", "nats", "sum", "valid token of the domain"),
    # By objective, where held-out documents are more than text.
    Metric("eval/objective/*/loss", "nats", "sum", "valid token of the objective"),
    Metric("data/domain/*/samples", "samples trained on, mixtures and replay only", "none"),
    # Continual pre-training: held-out loss, and its change since before the first step. Of several
    # folders of old data the first are means over the folders, and those by name follow.
    Metric("cpt/old_loss", "nats, old data", "sum", "valid token"),
    Metric("cpt/new_loss", "nats, new data", "sum", "valid token"),
    Metric("cpt/forgetting_nats", "nats, rise on old data", "sum", "valid token"),
    Metric("cpt/gain_nats", "nats, fall on new data", "sum", "valid token"),
    Metric("cpt/old/*/loss", "nats, one folder of several", "sum", "valid token"),
    Metric("cpt/old/*/forgetting_nats", "nats, rise on one folder", "sum", "valid token"),
    Metric("cpt/seconds", "seconds", "none", deterministic=False),
    # Suites of evaluations: suite, task and metric of each row, and ema_METRIC for the average of
    # the weights. The steps that have them depend on time where the suites' share of it is used up.
    Metric("suite/*/*/*", "as the metric's name says", "none"),
    # Where it is not 0: depends on the machine.
    Metric("tracker/dropped", "lines of this start", "none", deterministic=False),
    # Of system.jsonl alone, for each host.
    Metric("system/cpu_share", "share busy since the line before", "none", deterministic=False),
    Metric(
        "system/load", "processes that run or wait, mean of a minute", "none", deterministic=False
    ),
    Metric("system/memory_available_bytes", "bytes", "none", deterministic=False),
    Metric("system/disk_read_bytes", "bytes since the line before", "none", deterministic=False),
    Metric("system/disk_written_bytes", "bytes since the line before", "none", deterministic=False),
    Metric(
        "system/network_received_bytes", "bytes since the line before", "none", deterministic=False
    ),
    Metric("system/network_sent_bytes", "bytes since the line before", "none", deterministic=False),
    # Numbers that hooks add: name of the hook, and key.
    Metric("plugin/*/*", "as the hook says", "none", deterministic=False),
    Metric("hooks/*/seconds", "seconds in a hook", "max", "step", deterministic=False),
    Metric("suite/*/failures", "times it failed, since the start of the run", "none"),
)

_BY_NAME = {metric.name: metric for metric in METRICS}
_PLACES = {name: place for place, name in enumerate(_BY_NAME)}


def record(*, step: int, **values: float | None) -> dict[str, float]:
    """Makes one line of metrics: plain ints and floats, in the order of the table.

    None stands for a value that was not measured at this step, and is left out; a name that is not
    in the table raises ValueError. A name with a slash is given as `**{"moe/z_loss": ...}`.
    """
    by_name = {"step": step, **values}
    places = {name: _PLACES[_look_up(name).name] for name in by_name}
    return {
        name: int(value) if isinstance(value, Integral) else float(value)
        for name in sorted(by_name, key=places.__getitem__)  # members of a family as given
        if (value := by_name[name]) is not None
    }


def member_name(family: str, *members: str, safe: str = "") -> str:
    """Returns the key of one member of a family, as of "eval/domain/*/loss" and a domain; each of
    several `*` stands for a member.

    What a member's name has beside letters, digits, `_.-~` and those in `safe` is written as %XX,
    so that a slash or a space in it makes no other key.
    """
    parts = family.split("*")
    assert len(parts) == len(members) + 1, family
    quoted = (quote(member, safe=safe) for member in members)
    return parts[0] + "".join(map("".join, zip(quoted, parts[1:], strict=True)))


def member_of(family: str, name: str) -> str | None:
    """Returns the first member, such as a domain, that a key of `member_name` is of; None for
    others."""
    found = _pattern(family).fullmatch(name)
    return found and unquote(found[1])


# Shown as progress, not written: lines of equal runs differ in step_seconds, tokens_per_second and
# memory_peak_bytes only.
SHOWN_ONLY = ("eval/seconds", "cpt/seconds")


def deterministic_part(line: Mapping[str, float]) -> dict[str, float]:
    """Drops from a record the times, throughput and memory, which differ between equal runs."""
    return {name: value for name, value in line.items() if _look_up(name).deterministic}


def _look_up(name: str) -> Metric:
    if name in _BY_NAME:
        return _BY_NAME[name]
    for family, pattern in _FAMILIES.items():
        if pattern.fullmatch(name):
            return _BY_NAME[family]
    close = get_close_matches(name, _BY_NAME, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{name!r} is not a metric.{hint} Known: {', '.join(_BY_NAME)}")


def _pattern(family: str) -> re.Pattern[str]:
    """Matches the keys of a family; its group is the member as `member_name` writes it."""
    return re.compile(re.escape(family).replace(re.escape("*"), "([^/]+)"))


_FAMILIES = {name: _pattern(name) for name in _BY_NAME if "*" in name}
