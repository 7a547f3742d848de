"""What the user listed."""

import pickle
from pathlib import Path

import pytest

from cdrmix.corpus.steps.url import Blocklist, read_list
from cdrmix.errors import ConfigError, DataError
from tests.unit.corpus.document_steps import reason_for


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text("# spam\nbad.example\nwww.worse.example # and this\n")
    (tmp_path / "urls").write_text("https://good.example/bad-page\ngood.example/other?a=1&b=2\n")
    (tmp_path / "words").write_text("Grue\nvorpal sword\nÄrger\n")
    return tmp_path


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://bad.example/a", "blocked host"),
        ("https://www.bad.example:443/", "blocked host"),
        ("https://deep.sub.bad.example/", "blocked host"),
        ("https://worse.example/", "blocked host"),
        ("https://notbad.example/", None),
        ("https://bad.example.org/", None),
        ("http://www.good.example/bad-page/?utm_source=x", "blocked url"),
        ("https://good.example/other?b=2&a=1", "blocked url"),
        ("https://good.example/other", None),
        ("no address", None),
    ],
)
def test_addresses_and_hosts_are_blocked(lists: Path, url: str, reason: str | None) -> None:
    step = Blocklist(hosts=lists / "hosts", urls=lists / "urls")
    assert reason_for(step, "text", url=url) == reason
    assert reason_for(step, "text") is None


@pytest.mark.parametrize(
    ("text", "num_words"),
    [
        ("Likely to be eaten by a GRUE.", 1),
        ("a vorpal\nsword!", 1),
        ("a sword, vorpal", 0),
        ("gruesome", 0),
        ("so ein Ärger", 1),
        ("grue, grue, grue", 1),
        ("vorpal vorpal sword against grue", 2),
    ],
)
def test_words_and_phrases_are_blocked(lists: Path, text: str, num_words: int) -> None:
    for at_least in (1, 2, 3):
        step = Blocklist(words=lists / "words", min_distinct_words=at_least)
        assert reason_for(step, text) == ("blocked words" if num_words >= at_least else None)


def test_step_travels_with_its_lists(lists: Path) -> None:
    step = pickle.loads(pickle.dumps(Blocklist(words=lists / "words")))
    (lists / "words").unlink()
    assert reason_for(step, "a grue") == "blocked words"


def test_list_that_blocks_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of hosts, urls, words"):
        Blocklist()
    with pytest.raises(DataError, match="cannot be read"):
        Blocklist(hosts=tmp_path / "missing")
    (tmp_path / "empty").write_text("# nothing yet\n\n")
    with pytest.raises(DataError, match="holds no entry"):
        read_list(tmp_path / "empty")
    (tmp_path / "latin").write_bytes(b"\xe9\n")
    with pytest.raises(DataError, match="cannot be read"):
        read_list(tmp_path / "latin")
    (tmp_path / "urls").write_text("http://:80/\n")
    with pytest.raises(DataError, match="not a web address"):
        Blocklist(urls=tmp_path / "urls")
