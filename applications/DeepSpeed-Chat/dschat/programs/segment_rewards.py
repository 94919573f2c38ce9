# SPDX-License-Identifier: Apache-2.0
"""Divides a program's reward among the macro actions of its response (--segment_rewards).

`rewards_of_tests` says what each test is worth; `rewards_by_segment` gives that to the macro action in which the
function that the test calls ends, which `function_ends` finds.
"""

from __future__ import annotations

import tokenize
from bisect import bisect_left
from collections.abc import Collection, Sequence
from contextlib import suppress
from io import StringIO
from itertools import accumulate, pairwise

from dschat.programs.blocks import ProgramBlock, find_program
from dschat.programs.run import ProgramOutcome, paper_reward

TestReward = tuple[int | None, float]  # number of a test, None for the whole program, and its part of the reward
NON_CODE = (tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER)


def rewards_of_tests(outcome: ProgramOutcome, reward: str) -> list[TestReward]:
    """Divides a program's reward among its tests.

    Without an error, every test gets its share. The reward of an error goes to the first test that ended in one, that
    of a compile error to the whole program.

    Args:
        outcome: outcome of the tests.
        reward: "paper" or "ratio".
    """
    if reward == "paper":
        if outcome.status == "compile_error":
            return [(None, paper_reward(outcome))]
        for number, status in enumerate(outcome.tests):
            if status in ("runtime_error", "timeout"):
                return [(number, paper_reward(outcome))]
    rewards: list[TestReward] = []
    for number, status in enumerate(outcome.tests):
        share = float(status == "passed")
        if reward == "paper":
            share = 1.3 * share - 0.3
        rewards.append((number, share / outcome.total))
    return rewards


def rewards_by_segment(
    tests: Sequence[TestReward],
    functions: Sequence[str | None],
    segments: Sequence[str],
    which: ProgramBlock = "last",
    prompt: str = "",
) -> list[float]:
    """The reward of each macro action: a test's reward goes to the one in which the function that it calls ends.

    Args:
        tests: from `rewards_of_tests`.
        functions: the function that each test calls; None for a program that reads standard input.
        segments: texts of the macro actions, which form the response.
        which: see `dschat.programs.blocks.find_program`.
        prompt: see there.
    """
    rewards = [0.0] * len(segments)
    if not segments:  # an empty response
        return rewards
    segment_ends = list(accumulate(map(len, segments)))
    ends = function_ends("".join(segments), {None, *functions}, which, prompt)
    for number, reward in tests:
        end = ends[None if number is None else functions[number]]
        rewards[min(bisect_left(segment_ends, end), len(segments) - 1)] += reward
    return rewards


def function_ends(
    response: str, functions: Collection[str | None], which: ProgramBlock = "last", prompt: str = ""
) -> dict[str | None, int]:
    """Where functions end in a response. One that its program does not define ends where the program ends.

    Args:
        response: response of a policy.
        functions: names of functions; None for the program.
        which: see `dschat.programs.blocks.find_program`.
        prompt: see there.

    Returns:
        For each function, the number of characters of the response up to its end; all of them without a program.
    """
    program = find_program(response, which, prompt)
    if program is None:
        return dict.fromkeys(functions, len(response))
    ends: dict[str | None, int] = dict.fromkeys(functions, len(program.text.rstrip()))
    ends.update(_definition_ends(program.text, functions))
    return {function: program.position_in_response(end) for function, end in ends.items()}


def _definition_ends(program: str, functions: Collection[str | None]) -> dict[str, int]:
    """The ends of the last definitions of functions, in characters of the program."""
    tokens = _tokens(program)
    starts: dict[str, int] = {}
    for index, (word, name) in enumerate(pairwise(tokens), start=1):
        if word.type == tokenize.NAME and word.string == "def" and name.string in functions:
            starts[name.string] = index

    line_starts = [0, *accumulate(len(line) + 1 for line in program.split("\n"))]
    ends: dict[str, int] = {}
    for function, start in starts.items():
        last = _last_token(tokens[start:])
        row, column = last.start if last.type == tokenize.NEWLINE else last.end
        ends[function] = line_starts[row - 1] + column
    return ends


def _tokens(program: str) -> list[tokenize.TokenInfo]:
    """The tokens of a program, as far as it can be read. Nothing is compiled."""
    tokens: list[tokenize.TokenInfo] = []
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(StringIO(program).readline):
            if token.type == tokenize.ERRORTOKEN:  # no program has one; searching behind each would be quadratic
                break
            tokens.append(token)
    return tokens


def _last_token(tokens: Sequence[tokenize.TokenInfo]) -> tokenize.TokenInfo:
    """The last token of a function's code: where its indented block is closed, or where its only line ends.

    Args:
        tokens: tokens of the program, from the function's name on.
    """
    last = tokens[0]
    depth = 0
    has_block = False
    for token in tokens[1:]:
        if token.type == tokenize.INDENT:
            depth += 1
            has_block = True
        elif token.type == tokenize.DEDENT:
            depth -= 1
        if token.type in NON_CODE:
            if has_block and depth == 0:
                break
        elif not has_block and last.type == tokenize.NEWLINE:  # the next statement, after a body on the same line
            break
        else:
            last = token
    return last
