# SPDX-License-Identifier: Apache-2.0
"""Metrics are declared once; `cli_runs.check_names` compares them with what runs wrote."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from dschat.base.glossary import METRICS, metrics_of, page
from dschat.base.steps import STEPS
from dschat.training.symptoms import LIMITS, symptoms

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "applications" / "DeepSpeed-Chat"


def test_the_page_is_up_to_date() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert text == page(), "python -m dschat.base.glossary > docs/metrics.md"


@pytest.mark.parametrize("step", STEPS)
def test_a_step_declares_each_name_once(step: str) -> None:
    declared = metrics_of(step)
    assert max(Counter(metric.name for metric in declared).values()) == 1
    assert all(set(metric.runs.split()) <= {*STEPS, "all"} for metric in METRICS)
    assert STEPS[step].best in {metric.name for metric in declared if not metric.when}


def test_names_are_fitted_by_their_family_alone() -> None:
    (family,) = [metric for metric in METRICS if metric.name == "eval/scores_turn_<number>"]
    assert family.fits("eval/scores_turn_12") and not family.fits("eval/scores_turn_") and not family.fits("eval/x")


def test_names_that_code_mentions_are_declared() -> None:
    """In dschat, the benchmarks and the training scripts: texts that begin as a metric does."""
    prefixes = {metric.name.partition("/")[0] for metric in METRICS if "/" in metric.name}
    begins_so, unknown = re.compile(f"({'|'.join(prefixes)})/\\w+"), []
    for file in sorted(CODE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and begins_so.fullmatch(text := str(node.value)):
                name = re.sub("_squared$", "_variance", text)  # a mean of squares, which `with_variances` replaces
                if not any(metric.fits(name) for metric in METRICS):
                    unknown.append(f"{file}:{node.lineno}: {text}")
    assert not unknown


def test_warnings_read_declared_metrics_and_have_the_stated_limits() -> None:
    read = {name for symptom in symptoms() for name in symptom.metrics}
    assert read <= {metric.name for step in ("ppo", "refuel_online") for metric in metrics_of(step)}
    worry = {metric.name: metric.worry for metric in metrics_of("ppo")}
    assert f"above {LIMITS.kl:g}" in worry["objective/kl"]
    assert f"above {LIMITS.repetition}" in worry["response/repetition"]
    assert f"above {LIMITS.correlation}" in worry["response/score_length_correlation"]
    assert f"from {LIMITS.rows_for_correlation} responses" in worry["response/score_length_correlation"]
    assert f"below −{-LIMITS.explained:.0f}" in worry["val/explained_variance"]
