# SPDX-License-Identifier: Apache-2.0
"""Rows of the published data sets with columns of their own: TL;DR comparisons, WebGPT comparisons, APPS problems.

Prompt and response strings are those of the published runs, character by character: a reward model that was trained on
one form scores another one differently. HH-RLHF has the columns of `dschat.data.formats.rows.DataKeys`.

Each function takes a row with the columns of its format and the row's origin. It raises UserError, which names the
origin, where a column holds something else.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dschat.data.formats.rows import Row, check_text, kind_of
from dschat.errors import UserError

NO_TEXT = "neither post nor article"  # why a TL;DR row is skipped
NO_SOLUTION = "no reference solution"  # why an APPS row has no response

# Citations: with the space before them, then without one.
_CITATIONS = (re.compile(r" [\(\[].*?[\)\]]"), re.compile(r"[\(\[].*?[\)\]]"))


def tldr_row(raw: dict[str, Any], origin: str) -> Row | None:
    """A row of openai/summarize_from_feedback `comparisons`; None with neither a Reddit post nor a CNN/DM article."""
    info, summaries, choice = raw["info"], raw["summaries"], raw["choice"]
    _check(isinstance(info, dict), "info", "an object", info, origin)
    if not (isinstance(summaries, list) and len(summaries) == 2 and all(isinstance(s, dict) for s in summaries)):
        raise UserError(f"{origin}: column 'summaries' must hold two objects with a text; correct the row.")
    if not isinstance(choice, int) or choice not in (0, 1):
        raise UserError(f"{origin}: column 'choice' must be 0 or 1, not {choice!r}; correct the row.")
    for name in ("post", "article", "subreddit"):
        if info.get(name) is not None:
            check_text(info[name], f"'info.{name}'", origin)
    for number, summary in enumerate(summaries):
        check_text(summary.get("text"), f"'summaries[{number}].text'", origin)
    prompt = tldr_prompt(info)
    if prompt is None:
        return None
    return Row(prompt, None, summaries[choice]["text"], summaries[1 - choice]["text"], raw, origin)


def tldr_prompt(info: dict[str, Any]) -> str | None:
    """Prompt of a TL;DR row.

    Args:
        info: its `info` column: texts post or article, and subreddit, each possibly None or absent.

    Returns:
        "POST\\nSubreddit: r/S\\n<post>\\nTL;DR: ", with ARTICLE for an article, without the second line
        where there is no subreddit; None with neither post nor article.
    """
    for head, name in (("POST\n", "post"), ("ARTICLE\n", "article")):
        if info.get(name) is not None:
            subreddit = info.get("subreddit")
            line = "" if subreddit is None else f"Subreddit: r/{subreddit}\n"
            return f"{head}{line}{info[name]}\nTL;DR: "
    return None


def webgpt_row(raw: dict[str, Any], origin: str) -> Row:
    """A row of openai/webgpt_comparisons; where the scores are equal, answer_0 counts as the better one.

    The columns tokens_0 and tokens_1 (thousands of GPT-2 ids a row, the same texts once more) are not kept in `extra`.
    """
    question = raw["question"]
    _check(isinstance(question, dict), "question", "an object", question, origin)
    check_text(question.get("full_text"), "'question.full_text'", origin)
    for column in ("answer_0", "answer_1"):
        check_text(raw[column], f"column {column!r}", origin)
    for column in ("score_0", "score_1"):
        is_number = isinstance(raw[column], int | float) and not isinstance(raw[column], bool)
        _check(is_number, column, "a number", raw[column], origin)
    answers = [" " + without_citations(raw[column]) for column in ("answer_0", "answer_1")]
    better = 0 if raw["score_0"] >= raw["score_1"] else 1
    extra = {name: value for name, value in raw.items() if name not in ("tokens_0", "tokens_1")}
    prompt = f" Human: {question['full_text']} Assistant:"
    return Row(prompt, None, answers[better], answers[1 - better], extra, origin)


def without_citations(answer: str) -> str:
    """An answer without everything in brackets, square or round, and without the space before it."""
    for pattern in _CITATIONS:
        answer = pattern.sub("", answer)
    return answer


def apps_row(raw: dict[str, Any], origin: str) -> Row:
    """A row of codeparrot/apps: a programming problem, and its first reference solution where it has one.

    The columns solutions (a list) and input_output (an object) are JSON texts, possibly empty. Where there is no
    solution, the row says so in `no_response`.
    """
    check_text(raw["question"], "column 'question'", origin)
    starter = raw.get("starter_code") or ""
    check_text(starter, "column 'starter_code'", origin)
    solutions = _decode(raw["solutions"], "solutions", origin) or []
    _check(isinstance(solutions, list), "solutions", "a JSON list", solutions, origin)
    solution = solutions[0] if solutions else None
    if solution is not None:
        check_text(solution, "the first of 'solutions'", origin)
    form = "Use Call-Based format" if _is_call_based(raw["input_output"], origin) else "Use Standard Input format"
    problem = f"{raw['question']}\n{starter}" if starter else raw["question"]
    prompt = f"\nQUESTION:\n{problem}\n{form}\nANSWER:\n"
    return Row(prompt, None, solution, None, raw, origin, None if solution is not None else NO_SOLUTION)


def _is_call_based(input_output: Any, origin: str) -> bool:
    """Whether the solution is a function that the tests call, rather than a program that reads standard input.

    Tests are megabytes long: those without the word are not parsed.
    """
    if isinstance(input_output, str) and "fn_name" not in input_output:
        return False
    tests = _decode(input_output, "input_output", origin)
    return isinstance(tests, dict) and bool(tests.get("fn_name"))


def _decode(value: Any, column: str, origin: str) -> Any:
    """What a column of JSON text holds; None where it is empty. Integers stay text: Python limits their length."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value, parse_int=str)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: column {column!r} holds no valid JSON ({error}); correct the row.") from error


def _check(is_right: bool, column: str, wanted: str, value: Any, origin: str) -> None:
    """Raises UserError, which names the row, unless a column holds what it should."""
    if not is_right:
        raise UserError(f"{origin}: column {column!r} must hold {wanted}, not {kind_of(value)}; correct the row.")


# Format → the columns it is recognised by, and what makes a `Row` of such a row.
PUBLISHED_FORMATS: Mapping[str, tuple[Sequence[str], Callable[[dict[str, Any], str], Row | None]]] = {
    "TL;DR comparison": (("info", "summaries", "choice"), tldr_row),
    "WebGPT comparison": (("question", "answer_0", "answer_1", "score_0", "score_1"), webgpt_row),
    "APPS problem": (("question", "solutions", "input_output"), apps_row),
}
