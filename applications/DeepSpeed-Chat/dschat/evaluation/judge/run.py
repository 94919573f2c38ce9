# SPDX-License-Identifier: Apache-2.0
"""A run of the judge from its flags to the line that sums it up."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dschat.common.chat_servers import Endpoint, ReplyCache
from dschat.common.journal import Journal
from dschat.common.progress import progress
from dschat.errors import UserError
from dschat.evaluation.judge.costs import Spending, estimated_tokens
from dschat.evaluation.judge.flags import AskingOptions, JudgeOptions, parse_flags
from dschat.evaluation.judge.pairwise import Setup, control_question, has_verdict, judge_pairs, questions_of
from dschat.evaluation.judge.question import Form
from dschat.evaluation.judge.rubric_file import read_rubric
from dschat.evaluation.judge.rubrics import RUBRICS
from dschat.evaluation.pairs.responses import Pair, model_names, read_pairs

if TYPE_CHECKING:
    from dschat.evaluation.judge.client import JudgeClient  # which needs the openai library

logger = logging.getLogger(__name__)


def run_judge(words: Sequence[str], description: str, dataset: str | None = None) -> str:
    """Judges two files of responses; returns one line with counts, tokens, cost and file, or a dry run's estimate.

    Args:
        words: the command line without the program.
        description: first lines of --help.
        dataset: the rubric to use whatever --dataset says; None to follow --dataset.
    """
    options = parse_flags(JudgeOptions, words, description)
    if dataset is not None and options.rubric is not None:
        raise UserError(f"--rubric: this script always judges by the {dataset} rubric; give yours to gpt4-eval.py.")
    if dataset not in (None, options.dataset):
        logger.info("--dataset %s: judged by the %s rubric, and recorded as %s", options.dataset, dataset, dataset)
    pairs = read_pairs(options.model_name_a, "--model_name_a", options.model_name_b, "--model_name_b")
    first, second = model_names([options.model_name_a, options.model_name_b])
    rubric = read_rubric(options.rubric, options.dataset) if options.rubric else RUBRICS[dataset or options.dataset]
    setup = Setup(rubric, options.judge_model, (first, second), options.single_order, options.seed)
    return estimate(pairs, setup, options) if options.dry_run else judge(pairs, setup, options)[1]


def judge(pairs: Sequence[Pair], setup: Setup, options: AskingOptions) -> tuple[list[dict[str, Any]], str]:
    """Judges pairs; writes and returns their rows, and one line with counts, tokens, cost and file.

    Raises UserError, which says what is kept, where the judge cannot go on or gives no verdict at all.
    """
    prices, endpoint, cache = options.prices(), options.endpoint(), _cache(options)
    if options.sk:
        logger.warning("--sk shows the key to everybody on this machine; better set OPENAI_API_KEY")
    if endpoint.base_url.startswith("http://") and not endpoint.is_local:
        logger.warning("%s is not encrypted: the key and the texts can be read on the way", endpoint.base_url)
    endpoint, spending = replace(endpoint, key=options.key(endpoint)), Spending(prices, options.max_cost)
    try:
        from dschat.evaluation.judge.client import JudgeClient
    except ImportError as error:
        raise UserError("The judge needs the openai library: pip install 'ma-rlhf[judge]'.") from error
    client = JudgeClient(endpoint, cache, spending, control_question(setup.rubric))
    rows = _judge(pairs, setup, endpoint, client, options)
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


def _cache(options: AskingOptions) -> ReplyCache:
    return ReplyCache(options.cache or options.output.parent / ".judge-cache", has_verdict)


def _report_invalid(rows: Sequence[dict[str, Any]], options: AskingOptions) -> None:
    """Names what was wrong with answers that gave no verdict; raises UserError where all are such."""
    problems = Counter(
        order["problem"]
        for row in rows
        for order in row.get("orders", ())
        if row["verdict"] == "invalid" and "problem" in order
    )
    invalid = sum(row["verdict"] == "invalid" for row in rows)
    if not invalid:
        return
    told = "; ".join(f"{problem.rstrip('.')} ({count} times)" for problem, count in problems.most_common(2))
    if invalid == len(rows):
        raise UserError(
            f"no pair of {invalid} got a verdict: {told}. The answers are in {options.output}; try another "
            "--judge-model or --max-tokens with --overwrite."
        )
    logger.warning("%d of %d pairs got no verdict: %s", invalid, len(rows), told)


def _judge(
    pairs: Sequence[Pair], setup: Setup, endpoint: Endpoint, client: "JudgeClient", options: AskingOptions
) -> list[dict[str, Any]]:
    """Judges with a bar on the screen; an interrupted run goes on only with the settings that the verdicts hang on."""
    settings = {
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
    bar = progress(len({pair.id for pair in pairs}), "judged", unit="pair")
    with closing(Journal(options.output, settings, options.overwrite)) as journal, bar:
        return judge_pairs(pairs, setup, client, journal, options.concurrency, bar.update)


def estimate(pairs: Sequence[Pair], setup: Setup, options: AskingOptions) -> str:
    """What a run would send, by questions that differ and are not in the cache."""
    prices, endpoint, cache = options.prices(), options.endpoint(), _cache(options)
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
        f"{f', about ${prices.cost(sent, answered):.2f}' if prices else '; --price-in and --price-out give the cost'}"
    )
