"""The trackers of a run, as a hook of rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from cdrmix.config.load import kept_values
from cdrmix.config.tracking import TrackerConfig, name_of
from cdrmix.hooks import Hook, RunView
from cdrmix.log import get_logger
from cdrmix.monitoring.metrics import SHOWN_ONLY
from cdrmix.tracking.copies import command_to_copy, folder_of
from cdrmix.tracking.feed import Feed, close_feeds
from cdrmix.tracking.writer import WRITER_LOG, job_of

logger = get_logger(__name__)


class TrackerHook(Hook):
    """Hands each line of the metrics to the trackers, and waits for none of them."""

    def __init__(self, trackers: Sequence[TrackerConfig], *, wait_seconds: float) -> None:
        """`wait_seconds` is the longest wait at the end of a stage."""
        self._trackers = trackers
        self._wait_seconds = wait_seconds
        self._feeds: list[Feed] = []
        self._in_trouble: set[str] = set()  # trackers of which that was told
        self._dropped = 0  # lines, in earlier stages of this start

    def on_start(self, run: RunView) -> None:
        """Starts the trackers, for which points after the present step are void."""
        self._run = run
        config = kept_values(run.config, mode="json")
        for tracker in self._trackers:
            name = name_of(tracker.use)
            folder = folder_of(run.directory, name)
            # A run that begins again measures the model before its first step again.
            job = job_of(tracker, run.directory, folder, step=run.step or -1, config=config)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._feeds.append(Feed(job, name=tracker.use))
            except OSError as error:
                self._tell(tracker.use, f"cannot be started ({error.strerror})")

    def on_log(self, step: int, record: Mapping[str, float]) -> Mapping[str, float] | None:
        """Hands over a line; returns the number of lines that were dropped so far, if any."""
        dropped = self._dropped + sum(feed.dropped for feed in self._feeds)
        counter = {"tracker/dropped": dropped} if dropped else {}
        values = {key: value for key, value in record.items() if key not in SHOWN_ONLY}
        for feed in self._feeds:
            feed.write(values | counter)
        self._tell_troubles()
        return counter

    def on_rewind(self, step: int) -> None:
        """Tells the trackers to what step the run has gone back."""
        for feed in self._feeds:
            feed.rewind(step or -1)

    def on_end(self, outcome: Literal["done", "stopped"]) -> None:
        """Waits a while for the trackers, and tells what they have not written."""
        self._close(self._wait_seconds)

    def on_error(self, exception: BaseException) -> None:
        """Leaves the trackers what they have got: other ranks may wait for this one to end."""
        self._close(0)

    def _close(self, seconds: float) -> None:
        feeds = self._feeds
        self._feeds = []
        close_feeds(feeds, seconds=seconds)
        self._dropped += sum(feed.dropped for feed in feeds)
        for feed in feeds:
            if feed.dropped:
                lines = "line" if feed.dropped == 1 else "lines"
                logger.warning(
                    "warning: tracker %s: %d %s of metrics.jsonl may be missing in its copy (%s). "
                    "Make it anew with: %s",
                    *(feed.name, feed.dropped, lines, feed.why),
                    command_to_copy(self._run.directory, feed.name),
                )

    def _tell_troubles(self) -> None:
        for feed in self._feeds:
            if feed.why is not None:
                self._tell(feed.name, feed.why)

    def _tell(self, use: str, why: str) -> None:
        if use not in self._in_trouble:
            self._in_trouble.add(use)
            logger.warning(
                "warning: tracker %s: %s. The run goes on; see %s, and make its copy anew with: %s",
                *(use, why, folder_of(self._run.directory, name_of(use)) / WRITER_LOG),
                command_to_copy(self._run.directory, use),
            )
