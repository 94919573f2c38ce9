# SPDX-License-Identifier: Apache-2.0
"""Output folders of step 3 written by hand, small enough to work out every number, and a reader of HTML pages."""

import json
from collections.abc import Callable, Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

Row = dict[str, Any]

GOLD = {"first": [0.1, 0.3], "low": [0.4, 0.6], "high": [0.5, 0.9]}


class Page(HTMLParser):
    """Elements with their attributes, and the text outside style sheets. Checks that the elements nest."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        """The attributes of every element of a CSS class."""
        return [attrs for _, attrs in self.elements if name in (attrs.get("class") or "").split()]


def make_sample(prompt: str, gold: float, text: str, ngram: int) -> Row:
    """A sample of three tokens with KL 0.5 × 2 + 0.5 = 1.5 and score ten times the gold score."""
    tokens = [
        {"text": text, "macro_action": index // ngram, "value": 0.1, "reward": 0.2, "advantage": 0.3}
        | {"logprob": -1.0, "ref_logprob": -1.5}
        for index in range(3)
    ]
    sample = {"prompt": prompt, "response": text * 3, "score": 10 * gold, "gold_scores": gold, "finished": True}
    return sample | {"kl": 1.5, "length": 3, "tokens": tokens}


def eval_row(update: int, samples: list[Row]) -> Row:
    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(samples)

    row = {"update": update, "samples": 8 * update, "seconds": 1.5 * update}
    row |= {"eval/scores": mean(s["score"] for s in samples), "eval/kl": 1.5, "eval/length": 3.0}
    row |= {"eval/eos_rate": mean(s["finished"] for s in samples)}
    return row | {"eval/gold_scores": mean(s["gold_scores"] for s in samples)}


def train_row(update: int, ngram: int) -> Row:
    row: Row = {"update": update, "samples": 8 * update, "seconds": 1.5 * update, "objective/scores": float(update)}
    row |= {"objective/gold_scores": 0.1 * update, "objective/kl": 0.2, "response/length": 3.0}
    row |= {"val/explained_variance": None if update == 1 else 0.1 * update}
    return row | {"macro/length": float(ngram), "macro/lambda_eff": 0.95 ** (1 / ngram)}


def write_lines(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_run(
    folder: Path, gold: list[float], ngram: int = 1, prompts: Sequence[str] = ("p0", "p1"), text: str = "good"
) -> Path:
    """A finished run of ten updates, evaluated before and after."""
    first = [make_sample(p, g, text, ngram) for p, g in zip(prompts, GOLD["first"], strict=True)]
    last = [make_sample(p, g, text, ngram) for p, g in zip(prompts, gold, strict=True)]
    write_lines(folder / "samples" / "update-000000.jsonl", first)
    write_lines(folder / "samples" / "update-000010.jsonl", last)
    train = [train_row(update, ngram) for update in range(1, 11)]
    write_lines(folder / "metrics.jsonl", [eval_row(0, first), *train, eval_row(10, last)])
    config = {"ngram": str(ngram), "seed": 1, "metric_function": "pkg/synthetic.py:gold_scores"}
    (folder / "train_config.json").write_text(json.dumps(config | {"data_path": [text]}))
    (folder / "run.json").write_text(json.dumps({"step": "ppo", "finished": True}))
    return folder


def make_two_runs(folder: Path) -> dict[str, Path]:
    """PPO and MA-PPO: gold 0.5 and 0.7 after an SFT model of 0.2."""
    return {"PPO": make_run(folder / "ppo", GOLD["low"]), "MA-PPO": make_run(folder / "ma", GOLD["high"], ngram=2)}


def edit_rows(path: Path, change: Callable[[int, Row], Row]) -> None:
    """Put every row of a JSONL file through `change`, a function from (index, row) to a row."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [change(index, row) for index, row in enumerate(rows)])


def tables_of(outcome: Any) -> dict[str, Any]:
    """The tables of a report by their kind, such as evaluations."""
    tables = list(outcome.tables)
    for part in outcome.details:
        tables += part.tables
    return {table.kind: table for table in tables}
