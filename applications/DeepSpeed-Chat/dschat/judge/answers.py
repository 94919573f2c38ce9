# SPDX-License-Identifier: Apache-2.0
"""Reading a judge's answer, which is JSON or holds JSON inside other text, and asking for a readable one.

Where several objects hold an answer, they must agree: none of them counts more than another, and an answer that
contradicts itself is asked for again. So is JSON that is broken: nothing is guessed from it.
"""

import json
import re
from collections.abc import Callable
from typing import TypeVar

from dschat.base.jsonl import RepeatedKey, without_repeats
from dschat.base.reply_cache import Reply
from dschat.judge.questions import JudgeQuestion

# The beginning of an object with a key, also where the text ends within the key. In prose, "{}", "{ 1" and
# '{"A", "B"}' are none.
OBJECT_START = re.compile(r"""\{\s*"(?:[^"\\]|\\.)*+("\s*:|"?\s*\Z)""", re.DOTALL)
MAX_QUOTED = 2000  # characters of an unreadable answer that go into the repair request

Ask = Callable[[JudgeQuestion], Reply]  # asks the judge
Keep = Callable[[JudgeQuestion, Reply], None]  # caches a reply as the answer to a question
T = TypeVar("T")


class UnreadableAnswer(ValueError):
    """An answer that holds no verdict or scores, or holds them twice. The message tells the judge what is wrong.

    Attributes:
        replies: the answers to a question and to its repetition, where both were asked.
    """

    replies: tuple[Reply, ...] = ()


def json_objects(text: str) -> tuple[list[dict[str, object]], list[str]]:
    """The outermost objects in an answer without thoughts, and the n + 1 texts before, between and after n of them.

    Line breaks and tabs inside strings are taken as they are.

    Raises:
        UnreadableAnswer: an object is broken or cut off, or has a key twice.
    """
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=without_repeats)
    objects = []
    texts = []
    position = 0
    while start := OBJECT_START.search(text, position):
        texts.append(text[position : start.start()])
        try:
            value, position = decoder.raw_decode(text, start.start())
        except RepeatedKey as error:
            raise UnreadableAnswer(str(error)) from error
        except (ValueError, RecursionError):
            raise UnreadableAnswer("its JSON is broken or cut off") from None
        objects.append(value)
    return objects, [*texts, text[position:]]


def ask_until_read(
    question: JudgeQuestion, ask: Ask, keep: Keep, read: Callable[[Reply], T], expected: str, pattern: str
) -> tuple[T, list[Reply]]:
    """Ask a question, and once more if the answer cannot be read.

    A second answer that can be read is cached as the question's own, so that the question costs nothing later.

    Args:
        question: the question.
        ask: asks the judge.
        keep: caches a reply.
        read: reads an answer; raises UnreadableAnswer if it cannot.
        expected: what the answer should be, such as "a verdict".
        pattern: the JSON object that is expected, as the judge reads it.

    Returns:
        What was read, and the answers: two if the first was asked for again.

    Raises:
        UnreadableAnswer: neither answer can be read; the message may add why the last one is incomplete.
    """
    first = ask(question)
    try:
        return read(first), [first]
    except UnreadableAnswer as problem:
        second = ask(repair(question, first, problem, expected, pattern))
    try:
        result = read(second)
    except UnreadableAnswer as problem:
        failure = UnreadableAnswer(f"{problem}; {second.flaw}" if second.flaw else str(problem))
        failure.replies = (first, second)
        raise failure from problem
    keep(question, second)
    return result, [first, second]


def repair(
    question: JudgeQuestion, reply: Reply, problem: UnreadableAnswer, expected: str, pattern: str
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
