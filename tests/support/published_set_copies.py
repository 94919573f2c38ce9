# SPDX-License-Identifier: Apache-2.0
"""Small copies of the four published data sets, made by code: their real columns and their odd cases.

`write_all(folder)` leaves folder/{tldr,hh,webgpt,apps} as MA_RLHF_DATA expects them. A row depends on the set, the
split and its number alone, so a larger file begins with the smaller one. Odd cases stand at fixed row numbers:

| set | row | case |
|---|---|---|
| tldr | 2 | subreddit None |
| tldr, validation | 4, 14, 24, ... | a CNN/DM article instead of a post |
| webgpt | 1 | equal scores |
| webgpt | all | citations in square brackets; in row 3 after a round one, and without a space |
| apps | 1 | solutions is an empty text, input_output too |
| apps | 2 | input_output holds an integer of 5,000 digits |
| apps | 3 | fn_name and starter code |
| apps | 4 | solutions is an empty list |
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETS = ("tldr", "hh", "webgpt", "apps")
SUBREDDITS = ("relationships", "AskReddit", "tifu", "dating_advice", "pets", "jobs", "books", "cooking")
PEOPLE = ("friend", "sister", "brother", "boss", "uncle", "neighbour", "wife", "teacher")
THINGS = ("car", "bike", "book", "dog", "phone", "house", "garden", "lamp")
PLACES = ("the office", "the park", "a small shop", "the station", "our kitchen", "the school")
VERBS = ("lost", "sold", "found", "painted", "broke", "borrowed", "fixed", "bought")
FEELINGS = ("happy", "angry", "tired", "calm", "sorry", "proud")
BIG = "7" * 5000  # more digits than int() reads


def _rng(name: str, split: str, index: int) -> random.Random:
    return random.Random(f"{name}/{split}/{index}")


def _sentence(rng: random.Random) -> str:
    who, what = rng.choice(PEOPLE), rng.choice(THINGS)
    return f"My {who} {rng.choice(VERBS)} the {what} at {rng.choice(PLACES)} and I am {rng.choice(FEELINGS)}."


def _text(rng: random.Random) -> str:
    return " ".join(_sentence(rng) for _ in range(rng.randint(2, 5)))


def tldr_row(index: int, split: str = "train") -> dict[str, Any]:
    """A row of openai/summarize_from_feedback `comparisons`; see the table above for odd ones."""
    rng = _rng("tldr", split, index)
    info: dict[str, Any] = {
        "id": f"t3_{split}{index:05d}",
        "post": _text(rng),
        "title": f"What should I do about my {rng.choice(THINGS)}?",
        "subreddit": rng.choice(SUBREDDITS),
        "site": None,
        "article": None,
    }
    if index == 2:
        info["subreddit"] = None
    if split == "validation" and index % 10 == 4:
        info |= {"post": None, "title": None, "subreddit": None, "site": "cnn", "article": "(CNN) -- " + _text(rng)}
    first, second = " " + _sentence(rng), " " + _sentence(rng) + f" Number {index}."
    return {
        "info": info,
        "summaries": [
            {"text": first, "policy": "sup2", "note": None},
            {"text": second, "policy": "ref", "note": "fine"},
        ],
        "choice": rng.randrange(2),
        "worker": f"worker{rng.randrange(20):02d}",
        "batch": f"batch{rng.randrange(5)}",
        "split": {"train": "train", "validation": "valid1"}[split],
        "extra": {"confidence": rng.randint(1, 9)},
    }


def hh_row(index: int, split: str = "train") -> dict[str, Any]:
    """A row of Dahoas/full-hh-rlhf: prompt, response (the chosen one again), chosen, rejected."""
    rng = _rng("hh", split, index)
    prompt = f"\n\nHuman: How can I help my {rng.choice(PEOPLE)} with a {rng.choice(THINGS)}? ({split} {index})"
    if index % 3 == 0:
        prompt += f"\n\nAssistant: Where is it?\n\nHuman: {_sentence(rng)}"
    chosen, rejected = " You could ask. " + _sentence(rng), f" I do not know, number {index}."
    return {"prompt": prompt + "\n\nAssistant:", "response": chosen, "chosen": chosen, "rejected": rejected}


def webgpt_row(index: int, split: str = "train") -> dict[str, Any]:
    """A row of openai/webgpt_comparisons; see the table above for odd ones."""
    rng = _rng("webgpt", split, index)
    scores = [0.0, 0.25, -0.5, 1.0]
    score = 0.0 if index == 1 else rng.choice(scores[1:])
    answers = [f"{_sentence(rng)} [1] {_sentence(rng)} [1, 2]", f"{_sentence(rng)} [2] That is all, number {index}."]
    if index == 3:
        answers[0] = "Light (a wave) bends[1]. See [2](page) for more."
    row: dict[str, Any] = {
        "question": {
            "dataset": "eli5",
            "id": f"q{index:05d}",
            "full_text": f"Why is my {rng.choice(PEOPLE)} so {rng.choice(FEELINGS)}? ({split} {index})",
        }
    }
    for side, sign in ((0, 1.0), (1, -1.0)):
        row |= {
            f"quotes_{side}": {"title": ["A page (example.com)"], "extract": [_sentence(rng)]},
            f"answer_{side}": answers[side],
            f"tokens_{side}": {"prefix": [rng.randrange(50257) for _ in range(3)], "completion": [rng.randrange(9)]},
            f"score_{side}": sign * score,
        }
    return row


def apps_row(index: int, split: str = "train") -> dict[str, Any]:
    """A row of codeparrot/apps; see the table above for odd ones. Texts in texts, as in the original."""
    rng = _rng("apps", split, index)
    number = rng.randint(2, 9)
    solutions = [
        f"n = int(input())\nprint(n * {number})\n",
        f"x = int(input())\nfor _ in range(1):\n    print({number} * x)",
    ]
    row = {
        "id": index,
        "question": f"Read a number and print it times {number}.\n\n-----Input-----\n\nOne integer. ({split} {index})",
        "solutions": json.dumps(solutions),
        "input_output": json.dumps({"inputs": ["3\n"], "outputs": [f"{3 * number}\n"]}),
        "difficulty": ("introductory", "interview", "competition")[index % 3],
        "url": f"https://example.org/{split}/{index}",
        "starter_code": "",
    }
    if index == 1:
        row |= {"solutions": "", "input_output": ""}
    if index == 2:
        row["input_output"] = f'{{"inputs": [[{BIG}]], "outputs": [{BIG}]}}'
    if index == 3:
        row["input_output"] = json.dumps({"fn_name": "times", "inputs": [[3]], "outputs": [3 * number]})
        row["starter_code"] = "class Solution:\n    def times(self, n: int) -> int:\n        "
    if index == 4:
        row["solutions"] = "[]"
    return row


MAKERS: dict[str, Callable[[int, str], dict[str, Any]]] = {
    "tldr": tldr_row,
    "hh": hh_row,
    "webgpt": webgpt_row,
    "apps": apps_row,
}
EVAL_SPLITS = {"tldr": "validation", "hh": "test", "webgpt": None, "apps": "test"}


def make_rows(name: str, count: int, split: str = "train") -> list[dict[str, Any]]:
    """Rows 0 to count - 1 of a split of one of SETS."""
    return [MAKERS[name](index, split) for index in range(count)]


def schema_of(name: str) -> Any:
    """The pyarrow schema of one of SETS, as its parquet files on the hub have it."""
    import pyarrow as pa

    text = pa.string()
    if name == "tldr":
        info = pa.struct([(column, text) for column in ("id", "post", "title", "subreddit", "site", "article")])
        summary = pa.struct([("text", text), ("policy", text), ("note", text)])
        extra = pa.struct([("confidence", pa.int32())])
        columns = [("info", info), ("summaries", pa.list_(summary)), ("choice", pa.int32())]
        return pa.schema([*columns, *((column, text) for column in ("worker", "batch", "split")), ("extra", extra)])
    if name == "webgpt":
        columns = [("question", pa.struct([("dataset", text), ("id", text), ("full_text", text)]))]
        quotes = pa.struct([("title", pa.list_(text)), ("extract", pa.list_(text))])
        tokens = pa.struct([("prefix", pa.list_(pa.int32())), ("completion", pa.list_(pa.int32()))])
        kinds = {"quotes": quotes, "answer": text, "tokens": tokens, "score": pa.float32()}
        return pa.schema(columns + [(f"{column}_{i}", kind) for i in (0, 1) for column, kind in kinds.items()])
    row = MAKERS[name](0, "train")
    return pa.schema([(column, pa.int64() if column == "id" else text) for column in row])


def write_rows(file: Path, rows: list[dict[str, Any]], name: str | None = None) -> Path:
    """Writes rows as the file's suffix says, .jsonl or .parquet (there with the schema of a set); the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows, schema=schema_of(name) if name else None), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def write_set(folder: Path, name: str, rows: int = 40, eval_rows: int | None = None) -> Path:
    """Writes one set into `folder`: `rows` to train on and, but for webgpt, `eval_rows` (else half as many) others."""
    write_rows(folder / "train.jsonl", make_rows(name, rows))
    split = EVAL_SPLITS[name]
    if split is not None:
        count = rows // 2 if eval_rows is None else eval_rows
        write_rows(folder / f"{split}.jsonl", make_rows(name, count, split))
    return folder


def write_all(folder: Path, rows: int = 40, eval_rows: int | None = None) -> dict[str, Path]:
    """Writes every set, each into a folder of its name below `folder`; name → that folder."""
    return {name: write_set(folder / name, name, rows, eval_rows) for name in SETS}


def anthropic_rows(count: int, split: str = "train") -> list[dict[str, Any]]:
    """Rows of Anthropic/hh-rlhf: the rows of `hh_row`, with the prompt in both columns."""
    rows = []
    for index in range(count):
        row = hh_row(index, split)
        rows.append({column: row["prompt"] + row[column] for column in ("chosen", "rejected")})
    return rows


def gsm8k_rows(count: int) -> list[dict[str, Any]]:
    """Rows of openai/gsm8k."""
    rows = []
    for index in range(count):
        solution = f"{index} and one are {index}+1 = <<{index}+1={index + 1}>>{index + 1}.\n#### {index + 1}"
        rows.append({"question": f"Ann has {index} apples and buys one. How many has she?", "answer": solution})
    return rows
