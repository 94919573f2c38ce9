# SPDX-License-Identifier: Apache-2.0
"""CSV, packed files and folders of save_to_disk: the same rows as JSON Lines, errors with file and row."""

import csv
import gzip
import re

import pytest
from datasets import Dataset, DatasetDict

from cli_runs import write_jsonl
from data_cases import error_of
from dialogue_cases import dialogue
from dschat.data.sources import load_source

ROWS = [
    {"prompt": 'a "quoted", long\nquestion', "chosen": " good", "rejected": " bad"},
    {"prompt": "été", "chosen": " 1,5", "rejected": "x" * 200_000},
]


def write_csv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
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


@pytest.mark.parametrize("packed", [False, True])
def test_csv(tmp_path, packed):
    """With evaluation rows, so that the order of the others is that of the file."""
    for name in ("train", "test"):
        file = write_csv(tmp_path / f"{name}.csv", ROWS)
        if packed:
            pack(file)
    source = load_source(tmp_path)
    assert texts_of(source) == ROWS and len(source.eval) == 2
    assert source.train[1].origin == f"{tmp_path}/train{'.csv.gz' if packed else '.csv'} row 2"
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


def test_packed_json(tmp_path):
    path = pack(write_jsonl(tmp_path / "a.jsonl", ROWS))
    source = load_source(path)
    rows = {row.origin: row.prompt for row in source.train}
    assert rows[f"{path}:2"] == ROWS[1]["prompt"] and source.name == "a"


def test_saved_splits(tmp_path):
    splits = {"train_sft": Dataset.from_list(ROWS), "validation": Dataset.from_list(ROWS[:1])}
    splits |= {"test": Dataset.from_list(ROWS), "other": Dataset.from_list([{"messages": dialogue("hi", "hello")}])}
    DatasetDict(splits).save_to_disk(tmp_path)
    source = load_source(tmp_path)
    assert texts_of(source) == ROWS and [row.chosen for row in source.eval] == [" good"]
    assert source.train[1].origin == f"{tmp_path}/train_sft row 2"
    assert [(file.parent.name, file.suffix) for file in source.files] == [
        ("train_sft", ".arrow"),
        ("validation", ".arrow"),
    ]
    # one split alone is divided, and lists of messages stay lists
    alone = load_source(tmp_path / "other")
    assert [row.chosen for row in alone.train + alone.eval] == ["hello"]


def test_bad_saved_folders(tmp_path):
    DatasetDict({"part": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    expected = "no split that begins with train (or, for evaluation, with valid, eval, test), only part"
    assert expected in error_of(tmp_path / "saved")
    Dataset.from_list([{"prompt": "a"}, {"prompt": None}]).save_to_disk(tmp_path / "rows")
    assert error_of(tmp_path / "rows").startswith(f"{tmp_path}/rows row 2: column 'prompt' is empty")
    (arrow,) = (tmp_path / "rows").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:40])
    assert "/rows: a folder of save_to_disk that cannot be opened" in error_of(tmp_path / "rows")
