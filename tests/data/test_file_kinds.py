# SPDX-License-Identifier: Apache-2.0
"""CSV, packed files and folders of save_to_disk: the same rows as JSON Lines, errors with file and row."""

import csv
import gzip
import json
import re

import pytest
from datasets import Dataset, DatasetDict

from data_cases import error_of
from dschat.data.sources import load_source, open_data

ROWS = [
    {"prompt": 'a "quoted", long\nquestion', "chosen": " good", "rejected": " bad"},
    {"prompt": "été", "chosen": " 1,5", "rejected": "x" * 200_000},
]


def write_csv(path, rows, newline="\r\n"):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator=newline)
        writer.writeheader()
        writer.writerows(rows)
    return path


def pack(path):
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return packed


def texts_of(source):
    return [{"prompt": r.prompt, "chosen": r.chosen, "rejected": r.rejected} for r in source.train]


@pytest.fixture
def folder(tmp_path):
    """Holds evaluation rows, so that the order of the others is that of the files."""
    for kind in ("csv", "jsonl", "saved"):
        (tmp_path / kind).mkdir()
    return tmp_path


@pytest.mark.parametrize("packed", [False, True])
def test_csv(folder, packed):
    for name in ("train", "test"):
        file = write_csv(folder / "csv" / f"{name}.csv", ROWS)
        if packed:
            file = pack(file)
    source = load_source(folder / "csv")
    assert texts_of(source) == ROWS and len(source.eval) == 2
    ending = ".csv.gz" if packed else ".csv"
    assert [row.origin for row in source.train] == [f"{folder}/csv/train{ending} row {number}" for number in (1, 2)]
    assert load_source(source.files[0]).name == "train"


def test_csv_of_spreadsheets(tmp_path):
    """A byte-order mark, blank lines, spaces around names; an empty cell is no text."""
    path = tmp_path / "a.csv"
    path.write_bytes("\ufeffprompt, completion \r\n\r\na,b\r\nc,\r\n".encode())
    rows = load_source(path).train + load_source(path).eval
    assert sorted((r.prompt, r.chosen, r.origin) for r in rows if r.chosen) == [("a", "b", f"{path} row 1")]
    assert [r.origin for r in rows if r.chosen is None] == [f"{path} row 2"]


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"prompt,chosen\na,b\nc,d,e\n", "is not a readable csv file .*Expected 2 columns, got 3: c,d,e"),
        (b'prompt,chosen\na,b\n"c,d\n', "is not a readable csv file"),
        (b"prompt,prompt\na,b\n", "must name the columns, each by a name of its own, not 'prompt', 'prompt'"),
        (b"prompt,chosen\na,b\n,b\n", "bad.csv row 2: column 'prompt' is empty; fill it, or remove the row"),
        (b"prompt;chosen\na;b\n", "the first line names one column, 'prompt;chosen'; separate columns by commas"),
        (b"messages\n\"[{'role': 'user'}]\"\n", "bad.csv row 1: .*write it as a list, into a file of JSON Lines"),
        (b"prompt,chosen\n", "bad.csv is empty"),
    ],
)
def test_bad_csv_is_named(tmp_path, content, wanted):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    assert re.search(wanted, error_of(path))


def test_packed_json(folder):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name, text in (("a.jsonl", lines), ("b.json", lines), ("c.json", "\ufeff\n" + json.dumps(ROWS))):
        (folder / name).write_text(text, encoding="utf-8")
        path = pack(folder / name)
        source = load_source(path)
        assert sorted(map(str, texts_of(source))) == sorted(map(str, ROWS)) and source.name == name[0]
    assert {row.origin for row in load_source(folder / "a.jsonl.gz").train} == {
        f"{folder}/a.jsonl.gz:{line}" for line in (1, 2)
    }


def test_saved_splits(folder):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    splits = {"train_sft": Dataset.from_list(ROWS), "validation": Dataset.from_list(ROWS[:1])}
    splits |= {"test": Dataset.from_list(ROWS), "other": Dataset.from_list([{"messages": talk}])}
    DatasetDict(splits).save_to_disk(folder / "saved")
    source = load_source(folder / "saved")
    assert texts_of(source) == ROWS and [row.chosen for row in source.eval] == [" good"]
    assert [row.origin for row in source.train] == [f"{folder}/saved/train_sft row {n}" for n in (1, 2)]
    assert [file.parent.name for file in source.files] == ["train_sft", "validation"]
    assert all(file.suffix == ".arrow" for file in source.files)
    assert len(list(open_data(str(folder / "saved"), "--data").train)) == 2
    # one split alone is divided, and lists of messages stay lists
    alone = load_source(folder / "saved" / "other")
    assert [row.chosen for row in alone.train + alone.eval] == ["hello"]


def test_bad_saved_folders(folder, tmp_path):
    DatasetDict({"part": Dataset.from_list(ROWS)}).save_to_disk(folder / "saved")
    expected = "no split that begins with train (or, for evaluation, with valid, eval, test), only part"
    assert expected in error_of(folder / "saved")
    Dataset.from_list([{"prompt": "a"}, {"prompt": None}]).save_to_disk(tmp_path / "rows")
    assert error_of(tmp_path / "rows").startswith(f"{tmp_path}/rows row 2: column 'prompt' is empty")
    (arrow,) = (tmp_path / "rows").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:40])
    assert f"--data_path {tmp_path}/rows: a folder of save_to_disk that cannot be opened" in error_of(
        tmp_path / "rows"
    )
