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
from dschat.lab.judge.verdicts import Setup
from dschat.lab.responses import model_names
from dschat.rollouts.chat_servers import OPENAI_URL, Endpoint, checked_address
from dschat.scoring.judge.costs import Prices
from dschat.settings.commands import PORT, OverwriteFlags
from dschat.settings.config import Config
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, Range, check_values, flag, flags_of
from dschat.settings.rubrics import Rubric
from dschat.settings.rules import Check, Rules

DEFAULT_JUDGE = "gpt-4o-2024-05-13"
BY_SCORES = "--by_scores"
# Flags of `dschat judge-turns` that say nothing without a judge.
JUDGE_ONLY = ("judge_model", "sk", "single_order", "dry_run", "cache", "price_in", "price_out", "max_cost")
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
class JudgeFlags:
    """The judge model and how it is asked."""

    judge_model: str = flag("name of the judge model on its server", DEFAULT_JUDGE)
    base_url: str | None = flag(
        "address of an OpenAI-compatible server; OpenAI's if not given", None, environment="OPENAI_BASE_URL"
    )
    sk: str | None = flag(
        "API key; prefer the environment variable JUDGE_API_KEY, or OPENAI_API_KEY for OpenAI's own server",
        None,
        secret=True,
        nargs="?",
    )
    single_order: bool = flag("show each pair once, in random order, instead of once in each order", False)
    max_tokens: int = flag("maximum length of the judge's answer, in tokens", 1024, COUNT)
    dry_run: bool = flag("estimate tokens and cost without sending or writing anything", False)
    cache: Path | None = flag(
        "folder that caches the judge's answers; .judge-cache beside --output if not given", None
    )


