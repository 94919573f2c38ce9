# SPDX-License-Identifier: Apache-2.0
"""A run of the judge, from its flags to the line that sums it up."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dschat.base.chat_servers import with_key
from dschat.base.errors import UserError
from dschat.base.journal import Journal
from dschat.base.reply_cache import ReplyCache
from dschat.base.statistics import score_verdict
from dschat.evaluation.responses import Pair, compared, read_pairs, with_origins
from dschat.judge.client import JudgeClient
from dschat.judge.costs import Spending, estimated_tokens
from dschat.judge.options import BY_SCORES, AskingOptions, JudgeOptions, TurnOptions
from dschat.judge.published_rubrics import DIALOGUE, DIALOGUES, RUBRICS, answer_tokens
from dschat.judge.questions import Form, JudgeQuestion
from dschat.judge.rubrics import read_rubric
from dschat.judge.turn_pairs import TurnRates, rates_by_turn, turn_pairs
from dschat.judge.verdicts import Setup, has_verdict, judge_pairs, questions_of

logger = logging.getLogger(__name__)


def run_judge(options: JudgeOptions) -> str:
    """Judge two files of responses; returns one line with counts, tokens, cost and file, or a dry run's estimate."""
    files = options.compared
    pairs = read_pairs(files.model_name_a, "--model_name_a", files.model_name_b, "--model_name_b")
    rubric_file = options.comparison.rubric
    if rubric_file is None:
        rubric = RUBRICS[options.dataset_name]
    else:
        rubric = read_rubric(rubric_file, "--rubric")
    setup = options.setup(rubric, options.dataset_name)
    if options.judge.dry_run:
        return estimate(pairs, setup, options)
    _, summary = judge(pairs, setup, options)
    return summary


def judge(pairs: Sequence[Pair], setup: Setup, options: AskingOptions) -> tuple[list[dict[str, Any]], str]:
    """Judge pairs and write their rows.

    Answers are saved in the cache as they come; an interrupted run asks only for those that it does not hold.

    Returns:
        The rows, and one line with counts, tokens, cost and file.

    Raises:
        UserError: the judge cannot continue or gives no verdict at all; says what is saved.
    """
    output = options.compared.output
    prices = options.costs.prices()
    if options.judge.sk:
        logger.warning("--sk shows the key to everybody on this machine; better set JUDGE_API_KEY or OPENAI_API_KEY")
    endpoint = with_key(options.endpoint(), options.judge.sk)
    spending = Spending(prices, options.costs.max_cost)
    client = JudgeClient(endpoint, ReplyCache(options.cache_folder), spending)
    with closing(Journal(output, {}, options.result.overwrite)) as journal:
        rows = judge_pairs(pairs, setup, client, options.requests.concurrency)
        journal.finish(rows)
    _report_invalid(rows, output)

    counts = Counter(row["verdict"] for row in rows)
    first, second = setup.models
    orders = "one order" if setup.single_order else "both orders"
    lost = f" and {spending.lost} whose answers did not arrive, by estimate" if spending.lost else ""
    cost = f", ${spending.cost:.4f}" if prices else ""
    summary = (
        f"{first} against {second} on {setup.dataset}, {setup.rater}, {orders}: "
        f"{counts['A']} wins, {counts['tie']} ties, {counts['B']} losses, {counts['invalid']} invalid of "
        f"{counts.total()}; {spending.requests} requests{lost} ({client.cached} more from the cache), "
        f"{spending.input_tokens} + {spending.output_tokens} tokens{cost}; {output}"
    )
    return rows, summary


def _report_invalid(rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Report the problems of answers that gave no verdict; raises UserError if no pair has one."""
    invalid = [row for row in rows if row["verdict"] == "invalid"]
    if not invalid:
        return
    problems: Counter[str] = Counter()
    for row in invalid:
        for order in row.get("orders", ()):
            if "problem" in order:
                problems[order["problem"]] += 1
    most_frequent = []
    for problem, count in problems.most_common(2):
        most_frequent.append(f"{problem.rstrip('.')} ({count} times)")
    reasons = "; ".join(most_frequent)
    if len(invalid) == len(rows):
        raise UserError(
            f"no pair of {len(rows)} got a verdict: {reasons}. The answers are in {output}; try another "
            "--judge_model or --max_tokens with --overwrite."
        )
    logger.warning("%d of %d pairs got no verdict: %s", len(invalid), len(rows), reasons)


def estimate(pairs: Sequence[Pair], setup: Setup, options: AskingOptions) -> str:
    """The requests and tokens that a run would send: of questions that differ and are not in the cache."""
    prices = options.costs.prices()
    endpoint = options.endpoint()
    cache = ReplyCache(options.cache_folder)
    questions: dict[str, JudgeQuestion] = {}
    for pair in pairs:
        for question in questions_of(pair, setup).values():
            questions[question.digest(endpoint)] = question

    requests = 0
    cached = 0
    sent = 0
    for digest, question in questions.items():
        if cache.get(digest, has_verdict) is not None:
            cached += 1
            continue
        requests += 1
        body = json.dumps(Form().body(endpoint, question), ensure_ascii=False)
        sent += estimated_tokens(len(body.encode("utf-8", "replace")))

    answered = requests * answer_tokens(setup.rubric)
    cost = "; --price_in and --price_out give the cost"
    if prices:
        cost = f", about ${prices.cost(sent, answered):.2f}"
    return (
        f"dry run, nothing sent: {len(pairs)} pairs, {requests} requests to {endpoint.model} at "
        f"{endpoint.base_url} ({cached} more are in the cache); estimated at 4 characters per token, without repeats "
        f"and repairs: {sent} tokens sent, {answered} answered{cost}"
    )


def judge_turns(options: TurnOptions) -> tuple[TurnRates | None, Path, str]:
    """Judge every dialogue at every turn.

    Returns:
        Win rates, or None for a dry run; the file of verdicts; and the line that sums the run up.
    """
    files = options.compared
    pairs = turn_pairs(files.model_name_a, "--model_name_a", files.model_name_b, "--model_name_b")
    setup = options.setup(DIALOGUES, DIALOGUE)
    if options.turns.by_scores:
        rows = compare_scores(pairs, setup.models, options)
        summary = str(files.output)
    elif options.judge.dry_run:
        return None, files.output, estimate(pairs, setup, options)
    else:
        rows, summary = judge(pairs, setup, options)
    rates = rates_by_turn(with_origins(files.output, rows))
    return rates, files.output, summary


def compare_scores(pairs: Sequence[Pair], models: tuple[str, str], options: TurnOptions) -> list[dict[str, Any]]:
    """Write and return the verdicts of the rows' own scores; raises UserError if a row has none."""
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        for side in (pair.a, pair.b):
            if side.reward is None:
                raise UserError(f"{BY_SCORES}: {side.origin} has no column 'scores'; add one number per turn.")
        score_a = float(pair.a.reward or 0)
        score_b = float(pair.b.reward or 0)
        details = {"reward_a": score_a, "reward_b": score_b}
        comparison = compared(pair, score_verdict(score_a, score_b), "reward", "scores", models, DIALOGUE, details)
        rows.append(comparison.to_row())
    with closing(Journal(options.compared.output, {}, options.result.overwrite)) as journal:
        journal.finish(rows)
    return rows
