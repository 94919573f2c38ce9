# SPDX-License-Identifier: Apache-2.0
"""The report on text metrics: perplexity and ROUGE of policies, loss and accuracy of reward models."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dschat.base.statistics import MeanInterval, bounded_interval, wilson
from dschat.evaluation.page import OUTPUT, REPORT_NAME, Report, Table, write_report

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
            also with `response_tokens` and, if the data have a response to compare with, rouge1, rouge2 and rougeL.

    Returns:
        `model`, `update` (None if unknown), number of `rows`, `tokens` that the loss is a mean over, `loss` (nats
        per token), `rouge` (name → mean) and `length` (mean tokens of a response; None without responses), and
        `perplexity`. Intervals are of 95 % over texts; there is none where a loss is not finite.
    """
    token_counts = [int(row["loss_tokens"]) for row in rows]
    loss = _mean_loss([float(row["loss_sum"]) for row in rows], token_counts)
    rouges = {}
    length = None
    if "response_tokens" in rows[0]:
        length = fmean(row["response_tokens"] for row in rows)
        scores: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            for name in ROUGES:
                if name in row:
                    scores[name].append(row[name])
        for name, numbers in scores.items():
            rouges[name] = bounded_interval(numbers, [1] * len(numbers))
    return {
        "model": rows[0]["model"],
        "update": rows[0]["update"],
        "rows": len(rows),
        "tokens": sum(token_counts),
        "loss": loss,
        "rouge": rouges,
        "length": length,
        "perplexity": _perplexity(loss),
    }


def _mean_loss(sums: Sequence[float], counts: Sequence[int]) -> MeanInterval:
    """Mean of a loss, from its sum over each text and the number of its values; no interval if one is not finite."""
    total = sum(sums)
    if not math.isfinite(total):
        return MeanInterval(total / sum(counts))
    return bounded_interval(sums, counts)


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
    margins = [float(row["chosen_score"]) - float(row["rejected_score"]) for row in rows]
    losses = [_softplus(-margin) for margin in margins]
    return {
        "model": rows[0]["model"],
        "update": rows[0]["update"],
        "rows": len(rows),
        "loss": _mean_loss(losses, [1] * len(losses)),
        "accuracy": wilson(sum(margin > 0 for margin in margins), len(margins)),
    }


def _softplus(number: float) -> float:
    """log(1 + exp(number)), without overflow."""
    return max(number, 0.0) + math.log1p(math.exp(-abs(number)))


def write_text_report(
    policies: Sequence[Result], rewards: Sequence[Result], folder: Path, loss_over: str = "the response"
) -> str:
    """Write report.md and report.json; returns the tables. Raises UserError if it cannot.

    Args:
        policies: results of policies in the order of the table.
        rewards: results of reward models; not empty if `policies` is.
        folder: folder of the report.
        loss_over: which tokens the loss of policies is over, in words.
    """
    tables = []
    remarks = [REMARK]
    if policies:
        tables.append(_policy_table(policies))
        remarks.append(f"The loss of policies is over the tokens of {loss_over}.")
    if rewards:
        tables.append(_reward_table(rewards))
    content = {"policies": policies, "reward_models": rewards, "loss_over": loss_over}
    report = Report("", tables, remarks=remarks)
    return write_report(folder, REPORT_NAME, content, report, flag=OUTPUT).rstrip("\n")


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
                columns[label].append(policy["rouge"].get(name, ""))
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
    models: list[object] = []
    updates: list[object] = []
    for result in results:
        models.append(result["model"])
        updates.append(result["update"])
    all_columns = {kind: models}
    if any(update is not None for update in updates):
        all_columns["updates"] = updates
    all_columns |= columns
    rows = zip(*all_columns.values(), strict=True)
    return Table(list(all_columns), list(rows))
