# SPDX-License-Identifier: Apache-2.0
"""ROUGE, perplexity, reward loss and accuracy, worked by hand."""

import json
import math

import pytest

from dschat.evaluation.text_metrics import policy_result, reward_result, rouge, write_text_report


def test_rouge_by_hand():
    """Reference: the cat sat on the mat (6 words, 5 pairs). Response: The cat lay on a mat! (6 words, 5 pairs).

    Common words: the, cat, on, mat = 4 of 6 and 6. Common pairs: the cat = 1 of 5 and 5. Longest common subsequence:
    the cat on mat = 4 of 6 and 6.
    """
    found = rouge("The cat lay on a mat!", "the cat sat on the mat")
    assert found == pytest.approx({"rouge1": 4 / 6, "rouge2": 1 / 5, "rougeL": 4 / 6})


def test_rouge_of_unequal_lengths_and_order():
    """Reference a b c d, response d c: precision 2/2, recall 2/4 → F1 2/3; the subsequence is one word: 2·½·¼/¾."""
    found = rouge("d c", "a b c d")
    assert found == pytest.approx({"rouge1": 2 / 3, "rouge2": 0.0, "rougeL": 1 / 3})
    assert rouge("runs", "running")["rouge1"] == 0.0, "words are not stemmed"
    assert rouge("", "a")["rouge1"] == 0.0


def text(loss, tokens):
    return {"model": "m", "update": 5, "loss_sum": loss, "loss_tokens": tokens}


def test_perplexity_is_of_tokens_not_of_texts():
    """(2 + 9) nats over (1 + 9) tokens; the mean of the texts' own losses would be 1.5."""
    result = policy_result([text(2.0, 1), text(9.0, 9)])
    assert result["loss"].value == pytest.approx(1.1)
    assert result["perplexity"].value == pytest.approx(math.exp(1.1))
    assert (result["rows"], result["tokens"], result["rouge"], result["length"]) == (2, 10, {}, None)


def test_reward_loss_and_accuracy_by_hand():
    """Margins 0, 3, −2: losses log 2, log(1 + e⁻³), log(1 + e²); a tie is ranked wrong, as in training."""
    pairs = [(1.0, 1.0), (4.0, 1.0), (0.0, 2.0)]
    rows = [{"model": "r", "update": None, "chosen_score": c, "rejected_score": r} for c, r in pairs]
    result = reward_result(rows)
    expected = (math.log(2) + math.log(1 + math.exp(-3)) + math.log(1 + math.exp(2))) / 3
    assert result["loss"].value == pytest.approx(expected)
    assert result["accuracy"].value == pytest.approx(1 / 3)
    far = reward_result([rows[0] | {"chosen_score": 0.0, "rejected_score": 1e4}])
    assert far["loss"].value == pytest.approx(1e4), "no overflow"


def test_numbers_that_are_not_finite(tmp_path):
    """One of two is enough: the means are no numbers, without intervals, and null in the file."""
    policy = policy_result([text(2.0, 1), text(math.nan, 1)])
    pairs = [(1.0, 0.0), (math.nan, 0.0), (0.0, math.inf)]
    reward = reward_result([{"model": "r", "update": None, "chosen_score": c, "rejected_score": r} for c, r in pairs])
    assert reward["accuracy"].value == pytest.approx(1 / 3)
    table = write_text_report([policy], [reward], tmp_path)
    assert (tmp_path / "report.md").read_text() == table + "\n"
    content = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    none = {"value": None, "low": None, "high": None}
    assert content["policies"][0]["loss"] == content["reward_models"][0]["loss"] == none
    assert content["policies"][0]["perplexity"] == none and table.count("nan") == 3


@pytest.mark.parametrize(("right", "pairs"), [(7, 7), (0, 1)])
def test_all_or_no_pairs_right(right, pairs, tmp_path):
    margins = [1.0 + n for n in range(right)] + [-1.0 - n for n in range(pairs - right)]
    rows = [{"model": "r", "update": None, "chosen_score": margin, "rejected_score": 0.0} for margin in margins]
    table = write_text_report([], [reward_result(rows)], tmp_path)
    assert f"| {100 * right / pairs:.1f} [" in table
