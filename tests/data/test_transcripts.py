# SPDX-License-Identifier: Apache-2.0
"""Preferences whose two sides are whole dialogues: what is the prompt, what is skipped, and why."""

import pytest

from cli_runs import write_jsonl as write
from data_cases import error_of
from dialogue_cases import bot, user
from dschat.data.formats import parse_row
from dschat.data.sources import load_source
from dschat.settings.common import ColumnFlags
from published_set_copies import anthropic_rows

ASKED = "\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: 2+2?"
TALK = [user("Hi."), bot("Hello."), user("2+2?")]


def reply(text):
    return f"\n\nAssistant:{text}"


def parsed(chosen, rejected, **flags):
    row = parse_row({"chosen": chosen, "rejected": rejected, "id": 3}, ColumnFlags(**flags), "rows:1")
    return row if isinstance(row, str) else (row.prompt, row.messages, row.chosen, row.rejected)


def test_what_both_dialogues_share_is_the_prompt():
    found = parsed(ASKED + reply(" Four."), ASKED + reply(" Four or five."))
    assert found == (f"{ASKED}\n\nAssistant:", None, " Four.", " Four or five.")


def test_common_words_of_the_replies_stay_in_the_replies():
    """Also where one reply is the beginning of the other one, or empty."""
    assert parsed(ASKED + reply(" It is 4"), ASKED + reply(" It is 4, or 5"))[2:] == (" It is 4", " It is 4, or 5")
    assert parsed(ASKED + reply(" "), ASKED + reply(" Four."))[2:] == (" ", " Four.")


def test_a_chat_template_gets_messages():
    found = parsed(ASKED + reply(" Four."), ASKED + reply(" Five."), apply_chat_template=True)
    assert found == (None, TALK, "Four.", "Five.")


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        ([" Four."], [" Four."], "chosen and rejected are equal"),
        ([" Four.", " Really."], [" Four."], "one dialogue is the beginning of the other"),
        ([" Four.", " Really."], [" Five."], "chosen and rejected differ in more than the last turn"),
        ([" Four.", " Really."], [" Five.", " Really."], "chosen and rejected differ in more than the last turn"),
    ],
)
def test_what_is_no_comparison_of_replies_is_skipped(chosen, rejected, reason):
    """As text and as messages, for the same reason."""
    assert parsed(ASKED + "".join(map(reply, chosen)), ASKED + "".join(map(reply, rejected))) == reason
    assert parsed([*TALK, *map(bot, chosen)], [*TALK, *map(bot, rejected)]) == reason


def test_dialogues_without_a_prompt_or_a_reply_are_skipped():
    other = "\n\nHuman: Bye."
    assert parsed(ASKED + reply(" 4"), other + reply(" 5")) == "chosen and rejected share no prompt"
    ended = "a dialogue does not end with the assistant"
    assert parsed(ASKED + reply(" 4"), f"{ASKED}\n\nHuman: And 3+3?") == ended
    assert parsed([*TALK, bot("4")], [*TALK, user("And 3+3?")]) == ended
    assert parsed(ASKED + reply(" 4"), None) == "chosen and rejected share no prompt"
    stripped = ASKED.strip()
    assert parsed(stripped + reply(" 4"), stripped + reply(" 5"))[0] == f"{stripped}\n\nAssistant:"
    no_messages = parsed(stripped + reply(" 4"), stripped + reply(" 5"), apply_chat_template=True)
    assert no_messages == "a dialogue does not begin with Human:, and cannot be messages"


def test_skipped_rows_are_counted_by_reason(tmp_path, caplog):
    rows = anthropic_rows(40)
    rows[3]["rejected"] = rows[3]["chosen"]
    rows[5]["chosen"] += reply(" More.")
    source = load_source(write(tmp_path / "rows.jsonl", rows))
    assert source.num_rows == (40, None) and len(source.train) + len(source.eval) == 38
    assert "skipped 2 rows (chosen and rejected are equal: 1, chosen and rejected differ in more than" in caplog.text
    rows = write(tmp_path / "equal.jsonl", [rows[3]] * 2)
    assert "no usable row in equal (chosen and rejected are equal: 2)" in error_of(rows)


def test_texts_without_turns_still_need_a_prompt():
    with pytest.raises(Exception, match="rows:1: no column 'prompt' among 'chosen', 'rejected', 'id'"):
        parsed("Four.", "Five.")
