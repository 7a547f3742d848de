"""Readers: what each kind of file gives, and what becomes of files that cannot be read."""

import gzip
import json
import resource
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdrmix.corpus.source import SourceConfig, find_files
from cdrmix.corpus.steps import read as read_module
from cdrmix.corpus.steps.read import paced, read_file, retry_rows
from cdrmix.corpus.steps.read_bytes import Unreadable
from cdrmix.corpus.steps.read_text import extract_text
from cdrmix.data.document import Document
from cdrmix.errors import DataError


def source_of(path: Path, **options: Any) -> SourceConfig:
    return SourceConfig(name="s", type="local", path=str(path), domain="prose", **options)


def read(path: Path, **options: Any) -> tuple[list[Document], list[tuple[str, int | None, str]]]:
    """Documents of all files of a source, and (file, row, reason) of what was set aside."""
    source = source_of(path, **options)
    aside: list[tuple[str, int | None, str]] = []
    found = find_files(source)
    aside += [(name, None, reason) for name, reason in found.unreadable]
    documents = [
        document
        for file in found.files
        for document in read_file(
            file, source, lambda name, row, reason, _: aside.append((name, row, reason))
        )
    ]
    return documents, aside


def texts(path: Path, **options: Any) -> list[str]:
    documents, aside = read(path, **options)
    assert not aside
    return [document.text for document in documents]


def zstd(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor().compress(content))


def write_docx(path: Path, body: str) -> None:
    xml = (
        '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
        f"<w:body>{body}</w:body></w:document>"
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", xml)


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def test_a_document_is_named_by_source_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.jsonl").write_text('{"text": "x"}\n{"text": "y", "url": "http://u"}\n')
    documents, _ = read(tmp_path)
    assert [document.id for document in documents] == ["s/sub/a.jsonl#0", "s/sub/a.jsonl#1"]
    assert documents[1].metadata == {"path": "sub/a.jsonl", "url": "http://u"}
    assert (documents[0].source, documents[0].domain) == ("s", "prose")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_metadata_inside_objects_is_kept_under_its_last_name(tmp_path: Path, kind: str) -> None:
    rows = [{"text": "x", "metadata": {"url": "http://u", "n": 1}}, {"text": "y", "metadata": None}]
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        arrow = pytest.importorskip("pyarrow", reason="the [data] extra is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    documents, _ = read(tmp_path, metadata_fields=("metadata.url", "metadata.none"))
    assert [document.metadata for document in documents] == [
        {"path": f"a.{kind}", "url": "http://u"},
        {"path": f"a.{kind}"},
    ]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.rst", "a.py", "a.rs", "Makefile", "A.TXT"])
def test_text_and_code_are_handed_on_as_they_are(tmp_path: Path, name: str) -> None:
    text = "first\r\n\tsecond  \nécrit\n"
    (tmp_path / name).write_bytes(text.encode())
    assert texts(tmp_path) == [text]


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.txt.gz", gzip.compress), ("a.txt.zst", zstd), ("a.jsonl.gz", gzip.compress)],
)
def test_compressed_files_are_read_by_the_name_inside(
    tmp_path: Path, name: str, compress: Callable[[bytes], bytes]
) -> None:
    content = b'{"text": "word"}\n' if "jsonl" in name else b"word"
    (tmp_path / name).write_bytes(compress(content) + compress(content if "jsonl" in name else b""))
    assert texts(tmp_path) == (["word", "word"] if "jsonl" in name else ["word"])


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "a"}, {"text": "b"}]',
        '{"text": "a"}\n{"text": "b"}\n',
        '{\n "text": "a"\n}\n{"text":\n"b"}',
        '\ufeff[{"text": "a"},\n\n{"text": "b"}]\n',
    ],
)
def test_json_is_a_list_or_values_one_after_the_other(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    assert texts(tmp_path) == ["a", "b"]


def test_a_json_list_longer_than_what_is_read_at_once_is_whole(tmp_path: Path) -> None:
    wanted = [f"{number} " + "x" * (number % 700) for number in range(6000)]
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in wanted]))
    assert (tmp_path / "a.json").stat().st_size > 2 * 2**20
    assert texts(tmp_path) == wanted


