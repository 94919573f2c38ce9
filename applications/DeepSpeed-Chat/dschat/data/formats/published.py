# SPDX-License-Identifier: Apache-2.0
"""Rows of the published data sets with columns of their own: TL;DR comparisons, WebGPT comparisons, APPS problems.

Prompt and response strings are those of the published runs, character by character: a reward model that was trained on
one form scores another one differently. HH-RLHF has the columns of `dschat.data.formats.formats`.
"""

import json
import re
from typing import Any

from dschat.data.formats.rows import Row, check_text, kind_of
from dschat.errors import UserError

TLDR_COLUMNS = ("info", "summaries", "choice")
WEBGPT_COLUMNS = ("question", "answer_0", "answer_1", "score_0", "score_1")
APPS_COLUMNS = ("question", "solutions", "input_output")
NO_SOLUTION = "no reference solution"  # why an APPS row has no response
REMEDY = "correct the row"

# Citations: with the space before them, then without one.
_CITATIONS = (re.compile(r" [\(\[].*?[\)\]]"), re.compile(r"[\(\[].*?[\)\]]"))


def tldr_row(raw: dict[str, Any], origin: str) -> Row | None:
    """A row of openai/summarize_from_feedback `comparisons`, a Reddit post or a CNN/DM article.

    Args:
        raw: a row with TLDR_COLUMNS.
        origin: where the row stands.

    Returns:
        The row; None with neither post nor article.

    Raises:
        UserError: a column holds something else; the message names the row.
    """
    info, summaries, choice = (raw[column] for column in TLDR_COLUMNS)
    if not isinstance(info, dict):
        raise UserError(f"{origin}: column 'info' must hold an object, not {kind_of(info)}; {REMEDY}.")
    if not (isinstance(summaries, list) and len(summaries) == 2 and all(isinstance(s, dict) for s in summaries)):
        raise UserError(f"{origin}: column 'summaries' must hold two objects with a text; {REMEDY}.")
    if not isinstance(choice, int) or choice not in (0, 1):
        raise UserError(f"{origin}: column 'choice' must be 0 or 1, not {choice!r}; {REMEDY}.")
    for name in ("post", "article", "subreddit"):
        if info.get(name) is not None:
            check_text(info[name], f"'info.{name}'", REMEDY, origin)
    for number, summary in enumerate(summaries):
        check_text(summary.get("text"), f"'summaries[{number}].text'", REMEDY, origin)
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

    Args:
        raw: a row with WEBGPT_COLUMNS.
        origin: where the row stands.

    Raises:
        UserError: a column holds something else; the message names the row.
    """
    question = raw["question"]
    if not isinstance(question, dict):
        raise UserError(f"{origin}: column 'question' must hold an object, not {kind_of(question)}; {REMEDY}.")
    check_text(question.get("full_text"), "'question.full_text'", REMEDY, origin)
    for column in ("answer_0", "answer_1"):
        check_text(raw[column], f"column {column!r}", REMEDY, origin)
    for column in ("score_0", "score_1"):
        if not isinstance(raw[column], int | float) or isinstance(raw[column], bool):
            raise UserError(f"{origin}: column {column!r} must hold a number, not {kind_of(raw[column])}; {REMEDY}.")
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

    Args:
        raw: a row with APPS_COLUMNS and, optionally, starter_code. solutions (a list) and input_output (an object) are
            JSON texts, possibly empty.
        origin: where the row stands.

    Returns:
        The row, with `no_response` set where there is no solution.

    Raises:
        UserError: a column holds something else; the message names the row.
    """
    check_text(raw["question"], "column 'question'", REMEDY, origin)
    starter = raw.get("starter_code") or ""
    check_text(starter, "column 'starter_code'", REMEDY, origin)
    solutions = _decode(raw["solutions"], "solutions", origin) or []
    if not isinstance(solutions, list):
        raise UserError(f"{origin}: column 'solutions' must hold a JSON list, not {kind_of(solutions)}; {REMEDY}.")
    solution = solutions[0] if solutions else None
    if solution is not None:
        check_text(solution, "the first of 'solutions'", REMEDY, origin)
    prompt = apps_prompt(raw["question"], starter, _is_call_based(raw["input_output"], origin))
    return Row(prompt, None, solution, None, raw, origin, None if solution is not None else NO_SOLUTION)


def apps_prompt(question: str, starter_code: str, call_based: bool) -> str:
    """Prompt of an APPS problem.

    Args:
        question: the problem.
        starter_code: code that the solution continues; empty where there is none.
        call_based: the solution is a function that is called, rather than a program that reads standard input.
    """
    starter = f"\n{starter_code}" if starter_code else ""
    form = "Use Call-Based format" if call_based else "Use Standard Input format"
    return f"\nQUESTION:\n{question}{starter}\n{form}\nANSWER:\n"


def _is_call_based(input_output: Any, origin: str) -> bool:
    """Whether the tests name a function. Tests are megabytes long: those without the word are not parsed."""
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
        raise UserError(f"{origin}: column {column!r} holds no valid JSON ({error}); {REMEDY}.") from error