@dataclass(kw_only=True, frozen=True)
class CostFlags:
    """Prices of the judge model, and the most that a run may cost."""

    price_in: float | None = flag("price in US dollars per million input tokens", None, AT_LEAST_0)
    price_out: float | None = flag("price in US dollars per million output tokens", None, AT_LEAST_0)
    max_cost: float | None = flag(
        "stop before the run costs more than this, in US dollars; a resumed run counts from 0 again", None, AT_LEAST_0
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
    """Rubric by which the judge compares."""

    dataset: str = flag(
        "data set whose rubric is used: summarize, hh-rlhf (hh) or webgpt; with --rubric, any name for the results",
        "summarize",
    )
    rubric: Path | None = flag("file with a rubric of your own (.toml or .json); see docs/evaluation.md", None)


@dataclass(kw_only=True, frozen=True)
class TurnFlags:
    """What decides each turn."""

    by_scores: bool = flag("decide each turn by the higher value in the rows' column scores, without a judge", False)


@dataclass(kw_only=True, frozen=True)
class VoteFlags:
    """Who votes, by which guidelines, and where."""

    dataset: str = flag("data set whose guidelines are shown: summarize, hh-rlhf or webgpt; or any other name", "")
    rater: str | None = flag("name of the person who votes; the login name if not given (--web asks for it)", None)
    web: bool = flag("vote on a web page served on this machine (needs the extra ui)", False)
    port: int | None = flag("port of --web; the first free one from 7860 if not given", None, PORT, only_with="web")


# -- commands


def _check_output_is_no_input(options: "AskingOptions | VoteOptions") -> None:
    """Raise UserError if the verdicts would replace a file of responses."""
    compared = options.compared
    for name, file in (("model_name_a", compared.model_name_a), ("model_name_b", compared.model_name_b)):
        if file.resolve() == compared.output.resolve():
            raise UserError(f"--output {compared.output} is the file of --{name}; give another one.")


def _check_prices(options: "AskingOptions") -> None:
    """Raise UserError if prices of the judge model are missing."""
    options.costs.prices()


def _check_rubric_of_dataset(options: "JudgeOptions") -> None:
    """Raise UserError if --dataset names no data set that has a rubric."""
    _ = options.dataset_name  # raises


def _check_scores_need_no_judge(options: "TurnOptions") -> None:
    """Raise UserError for --by_scores with a flag of the judge."""
    if not options.turns.by_scores:
        return
    values = options.flat()
    flags = flags_of(TurnOptions)
    for name in JUDGE_ONLY:
        if values[name] != flags[name].default:
            raise UserError(f"{BY_SCORES} asks no judge and costs nothing: leave --{name} out.")


class AskingOptions(Config):
    """Flags of every command that asks a judge model."""

    helps: ClassVar[dict[str, str]] = {
        "overwrite": "replace --output if it is finished, or was begun without this flag or with other settings"
    }
    rules: ClassVar[Rules] = (Check(_check_output_is_no_input), Check(_check_prices))

    compared: ComparedFlags
    judge: JudgeFlags
    costs: CostFlags
    requests: RequestFlags
    result: OverwriteFlags

    def endpoint(self) -> Endpoint:
        """The judge's server and model, without a key.

        Raises:
            UserError: --base_url is not a bare address.
        """
        return Endpoint(
            model=self.judge.judge_model,
            base_url=checked_address(self.judge.base_url or OPENAI_URL, "--base_url"),
            max_tokens=self.judge.max_tokens,
            timeout=self.requests.timeout,
            tries=self.requests.max_tries,
        )

    def setup(self, rubric: Rubric, dataset: str) -> Setup:
        """The settings that all pairs of the run share; `dataset` is the name of the data in results."""
        return Setup(
            rubric, dataset, self.judge.judge_model, self.compared.names, self.judge.single_order, self.compared.seed
        )

    @property
    def cache_folder(self) -> Path:
        """The folder that holds the answers of earlier runs."""
        return self.judge.cache or self.compared.output.parent / ".judge-cache"


class JudgeOptions(AskingOptions):
    """Let a judge model compare the responses of two models, pair by pair.

    If it is interrupted, the same command continues it.
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
    with --by_scores, the rows' own scores decide. If it is interrupted, the same command continues it.
    """

    helps: ClassVar[dict[str, str]] = {
        "model_name_a": "file of finished dialogues of the first policy (.jsonl)",
        "model_name_b": "file of finished dialogues of the second policy (.jsonl)",
        "output": "file to write verdicts to (.jsonl), by dialogue and turn; table and chart are written beside it",
    }
    rules: ClassVar[Rules] = (*AskingOptions.rules, Check(_check_scores_need_no_judge))

    turns: TurnFlags


class VoteOptions(Config):
    """People compare the responses of two models: in the terminal, or with --web in a browser.

    Every vote is saved at once. The same command continues where the rater stopped.
    """

    helps: ClassVar[dict[str, str]] = {"output": "file to write votes to (.jsonl); votes already in it are kept"}
    rules: ClassVar[Rules] = (Check(_check_output_is_no_input),)

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
class PassOptions:
    """pass@k of files that `dschat programs` wrote, by difficulty, with 95 % intervals over problems."""

    files: Sequence[Path] = flag("files that `dschat programs` wrote, one per model", positional=True)
    k: Sequence[int] = flag(
        "values of k: pass@k is the probability that at least one of k programs passes", (1, 5), AT_LEAST_1
    )

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(kw_only=True, frozen=True)
class ReportOptions:
    """Compare training runs, or two models by verdicts on their responses, and write tables, JSON and charts.

    Output folders of runs of one step give the flags that differ, the first, the best and the last evaluation of each,
    and curves; runs of step 3 also sample responses. Files of verdicts and of scored responses give win
    rates, position, length and agreement; programs that were run (`dschat programs`) pass@1 and pass@5; sweeps
    (`dschat best-of-n`), one per model, the rewards of the best of N; verdicts by turn (`dschat judge-turns`) win
    rates.
    """

    files: Sequence[Path] = flag(
        "output folders of runs of one step; or files of one kind: verdicts of judges and people and scored responses"
        " of both models; programs that were run; best-of-n sweeps; or verdicts by turn",
        positional=True,
    )
    output: Path = flag("folder to write the report to")
    reward_margin: float = flag("rewards that differ by at most this count as a tie", 0.0, MARGIN)
    dataset: str = flag(
        "data set of files that do not name one: summarize, hh-rlhf, webgpt or any other name; apps (programs) and"
        " ultrainteract (verdicts by turn) also show published results",
        "",
    )
    best_of: Sequence[int] | None = flag(
        "best-of-n sweeps: values of N; if not given, those of 4 8 16 32 that were generated, and all responses",
        None,
        AT_LEAST_1,
    )

    def __post_init__(self) -> None:
        check_values(self)
