# SPDX-License-Identifier: Apache-2.0
"""Reading a judge's answers: JSON as asked for, or inside other text; and a request to repair one."""

import json
import re
from collections.abc import Callable, Iterator

from dschat.base.jsonl import without_repeats
from dschat.rollouts.chat_servers import Reply
from dschat.scoring.judge.questions import JudgeQuestion

OBJECT_START = re.compile(r"\{\s*\"")
QUOTED = 2000  # characters of an unreadable answer that go into the repair request
Ask = Callable[[JudgeQuestion], Reply]


class UnreadableAnswer(ValueError):
    """An answer that does not say what was asked, or says it twice. The message says which."""


def without_thoughts(text: str) -> str:
    """Answer of a reasoning model after its <think> block; a JSON object may hold the marks in its own text."""
    try:
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    return text.rpartition("</think>")[2].partition("<think>")[0]


def json_objects(text: str) -> Iterator[dict[str, object]]:
    """Outermost JSON objects in a text; raises UnreadableAnswer where one begins that is broken."""
    decoder = json.JSONDecoder(object_pairs_hook=without_repeats)
    start = OBJECT_START.search(text)
    while start:
        try:
            value, end = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError) as error:
            raise UnreadableAnswer("its JSON is broken or cut off") from error
        yield value
        start = OBJECT_START.search(text, end)


def repair(
    question: JudgeQuestion,
    reply: Reply,
    problem: UnreadableAnswer,
    wanted: str,
    form: str,
) -> JudgeQuestion:
    """Question again, with the unreadable answer and a request for one that can be read.

    Args:
        question: as it was asked.
        reply: its answer.
        problem: why the answer cannot be read.
        wanted: what it should be, such as "a verdict".
        form: the JSON object that it should be, as a pattern for the judge to read.
    """
    request = (
        f"Your answer cannot be read as {wanted}: {problem}. Answer once more, briefly, with only this JSON object: "
        f"{form}"
    )
    answer = (reply.text or reply.refusal)[:QUOTED].strip() or "(no answer)"
    messages = ({"role": "assistant", "content": answer}, {"role": "user", "content": request})
    return JudgeQuestion((*question.messages, *messages), question.schema)
