"""Rehearses a plan: its layout, shrunk, with real steps and collectives on this machine.

Each small layout trains, saves and ends; resumes from its first checkpoint; and resumes from it in
one process. One process trains the same micro-steps from the start. Runs of one layout are compared
to the bit, the others to a relative 1e-5. A small Stage B starts from the backbone that the first
layout has trained.
"""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.data.sample import build_sample
from cdrmix.errors import PlanError
from cdrmix.log import get_logger
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.comparison import Comparison, compare, unavailable
from cdrmix.planning.shrink import (
    Aspect,
    Rehearsal,
    aspects,
    planned_stage_b,
    rehearsal_text,
    rehearsals,
    stage_b_aspects,
    stage_b_rehearsal,
)
from cdrmix.sessions.rehearsal_runs import Check, SmallRuns

logger = get_logger(__name__)
# Packages of the standard library whose text is enough to train a tokenizer of 512 slots on.
_TEXT = ("asyncio", "email", "json", "logging", "unittest")


@dataclass(frozen=True)
class RehearsedStage:
    """Rehearsal of a stage."""

    title: str
    planned: dict[str, Any]  # layout of the plan, as plain values
    small: list[Rehearsal]  # the layouts that were run
    checks: list[list[Check]]  # by layout
    aspects: list[Aspect]

    @property
    def passed(self) -> bool:
        """True if all comparisons passed."""
        return all(check.passed for checks in self.checks for check in checks)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        layouts = [
            {
                "profile": each.profile,
                "degrees": asdict(each.degrees),
                "checks": [asdict(check) | {"passed": check.passed} for check in checks],
            }
            for each, checks in zip(self.small, self.checks, strict=True)
        ]
        return {
            "planned": self.planned,
            "layouts": layouts,
            "aspects": [asdict(aspect) for aspect in self.aspects],
        }

    def lines(self, *, first: int) -> list[str]:
        """Tables for people, with layouts numbered from `first`."""
        lines = [self.title]
        heads = [f"rehearsed {first + n}" for n in range(len(self.small))]
        for head, each, checks in zip(heads, self.small, self.checks, strict=True):
            lines += ["", f"{head}: {each.describe()}, {each.degrees.world_size} processes"]
            lines += [f"  {check}" for check in checks]
        rows = [["", "planned", *heads, "exercised"]]
        for aspect in self.aspects:
            verdict = {True: "yes", False: "no", None: ""}[aspect.is_exercised]
            rows.append([aspect.name, aspect.planned, *aspect.rehearsed, verdict])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        return [*lines, "", *table, ""]


@dataclass(frozen=True)
class Rehearsed:
    """Rehearsal of a plan."""

    compared: Comparison
    stage_a: RehearsedStage
    stage_b: RehearsedStage | None  # None where the run has none
    seconds: float

    @property
    def passed(self) -> bool:
        """True if all comparisons passed."""
        return self.stage_a.passed and (self.stage_b is None or self.stage_b.passed)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        stage_b = {} if self.stage_b is None else {"stage_b": self.stage_b.to_json()}
        return {
            "name": self.compared.config.name,
            "passed": self.passed,
            **self.stage_a.to_json(),
            **stage_b,
            "seconds": self.seconds,
        }

    def as_text(self) -> str:
        """Tables for people."""
        lines = self.stage_a.lines(first=1)
        if self.stage_b is not None:
            lines += self.stage_b.lines(first=1 + len(self.stage_a.small))
        verdict = "passed" if self.passed else "FAILED"
        return "\n".join([*lines, f"rehearsal {verdict} in {self.seconds:.0f} s"])


def rehearse(config: Config, cluster: Cluster) -> Rehearsed:
    """Plan a run on a cluster and run the plan's layout, shrunk, on this machine's processors.

    Raises PlanError if there is no plan that this version can run.
    """
    began = time.monotonic()
    compared = compare(config, cluster)
    plan = compared.plan
    if plan.missing:
        raise PlanError("\n".join(unavailable(plan, config, cluster)))
    small = rehearsals(config, plan)
    planned = planned_stage_b(config, plan, cluster)
    stage_b = [] if planned is None else [stage_b_rehearsal(config, planned, small[0])]
    with tempfile.TemporaryDirectory(prefix="cdrmix-rehearsal-") as folder:
        checks = _run(Path(folder), small, stage_b)
    stage_a = RehearsedStage(
        title=f"{config.name} on {cluster}: {plan.describe()}",
        planned=plan.estimates_to_json(),
        small=small,
        checks=checks[: len(small)],
        aspects=aspects(config, plan, small),
    )
    after = None
    if planned is not None:
        title = f"Stage B: {rehearsal_text(planned.name, planned.degrees)}"
        if not compared.stage_b_fits:
            title += "; does NOT fit that cluster's memory, see cdrmix plan"
        after = RehearsedStage(
            title=title,
            planned=planned.to_json(),
            small=stage_b,
            checks=checks[len(small) :],
            aspects=stage_b_aspects(config, planned, stage_b[0]),
        )
    return Rehearsed(compared, stage_a, after, time.monotonic() - began)


def _run(root: Path, small: list[Rehearsal], stage_b: list[Rehearsal]) -> list[list[Check]]:
    """Run every layout, those of Stage B last: they start from the first one's backbone."""
    logger.info("building a corpus of a few files")
    stdlib = Path(sysconfig.get_path("stdlib"))
    sources = root / "sources"
    for package in _TEXT:
        shutil.copytree(stdlib / package, sources / package)
    (sources / "pydoc_data").mkdir()
    shutil.copy(stdlib / "pydoc_data" / "topics.py", sources / "pydoc_data")
    corpus = root / "corpus"
    # Of sources that every Python has: a rehearsal needs no data set and no network.
    build_sample(corpus, small[0].config.model.vocab_size, stdlib=sources)
    layouts = [(layout, "") for layout in small] + [(layout, "Stage B, ") for layout in stage_b]
    checks = list[list[Check]]()
    backbones = list[Path]()
    for number, (layout, stage) in enumerate(layouts, 1):
        logger.info("running %d of %d: %s%s", number, len(layouts), stage, layout.describe())
        backbone = backbones[0] if stage else None
        runs = SmallRuns(root / str(number), corpus, layout, backbone=backbone)
        checks.append(list(runs.checks()))
        backbones.append(runs.first)
    return checks
