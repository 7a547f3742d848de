"""Published question-answering files, made here in their formats, as rows of tasks."""

import json
from pathlib import Path
from typing import Any

import pytest

from cdrmix.cli import main
from cdrmix.errors import DataError
from cdrmix.reasoning.public_tasks import READERS, convert
from cdrmix.reasoning.task_files import read_examples
from cdrmix.reasoning.tasks import Example, score
from cdrmix.verbs.data_verbs import TASK_FORMATS

CONTEXT = "The mill was built in 1820. Mrs. Ada Byron ran it for ten years! It burned down."


def squad() -> dict[str, Any]:
    def answer(text: str) -> dict[str, Any]:
        return {"text": text, "answer_start": CONTEXT.index(text)}

    qas: list[dict[str, Any]] = [
        {
            "id": "1",
            "question": "Who ran the mill?",
            "answers": [answer("Ada Byron"), answer("Mrs. Ada Byron"), answer("Ada Byron")],
            "is_impossible": False,
        },
        {"id": "2", "question": "Who sold it?", "answers": [], "is_impossible": True},
        {"id": "3", "question": "When was it built?", "answers": [answer("1820")]},
    ]
    paragraphs = [{"context": CONTEXT, "qas": qas}]
    return {"version": "v2.0", "data": [{"title": "Mill", "paragraphs": paragraphs}]}


def hotpot() -> dict[str, Any]:
    return {
        "_id": "5a8b",
        "question": "Where is the river of the mill town?",
        "answer": "in the north",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Mill Town", 1], ["Ouse", 0], ["Ouse", 7]],
        "context": [
            ["Mill Town", ["Mill Town is old.", " It stands on the Ouse."]],
            ["Ouse", ["The Ouse is a river in the north.", " It is long."]],
            ["Elsewhere", ["Nothing happens here."]],
        ],
    }


def musique() -> dict[str, Any]:
    texts = ["A town. Its river is the Ouse.", "Nothing.", "The Ouse ends in Hull. It is long."]
    return {
        "id": "2hop__1_2",
        "paragraphs": [
            {"idx": n, "title": f"T{n}", "paragraph_text": text, "is_supporting": n != 1}
            for n, text in enumerate(texts)
        ],
        "question": "Where does the river of the town end?",
        "question_decomposition": [
            {"id": 1, "question": "?", "answer": "Ouse", "paragraph_support_idx": 0},
            {"id": 2, "question": "#1?", "answer": "Hull", "paragraph_support_idx": 2},
        ],
        "answer": "Hull",
        "answer_aliases": ["Kingston upon Hull"],
        "answerable": True,
    }