def test_a_nested_text_field_is_found_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": {"body": "deep"}}\n')
    assert texts(tmp_path, text_field="content.body") == ["deep"]


def test_csv_fields_may_hold_line_ends_and_commas(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text,url\n1,"one,\ntwo ""three""",http://u\n')
    (tmp_path / "b.tsv").write_text("text\tid\nfour, five\t2\n")
    assert texts(tmp_path) == ['one,\ntwo "three"', "four, five"]


def test_html_gives_what_a_page_shows(tmp_path: Path) -> None:
    page = (
        "<!doctype html><html><head><title>A &amp; B</title><style>p{}</style></head><body>"
        "<nav><a>menu</a></nav><script>var x = '<p>no</p>';</script><h1>Head</h1>"
        "<p>One\n  <b>bold</b>word.<br>Next</p><ul><li>first<li>second</ul>"
        "<pre>  a\n    b</pre><table><tr><td>1</td><td>2</td></tr></table></body></html>"
    )
    (tmp_path / "a.html").write_text(page)
    (document,), _ = read(tmp_path)
    assert document.text == (
        "Head\n\nOne boldword.\nNext\n\n  • first\n  • second\n  a\n    b\n1\t\t2"
    )
    assert document.metadata["title"] == "A & B"


def test_html_left_open_hides_no_more_than_it_must() -> None:
    assert extract_text("<head><title>t</title><body><p>shown")[0] == "shown"
    assert extract_text("<nav>menu</nav></nav></p>shown")[0] == "shown"


def test_html_leaves_out_landmarks_and_keeps_captions_and_summaries() -> None:
    page = (
        "<div role='navigation'>menu</div><h1>Head<a class='headerlink'>¶</a></h1>"
        "<figure><img src=x><figcaption>caption</figcaption></figure>"
        "<details><summary>short</summary>long</details><div role='contentinfo'>notice</div>"
    )
    assert extract_text(page)[0].split() == ["Head", "caption", "short", "long"]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("<nav>" * 60_000 + "</div>" * 30_000 + "x", id="time of ends without a start"),
        pytest.param("".join(f"<p><font size={i}>" for i in range(5_000)), id="memory of fonts"),
        pytest.param("<ul><li>x" * 2_000, id="indentation of lists"),
    ],
)
def test_hostile_html_is_set_aside_within_its_limits(page: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(Unreadable, match="beyond the limits"):
        extract_text(page)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert extract_text("<p>the next page")[0] == "the next page"


def test_html_is_decoded_as_it_declares(tmp_path: Path) -> None:
    page = '<html><head><meta charset="iso-8859-1"></head><body>café</body></html>'
    (tmp_path / "a.html").write_bytes(page.encode("latin-1"))
    assert texts(tmp_path) == ["café"]


def test_docx_gives_paragraphs_and_tables_in_order(tmp_path: Path) -> None:
    cells = "".join(f"<w:tc>{paragraph(text)}</w:tc>" for text in ("x", "y"))
    body = paragraph("One") + f"<w:tbl><w:tr>{cells}</w:tr></w:tbl>" + paragraph("Two &lt;3")
    write_docx(tmp_path / "a.docx", body)
    assert texts(tmp_path) == ["One\nx\ty\nTwo <3"]


def test_parquet_and_arrow_give_their_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the [data] extra is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [f"t{i}" for i in range(150)], "n": list(range(150))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=40)
    for name, new in (("b", pyarrow.ipc.new_stream), ("c", pyarrow.ipc.new_file)):
        with new(str(tmp_path / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table)
    assert texts(tmp_path) == 3 * [f"t{i}" for i in range(150)]


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "binary.txt": (b"ab\0cd", "NUL characters"),
    "latin.txt": ("é".encode("latin-1") * 20, "invalid utf-8"),
    "blank.txt": (b" \n\n", "empty text"),
    "not-gzip.txt.gz": (b"plain text", "damaged compression"),
    "cut.txt.gz": (gzip.compress(bytes(range(256)) * 400)[:-40], "damaged compression"),
    "nested.json": (b'{"data": {"rows": []}}', "no text in field 'text'"),
    "cut.json": (b'[{"text": 5}, {"te', "invalid JSON"),
    "deep.json": (b"[" * 200_000, "invalid JSON"),
    "number.json": (b'{"text": 5}', "field 'text' holds no text"),
    "header.csv": (b"id,content\n1,x\n", "no column 'text'"),
    "quote.csv": (b'text,id\n"open,1\nand never closed', "invalid CSV"),
    "nul.csv": (b"text,id\na\0b,1\n", "NUL characters"),
    "a.docx": (b"PK\x03\x04 and no more", "damaged docx"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read_is_set_aside_and_the_others_are_read(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "zzz.txt").write_text("good")
    content, reason = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    documents, aside = read(tmp_path)
    assert [document.text for document in documents] == ["good"]
    assert (name, reason) in [(file, why) for file, _, why in aside]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_table_is_set_aside(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow", reason="the [data] extra is not installed")
    (tmp_path / name).write_bytes(b"PAR1 and no more")
    documents, ((file, _, reason),) = read(tmp_path)
    assert not documents
    assert (file, reason) == (name, f"damaged {name[2:]}")


def test_a_truncated_zst_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(50_000))
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(lines)[:-100])
    documents, aside = read(tmp_path)
    assert aside == [("a.jsonl.zst", None, "damaged compression")]
    assert [document.text for document in documents] == list(map(str, range(len(documents))))


def test_rows_before_a_truncation_are_kept(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(50_000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-100])
    documents, aside = read(tmp_path)
    assert len(documents) > 49_000
    assert aside == [("a.jsonl.gz", None, "damaged compression")]


def test_a_bad_row_is_set_aside_alone(tmp_path: Path) -> None:
    rows = [
        '{"text": "a"}',
        '{"text": ',
        "[1]",
        '{"txt": "x"}',
        '{"text": "\\ud800"}',
        "",
        '{"text": "b"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "b.csv").write_text("text,id\nc,1\nd\ne,2\n")
    documents, aside = read(tmp_path)
    assert [document.text for document in documents] == ["a", "b", "c", "e"]
    assert aside == [
        ("a.jsonl", 1, "invalid JSON"),
        ("a.jsonl", 2, "not an object"),
        ("a.jsonl", 3, "no text in field 'text'"),
        ("a.jsonl", 4, "invalid unicode"),
        ("b.csv", 1, "row does not fit the header"),
    ]


def test_invalid_bytes_are_replaced_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "caf\xe9 \\ud800"}')
    assert texts(tmp_path, encoding_errors="replace") == [
        "caf\ufffd",
        "caf\ufffd \ufffd\ufffd\ufffd",
    ]


def test_a_line_of_500_mb_is_passed_over_without_being_held(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "before"}\n')
        file.seek(500_000_000)  # a hole: no disk is used
        file.write(b'\n{"text": "after"}\n')
    tracemalloc.start()
    documents, aside = read(tmp_path, max_document_bytes=2**20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [document.text for document in documents] == ["before", "after"]
    assert aside == [("a.jsonl", 1, "line longer than max_document_bytes")]
    assert peak < 16 * 2**20


def test_a_tar_header_of_400_mb_is_not_held(tmp_path: Path) -> None:
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 400_000_000
    text = tarfile.TarInfo("before.txt")
    text.size = 5
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(text.tobuf() + b"words".ljust(512, b"\0") + name.tobuf())
        file.truncate(400_010_000)
    tracemalloc.start()
    documents, aside = read(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not documents, "members of the sample may be missing"
    assert aside == [("a.tar", None, "damaged tar")]
    assert peak < 16 * 2**20


@pytest.mark.parametrize(
    ("value", "reason"),
    [("a" * 10_000_000, "expands too much"), ("0123456789abcdef" * 40_000, None)],
    ids=["a value that shrinks", "one within the limit"],
)
def test_a_parquet_of_one_value_in_every_row_is_not_decoded_whole(
    tmp_path: Path, value: str, reason: str | None
) -> None:
    arrow, parquet = (pytest.importorskip(f"pyarrow{name}") for name in ("", ".parquet"))
    num_rows = 2 if reason else 64
    table = arrow.table({"text": [value] * num_rows})
    options = {"dictionary_pagesize_limit": 2**28}
    codec = "zstd" if reason else "none"
    parquet.write_table(table, tmp_path / "a.parquet", compression=codec, **options)
    del table
    pool = arrow.system_memory_pool()
    before = arrow.default_memory_pool()
    arrow.set_memory_pool(pool)
    try:
        documents, aside = read(tmp_path, max_document_bytes=2**20)
    finally:
        arrow.set_memory_pool(before)
    assert [why for _, _, why in aside] == [reason] * bool(reason)
    assert len(documents) == (0 if reason else num_rows)
    assert pool.max_memory() < 24 * 2**20, "64 rows are 41 MB"


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow of dictionaries"])
def test_a_row_of_a_table_larger_than_allowed_is_set_aside_alone(tmp_path: Path, kind: str) -> None:
    arrow, parquet = (pytest.importorskip(f"pyarrow{name}") for name in ("", ".parquet"))
    table = arrow.table({"text": ["one", "x" * 2000, "\N{SNOWMAN}" * 400, "two"]})
    if kind == "parquet":
        parquet.write_table(table, tmp_path / "a.parquet")
    else:
        if kind.endswith("dictionaries"):
            table = arrow.table({"text": table["text"].dictionary_encode()})
        with arrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table)
    documents, aside = read(tmp_path, max_document_bytes=1000)
    assert [document.text for document in documents] == ["one", "two"]
    why = "row longer than max_document_bytes"
    assert [(row, reason) for _, row, reason in aside] == [(1, why), (2, why)]


@pytest.mark.parametrize(
    ("row", "known"),
    [
        ({"id": 1, "content": {"text": "x", "n": 1}}, "id, content; text inside: content.text"),
        (
            {"a": {"b": {"body": "x"}, "title": "y"}},
            "a; text inside: a.b.body, a.title",
        ),
        ({"id": 1, "content": {"n": 1}, "tags": ["x"]}, "id, content, tags"),
        # No path leads to it: the dot of a key would be read as a step into an object.
        ({"content": {"a.b": "x"}}, "content"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_text_inside_of_objects_is_named_by_its_path(
    tmp_path: Path, kind: str, row: dict[str, Any], known: str
) -> None:
    file = tmp_path / f"a.{kind}"
    file.write_text(json.dumps(row) + "\n")
    told: list[str] = []
    source = source_of(file)
    (found,) = find_files(source).files
    assert not list(read_file(found, source, lambda *entry: told.append(entry[3])))
    assert told == [f"its fields: {known}"]
    for name in known.partition("text inside: ")[2].split(", "):
        if name:
            assert texts(file, text_field=name)


def test_text_inside_of_the_named_field_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"c": {"content": {"text": "x"}}}) + "\n")
    told: list[tuple[str, str]] = []
    source = source_of(tmp_path, text_field="c.content")
    (found,) = find_files(source).files
    assert not list(read_file(found, source, lambda *entry: told.append(entry[2:])))
    reason = "field 'c.content' holds no text"
    assert told == [(reason, "it holds a dict; text inside: c.content.text")]


def test_text_inside_of_a_column_is_named_by_its_path(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": 1, "content": {"text": "x", "n": 1}}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    told: list[str] = []
    source = source_of(tmp_path)
    (found,) = find_files(source).files
    assert not list(read_file(found, source, lambda *entry: told.append(entry[3])))
    assert told == ["its columns: id, content; text inside: content.text"]
    assert texts(tmp_path, text_field="content.text") == ["x"]


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.csv", "a.html"])
def test_a_text_larger_than_allowed_is_set_aside(tmp_path: Path, name: str) -> None:
    start = {"a.json": '{"text": "', "a.csv": "text\n"}.get(name, "")
    (tmp_path / name).write_text(start + "x" * 3_000_000)
    documents, ((_, _, reason),) = read(tmp_path, max_document_bytes=1_000_000)
    assert not documents
    assert "max_document_bytes" in reason


def test_links_are_followed_but_not_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("word")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "loop").symlink_to(tmp_path)
    (tmp_path / "itself.txt").symlink_to(tmp_path / "itself.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    documents, aside = read(tmp_path)
    assert [d.metadata["path"] for d in documents] == ["data/a.txt", "elsewhere/a.txt"]
    assert sorted((name, reason) for name, _, reason in aside) == [
        ("data/loop", "symbolic link loop"),
        ("elsewhere/loop", "symbolic link loop"),
        ("gone.txt", "cannot be read: No such file or directory"),
        ("itself.txt", "cannot be read: Too many levels of symbolic links"),
    ]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_text("word")
    documents, aside = read(tmp_path)
    assert len(documents) == 1
    assert aside == [("a.txt", None, "not a regular file")]


def test_other_kinds_hidden_files_and_skipped_ones_are_not_read(tmp_path: Path) -> None:
    for name in ("a.txt", ".hidden.txt", "b.png", "c.png", "test/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("word")
    found = find_files(source_of(tmp_path, skip=("test/*",)))
    assert [file.name for file in found.files] == ["a.txt"]
    assert found.other_kinds == {".png": 2}


def test_the_standard_library_is_read_without_what_was_installed_beside_it() -> None:
    source = SourceConfig(name="s", type="local", path="python:stdlib", domain="code")
    names = {file.name for file in find_files(source).files}
    assert "json/decoder.py" in names
    assert not [name for name in names if name.startswith(("site-packages/", "dist-packages/"))]


def test_the_folder_of_the_build_is_no_part_of_a_source_around_it(tmp_path: Path) -> None:
    for name in ("out/work/documents.jsonl", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("word")
    found = find_files(source_of(tmp_path), leave_out=tmp_path / "out")
    assert [file.name for file in found.files] == ["a.txt"]


def test_an_empty_folder_and_a_missing_one_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"source 's': .*no file that can be read.*1 \.png"):
        find_files(source_of(tmp_path))
    with pytest.raises(DataError, match="no such file or folder"):
        find_files(source_of(tmp_path / "none"))


class FlakyRows:
    """A stream of numbers whose connection breaks at some of them, once each."""

    def __init__(self, size: int, breaks: list[int]) -> None:
        self.size, self.breaks = size, list(breaks)
        self.opened_at: list[int] = []

    def __call__(self, row: int) -> Any:
        self.opened_at.append(row)
        for number in range(row, self.size):
            if number in self.breaks:
                self.breaks.remove(number)
                raise ConnectionError("reset by peer")
            yield number


def test_a_broken_stream_goes_on_at_the_next_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, pauses = FlakyRows(10, [4, 4, 4, 9]), []
    monkeypatch.setattr(read_module, "sleep", pauses.append)
    assert list(retry_rows(rows, retries=3, what="s")) == list(range(10))
    assert rows.opened_at == [0, 4, 4, 4, 9]
    assert pauses == [1.0, 2.0, 4.0, 1.0]


def test_a_stream_that_stays_broken_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = FlakyRows(10, [4] * 4)
    monkeypatch.setattr(read_module, "sleep", lambda _: None)
    with pytest.raises(DataError, match=r"s: reading failed 3 times at row 4: reset by peer"):
        list(retry_rows(rows, retries=2, what="s"))


def test_a_paced_stream_is_no_faster_than_asked() -> None:
    import time

    begin = time.monotonic()
    assert list(paced(iter(range(11)), 50)) == list(range(11))
    assert time.monotonic() - begin >= 0.2
