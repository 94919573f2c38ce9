# SPDX-License-Identifier: Apache-2.0
"""Every metric that a run writes: its meaning, its unit, and when to worry.

They are declared in metrics.toml, from which docs/metrics.md is made:

    python -m dschat.base.glossary > docs/metrics.md

Rows of metrics.jsonl, TensorBoard and W&B use these names.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from dschat.base.steps import STEPS

HEAD = ("update", "samples", "seconds")  # the first keys of every row
# The first metrics of an evaluation that is written in one line.
HEADLINES = ("loss", "perplexity", "accuracy", "scores", "kl", "kl_per_token")


@dataclass(frozen=True)
class Metric:
    """A number in metrics.jsonl."""

    name: str  # its key; <…> is a name that depends on the run
    runs: str  # steps that write it, separated by spaces; "all" for all of them
    meaning: str
    unit: str = ""
    worry: str = ""  # values that point to a problem; empty if any value may be right
    when: str = ""  # condition on which it is written; empty if every run of these steps writes it

    @property
    def steps(self) -> list[str]:
        """The steps that write it, by their names in run.json."""
        return [name for name in STEPS if self.runs == "all" or name in self.runs.split()]

    def fits(self, name: str) -> bool:
        """Whether a key of metrics.jsonl is this metric, or one of its family."""
        return re.fullmatch(re.sub("<[a-z]+>", r"\\w+", self.name), name) is not None


def _read_tables() -> dict[str, tuple[Metric, ...]]:
    text = (Path(__file__).parent / "metrics.toml").read_text(encoding="utf-8")
    tables: dict[str, tuple[Metric, ...]] = {}
    for heading, rows in tomllib.loads(text)["tables"].items():
        tables[heading] = tuple(Metric(**row) for row in rows)
    return tables


TABLES = _read_tables()  # by heading
METRICS = tuple(chain.from_iterable(TABLES.values()))


def metrics_of(step: str) -> list[Metric]:
    """The metrics that a run of a step may write. `step`: its name in run.json."""
    return [metric for metric in METRICS if step in metric.steps]


def names_under(prefix: str, step: str, always: bool = False) -> tuple[str, ...]:
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
        "finite is `null`. This page is made from `dschat/base/metrics.toml`.\n"
    )
    yield 'Means are over all processes. "Step 3" is PPO; other estimators write those numbers that need no critic.\n'
    best = ", ".join(f"{step.label} `{step.best}`" for step in STEPS.values())
    yield f"The best checkpoint (`--save_total_limit`) is chosen by: {best}."
    for heading, rows in TABLES.items():
        yield f"\n## {heading}\n"
        yield "| name | of | unit | what it is | when to worry |"
        yield "|---|---|---|---|---|"
        for metric in rows:
            runs = "all"
            if metric.runs != "all":
                runs = ", ".join(STEPS[step].label for step in metric.steps)
            condition = f" (with {metric.when})" if metric.when else ""
            yield f"| `{metric.name}` | {runs} | {metric.unit} | {metric.meaning}{condition} | {metric.worry} |"


if __name__ == "__main__":
    print(page(), end="")
