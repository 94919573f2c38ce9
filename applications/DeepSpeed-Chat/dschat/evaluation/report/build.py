# SPDX-License-Identifier: Apache-2.0
"""A report on verdicts and rewards: which of two models is better, by whom, how surely, and how far they agree."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dschat.common.statistics import RESAMPLES, WinRates
from dschat.errors import UserError
from dschat.evaluation.report.results import RaterResult, SectionResult, section_result
from dschat.evaluation.report.sections import sections_of
from dschat.evaluation.report.text import report_text
from dschat.evaluation.report.votes import read_votes


@dataclass(frozen=True)
class EvaluationReport:
    """What files of verdicts and of scored responses say."""

    files: list[Path]
    margin: float  # rewards that differ by no more were a tie
    sections: list[SectionResult]  # one per pair of models and data set

    def text(self) -> str:
        """The tables for a terminal."""
        return report_text(self.sections, self.margin)

    def to_json(self) -> dict[str, Any]:
        """The numbers as JSON can hold them: what is not defined is null."""
        return {
            "files": [str(file) for file in self.files],
            "reward_margin": self.margin,
            "intervals": {"level": 0.95, "bootstrap_resamples": RESAMPLES},
            "sections": [_section_row(section) for section in self.sections],
        }


def build_evaluation_report(
    files: Sequence[Path], output_dir: Path, reward_margin: float = 0.0, dataset: str = ""
) -> EvaluationReport:
    """Writes `report.json` and `report.png`; `.text()` of what it returns is the table for the terminal.

    Args:
        files: files of verdicts (`dschat.evaluation.pairs.comparisons`) and of responses with rewards
            (`dschat.evaluation.pairs.responses`), in any mixture and order.
        output_dir: folder of the two files; made where it is missing.
        reward_margin: rewards that differ by no more are a tie.
        dataset: of the files that name none.
    """
    from dschat.evaluation.report.plot import draw_report

    if not files:
        raise UserError("A report needs at least one file of verdicts, or two of responses with rewards.")
    if not (math.isfinite(reward_margin) and reward_margin >= 0):
        raise UserError(f"--reward-margin {reward_margin}: must be 0 or more.")
    paths = [Path(file) for file in files]
    sections = sections_of(read_votes(paths, reward_margin), reward_margin, dataset)
    report = EvaluationReport(paths, reward_margin, [section_result(section) for section in sections])
    content = json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n"
    picture = draw_report(report.sections)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "report.json").write_text(content, encoding="utf-8")
        (output_dir / "report.png").write_bytes(picture)
    except OSError as error:
        raise UserError(f"--output {output_dir}: cannot be written: {error}") from error
    return report


def _section_row(section: SectionResult) -> dict[str, Any]:
    """A section as JSON; `a` is the first model, `win` its win."""
    row = asdict(section)
    model_a, model_b = row.pop("models")
    return {"model_a": model_a, "model_b": model_b, **row, "raters": [_rater_row(rater) for rater in section.raters]}


def _rater_row(rater: RaterResult) -> dict[str, Any]:
    row = asdict(rater)
    del row["rates"]
    aspects = {name: _rates_row(rates) for name, rates in rater.aspects.items()}
    return row | _rates_row(rater.rates) | {"aspects": aspects}


def _rates_row(rates: WinRates) -> dict[str, Any]:
    shares = asdict(rates)
    counts = shares.pop("tally")
    return {"verdicts": rates.tally.given, "counted": rates.tally.counted, "counts": counts, "rates": shares}
