"""Searches of layouts, most of the time of a plan, that the tests of a file share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from cdrmix.config.schema import Config
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.plan import Plan
from cdrmix.planning.search import search

_MOST_KEPT = 16  # searches, of some 3 MB each


@contextlib.contextmanager
def sharing_searches(unread: dict[str, Any] | None = None) -> Iterator[None]:
    """Have equal searches be made once; all else of a plan is made in each test.

    Args:
        unread: keys of the configuration that no search reads, as pydantic's `exclude`.
    """
    found: dict[tuple[str, ...], list[Plan]] = {}

    def shared(config: Config, cluster: Cluster, *, profile: str | None = None) -> list[Plan]:
        # Also which settings are given: a search leaves these as they are, at their defaults too.
        values, given = (
            config.model_dump_json(exclude=unread, exclude_unset=is_given)
            for is_given in (False, True)
        )
        key = (values, given, repr(cluster), repr(profile))
        found[key] = plans = found.pop(key, None) or search(config, cluster, profile=profile)
        if len(found) > _MOST_KEPT:
            del found[next(iter(found))]
        return list(plans)

    with pytest.MonkeyPatch.context() as patch:
        for user in ("comparison", "profile"):
            patch.setattr(f"cdrmix.planning.{user}.search", shared)
        yield


@pytest.fixture(scope="module")
def shared_searches() -> Iterator[None]:
    """Equal searches of a file's tests are made once."""
    with sharing_searches():
        yield
