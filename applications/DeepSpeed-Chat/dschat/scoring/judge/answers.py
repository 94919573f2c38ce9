# SPDX-License-Identifier: Apache-2.0
"""Reading a judge's answer, which is JSON or holds JSON inside other text, and asking for a readable one."""

import json
import re
from collections.abc import Iterator

from dschat.base.jsonl import RepeatedKey, without_repeats
from dschat.rollouts.reply_cache import Reply
from dschat.scoring.judge.questions import JudgeQuestion

# An object that begins with a key, which may be cut off at the end of the text. In prose, "{}", "{ 1" and '{"A", "B"}'
# are none.
OBJECT_START = re.compile(r'\{\s*"(?:[^"\\]|\\.)*("\s*:|"?\s*\Z)', re.DOTALL)
CODE_BLOCK = re.compile(r"\s*```\w*\n(.*)\n\s*```\s*", re.DOTALL)
MAX_QUOTED = 2000  # characters of an unreadable answer that go into the repair request


class UnreadableAnswer(ValueError):
    """An answer that holds no verdict or scores, or holds them twice. The message tells the judge what is wrong."""


def without_thoughts(text: str) -> str:
    """Answer of a reasoning model: the text after its last <think> block, which is empty if the block is not closed.

    Text that is one JSON object, in a code block or not, is returned unchanged: its strings may hold these marks.
    """
    block = CODE_BLOCK.fullmatch(text)
    try:
        if isinstance(json.loads(block[1] if block else text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    return text.rpartition("</think>")[2].partition("<think>")[0]


def json_objects(text: str) -> Iterator[dict[str, object]]:
    """The outermost JSON objects in a text that begin with a key, in their order.

    Raises:
        UnreadableAnswer: an object is broken, cut off, or has a key twice.
    """
    decoder = json.JSONDecoder(object_pairs_hook=without_repeats)
    start = OBJECT_START.search(text)
    while start:
        try:
            value, end = decoder.raw_decode(text, start.start())
        except RepeatedKey as error:
            raise UnreadableAnswer(str(error)) from error
        except (ValueError, RecursionError) as error:
            raise UnreadableAnswer("its JSON is broken or cut off") from error
        yield value
        start = OBJECT_START.search(text, end)


def repair(
    question: JudgeQuestion,
    reply: Reply,
    problem: UnreadableAnswer,
    expected: str,
    pattern: str,
) -> JudgeQuestion:
    """The question, followed by the unreadable answer and a request for one that can be read.

    Args:
        question: the question that was asked.
        reply: the judge's answer.
        problem: why the answer cannot be read.
        expected: what the answer should be, such as "a verdict".
        pattern: the JSON object that is expected, as the judge reads it.
    """
    request = (
        f"Your answer cannot be read as {expected}: {problem}. Answer once more, briefly, with only this JSON object: "
        f"{pattern}"
    )
    answer = (reply.text or reply.refusal)[:MAX_QUOTED].strip() or "(no answer)"
    messages = ({"role": "assistant", "content": answer}, {"role": "user", "content": request})
    return JudgeQuestion((*question.messages, *messages), question.schema)
