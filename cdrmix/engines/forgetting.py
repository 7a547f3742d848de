"""Loss on old and new held-out data, against the loss of the model that the run began with."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from cdrmix.config.cpt import CptConfig
from cdrmix.engines.old_data import HeldOut
from cdrmix.errors import StateError
from cdrmix.evaluation.perplexity import evaluate
from cdrmix.hooks import Hook, RunView
from cdrmix.monitoring.health import Health
from cdrmix.monitoring.metrics import member_name
from cdrmix.parallel.apply import for_inference
from cdrmix.parallel.topology import Topology

FORGETTING = "cdrmix:forgetting"
"""Name of the hook, in a run and in its checkpoints."""


@dataclass
class Measured:
    """Held-out set with its loss before the first step and at the newest measure (nats per token).

    Both are None before the first measure, and `tokens` 0.
    """

    name: str
    kind: str  # old or new
    digest: str  # of the data set's manifest, sha256
    tokens: int = 0  # predicted, the same at each measure
    base_loss: float | None = None
    loss: float | None = None

    @property
    def change(self) -> float:
        """Loss now less the loss before the first step: forgetting where above 0."""
        assert self.loss is not None and self.base_loss is not None, "measured before"
        return self.loss - self.base_loss


class Forgetting(Hook):
    """Losses on the held-out sets of a run, old ones and new, at some steps of its pretraining.

    Args:
        old: sets with what may be forgotten; there may be none.
        new: held-out split of the data that is trained on.
        health: judges what is forgotten.
        segment_documents: keep the documents of a sample apart, as in training.
        batch_size: samples of a forward pass.
    """

    collective = True

    def __init__(
        self,
        cpt: CptConfig,
        old: Sequence[HeldOut],
        new: HeldOut,
        *,
        health: Health,
        topology: Topology,
        batch_size: int,
        segment_documents: bool = False,
    ) -> None:
        self._settings = cpt.forgetting
        self._health = health
        self._topology = topology
        self._batch_size = batch_size
        self._segment_documents = segment_documents
        self._datasets = [each.dataset for each in (*old, new)]
        self.sets = [Measured(each.name, "old", each.dataset.manifest_digest) for each in old]
        self.sets.append(Measured(new.name, "new", new.dataset.manifest_digest))
        self._step = 0  # of the newest measure

    def on_start(self, run: RunView) -> None:
        """Measures this stage, if it is pretraining."""
        self._run = run

    def measures_at(self, step: int, is_last: bool) -> bool:
        """Tells if a measure is due: before the first step, at the interval, and at the end."""
        if self._run.stage != "a":
            return False
        every = self._settings.every_steps or self._run.config.evaluation.every_steps
        return is_last or step == 0 or (every is not None and step % every == 0)

    def on_measure(self, step: int) -> dict[str, float]:
        """Measures every set and returns the metrics; collective. The first is the base.

        Raises StateError on every rank if another number of tokens is predicted than by the base.
        """
        began = time.monotonic()
        for each, dataset in zip(self.sets, self._datasets, strict=True):
            result = evaluate(
                for_inference(self._run.engine.module),
                dataset,
                max_tokens=self._settings.tokens,
                batch_size=self._batch_size,
                segment_documents=self._segment_documents,
                topology=self._topology,
            )
            if each.base_loss is None:
                each.base_loss, each.tokens = result.loss, result.tokens
            elif each.tokens != result.tokens:
                raise StateError(
                    f"cpt: the loss on {each.name} before the first step is over "
                    f"{each.tokens:,} tokens, and now over {result.tokens:,}. Set "
                    "data.segment_documents and training.sequence_length as they were then, or "
                    "begin a new run"
                )
            each.loss = result.loss
        self._step = step
        forgotten = {each.name: each.change for each in self.sets if each.kind == "old"}
        self._health.forgetting_known(step, forgotten, self._settings.stop_above)
        return {**self._metrics(), "cpt/seconds": time.monotonic() - began}

    def state_dict(self) -> dict[str, Any]:
        """Base and newest measure; nothing of later stages."""
        if self._run.stage != "a":
            return {}
        return {
            "step": self._step,
            "segment_documents": self._segment_documents,
            "sets": [asdict(each) for each in self.sets],
        }

    def check(self, state: dict[str, Any] | None) -> None:
        """Refuses the state in a checkpoint, before anything of it is loaded.

        Raises StateError if it is of other sets or documents seen otherwise, or None.
        """
        saved = [Measured(**each) for each in (state or {}).get("sets", [])]
        if state is None or [each.digest for each in saved] != [each.digest for each in self.sets]:
            there, here = (_listed(sets) for sets in (saved, self.sets))
            raise StateError(
                "cpt: the loss before the first step was measured on other data than this run "
                f"has:\n  checkpoint: {there}\n  this run: {here}\nGive cpt.forgetting.data and "
                "data.path with the folders of those digests, in that order, or begin a new run"
            )
        # Those of earlier versions do not tell; a change shows in the number of tokens there.
        segmented = state.get("segment_documents", self._segment_documents)
        if segmented != self._segment_documents:
            there, here = (str(each).lower() for each in (segmented, self._segment_documents))
            raise StateError(
                "cpt: the loss before the first step was measured with data.segment_documents = "
                f"{there}, and this run has {here}. Set it back, or begin a new run"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes base and newest measure from a checkpoint that `check` has passed."""
        saved = [Measured(**each) for each in state["sets"]]
        for mine, its in zip(self.sets, saved, strict=True):
            mine.tokens, mine.base_loss, mine.loss = its.tokens, its.base_loss, its.loss
        self._step = state["step"]

    def summary(self) -> dict[str, Any]:
        """Section `cpt` of metrics.json."""
        metrics = {name.removeprefix("cpt/"): value for name, value in self._means().items()}
        return {
            "step": self._step,
            **metrics,
            "sets": [asdict(each) | {"change": each.change} for each in self.sets],
        }

    def _means(self) -> dict[str, float]:
        """Metrics over all old sets, of which each counts the same, and of the new one."""
        *old, new = self.sets
        assert new.loss is not None and new.base_loss is not None, "measured before"
        metrics = {"cpt/new_loss": new.loss, "cpt/gain_nats": new.base_loss - new.loss}
        losses = [each.loss for each in old if each.loss is not None]
        if losses:
            metrics["cpt/old_loss"] = fmean(losses)
            metrics["cpt/forgetting_nats"] = fmean(each.change for each in old)
        return metrics

    def _metrics(self) -> dict[str, float]:
        metrics = self._means()
        *old, _ = self.sets
        for each in old if len(old) > 1 else ():
            loss = each.loss if each.loss is not None else math.nan
            metrics[member_name("cpt/old/*/loss", each.name)] = loss
            metrics[member_name("cpt/old/*/forgetting_nats", each.name)] = each.change
        return metrics


def _listed(sets: Sequence[Measured]) -> str:
    return ", ".join(f"{each.name} {each.digest[:12]} ({each.kind})" for each in sets) or "none"
