# SPDX-License-Identifier: Apache-2.0
"""Flags of the commands that compare models: judges, raters and reports."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from dschat.base.errors import UserError
from dschat.data.hub import compared_set
from dschat.lab.judge.rubrics import Rubric
from dschat.lab.judge.verdicts import Setup
from dschat.lab.responses import model_names
from dschat.rollouts.chat_servers import OPENAI_URL, Endpoint, checked_address
from dschat.scoring.judge.costs import Prices
from dschat.settings.commands import PORT, OverwriteFlags
from dschat.settings.config import Config
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, Range, check_values, flag
from dschat.settings.rules import Check, Rule, Rules

DEFAULT_JUDGE = "gpt-4o-2024-05-13"
BY_SCORES = "--by_scores"
COUNT: Range = (lambda number: 1 <= number <= 1_000_000, "a whole number of at least 1")
SECONDS: Range = (lambda value: 0 < value < math.inf, "a number of seconds above 0")


# -- groups of flags


@dataclass(kw_only=True, frozen=True)
class ComparedFlags:
    """Two files of responses, and the file of verdicts."""

    model_name_a: Path = flag("responses of the first model (.jsonl)", aliases=["--model_a"])
    model_name_b: Path = flag("responses of the second model (.jsonl)", aliases=["--model_b"])
    output: Path = flag("verdicts, as JSON Lines in the order of the first file")
    seed: int = flag("of the choice of sides and rows", 42, AT_LEAST_0)

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two models, taken from their files."""
        first, second = model_names([self.model_name_a, self.model_name_b])
        return first, second


@dataclass(kw_only=True, frozen=True)
class RequestFlags:
    """How requests are sent to an OpenAI-compatible server."""

    concurrency: int = flag("requests at the same time", 8, COUNT)
    timeout: float = flag("seconds to wait for an answer", 120.0, SECONDS)
    max_tries: int = flag("times to send a request", 8, COUNT)


@dataclass(kw_only=True, frozen=True)
class JudgeFlags:
    """The judge model and how it is asked."""

    judge_model: str = flag("name of the judge", DEFAULT_JUDGE)
    base_url: str | None = flag(
        "an OpenAI-compatible server; OpenAI's if not given", None, environment="OPENAI_BASE_URL"
    )
    sk: str | None = flag("the key; better: the environment variable OPENAI_API_KEY", None, secret=True, nargs="?")
    single_order: bool = flag("show each pair once, sides by chance, not in both orders", False)
    max_tokens: int = flag("longest answer in tokens", 1024, COUNT)
    dry_run: bool = flag("estimate tokens and cost, send and write nothing", False)
    cache: Path | None = flag("answers of earlier runs; .judge-cache beside --output if not given", None)


@dataclass(kw_only=True, frozen=True)
class CostFlags:
    """Prices of the judge model, and the most that a run may cost."""

    price_in: float | None = flag("US dollars per million tokens sent", None, AT_LEAST_0)
    price_out: float | None = flag("US dollars per million tokens answered", None, AT_LEAST_0)
    max_cost: float | None = flag(
        "stop before this run costs more dollars; every start counts from 0", None, AT_LEAST_0
    )

    def prices(self) -> Prices | None:
        """Prices per token, or None without both flags.

        Raises:
            UserError: one of the two prices is missing.
        """
        if self.price_in is not None and self.price_out is not None:
            return Prices(self.price_in, self.price_out)
        if self.max_cost is not None:
            raise UserError("--max_cost needs the prices of the model: give --price_in and --price_out.")
        if self.price_in is not None or self.price_out is not None:
            raise UserError("--price_in and --price_out: give both, or neither.")
        return None


@dataclass(kw_only=True, frozen=True)
class RubricFlags:
    """What the judge looks at."""

    dataset: str = flag("rubric: summarize, hh-rlhf (hh) or webgpt; with --rubric a name for the results", "summarize")
    rubric: Path | None = flag("file of your own rubric (.toml or .json), see docs/evaluation.md", None)


@dataclass(kw_only=True, frozen=True)
class TurnFlags:
    """What decides a turn."""

    by_scores: bool = flag("no judge: the higher number of the rows' column scores wins each turn", False)


@dataclass(kw_only=True, frozen=True)
class VoteFlags:
    """Who votes, on what data set, and where."""

    dataset: str = flag("summarize, hh-rlhf or webgpt: its guidelines are shown; or your own name", "")
    rater: str | None = flag("name of the person who votes; the login name if not given, and --web asks", None)
    web: bool = flag("vote in a browser on this machine (needs the extra ui)", False)
    port: int | None = flag("of --web; the first free one from 7860 if not given", None, PORT)


# -- commands


def _check_output_is_no_input(options: "AskingOptions") -> None:
    """Raise UserError where the verdicts would replace a file of responses."""
    compared = options.compared
    for name, file in (("model_name_a", compared.model_name_a), ("model_name_b", compared.model_name_b)):
        if file.resolve() == compared.output.resolve():
            raise UserError(f"--output {compared.output} is the file of --{name}; give another one.")


def _check_rubric_of_dataset(options: "JudgeOptions") -> None:
    """Raise UserError where --dataset names no data set that has a rubric."""
    _ = options.dataset_name  # raises


