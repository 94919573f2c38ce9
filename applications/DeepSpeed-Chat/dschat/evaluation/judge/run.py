# SPDX-License-Identifier: Apache-2.0
"""A run of the judge from its flags to the line that sums it up."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dschat.common.journal import Journal
from dschat.errors import UserError
from dschat.evaluation.judge.cache import ReplyCache
from dschat.evaluation.judge.client import JudgeClient
from dschat.evaluation.judge.costs import Prices, Spending, estimated_tokens, prices_of
from dschat.evaluation.judge.flags import check_flags, key_of, parse_flags, server_of
from dschat.evaluation.judge.pairwise import Setup, control_question, counts_of, judge_pairs, orders_of, question_of
from dschat.evaluation.judge.rubrics import RUBRICS
from dschat.evaluation.judge.server import Endpoint, on_this_machine
from dschat.evaluation.pairs.responses import Pair, model_names, read_pairs

logger = logging.getLogger(__name__)


def run_judge(words: list[str], description: str, dataset: str | None = None) -> str:
    """Judges two files of responses as a command line says.

    Args:
        words: the command line without the program.
        description: first lines of --help.
        dataset: the rubric to use whatever --dataset says; None to follow --dataset.

    Returns:
        What to print: counts, tokens, cost and file in one line; or the estimate of a dry run.

    Raises:
        UserError: bad flags or files, or the judge cannot go on.
    """
    note = (
        "rubric: summarize, hh-rlhf or webgpt; default: %(default)s"
        if dataset is None
        else f"taken, but always {dataset} here"
    )
    flags = parse_flags(words, description, note)
    check_flags(flags)
    if dataset not in (None, flags.dataset):
        logger.info("--dataset %s: judged by the %s rubric, and recorded as %s", flags.dataset, dataset, dataset)
    server = server_of(flags)
    prices = prices_of(flags.judge_model, flags.price_in, flags.price_out)
    if flags.max_cost is not None and prices is None:
        raise UserError(f"--max-cost: no price is known for {flags.judge_model}; give --price-in and --price-out.")
    pairs = read_pairs(flags.model_name_a, "--model_name_a", flags.model_name_b, "--model_name_b")
    name_a, name_b = model_names([flags.model_name_a, flags.model_name_b])
    setup = Setup(RUBRICS[dataset or flags.dataset], flags.judge_model, name_a, name_b, flags.single_order, flags.seed)
    cache = ReplyCache(flags.cache or flags.output.parent / ".judge-cache")
    endpoint = Endpoint(flags.judge_model, server, flags.max_tokens, flags.timeout)
    if flags.dry_run:
        return _estimate(pairs, setup, endpoint, cache, prices)
    endpoint = _with_key(endpoint, flags)
    spending = Spending(prices, flags.max_cost)
    control = control_question(setup.rubric)
    client = JudgeClient(endpoint, cache, spending, flags.max_tries, flags.retry_wait, control)
    rows = _judge(pairs, setup, client, flags)
    return _summary(rows, setup, client, flags.output)


def _with_key(endpoint: Endpoint, flags: argparse.Namespace) -> Endpoint:
    key = key_of(flags, endpoint.base_url)
    if flags.sk:
        logger.warning("--sk shows the key to everybody on this machine; better set OPENAI_API_KEY")
    if endpoint.base_url.startswith("http://") and not on_this_machine(endpoint.base_url):
        logger.warning("%s is not encrypted: the key and the texts can be read on the way", endpoint.base_url)
    return Endpoint(endpoint.model, endpoint.base_url, endpoint.max_tokens, endpoint.timeout, key)


def _judge(
    pairs: Sequence[Pair], setup: Setup, client: JudgeClient, flags: argparse.Namespace
) -> list[dict[str, Any]]:
    from tqdm import tqdm

    settings = {
        "dataset": setup.rubric.dataset,
        "judge-model": setup.rater,
        "base-url": client.endpoint.base_url,
        "max-tokens": client.endpoint.max_tokens,
        "single-order": setup.single_order,
        "seed": setup.seed if setup.single_order else None,
        "model_name_a": setup.model_a,
        "model_name_b": setup.model_b,
    }
    journal = Journal(flags.output, settings, flags.overwrite)
    try:
        with tqdm(total=len({pair.id for pair in pairs}), desc="judged", unit="pair", disable=None) as bar:
            return judge_pairs(pairs, setup, client, journal, flags.concurrency, bar.update)
    finally:
        journal.close()


def _summary(rows: Sequence[dict[str, Any]], setup: Setup, client: JudgeClient, output: Path) -> str:
    counts, spending = counts_of(rows), client.spending
    orders = "one order" if setup.single_order else "both orders"
    cost = f"${spending.cost:.4f}" if spending.prices else "cost unknown (--price-in, --price-out)"
    lost = f" and {spending.lost} whose answers did not arrive, by estimate" if spending.lost else ""
    return (
        f"{setup.model_a} against {setup.model_b} on {setup.rubric.dataset}, {setup.rater}, {orders}: "
        f"{counts['A']} wins, {counts['tie']} ties, {counts['B']} losses, {counts['invalid']} invalid of {len(rows)}; "
        f"{spending.requests} requests{lost} ({client.cached} more from the cache), {spending.input_tokens} + "
        f"{spending.output_tokens} tokens, {cost}; {output}"
    )


def _estimate(
    pairs: Sequence[Pair], setup: Setup, endpoint: Endpoint, cache: ReplyCache, prices: Prices | None
) -> str:
    """What a run would send, by questions that differ and are not in the cache."""
    questions = {}
    for pair in pairs:
        for first in orders_of(pair, setup):
            question = question_of(pair, first, setup.rubric)
            questions[question.digest(endpoint)] = question
    asked = [question for digest, question in questions.items() if cache.get(digest) is None]
    sent = sum(estimated_tokens(*question.texts()) for question in asked)
    answered = len(asked) * setup.rubric.output_tokens
    cost = f"about ${prices.cost(sent, answered):.2f}" if prices else "cost unknown (--price-in, --price-out)"
    return (
        f"dry run, nothing sent: {len(pairs)} pairs, {len(asked)} requests to {endpoint.model} at {endpoint.base_url} "
        f"({len(questions) - len(asked)} more are in the cache); estimated at 4 characters per token, without repeats "
        f"and repairs: {sent} tokens sent, {answered} answered, {cost}"
    )
