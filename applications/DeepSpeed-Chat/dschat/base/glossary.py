# SPDX-License-Identifier: Apache-2.0
"""Every metric that a run writes: its meaning, its unit, and when to worry. docs/metrics.md is made from it:

    python -m dschat.base.glossary > docs/metrics.md

Rows of metrics.jsonl, TensorBoard and W&B use these names.
"""

from collections.abc import Iterator
from itertools import chain

from dschat.base.evaluation_metrics import EVALUATIONS
from dschat.base.metric import ALL, RUNS, Metric
from dschat.base.rollout_metrics import ROLLOUTS
from dschat.base.update_metrics import EVERY_ROW, LOSSES, OPTIMISER, UPDATES

HEAD = ("update", "samples", "seconds")  # the first keys of every row
# The first metrics of an evaluation that is written in one line.
HEADLINES = (
    "loss",
    "perplexity",
    "accuracy",
    "scores",
    "kl",
    "kl_per_token",
)
# Step → the metric that makes a checkpoint the best, and whether a larger one is better.
BEST = {
    "sft": ("eval/loss", False),
    "reward": ("eval/accuracy", True),
    "dpo": ("eval/loss", False),
    "ppo": ("eval/scores", True),
    "refuel_online": ("eval/scores", True),
    "refuel": ("eval/loss", False),
}

TABLES: dict[str, tuple[Metric, ...]] = {  # by heading
    "Every row": EVERY_ROW,
    "Optimiser": OPTIMISER,
    "Losses and what they are made of": LOSSES,
    "Rollouts and their scores": ROLLOUTS,
    "Updates of step 3 and of REFUEL online: means over those of a rollout": UPDATES,
    "Evaluations, on held-out rows": EVALUATIONS,
}
METRICS = tuple(chain.from_iterable(TABLES.values()))


def metrics_of(step: str) -> list[Metric]:
    """The metrics that a run of a step may write. `step`: its name in run.json."""
    return [metric for metric in METRICS if step in metric.runs.split()]


def names_under(
    prefix: str,
    step: str,
    always: bool = False,
) -> tuple[str, ...]:
    """Names of a step's metrics after a prefix such as `eval/`, without families.

    `always`: only those that every run of the step writes.
    """
    names = []
    for metric in metrics_of(step):
        is_family = "<" in metric.name
        is_conditional = always and metric.when
        if metric.name.startswith(prefix) and not is_family and not is_conditional:
            names.append(metric.name.removeprefix(prefix))
    return tuple(names)


def page() -> str:
    """The text of docs/metrics.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Metrics\n"
    yield (
        "`metrics.jsonl` has one object per update (of step 3 and REFUEL online per rollout) and one per evaluation;\n"
        "TensorBoard and W&B show the same under the same names ([tracking.md](tracking.md)). A number that is not\n"
        "finite is `null`. This page is made from `dschat/base/glossary.py`.\n"
    )
    yield 'Means are over all processes. "Step 3" is PPO; other estimators write those numbers that need no critic.\n'
    best = ", ".join(f"{RUNS[step]} `{name}`" for step, (name, _) in BEST.items())
    yield f"The best checkpoint (`--save_total_limit`) is chosen by: {best}."
    for heading, rows in TABLES.items():
        yield f"\n## {heading}\n"
        yield "| name | of | unit | what it is | when to worry |"
        yield "|---|---|---|---|---|"
        for metric in rows:
            runs = "all" if metric.runs == ALL else ", ".join(RUNS[run] for run in metric.runs.split())
            condition = f" (with {metric.when})" if metric.when else ""
            yield f"| `{metric.name}` | {runs} | {metric.unit} | {metric.meaning}{condition} | {metric.worry} |"


if __name__ == "__main__":
    print(page(), end="")
