# SPDX-License-Identifier: Apache-2.0
"""Reward functions for problems with a known answer, by short name: `--reward_function math math_format`.

The answer of a response is what its last "####" or \\boxed{} marks, whichever is later, else its last number.
The reference is the row's column `answer`: a value, or a solution with one of these marks. Numbers are compared
exactly, as fractions. Anything else (letters, roots, intervals, terms) is compared as text, and where the texts differ
by math-verify if it is installed.
"""

import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

from dschat.base.errors import UserError

logger = logging.getLogger(__name__)

ANSWER = "answer"  # column of the reference
# An answer begins with a digit or a sign, or is a capital letter that ends the text. The headings "#### Step 2" and,
# with lines below it, "#### 2. Add" of Markdown are no answers.
NUMBERED_HEADING = r"\d+[.)][ \t]+\S.*\n\s*\S"
MARK = re.compile(rf"(?<!#)####\s*(?!{NUMBERED_HEADING})(?=[-−+.$\\(\[{{*`\d]|[A-Z]\.?\s*\Z)")
BOX = "\\boxed{"
# A minus after a word, a digit or a bracket is a subtraction.
NUMBER = r"(?:(?<![\w)])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?(?:/\d+(?:,\d{3})*)?"
PERCENT = r"(?i: ?%| percent\b)"
# Words after a number are its unit, also "million" and "thirds"; NO_UNIT has those that are not. Letters right behind
# a number, and single letters but "a", may be variables. The pattern is unambiguous, so matching takes linear time.
NO_UNIT = r"(?i:half|percent|pi)\b"
WORD = rf"(?!{NO_UNIT})(?:a|[A-Za-z]{{2,}})\.?"
UNIT = rf"(?:(?:km|cm|mm|kg|mg|ml|lbs?|oz|ft|mph|hrs?|mins?|am|pm)\.?|(?: {WORD})+)?"
# Further sentences may follow behind a full stop.
VALUE = re.compile(rf"({NUMBER})({PERCENT}?) ?{UNIT}(?:\. .*)?")
FRACTION = re.compile(r"(?<!\d)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
WORDS = re.compile(r"\\(?:text|mathrm)\{([^{}]*)\}")
SECONDS = 1  # that math-verify may take for each of its steps, by SIGALRM: it works in the main thread alone
LONGEST_EXPRESSION = 500  # characters that math-verify parses; a policy could fill seconds of each reward with more
# LaTeX and other signs around a number that do not change it.
SIGNS = {"−": "-", "{,}": ",", "\\%": "%", "\\$": "", "$": "", "\\!": "", "°": "", "\\,": "", "\\ ": " "}


def math(prompts: Sequence[str], responses: Sequence[str], rows: Sequence[dict[str, object]]) -> list[float]:
    """1 for each response with the right answer, else 0; `prompts` are not used."""
    scores = []
    for response, row in zip(responses, rows, strict=True):
        scores.append(float(is_right(answer_of(response), row)))
    return scores


def math_format(prompts: Sequence[str], responses: Sequence[str], rows: Sequence[dict[str, object]]) -> list[float]:
    """1 for each response that marks an answer by "####" or \\boxed{}, be it right or wrong, else 0."""
    return [float(bool(marked_answer(response))) for response in responses]


def gsm8k(prompts: Sequence[str], responses: Sequence[str], rows: Sequence[dict[str, object]]) -> list[float]:
    """1 for each response with the right answer after "####", else 0: the reward of published runs of PPO on GSM8K."""
    scores = []
    for response, row in zip(responses, rows, strict=True):
        scores.append(float(is_right(hashed_answer(response), row)))
    return scores


def is_right(answer: str, row: dict[str, object]) -> bool:
    """Whether an answer is equal to the reference of a row.

    Raises:
        UserError: the row has no reference.
    """
    reference = row.get(ANSWER)
    if reference is None:
        columns = ", ".join(map(repr, row))
        raise UserError(
            f"--reward_function: a row has no column {ANSWER!r} with the right answer, only {columns}; rename its"
            " column."
        )
    reference = str(reference)
    return bool(answer) and same_value(answer, marked_answer(reference) or reference)


def answer_of(text: str) -> str:
    """The marked answer of a text, else its last number; empty without either."""
    marked = marked_answer(text)
    if marked:
        return marked
    numbers = re.findall(f"{NUMBER}{PERCENT}?", _plain(text))
    return numbers[-1] if numbers else ""


def marked_answer(text: str) -> str:
    """What the last "####" or \\boxed{} of a text marks, whichever is later; empty without either."""
    _, box, rest = text.rpartition(BOX)
    if box and not hashed_answer(rest):
        return _until_closed(rest)
    return hashed_answer(text)


def hashed_answer(text: str) -> str:
    """What follows the last "####" of a text on its line; empty without one."""
    *before, rest = MARK.split(text)
    return rest.partition("\n")[0].strip() if before else ""


def _until_closed(text: str) -> str:
    """A text up to the brace that closes one before it; empty if none does."""
    depth = 1
    for position, character in enumerate(text):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth == 0:
            return text[:position].strip()
    return ""


def same_value(answer: str, reference: str) -> bool:
    """Whether two answers are equal: as numbers if both are, otherwise as texts or expressions."""
    values = numbers_of(answer)
    reference_values = numbers_of(reference)
    if values and reference_values:
        # A plain number may equal either value of a percentage; two percentages must have both in common.
        return values <= reference_values or reference_values <= values
    plain_answer = _plain(answer)
    is_same_text = plain_answer != "" and plain_answer == _plain(reference)
    return is_same_text or _same_expression(answer, reference)


def numbers_of(text: str) -> set[Fraction]:
    """The values of a number with or without a unit; empty for any other text.

    A percentage has two, since references write 20 % both as 20 and as 0.2.

    Example: "$1,200.50 a month" is 2401/2, and "20%" is 20 or 1/5.
    """
    match = VALUE.fullmatch(_plain(text))
    if match is None:
        return set()
    try:
        value = Fraction(match[1].replace(",", ""))
    except (ValueError, ZeroDivisionError):  # 1.5/2, 1/0
        return set()
    return {value, value / 100} if match[2] else {value}


def _plain(text: str) -> str:
    """A text without the signs of LaTeX, Markdown and money that may surround a number."""
    text = FRACTION.sub(r"\1/\2", text)
    text = WORDS.sub(r" \1", text)
    for sign, replacement in SIGNS.items():
        text = text.replace(sign, replacement)
    return " ".join(text.split()).lstrip("*` ").rstrip("*`. ")


def _same_expression(answer: str, reference: str) -> bool:
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        _warn_of_missing_library()
        return "".join(answer.split()) == "".join(reference.split())
    answer = " ".join(answer.split())
    if len(answer) > LONGEST_EXPRESSION:
        return False
    # From a text that is no LaTeX the default would take any one number, such as the last of "10 | 12".
    latex = [LatexExtractionConfig()]
    expected = parse(f"${reference}$", latex, parsing_timeout=SECONDS)
    parsed = parse(f"${answer}$", latex, parsing_timeout=SECONDS)
    return bool(verify(expected, parsed, timeout_seconds=SECONDS))


@cache
def _warn_of_missing_library() -> None:
    logger.warning(
        "Answers that are not numbers are compared as texts; pip install 'ma-rlhf[math]' brings math-verify, which"
        " compares expressions."
    )
