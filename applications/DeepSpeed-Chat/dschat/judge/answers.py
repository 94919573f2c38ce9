# SPDX-License-Identifier: Apache-2.0
"""Reading a judge's answer, which is JSON or holds JSON inside other text, and asking for a readable one.

Where several objects hold an answer, they must agree: none of them counts more than another, and an answer that
contradicts itself is asked for again.
"""

import json
import re
from collections.abc import Collection, Iterator

from dschat.base.jsonl import RepeatedKey, without_repeats
from dschat.judge.questions import JudgeQuestion
from dschat.turns.reply_cache import Reply

# An object that begins with a key, which may be cut off at the end of the text. In prose, "{}", "{ 1" and '{"A", "B"}'
# are none. Keys in other quotes, or in none, are those of an object that is not JSON.
OBJECT_START = re.compile(
    r"""\{\s*(?:(?P<json>"(?:[^"\\]|\\.)*+("\s*[:：]|"?\s*\Z))|['‘“][^'’”{}]*['’”]\s*[:：]|[A-Za-z_]\w*\s*:)""",
    re.DOTALL,
)
BRACE = re.compile(r"[{}]")
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
# A key in quotes that no backslash escapes, and its value: text in quotes, or a number or word before the next key.
QUOTED_KEY = r"""(?<!\\)["'‘“]{name}["'’”]"""
BARE_KEY = r"""(?<![\w"'\\-]){name}"""
VALUE = r"""\s*[:：]\s*(?:"((?:[^"\\]|\\.)*)"|['‘“]([^'’”‘“]*)['’”]|([\w.+/-]+)(?=\s*(?:[,\n]|//|\#)))"""
CODE_BLOCK = re.compile(r"\s*```\w*\n(.*)```\s*", re.DOTALL)
THOUGHT = r"think|thinking|thought|thoughts|reasoning"
THOUGHT_START = re.compile(rf"<(?:{THOUGHT})>|\[THINK\]")
THOUGHT_END = re.compile(rf"</(?:{THOUGHT})>|\[/THINK\]|<\|channel\|>final<\|message\|>")
MAX_QUOTED = 2000  # characters of an unreadable answer that go into the repair request


class UnreadableAnswer(ValueError):
    """An answer that holds no verdict or scores, or holds them twice. The message tells the judge what is wrong."""


def without_thoughts(text: str) -> str:
    """Answer of a reasoning model: the text after its last block of thoughts, empty if the block is not closed.

    Text that is one JSON object, in a code block or not, is returned unchanged: its strings may hold these marks.
    """
    block = CODE_BLOCK.fullmatch(text)
    try:
        if isinstance(json.loads(block[1] if block else text, strict=False), dict):
            return text
    except (ValueError, RecursionError):
        pass
    ends = [end.end() for end in THOUGHT_END.finditer(text)]
    return THOUGHT_START.split(text[max(ends, default=0) :])[0]


def json_objects(text: str, keys: Collection[str]) -> Iterator[dict[str, object]]:
    """The outermost objects in a text that begin with a key, in their order.

    Line breaks and tabs inside strings are taken as they are. Of an object that is not JSON for another reason, such
    as `\\(`, a last comma or single quotes, only the wanted keys are read, see `values_of`.

    Args:
        text: an answer without thoughts.
        keys: the wanted keys.

    Raises:
        UnreadableAnswer: an object is cut off, is broken and has none of these keys, or has a key twice.
    """
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=without_repeats)
    position = 0
    while start := OBJECT_START.search(text, position):
        try:
            value, position = decoder.raw_decode(text, start.start())
        except RepeatedKey as error:
            raise UnreadableAnswer(str(error)) from error
        except (ValueError, RecursionError):
            content, position = _content_of(text, start.start())
            value = values_of(content, keys)
            if not value and start["json"]:
                raise UnreadableAnswer("its JSON is broken") from None
        if value:
            yield value


def _content_of(text: str, start: int) -> tuple[str, int]:
    """What is between the braces of an object, without objects inside it; and where the object ends.

    Raises:
        UnreadableAnswer: the object is not closed.
    """
    parts: list[str] = []
    depth = 0
    last = start
    for brace in BRACE.finditer(text, start):
        if depth == 1:
            parts.append(text[last : brace.start()])
        depth += 1 if brace[0] == "{" else -1
        last = brace.end()
        if depth == 0:
            return "".join(parts) + "\n", last
    raise UnreadableAnswer("its JSON is broken or cut off")


def values_of(content: str, keys: Collection[str]) -> dict[str, object]:
    """The values of some keys in the text of an object that is not JSON: text, or a number that is in no quotes.

    Raises:
        UnreadableAnswer: a key has two values.
    """
    for form in (QUOTED_KEY, BARE_KEY):
        values: dict[str, object] = {}
        for key in keys:
            name = re.escape(key).replace("_", "[_ ]")
            matches = set(re.findall(form.format(name=name) + VALUE, content, re.IGNORECASE))
            if len(matches) > 1:
                raise UnreadableAnswer(f"it gives {key} twice")
            for double_quoted, quoted, bare in matches:
                is_number = NUMBER.fullmatch(bare) is not None
                values[key] = float(bare) if is_number else double_quoted or quoted or bare
        if values:
            return values
    return {}


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
