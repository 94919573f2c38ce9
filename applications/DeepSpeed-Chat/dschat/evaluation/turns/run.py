# SPDX-License-Identifier: Apache-2.0
"""A comparison of two policies' dialogues from its flags to the table."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.common.journal import Journal
from dschat.common.script import flag
from dschat.common.statistics import score_verdict
from dschat.errors import UserError
from dschat.evaluation.judge.flags import AskingOptions, parse_flags
from dschat.evaluation.judge.pairwise import Setup
from dschat.evaluation.judge.rubrics import DIALOGUES
from dschat.evaluation.judge.run import estimate, judge
from dschat.evaluation.pairs.comparisons import compared
from dschat.evaluation.pairs.responses import Pair, model_names
from dschat.evaluation.turns.dialogues import check_scored, turn_pairs
from dschat.evaluation.turns.report import rates_by_turn, write_turns

BY_SCORES = "--by-scores"


@dataclass
class TurnOptions(AskingOptions):
    """What a comparison by turn is told."""

    model_name_a: Path = flag("finished dialogues of the first policy", also="model_a")
    model_name_b: Path = flag("finished dialogues of the second policy", also="model_b")
    output: Path = flag("verdicts, as JSON Lines by dialogue and turn; table and picture go beside it")
    by_scores: bool = flag("no judge: the higher number of the rows' column scores wins each turn", False)

    def __post_init__(self) -> None:
        """Refuses values that mean nothing. Raises UserError, which names the flag."""
        super().__post_init__()
        if self.by_scores and self.dry_run:
            raise UserError(f"{BY_SCORES} asks no judge and costs nothing: leave --dry-run out.")


def run_turns(words: Sequence[str], description: str) -> str:
    """Judges every dialogue at every turn; returns the table, or a dry run's estimate.

    Args:
        words: the command line without the program.
        description: first lines of --help.
    """
    options = parse_flags(TurnOptions, words, description)
    pairs = turn_pairs(options.model_name_a, "--model_name_a", options.model_name_b, "--model_name_b")
    first, second = model_names([options.model_name_a, options.model_name_b])
    if options.by_scores:
        rows, line = compare_scores(pairs, (first, second), options), str(options.output)
    else:
        setup = Setup(DIALOGUES, options.judge_model, (first, second), options.single_order, options.seed)
        if options.dry_run:
            return estimate(pairs, setup, options)
        rows, line = judge(pairs, setup, options)
    folder, name = options.output.parent, options.output.name.removesuffix(".jsonl")
    places = ((f"{options.output}:{number}", row) for number, row in enumerate(rows, start=1))
    return f"{write_turns([rates_by_turn(places)], folder, name, {})}\n{line} and beside it {name}.md, .json and .png"


def compare_scores(pairs: Sequence[Pair], models: tuple[str, str], options: TurnOptions) -> list[dict[str, Any]]:
    """The verdicts of the rows' own scores; writes and returns them. Raises UserError where a row has none."""
    check_scored(pairs, BY_SCORES)
    rows = []
    for pair in pairs:
        a, b = float(pair.a.reward or 0), float(pair.b.reward or 0)
        details = {"reward_a": a, "reward_b": b}
        verdict = compared(pair, score_verdict(a, b), "reward", "scores", models, DIALOGUES.dataset, details)
        rows.append(verdict.to_row())
    settings = {"by-scores": True, "model_name_a": models[0], "model_name_b": models[1]}
    with closing(Journal(options.output, settings, options.overwrite)) as journal:
        journal.finish(rows)
    return rows
