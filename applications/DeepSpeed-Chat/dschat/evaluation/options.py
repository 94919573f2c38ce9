# SPDX-License-Identifier: Apache-2.0
"""Flags of the commands that compare models: raters, samples and reports; and what judges share with them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dschat.base.errors import UserError
from dschat.evaluation.responses import model_names
from dschat.settings.commands import PORT
from dschat.settings.config import Config
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, Range, check_values, flag
from dschat.settings.rules import Check, Rules

COUNT: Range = (lambda number: 1 <= number <= 1_000_000, "a whole number from 1 to 1,000,000")
MARGIN: Range = (lambda value: 0 <= value < math.inf, "a number of at least 0")
SECONDS: Range = (lambda value: 0 < value < math.inf, "a number of seconds above 0")


# -- groups of flags


@dataclass(kw_only=True, frozen=True)
class ComparedFlags:
    """Two files of responses, and the file of verdicts."""

    model_name_a: Path = flag("file of the first model's responses (.jsonl)", aliases=["--model_a"])
    model_name_b: Path = flag("file of the second model's responses (.jsonl)", aliases=["--model_b"])
    output: Path = flag("file to write verdicts to (.jsonl), in the order of the first model's responses")
    seed: int = flag("random seed of the choice of rows and of the side on which each model is shown", 42, AT_LEAST_0)

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two models, taken from their files."""
        first, second = model_names([self.model_name_a, self.model_name_b])
        return first, second


@dataclass(kw_only=True, frozen=True)
class RequestFlags:
    """How requests are sent to an OpenAI-compatible server."""

    concurrency: int = flag("number of concurrent requests to the server", 8, COUNT)
    timeout: float = flag("time-out of a request, in seconds", 120.0, SECONDS)
    max_tries: int = flag("maximum attempts per request", 8, COUNT)


@dataclass(kw_only=True, frozen=True)
class VoteFlags:
    """Who votes, by which guidelines, and where."""

    dataset: str = flag("data set whose guidelines are shown: summarize, hh-rlhf or webgpt; or any other name", "")
    rater: str | None = flag("name of the person who votes; the login name if not given (--web asks for it)", None)
    web: bool = flag("vote on a web page served on this machine (needs the extra ui)", False)
    port: int | None = flag(
        "port of --web; the first free one from 7860 if 0 or not given", None, PORT, only_with="web"
    )


# -- commands


def check_output_is_no_input(options: Any) -> None:
    """Raise UserError if the verdicts, or a report named after them, would replace a file of responses."""
    compared = options.compared
    for name, file in (("model_name_a", compared.model_name_a), ("model_name_b", compared.model_name_b)):
        if file.resolve().with_suffix("") == compared.output.resolve().with_suffix(""):
            raise UserError(f"--output {compared.output} has the name of --{name}; give another one.")


class VoteOptions(Config):
    """People compare the responses of two models: in the terminal, or with --web in a browser.

    Every vote is saved at once. The same command continues where the rater stopped.
    """

    helps: ClassVar[dict[str, str]] = {"output": "file to write votes to (.jsonl); votes already in it are kept"}
    rules: ClassVar[Rules] = (Check(check_output_is_no_input),)

    compared: ComparedFlags
    voting: VoteFlags


@dataclass(kw_only=True, frozen=True)
class SampleOptions:
    """Choose rows of a file of responses for judges and people to compare: the same prompts for every model."""

    data_path: Path = flag("file of responses to choose from (.jsonl)", aliases=["--data_file"])
    save_path: Path = flag("file to write the chosen rows to (.jsonl)", aliases=["--save_file"])
    dataset: str = flag(
        "data set of the responses: summarize (at most 5 rows per subreddit), hh-rlhf, webgpt, or any other name",
        "summarize",
    )
    num: int = flag("number of rows to choose", 50, AT_LEAST_1)
    seed: int = flag("random seed of the choice", 42, AT_LEAST_0)

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(kw_only=True, frozen=True)
class ReportOptions:
    """Compare training runs, or two models by verdicts on their responses, and write tables, JSON and charts.

    Output folders of runs of one step give the flags that differ, the first, the best and the last evaluation of each,
    and curves; runs of step 3 also sample responses. Files of verdicts and of scored responses give win
    rates, position, length and agreement; programs that were run (`dschat programs`) pass@1 and pass@5; sweeps
    (`dschat best-of-n`), one per model, the rewards of the best of N; verdicts by turn (`dschat judge-turns`) win
    rates; benchmarks (`dschat evaluate`), one file per model, their results side by side.
    """

    files: Sequence[Path] = flag(
        "output folders of runs of one step; or files of one kind: verdicts of judges and people and scored responses"
        " of both models; programs that were run; best-of-n sweeps; verdicts by turn; or results of benchmarks",
        positional=True,
    )
    output: Path = flag("folder to write the report to")
    reward_margin: float = flag("rewards that differ by at most this count as a tie", 0.0, MARGIN)
    dataset: str = flag(
        "data set of files that do not name one: summarize, hh-rlhf, webgpt or any other name; apps (programs) also"
        " shows published results",
        "",
    )
    best_of: Sequence[int] | None = flag(
        "best-of-n sweeps: values of N; if not given, those of 4 8 16 32 that were generated, and all responses",
        None,
        AT_LEAST_1,
    )

    def __post_init__(self) -> None:
        check_values(self)
