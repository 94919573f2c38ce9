# SPDX-License-Identifier: Apache-2.0
"""Writes conversations, comparisons and a tiny model: all that the first commands of the README and the tutorial read.

    python examples/chats.py FOLDER

The texts are synthetic: the user asks for a review, and the better one complains first and praises afterwards.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from dschat.base.jsonl import write_rows
from dschat.models.tiny import make_model
from dschat.quickstart.synthetic import make_rows, row_texts
from dschat.quickstart.synthetic_dialogues import CHAT_TEMPLATE

CONVERSATIONS = 2000
COMPARISONS = 4096
Message = dict[str, str]


def question(row: dict[str, Any]) -> list[Message]:
    """The user's message."""
    return [{"role": "user", "content": row["info"]["post"]}]


def answer(row: dict[str, Any], number: int) -> list[Message]:
    """One of a row's two answers."""
    text = row["summaries"][number]["text"]
    return [{"role": "assistant", "content": text.strip()}]


def main(folder: Path) -> None:
    """Writes chats.jsonl (for step 1), pairs.jsonl (for steps 2 and 3) and model/, unless one of them exists."""
    for name in ("chats.jsonl", "pairs.jsonl", "model"):
        if (folder / name).exists():
            sys.exit(f"{folder / name} exists already: give another folder")

    demonstrations = make_rows(CONVERSATIONS, 0, "demonstrations")
    chats = []
    for row in demonstrations:
        messages = question(row) + answer(row, row["choice"])
        chats.append({"messages": messages})
    write_rows(folder / "chats.jsonl", chats)

    pairs = []
    for row in make_rows(COMPARISONS, 0, "comparisons"):
        pair = {
            "prompt": question(row),
            "chosen": answer(row, row["choice"]),
            "rejected": answer(row, 1 - row["choice"]),
        }
        pairs.append(pair)
    write_rows(folder / "pairs.jsonl", pairs)

    texts = row_texts(demonstrations[:1000])
    make_model(folder / "model", texts, chat_template=CHAT_TEMPLATE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of all files")
    main(parser.parse_args().folder)
