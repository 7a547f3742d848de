"""Record of a start: the version, command, configuration, data and layout that it trains with."""

from __future__ import annotations

import datetime
import os
import socket
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix import __version__, runtime
from cdrmix.checkpoint.files import read_json
from cdrmix.cluster.start_records import add_start_record, newest_start
from cdrmix.config.load import config_hash, with_absolute_paths
from cdrmix.config.plugin import plugins_of
from cdrmix.config.redaction import redacted
from cdrmix.config.resuming import changes_between, told
from cdrmix.config.resuming_rules import rule_of
from cdrmix.config.schema import Config
from cdrmix.data.mixture import MixedDataset, Mixture, built_mixture, plan_mixture
from cdrmix.data.shards import manifest_digest
from cdrmix.engines.run import JsonObject, Run
from cdrmix.engines.training_data import Corpus
from cdrmix.errors import ConfigError, StateError
from cdrmix.hooks.plugin import plugin_digests
from cdrmix.log import get_logger

logger = get_logger(__name__)

_MOST_DOMAINS = 6  # of a line of the log
_POINTS = 512  # at which the shares of a phase are averaged


def record_start(run: Run, state: JsonObject | None) -> None:
    """Write the record of this start into its run directory, and log it; collective.

    Changes are those against the start before, or else against the checkpoint with this `state`.
    Raises StateError if it cannot be written, and ConfigError if code of a user's has changed and
    that is refused.
    """
    hosts = Counter(runtime.all_gather_object(socket.gethostname()))
    runtime.first_rank_does(lambda: _write(run.directory.path, _describe(run, state, hosts)))


def _describe(run: Run, state: JsonObject | None, hosts: Counter[str]) -> JsonObject:
    config = run.config
    values = with_absolute_paths(redacted(config.model_dump(mode="json")))
    before = newest_start(run.directory.path) or state or {}
    old = before.get("config")
    changes = changes_between(old, values) if isinstance(old, dict) else []
    environment = read_json(run.directory.path / "environment.json")  # written a moment ago
    commit, _, mark = (environment["commit"] or "").partition("-")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    plan = run.plan
    return {
        "began": now,
        "from_step": run.step,
        "version": __version__,
        "commit": commit[:12] or None,
        "modified": bool(mark) if commit else None,
        "command": list(run.command),
        "folder": os.getcwd(),
        "config": values,
        # of these values: paths are the same from every folder
        "config_hash": config_hash(Config.model_validate(values)),
        "changes": [{"key": key, "old": old, "new": new} for key, old, new in changes],
        **({"plugins": plugins} if (plugins := plugin_digests(plugins_of(config))) else {}),
        "data": describe_data(config, run.stage.corpus),
        **run.stage.inputs(),
        **({"base": run.base} if run.base else {}),
        "hosts": [{"name": name, "ranks": ranks} for name, ranks in hosts.items()],
        "plan": {
            "profile": plan.profile,
            "degrees": plan.to_json()["degrees"],
            "micro_batch_size": plan.micro_batch_size,
            "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        },
        "stage": run.stage.name,
        "start_from": run.start_from,
    }


def describe_data(config: Config, corpus: Corpus) -> JsonObject:
    """Returns folder, digest, recipe, tokenizer, mixture and domains of a data set.

    The weight of a domain is its share of the samples of the whole run, as the mixture asks for it,
    or else of the tokens (ratio).
    """
    manifest = corpus.manifest
    tokens: dict[str, Counter[str]] = {"train": Counter(), "validation": Counter()}
    for shard in manifest.shards:
        tokens.setdefault(shard.split, Counter())[shard.domain] += shard.tokens
    train = tokens["train"]
    total = sum(train.values())
    weights = {name: count / total for name, count in train.items() if total}
    mixture = config.data.mixture or built_mixture(manifest)
    if mixture is not None and isinstance(corpus.train, MixedDataset):
        training = config.training
        plan = plan_mixture(mixture, train, training.sequence_length)
        weights = asked_shares(plan, training.num_steps * training.global_batch_size)
    return {
        "folder": os.path.abspath(corpus.folder),
        "digest": manifest_digest(manifest),
        "recipe": manifest.source.get("recipe"),
        "tokenizer_sha256": manifest.tokenizer.sha256,
        "mixture": mixture and [phase.model_dump(mode="json") for phase in mixture.phases],
        "domains": [
            {
                "name": name,
                "train_tokens": train[name],
                "validation_tokens": tokens["validation"][name],
                "weight": weights.get(name, 0.0),
            }
            for name in sorted({*train, *tokens["validation"]})
        ],
    }


def asked_shares(mixture: Mixture, num_samples: int) -> dict[str, float]:
    """Mean share of each domain over the first samples of a mixture (ratio)."""
    lengths = [phase.num_samples or num_samples for phase in mixture.phases]
    ends = [min(end, num_samples) for end in accumulate(lengths)]
    ends[-1] = num_samples  # the last shares hold to the end
    shares = np.zeros(len(mixture.domains))
    for start, stop in pairwise([0, *ends]):
        # Midpoints of equal parts; phase by phase, because points of the whole could miss one.
        points = np.linspace(start, stop, 2 * _POINTS + 1)[1::2] if stop > start else ()
        for point in points:
            part = (stop - start) / num_samples / len(points)
            shares += part * mixture.target_shares(int(point))
    return dict(zip(mixture.domains, shares.tolist(), strict=True))


def _write(folder: Path, record: JsonObject) -> None:
    digests = (newest_start(folder) or {}).get("plugins", {})
    plugins = record.get("plugins", {}).items()
    changed = [path for path, digest in plugins if digests.get(path, digest) != digest]
    told_of_code = f"since the start before the code of {', '.join(changed)} has changed"
    if changed and record["config"]["changed_plugins"] == "refuse":
        raise ConfigError(
            f"changed_plugins = refuse: {told_of_code}. Bring back what the run began with, or "
            "give --set changed_plugins=warn"
        )
    try:
        number = add_start_record(folder, record)
    except OSError as error:
        raise StateError(
            f"{error.filename or folder}: the record of this start cannot be written "
            f"({error.strerror}). Make room, or give a --run-dir that this user can write to"
        ) from error
    logger.info("start %d: %s", number, _program(record))
    logger.info("data: %s", _data(record["data"]))
    changes = [(each["key"], each["old"], each["new"]) for each in record["changes"]]
    if changes:
        alters = any(rule_of(key).kind != "free" for key, _, _ in changes)
        write = logger.warning if alters else logger.info
        write("%schanged since the start before: %s", "warning: " * alters, told(changes))
    if changed:
        logger.warning("warning: %s", told_of_code)


def _program(record: JsonObject) -> str:
    changed = ", with changed files" if record["modified"] else ""
    commit = f"commit {record['commit']}{changed}" if record["commit"] else "no git checkout"
    return f"CDRmix {record['version']}, {commit}, from step {record['from_step']}"


def _data(data: dict[str, Any]) -> str:
    domains = sorted(data["domains"], key=lambda each: -each["weight"])
    listed = [f"{each['name']} {each['weight']:.1%}" for each in domains[:_MOST_DOMAINS]]
    if len(domains) > _MOST_DOMAINS:
        listed.append(f"{len(domains) - _MOST_DOMAINS} more")
    source = "of the mixture" if data["mixture"] else "of the tokens"
    return f"{data['folder']}, digest {data['digest'][:12]}, {', '.join(listed)} {source}"
