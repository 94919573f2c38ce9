# SPDX-License-Identifier: Apache-2.0
"""Flags of `dschat judge` and `dschat judge-turns`."""

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from dschat.base.chat_servers import OPENAI_URL, Endpoint, checked_address
from dschat.base.errors import UserError
from dschat.data.compared_sets import compared_set
from dschat.evaluation.options import COUNT, ComparedFlags, RequestFlags, check_output_is_no_input
from dschat.judge.costs import Prices
from dschat.judge.rubrics import Rubric
from dschat.judge.verdicts import Setup
from dschat.settings.commands import OverwriteFlags
from dschat.settings.config import Config
from dschat.settings.flags import AT_LEAST_0, flag, flags_of
from dschat.settings.rules import Check, Rules

DEFAULT_JUDGE = "gpt-4o-2024-05-13"
BY_SCORES = "--by_scores"


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
        alone=None,
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
        """Prices of the judge model, or None without both flags.

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


def _check_prices(options: "AskingOptions") -> None:
    """Raise UserError if prices of the judge model are missing."""
    options.costs.prices()


def _check_rubric_of_dataset(options: "JudgeOptions") -> None:
    """Raise UserError if --dataset names no data set that has a rubric."""
    _ = options.dataset_name  # raises


def _check_scores_need_no_judge(options: "TurnOptions") -> None:
    """Raise UserError for --by_scores with a flag of the judge; an address in the environment is none."""
    if not options.turns.by_scores:
        return
    values = options.flat()
    flags = flags_of(TurnOptions)
    for group in (JudgeFlags, CostFlags, RequestFlags):
        for field in fields(group):
            declared = flags[field.name]
            if declared.environment is None and values[field.name] != declared.default:
                raise UserError(f"{BY_SCORES} asks no judge and costs nothing: leave --{field.name} out.")


class AskingOptions(Config):
    """Flags of every command that asks a judge model."""

    helps: ClassVar[dict[str, str]] = {
        "overwrite": "replace --output if it is finished, or was begun without this flag or with other settings"
    }
    rules: ClassVar[Rules] = (Check(check_output_is_no_input), Check(_check_prices))

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
