# SPDX-License-Identifier: Apache-2.0
"""The report on text metrics: perplexity and ROUGE of policies, loss and accuracy of reward models."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dschat.base.statistics import MeanInterval, bounded_interval, wilson
from dschat.evaluation.page import NAME, OUTPUT, Report, Table, write_report

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

ROUGES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
MAX_EXPONENT = 700.0  # exp of more overflows
REMARK = "[ ] holds 95 %, over texts: a percentile bootstrap; of accuracies, Wilson's interval."

Row = Mapping[str, Any]  # row of a result file
Result = dict[str, Any]


def rouge(response: str, reference: str) -> dict[str, float]:
    """F1, 0 to 1, of common words (rouge1), pairs of words (rouge2) and the longest common subsequence (rougeL).

    Words are runs of a–z and 0–9 in lower case, without stemming, so that texts in other scripts share none.
    """
    scores = _scorer().score(reference, response)
    return {name: score.fmeasure for name, score in scores.items()}


@cache
def _scorer() -> "RougeScorer":
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk

    return RougeScorer(list(ROUGES), use_stemmer=False)


def policy_result(rows: Sequence[Row]) -> Result:
    """Metrics of one policy on a split.

    Args:
        rows: at least one, with `model`, `update`, `loss_sum` (nats) and `loss_tokens`; where responses were sampled
            also with `response_tokens`, rouge1, rouge2 and rougeL.

    Returns:
        `model`, `update` (None if unknown), number of `rows`, `tokens` that the loss is a mean over, `loss` (nats
        per token), `rouge` (name → mean) and `length` (mean tokens of a response; None without responses), and
        `perplexity`. Intervals are of 95 % over texts; there is none where a loss is not finite.
    """
    table = pd.DataFrame(rows)
    loss_sums = list(map(float, table["loss_sum"]))
    loss_tokens = list(map(int, table["loss_tokens"]))
    token_count = sum(loss_tokens)
    total = sum(loss_sums)
    if math.isfinite(total):
        loss = bounded_interval(loss_sums, loss_tokens)
    else:
        loss = MeanInterval(total / token_count)
    rouges = {}
    length = None
    if "rouge1" in table:
        ones = [1] * len(table)
        rouges = {name: bounded_interval(table[name], ones) for name in ROUGES}
        length = sum(table["response_tokens"]) / len(table)
    return {
        "model": rows[0]["model"],
        "update": rows[0]["update"],
        "rows": len(table),
        "tokens": token_count,
        "loss": loss,
        "rouge": rouges,
        "length": length,
        "perplexity": _perplexity(loss),
    }


def _perplexity(loss: MeanInterval) -> MeanInterval:
    """exp of a loss in nats per token and of its interval's ends."""
    low = None if loss.low is None else math.exp(min(loss.low, MAX_EXPONENT))
    high = None if loss.high is None else math.exp(min(loss.high, MAX_EXPONENT))
    return MeanInterval(math.exp(min(loss.value, MAX_EXPONENT)), low, high)


def reward_result(rows: Sequence[Row]) -> Result:
    """Metrics of one reward model on a split.

    Args:
        rows: at least one, with `model`, `update`, `chosen_score` and `rejected_score`.

    Returns:
        `model`, `update`, number of `rows`, `loss`: mean of −log σ(chosen − rejected), and `accuracy`: share of pairs
        whose chosen response has the higher score.
    """
    table = pd.DataFrame(rows)
    margins = list(map(float, table["chosen_score"] - table["rejected_score"]))
    losses = [_softplus(-margin) for margin in margins]
    total = sum(losses)
    if math.isfinite(total):
        loss = bounded_interval(losses, [1] * len(losses))
    else:
        loss = MeanInterval(total / len(losses))
    accuracy = wilson(sum(margin > 0 for margin in margins), len(margins))
    return {
        "model": rows[0]["model"],
        "update": rows[0]["update"],
        "rows": len(table),
        "loss": loss,
        "accuracy": accuracy,
    }


def _softplus(number: float) -> float:
    """log(1 + exp(number)), without overflow."""
    return max(number, 0.0) + math.log1p(math.exp(-abs(number)))


def write_text_report(policies: Sequence[Result], rewards: Sequence[Result], folder: Path) -> str:
    """Write report.md and report.json; returns the tables. Raises UserError if it cannot.

    Args:
        policies: results of policies in the order of the table.
        rewards: results of reward models; not empty if `policies` is.
        folder: folder of the report.
    """
    tables = []
    if policies:
        tables.append(_policy_table(policies))
    if rewards:
        tables.append(_reward_table(rewards))
    content = {"policies": policies, "reward_models": rewards}
    report = Report("", tables, remarks=[REMARK])
    return write_report(folder, NAME, content, report, flag=OUTPUT).rstrip("\n")


def _policy_table(policies: Sequence[Result]) -> Table:
    has_responses = any(policy["rouge"] for policy in policies)
    columns: dict[str, list[object]] = defaultdict(list)
    for policy in policies:
        columns["texts"].append(policy["rows"])
        columns["tokens"].append(policy["tokens"])
        columns["loss"].append(policy["loss"].text(4))
        columns["perplexity"].append(policy["perplexity"].text(2))
        if has_responses:
            for name, label in ROUGES.items():
                columns[label].append(policy["rouge"][name])
            columns["length"].append(f"{policy['length']:.1f}")
    return _model_table("policy", policies, columns)


def _reward_table(rewards: Sequence[Result]) -> Table:
    columns: dict[str, list[object]] = defaultdict(list)
    for reward in rewards:
        columns["pairs"].append(reward["rows"])
        columns["loss"].append(reward["loss"].text(4))
        columns["accuracy, %"].append(reward["accuracy"])
    return _model_table("reward model", rewards, columns)


def _model_table(kind: str, results: Sequence[Result], columns: Mapping[str, list[object]]) -> Table:
    """Table with the models' names before the columns, and with updates where they are known of any model."""
    all_columns: dict[str, list[object]] = {kind: [result["model"] for result in results]}
    updates = [result["update"] for result in results]
    if any(update is not None for update in updates):
        all_columns["updates"] = updates
    all_columns |= columns
    rows = zip(*all_columns.values(), strict=True)
    return Table(list(all_columns), list(rows))