class AskingOptions(Config):
    """Flags of every command that asks a judge model."""

    helps: ClassVar[dict[str, str]] = {
        "overwrite": "make --output anew, also if it is there or was begun without this flag"
    }
    rules: ClassVar[Rules] = (Check(_check_output_is_no_input),)

    compared: ComparedFlags
    judge: JudgeFlags
    costs: CostFlags
    requests: RequestFlags
    result: OverwriteFlags

    def endpoint(self) -> Endpoint:
        """The judge's server and model, without a key.

        Raises:
            UserError: --base_url is no bare address.
        """
        return Endpoint(
            model=self.judge.judge_model,
            base_url=checked_address(self.judge.base_url or OPENAI_URL, "--base_url"),
            max_tokens=self.judge.max_tokens,
            timeout=self.requests.timeout,
            tries=self.requests.max_tries,
        )

    def setup(self, rubric: Rubric) -> Setup:
        """The settings that all pairs of the run share."""
        return Setup(rubric, self.judge.judge_model, self.compared.names, self.judge.single_order, self.compared.seed)

    @property
    def cache_folder(self) -> Path:
        """The folder that holds the answers of earlier runs."""
        return self.judge.cache or self.compared.output.parent / ".judge-cache"


class JudgeOptions(AskingOptions):
    """Let a judge model compare the responses of two models, pair by pair.

    Killed and started again with the same flags, it goes on where it stood.
    """

    rules: ClassVar[Rules] = (*AskingOptions.rules, Check(_check_rubric_of_dataset))

    comparison: RubricFlags

    @cached_property
    def dataset_name(self) -> str:
        """Name of the data set in results.

        Raises:
            UserError: there is no such data set.
        """
        remedy = "for data of your own any name, with --rubric FILE, which says how they are compared"
        return compared_set(self.comparison.dataset, self.comparison.rubric is not None, remedy)


class TurnOptions(AskingOptions):
    """Win rate by turn: which of two policies serves the user better in dialogues, as they stand after each turn.

    A row of a file is a finished dialogue: {"number": 0, "messages": [{"role": "user", "content": "…"}, …]}. Rows of
    both files with the same number begin with the same message. A judge model sees both dialogues up to each turn;
    with --by_scores, the rows' own scores decide. Killed and started again, the same command goes on where it stood.
    """

    helps: ClassVar[dict[str, str]] = {
        "model_name_a": "finished dialogues of the first policy",
        "model_name_b": "finished dialogues of the second policy",
        "output": "verdicts, as JSON Lines by dialogue and turn; table and picture go beside it",
    }
    rules: ClassVar[Rules] = (
        *AskingOptions.rules,
        Rule(
            lambda options: options.turns.by_scores and options.judge.dry_run,
            f"{BY_SCORES} asks no judge and costs nothing: leave --dry_run out.",
        ),
    )

    turns: TurnFlags


class VoteOptions(Config):
    """People compare the responses of two models: in the terminal, or with --web in a browser.

    Every vote is saved at once. The same command goes on where the rater stopped.
    """

    helps: ClassVar[dict[str, str]] = {"output": "file of the votes (.jsonl); votes in it are kept"}

    compared: ComparedFlags
    voting: VoteFlags


@dataclass(kw_only=True, frozen=True)
class SampleOptions:
    """Draw the rows of a file of responses that judges and people compare; the same prompts of every model."""

    data_path: Path = flag("responses (.jsonl)", aliases=["--data_file"])
    save_path: Path = flag("where they go", aliases=["--save_file"])
    dataset: str = flag("summarize (by subreddit), hh-rlhf, webgpt or your own name", "summarize")
    num: int = flag("rows to draw", 50)
    seed: int = flag("of the choice of rows", 42, AT_LEAST_0)


@dataclass(kw_only=True, frozen=True)
class PassOptions:
    """pass@k of files that `dschat programs` wrote, by difficulty, with 95 % intervals over problems."""

    files: Sequence[Path] = flag("one per model", positional=True)
    k: Sequence[int] = flag("programs that are looked at", (1, 5), AT_LEAST_1)

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(kw_only=True, frozen=True)
class ReportOptions:
    """Win rates, position, length and agreement, from files of verdicts and of scored responses: table, JSON, plot.

    Files of programs that were run (`dschat programs`) give pass@1 and pass@5 instead; sweeps (`dschat best-of-n`),
    one per model, the rewards of the best of N; verdicts by turn (`dschat judge-turns`) the win rates: in tables and
    curves.
    """

    files: Sequence[Path] = flag(
        "verdicts of judges and people, and responses with rewards (of both models), in any mixture; or programs;"
        " or sweeps; or verdicts by turn",
        positional=True,
    )
    output: Path = flag("folder for report.json and report.png")
    reward_margin: float = flag("rewards that differ by no more are a tie", 0.0)
    dataset: str = flag(
        "summarize, hh-rlhf, webgpt or your own name: data set of the files that name none; apps for programs and"
        " ultrainteract for verdicts by turn show the published figures as well",
        "",
    )
    best_of: Sequence[int] | None = flag(
        "of sweeps: numbers of responses to choose from; 4 8 16 32 as far as drawn, and all, if not given",
        None,
        AT_LEAST_1,
    )

    def __post_init__(self) -> None:
        check_values(self)