def write(path: Path, rows: Any) -> Path:
    """A list as JSON lines, or an object as one."""
    path.parent.mkdir(exist_ok=True)
    lines = rows if isinstance(rows, list) else [rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return path


def single(kind: str, path: Path) -> Example:
    (example,) = convert(kind, path).examples
    return example


def test_squad_gives_the_sentence_of_the_answer_as_evidence(tmp_path: Path) -> None:
    converted = convert("squad", write(tmp_path / "dev.json", squad()))
    first, last = converted.examples
    assert converted.num_unanswerable == 1
    assert first.answers == ("Ada Byron", "Mrs. Ada Byron") and first.match == "f1"
    assert last.evidence == ("The mill was built in 1820.",)
    assert all(line in first.text for line in first.evidence)
    assert score(first, "the ada byron") == 1
    version_1 = squad()
    for question in version_1["data"][0]["paragraphs"][0]["qas"]:
        question.pop("is_impossible", None)
    del version_1["data"][0]["paragraphs"][0]["qas"][1]
    assert convert("squad", write(tmp_path / "v1.json", version_1)).num_unanswerable == 0


def test_hotpotqa_gives_supporting_facts_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_text(json.dumps([hotpot()]))
    example = single("hotpotqa", path)
    assert example.evidence == ("It stands on the Ouse.", "The Ouse is a river in the north.")
    assert all(line in example.text for line in example.evidence)
    assert "Elsewhere. Nothing happens here." in example.text
    columns = hotpot() | {
        "supporting_facts": {"title": ["Mill Town", "Ouse"], "sent_id": [1, 0]},
        "context": {
            "title": [title for title, _ in hotpot()["context"]],
            "sentences": [sentences for _, sentences in hotpot()["context"]],
        },
    }
    assert single("hotpotqa", write(tmp_path / "hf.jsonl", columns)) == example


def test_musique_gives_the_sentences_of_its_hops(tmp_path: Path) -> None:
    rows = [musique(), musique() | {"answerable": False}]
    converted = convert("musique", write(tmp_path / "dev.jsonl", rows))
    (example,) = converted.examples
    assert converted.num_unanswerable == 1
    assert example.evidence == ("Its river is the Ouse.", "The Ouse ends in Hull.")
    assert example.answers == ("Hull", "Kingston upon Hull")
    bare = {key: value for key, value in musique().items() if key != "question_decomposition"}
    assert len(single("musique", write(tmp_path / "bare.jsonl", bare)).evidence) == 2


def test_babilong_is_named_by_its_folder_and_lists_are_words(tmp_path: Path) -> None:
    row = {"input": "Ada went home.", "question": "What has Ada? ", "target": "milk,football"}
    path = tmp_path / "qa8" / "4k.json"
    path.parent.mkdir()
    path.write_text(json.dumps([row]))
    example = single("babilong", path)
    assert (example.task, example.answers, example.match) == ("qa8", ("milk", "football"), "all")
    path = write(tmp_path / "other.jsonl", row | {"target": "the old mill"})
    assert single("babilong", path).match == "exact"


@pytest.mark.parametrize(
    ("asked", "question"),
    [
        (
            "\nWhat are all the special magic numbers for ada mentioned in the provided text? The "
            "special magic numbers for ada mentioned in the provided text are",
            "What are all the special magic numbers for ada mentioned in the provided text?",
        ),
        (
            "\nQuestion: Find all variables that are assigned the value 7 in the text above. "
            "Answer: According to the chain(s) of variable assignment",
            "Find all variables that are assigned the value 7 in the text above.",
        ),
        ("\n\nQuestion: Who ran it?", "Who ran it?"),
    ],
)
def test_ruler_splits_the_question_off(tmp_path: Path, asked: str, question: str) -> None:
    text = "Memorize it.\n\nIs it here? Yes. The number for ada is 77.\nThe number for bob is 8."
    row = {"index": 0, "input": text + asked, "outputs": ["77", "78"], "length": 40}
    example = single("ruler", write(tmp_path / "niah" / "validation.jsonl", row))
    assert (example.text, example.question) == (text, question)
    assert (example.task, example.match, example.answers) == ("niah", "all", ("77", "78"))
    row["outputs"] = ["a-b-c"]
    assert single("ruler", write(tmp_path / "uuid.jsonl", row)).match == "exact"


def broken(kind: str) -> tuple[Any, str]:
    """A file with one good row and one broken row, and what is said of that."""
    if kind == "squad":
        made = squad()
        made["data"][0]["paragraphs"][0]["qas"][2]["answers"][0]["answer_start"] = 0
        said = "data 1, paragraphs 1, qas 3, answers 1: '1820' does not stand at answer_start = 0"
        return made, said
    if kind == "hotpotqa":
        bad = hotpot() | {"supporting_facts": [["Nowhere", 0]]}
        return [hotpot(), bad], "line 2: supporting_facts name 'Nowhere', which context does not"
    if kind == "musique":
        return [musique(), musique() | {"paragraphs": None}], "line 2: paragraphs is None, not list"
    if kind == "babilong":
        good = {"input": "A.", "question": "B?", "target": "c"}
        return [good, good | {"target": 7}], "line 2: target is 7, not str"
    good = {"input": "A.\nB?", "outputs": ["c"]}
    return [good, {"input": "A.\nB?"}], "line 2: outputs is missing"


@pytest.mark.parametrize("kind", READERS)
def test_a_broken_row_is_one_message_with_its_place(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, said = broken(kind)
    path = write(tmp_path / "data.json", rows)
    out = tmp_path / "tasks.jsonl"
    code = main(["data", "tasks", "--format", kind, "--file", str(path), "--out", str(out)])
    told = capsys.readouterr().err.strip()
    assert code == 2 and f"{path}: " in told and said in told and "\n" not in told
    assert not out.exists()
    path.write_text('{"data": [')
    with pytest.raises(DataError, match="not JSON: "):
        convert(kind, path)
    path.write_text("[]" if kind != "squad" else '{"data": []}')
    with pytest.raises(DataError, match="no questions with an answer"):
        convert(kind, path)


def test_the_verb_writes_rows_that_are_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "dev.json", squad())
    out = tmp_path / "tasks.jsonl"
    flags = ["--file", str(path), "--out", str(out), "--window-tokens", "8", "--limit", "1"]
    assert main(["data", "tasks", "--format", "squad", *flags]) in (0, None)
    assert capsys.readouterr().out == f"{out}: 1 rows\n"
    (example,) = read_examples(out)
    # 80 characters are about 20 tokens, and those three windows, in the column of four
    assert example.length_ratio == 4 and example.question == "Who ran the mill?"
    assert tuple(READERS) == TASK_FORMATS
