"""Loss on old and new held-out data, against the loss of the model that the run began with."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from cdrmix.config.cpt import CptConfig
from cdrmix.config.schema import Config
from cdrmix.engines.old_data import HeldOut
from cdrmix.engines.run import JsonObject, Run
from cdrmix.errors import StateError
from cdrmix.evaluation.perplexity import evaluate
from cdrmix.monitoring.metrics import member_name
from cdrmix.parallel.apply import for_inference


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


class Forgetting:
    """Losses on the held-out sets of a run, old ones and new, at some of its steps.

    Args:
        old: sets with what may be forgotten; there may be none.
        new: held-out split of the data that is trained on.
        segment_documents: keep the documents of a sample apart, as in training.
    """

    def __init__(
        self,
        cpt: CptConfig,
        old: Sequence[HeldOut],
        new: HeldOut,
        *,
        segment_documents: bool = False,
    ) -> None:
        self._cpt = cpt
        self._segment_documents = segment_documents
        self._datasets = [each.dataset for each in (*old, new)]
        self.sets = [Measured(each.name, "old", each.dataset.manifest_digest) for each in old]
        self.sets.append(Measured(new.name, "new", new.dataset.manifest_digest))
        self._step = 0  # of the newest measure

    @property
    def has_base(self) -> bool:
        """True once the starting model was measured."""
        return self.sets[-1].base_loss is not None

    def is_due(self, step: int, config: Config, *, last: bool) -> bool:
        """Tells if a measure is due behind a step: at the interval, and at the end."""
        every = self._cpt.forgetting.every_steps or config.evaluation.every_steps
        return last or (every is not None and step % every == 0)

    def measure(self, run: Run) -> dict[str, float]:
        """Measures every set and returns the metrics; collective. The first is the base.

        Raises StateError on every rank if another number of tokens is predicted than by the base.
        """
        began = time.monotonic()
        with run.heartbeat.phase("evaluating"), run.wall_time.spent("evaluation"):
            for each, dataset in zip(self.sets, self._datasets, strict=True):
                result = evaluate(
                    for_inference(run.engine.module),
                    dataset,
                    max_tokens=self._cpt.forgetting.tokens,
                    batch_size=run.plan.micro_batch_size,
                    segment_documents=self._segment_documents,
                    topology=run.topology,
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
        self._step = run.step
        return {**self._metrics(), "cpt/seconds": time.monotonic() - began}

    @property
    def forgotten(self) -> dict[str, float]:
        """Rise of the loss on each old set since before the first step (nats per token)."""
        return {each.name: each.change for each in self.sets if each.kind == "old"}

    @property
    def stop_above(self) -> float | None:
        """Forgetting of a set beyond which the run stops (nats per token)."""
        return self._cpt.forgetting.stop_above

    def state_dict(self) -> JsonObject:
        """Base and newest measure, for a checkpoint."""
        return {
            "step": self._step,
            "segment_documents": self._segment_documents,
            "sets": [asdict(each) for each in self.sets],
        }

    def load_state_dict(self, state: JsonObject | None) -> None:
        """Takes base and newest measure from a checkpoint; a StateError if they are of other sets
        or documents seen otherwise, or it has none."""
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
        for mine, its in zip(self.sets, saved, strict=True):
            mine.tokens, mine.base_loss, mine.loss = its.tokens, its.base_loss, its.loss
        self._step = state["step"]

    def summary(self, run: Run) -> dict[str, Any]:
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
            metrics["cpt/forgetting_nats"] = fmean(self.forgotten.values())
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
