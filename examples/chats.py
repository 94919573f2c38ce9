# SPDX-License-Identifier: Apache-2.0
"""Writes what docs/tutorial.md starts from where there is no network: conversations, comparisons, a small model.

    python examples/chats.py FOLDER

The texts are synthetic: somebody asks for a review, and the better one complains first and praises afterwards.
"""

import sys
from pathlib import Path
from typing import Any

from dschat.base.jsonl import write_rows
from dschat.models.tiny import make_model
from dschat.quickstart.synthetic import make_rows, row_texts
from dschat.quickstart.synthetic_dialogues import CHAT_TEMPLATE

CONVERSATIONS, COMPARISONS = 2000, 4096
Message = dict[str, str]


def question(row: dict[str, Any]) -> list[Message]:
    """What the user asks."""
    return [{"role": "user", "content": row["info"]["post"]}]


def answer(row: dict[str, Any], number: int) -> list[Message]:
    """One of a row's two answers."""
    return [{"role": "assistant", "content": row["summaries"][number]["text"].strip()}]


def main(folder: Path) -> None:
    """Writes chats.jsonl (for step 1), pairs.jsonl (for steps 2 and 3) and model/."""
    chats, pairs = make_rows(CONVERSATIONS, 0, "demonstrations"), make_rows(COMPARISONS, 0, "comparisons")
    write_rows(folder / "chats.jsonl", [{"messages": question(row) + answer(row, row["choice"])} for row in chats])
    write_rows(
        folder / "pairs.jsonl",
        [
            {
                "prompt": question(row),
                "chosen": answer(row, row["choice"]),
                "rejected": answer(row, 1 - row["choice"]),
            }
            for row in pairs
        ],
    )
    make_model(folder / "model", row_texts(chats[:1000]), chat_template=CHAT_TEMPLATE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
