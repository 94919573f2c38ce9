# SPDX-License-Identifier: Apache-2.0
"""A run of the judge from its flags to the line that sums it up."""

import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.base.journal import Journal
from dschat.base.statistics import score_verdict
from dschat.lab.judge.costs import Spending, estimated_tokens
from dschat.lab.judge.rubrics import DIALOGUES, RUBRICS, Form, question_of, read_rubric
from dschat.lab.judge.verdicts import Setup, judge_pairs, questions_of
from dschat.lab.options import BY_SCORES, AskingOptions, JudgeOptions, TurnOptions
from dschat.lab.responses import Pair, compared, read_pairs
from dschat.lab.turns import TurnRates, rates_by_turn, turn_pairs
from dschat.rollouts.chat_servers import checked_key

logger = logging.getLogger(__name__)

# No server has a reason to refuse to judge it: a prompt and two responses.
HARMLESS = ("When is the library open?", "From nine to five, on weekdays.", "From nine to five.")


def run_judge(options: JudgeOptions) -> str:
    """Judges two files of responses; returns one line with counts, tokens, cost and file, or a dry run's estimate."""
    pairs = read_pairs(options.model_name_a, "--model_name_a", options.model_name_b, "--model_name_b")
    rubric = read_rubric(options.rubric, options.dataset) if options.rubric else RUBRICS[options.dataset]
    setup = options.setup(rubric)
    return estimate(pairs, setup, options) if options.dry_run else judge(pairs, setup, options)[1]


def judge(pairs: Sequence[Pair], setup: Setup, options: AskingOptions) -> tuple[list[dict[str, Any]], str]:
    """Judges pairs; writes and returns their rows, and one line with counts, tokens, cost and file.

    Raises UserError, which says what is kept, where the judge cannot go on or gives no verdict at all.
    """
    prices, endpoint = options.prices(), options.endpoint()
    if options.sk:
        logger.warning("--sk shows the key to everybody on this machine; better set OPENAI_API_KEY")
    if endpoint.base_url.startswith("http://") and not endpoint.is_local:
        logger.warning("%s is not encrypted: the key and the texts can be read on the way", endpoint.base_url)
    key, source = options.sk or os.environ.get("OPENAI_API_KEY"), "--sk" if options.sk else "OPENAI_API_KEY"
    endpoint = replace(endpoint, key=checked_key(key, source, endpoint))
    spending = Spending(prices, options.max_cost)
    try:
        from dschat.lab.judge.client import JudgeClient
    except ImportError as error:
        raise UserError("The judge needs the openai library: pip install 'ma-rlhf[judge]'.") from error
    client = JudgeClient(endpoint, options.replies(), spending, question_of(setup.rubric, *HARMLESS))
    settings = {  # that the verdicts depend on
        "dataset": setup.rubric.dataset,
        "judge-model": setup.rater,
        "base-url": endpoint.base_url,
        "max-tokens": endpoint.max_tokens,
        "single-order": setup.single_order,
        "seed": setup.seed if setup.single_order else None,
        "model_name_a": setup.models[0],
        "model_name_b": setup.models[1],
        **({"rubric": setup.rubric.digest} if setup.rubric.digest else {}),
    }
    with closing(Journal(options.output, settings, options.overwrite)) as journal:
        rows = judge_pairs(pairs, setup, client, journal, options.concurrency)
    counts = Counter(row["verdict"] for row in rows)
    _report_invalid(rows, options)
    lost = f" and {spending.lost} whose answers did not arrive, by estimate" if spending.lost else ""
    return rows, (
        f"{setup.models[0]} against {setup.models[1]} on {setup.rubric.dataset}, {setup.rater}, "
        f"{'one order' if setup.single_order else 'both orders'}: {counts['A']} wins, {counts['tie']} ties, "
        f"{counts['B']} losses, {counts['invalid']} invalid of {counts.total()}; {spending.requests} requests{lost} "
        f"({client.cached} more from the cache), {spending.input_tokens} + {spending.output_tokens} tokens"
        f"{f', ${spending.cost:.4f}' if prices else ''}; {options.output}"
    )


def _report_invalid(rows: Sequence[dict[str, Any]], options: AskingOptions) -> None:
    """Names what was wrong with answers that gave no verdict; raises UserError where all are such."""
    invalid = [row for row in rows if row["verdict"] == "invalid"]
    if not invalid:
        return
    problems = Counter(order["problem"] for row in invalid for order in row.get("orders", ()) if "problem" in order)
    told = "; ".join(f"{problem.rstrip('.')} ({count} times)" for problem, count in problems.most_common(2))
    if len(invalid) == len(rows):
        raise UserError(
            f"no pair of {len(rows)} got a verdict: {told}. The answers are in {options.output}; try another "
            "--judge_model or --max_tokens with --overwrite."
        )
    logger.warning("%d of %d pairs got no verdict: %s", len(invalid), len(rows), told)


def estimate(pairs: Sequence[Pair], setup: Setup, options: AskingOptions) -> str:
    """What a run would send, by questions that differ and are not in the cache."""
    prices, endpoint, cache = options.prices(), options.endpoint(), options.replies()
    asked = [question for pair in pairs for question in questions_of(pair, setup).values()]
    questions = {question.digest(endpoint): question for question in asked}
    new = [question for digest, question in questions.items() if cache.get(digest) is None]
    bodies = [json.dumps(Form().body(endpoint, question), ensure_ascii=False) for question in new]
    sent = sum(estimated_tokens(len(body.encode("utf-8", "replace"))) for body in bodies)
    answered = len(new) * setup.rubric.output_tokens
    return (
        f"dry run, nothing sent: {len(pairs)} pairs, {len(new)} requests to {endpoint.model} at {endpoint.base_url} "
        f"({len(questions) - len(new)} more are in the cache); estimated at 4 characters per token, without repeats "
        f"and repairs: {sent} tokens sent, {answered} answered"
        f"{f', about ${prices.cost(sent, answered):.2f}' if prices else '; --price_in and --price_out give the cost'}"
    )


def judge_turns(options: TurnOptions) -> tuple[TurnRates | None, Path, str]:
    """Judges every dialogue at every turn: win rates, None for a dry run; the file; a line."""
    pairs = turn_pairs(options.model_name_a, "--model_name_a", options.model_name_b, "--model_name_b")
    setup = options.setup(DIALOGUES)
    if options.by_scores:
        rows, line = compare_scores(pairs, setup.models, options), str(options.output)
    elif options.dry_run:
        return None, options.output, estimate(pairs, setup, options)
    else:
        rows, line = judge(pairs, setup, options)
    places = ((f"{options.output}:{number}", row) for number, row in enumerate(rows, start=1))
    return rates_by_turn(places), options.output, line


def compare_scores(pairs: Sequence[Pair], models: tuple[str, str], options: TurnOptions) -> list[dict[str, Any]]:
    """The verdicts of the rows' own scores; writes and returns them. Raises UserError where a row has none."""
    rows = []
    for pair in pairs:
        for side in (pair.a, pair.b):
            if side.reward is None:
                raise UserError(f"{BY_SCORES}: {side.origin} has no column 'scores'; add one number per turn.")
        a, b = float(pair.a.reward or 0), float(pair.b.reward or 0)
        details = {"reward_a": a, "reward_b": b}
        verdict = compared(pair, score_verdict(a, b), "reward", "scores", models, DIALOGUES.dataset, details)
        rows.append(verdict.to_row())
    settings = {"by-scores": True, "model_name_a": models[0], "model_name_b": models[1]}
    with closing(Journal(options.output, settings, options.overwrite)) as journal:
        journal.finish(rows)
    return rows
