"""A plan's layout, shrunk, with real steps and real collectives on processes of this machine.

Each small layout trains, saves and ends; goes on from its first checkpoint; and goes on from it in
one process. One process trains the same micro-steps from the start. What should be equal to the bit
is compared so, the rest to a relative 1e-5.
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
from cdrmix.engines.rehearsal_runs import Check, SmallRuns
from cdrmix.errors import PlanError
from cdrmix.log import get_logger
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.plan import Plan, plan, unavailable
from cdrmix.planning.rehearsal import Aspect, Rehearsal, aspects, rehearsals

logger = get_logger(__name__)

# Packages of the standard library whose text is enough to train a tokenizer of 512 slots on.
_TEXT = ("asyncio", "email", "json", "logging", "unittest")


@dataclass(frozen=True)
class Rehearsed:
    """A plan, and what its rehearsal showed.

    Attributes:
        plan: what was rehearsed.
        small: the layouts that were run.
        checks: comparisons by layout.
        aspects: what was exercised, and what not.
        seconds: wall time.
    """

    plan: Plan
    small: list[Rehearsal]
    checks: list[list[Check]]
    aspects: list[Aspect]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every comparison of every layout passed."""
        return all(check.passed for checks in self.checks for check in checks)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        layouts = [
            {
                "profile": each.profile,
                "degrees": asdict(each.degrees),
                "checks": [asdict(check) | {"passed": check.passed} for check in checks],
            }
            for each, checks in zip(self.small, self.checks, strict=True)
        ]
        return {
            "name": self.plan.config.name,
            "passed": self.passed,
            "planned": self.plan.pick.to_json(),
            "layouts": layouts,
            "aspects": [asdict(aspect) for aspect in self.aspects],
            "seconds": self.seconds,
        }

    def as_text(self) -> str:
        """The tables that a person reads."""
        lines = [f"{self.plan.config.name} on {self.plan.cluster}: {self.plan.pick.describe()}"]
        for number, (each, checks) in enumerate(zip(self.small, self.checks, strict=True), 1):
            ranks = each.degrees.world_size
            lines += ["", f"rehearsed {number}: {each.describe()}, {ranks} processes"]
            lines += [f"  {check}" for check in checks]
        lines += ["", *_aspect_lines(self.aspects, len(self.small)), ""]
        verdict = "passed" if self.passed else "FAILED"
        lines.append(f"rehearsal {verdict} in {self.seconds:.0f} s")
        return "\n".join(lines)


def rehearse(config: Config, cluster: Cluster) -> Rehearsed:
    """Plan a run on a cluster and run the plan's layout, shrunk, on this machine's processors.

    Raises:
        PlanError: if there is no plan that this version can run.
    """
    began, made = time.monotonic(), plan(config, cluster)
    if made.pick.missing:
        raise PlanError("\n".join(unavailable(made.pick, config, cluster)))
    small = rehearsals(config, made.pick)
    with tempfile.TemporaryDirectory(prefix="cdrmix-rehearsal-") as folder:
        root = Path(folder)
        logger.info("building a corpus of a few files")
        corpus = _build_corpus(root, small[0].config.model.vocab_size)
        checks = []
        for number, each in enumerate(small, 1):
            logger.info("running %d of %d: %s", number, len(small), each.describe())
            runs = SmallRuns(root / str(number), corpus, each)
            checks.append(list(runs.checks()))
    found = aspects(config, made.pick, small)
    return Rehearsed(made, small, checks, found, time.monotonic() - began)


def _build_corpus(root: Path, vocab_size: int) -> Path:
    stdlib, sources = Path(sysconfig.get_path("stdlib")), root / "sources"
    for package in _TEXT:
        shutil.copytree(stdlib / package, sources / package)
    (sources / "pydoc_data").mkdir()
    shutil.copy(stdlib / "pydoc_data" / "topics.py", sources / "pydoc_data")
    build_sample(root / "corpus", vocab_size, stdlib=sources)
    return root / "corpus"


def _aspect_lines(found: list[Aspect], layouts: int) -> list[str]:
    heads = ["", "planned", *(f"rehearsed {n}" for n in range(1, layouts + 1)), "exercised"]
    rows = [heads]
    for aspect in found:
        verdict = {True: "yes", False: "no", None: ""}[aspect.is_exercised]
        rows.append([aspect.name, aspect.planned, *aspect.rehearsed, verdict])
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
