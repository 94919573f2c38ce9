# SPDX-License-Identifier: Apache-2.0
"""A run of the judge from its flags to the line that sums it up."""

import argparse
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dschat.common.chat_servers import Endpoint, ReplyCache, checked_address, checked_key
from dschat.common.journal import Journal
from dschat.common.progress import progress
from dschat.common.script import add_flags, flag
from dschat.common.statistics import score_verdict
from dschat.data.hub import compared_set
from dschat.errors import UserError
from dschat.evaluation.judge.costs import Prices, Spending, estimated_tokens
from dschat.evaluation.judge.rubrics import DIALOGUES, RUBRICS, Form, Rubric, read_rubric
from dschat.evaluation.judge.verdicts import Setup, control_question, has_verdict, judge_pairs, questions_of
from dschat.evaluation.pairs import Pair, compared, model_names, read_pairs
from dschat.evaluation.turns import TurnRates, rates_by_turn, turn_pairs

if TYPE_CHECKING:
    from dschat.evaluation.judge.client import JudgeClient  # which needs the openai library

logger = logging.getLogger(__name__)

DEFAULT_JUDGE = "gpt-4o-2024-05-13"
DEFAULT_SERVER = "https://api.openai.com/v1"
BY_SCORES = "--by-scores"
Options = TypeVar("Options", bound="AskingOptions")


@dataclass
class AskingOptions:
    """What every run of a judge is told. A field is a flag: its name, type, default and help line."""

    model_name_a: Path = flag("responses of the first model", also="model_a")
    model_name_b: Path = flag("responses of the second model", also="model_b")
    output: Path = flag("verdicts, as JSON Lines in the order of the first file")
    overwrite: bool = flag("make --output anew, also if it is there or was begun without this flag", False)
    judge_model: str = flag("name of the judge; default: %(default)s", DEFAULT_JUDGE)
    base_url: str | None = flag("an OpenAI-compatible server; default: OpenAI's, or OPENAI_BASE_URL", None)
    sk: str | None = flag("the key; better: the environment variable OPENAI_API_KEY", None, nargs="?")
    single_order: bool = flag("show each pair once, sides by chance, not in both orders", False)
    seed: int = flag("of the sides with --single-order; default: %(default)s", 42)
    max_tokens: int = flag("longest answer; default: %(default)s", 1024)
    dry_run: bool = flag("estimate tokens and cost, send and write nothing", False)
    price_in: float | None = flag("US dollars per million tokens sent", None)
    price_out: float | None = flag("US dollars per million tokens answered", None)
    max_cost: float | None = flag("stop before this run costs more dollars; every start counts from 0", None)
    cache: Path | None = flag("answers of earlier runs; default: .judge-cache beside --output", None)
    concurrency: int = flag("requests at the same time; default: %(default)s", 8)
    timeout: float = flag("seconds to wait for an answer; default: %(default)s", 120.0)
    max_tries: int = flag("times to send a request; default: %(default)s", 8)

    def __post_init__(self) -> None:
        """Refuses values that mean nothing. Raises UserError, which names the flag."""
        for name in ("concurrency", "max_tries", "max_tokens"):
            if not 1 <= getattr(self, name) <= 1_000_000:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}.")
        for name in ("timeout", "max_cost", "price_in", "price_out"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UserError(f"--{name.replace('_', '-')} must be a number from 0 on, not {value}.")
        if self.timeout == 0:
            raise UserError("--timeout must be more than 0 seconds.")
        for name, file in (("model_name_a", self.model_name_a), ("model_name_b", self.model_name_b)):
            if file.resolve() == self.output.resolve():
                raise UserError(f"--output {self.output} is the file of --{name}; give another one.")

    def prices(self) -> Prices | None:
        """What --price-in and --price-out say; None where neither is given. Raises UserError where one is missing."""
        if self.price_in is not None and self.price_out is not None:
            return Prices(self.price_in, self.price_out)
        if self.max_cost is not None:
            raise UserError("--max-cost needs the prices of the model: give --price-in and --price-out.")
        if self.price_in is not None or self.price_out is not None:
            raise UserError("--price-in and --price-out: give both, or neither.")
        return None

    def endpoint(self) -> Endpoint:
        """Whom to ask, at --base-url, OPENAI_BASE_URL or OpenAI's; raises UserError where that is no bare address."""
        url = checked_address(self.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_SERVER, "--base-url")
        return Endpoint(self.judge_model, url, self.max_tokens, self.timeout, self.max_tries)

    def setup(self, rubric: Rubric) -> Setup:
        """What all pairs of the run share; models are called after their files."""
        first, second = model_names([self.model_name_a, self.model_name_b])
        return Setup(rubric, self.judge_model, (first, second), self.single_order, self.seed)

    def replies(self) -> ReplyCache:
        """The answers of earlier runs."""
        return ReplyCache(self.cache or self.output.parent / ".judge-cache", has_verdict)


@dataclass
class JudgeOptions(AskingOptions):
    """What a run on responses to the prompts of a data set is told."""

    dataset: str = flag(
        "rubric: summarize, hh-rlhf (hh) or webgpt; with --rubric a name for the results; default: %(default)s",
        "summarize",
    )
    rubric: Path | None = flag("file of your own rubric (.toml or .json), see docs/evaluation.md", None)

    def __post_init__(self) -> None:
        """Refuses values that mean nothing. Raises UserError, which names the flag."""
        super().__post_init__()
        remedy = "for data of your own any name, with --rubric FILE, which says how they are compared"
        self.dataset = compared_set(self.dataset, self.rubric is not None, remedy)


class _DiscreetParser(argparse.ArgumentParser):
    """Says what is wrong without repeating words: one of them may be a key at the wrong place."""

    def error(self, message: str) -> NoReturn:
        super().error(re.sub(r"(invalid \w+ value|ignored explicit argument|ambiguous option).*", r"\1", message))


def parse_flags(options: type[Options], words: Sequence[str], description: str) -> Options:
    """The options of a command line without its program. Raises UserError, see the class."""
    parser = _DiscreetParser(description=description, allow_abbrev=False)
    add_flags(parser, options)
    flags, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error("some words are no flags of this script (not repeated here: one may be a key); see --help")
    return options(**vars(flags))


def run_judge(words: Sequence[str], description: str, dataset: str | None = None) -> str:
    """Judges two files of responses; returns one line with counts, tokens, cost and file, or a dry run's estimate.

    `words` are the command line without the program, `description` begins --help; the rubric is that of `dataset`,
    whatever --dataset says, if it is given.
    """
    options = parse_flags(JudgeOptions, words, description)
    if dataset is not None and options.rubric is not None:
        raise UserError(f"--rubric: this script always judges by the {dataset} rubric; give yours to gpt4-eval.py.")
    if dataset not in (None, options.dataset):
        logger.info("--dataset %s: judged by the %s rubric, and recorded as %s", options.dataset, dataset, dataset)
    pairs = read_pairs(options.model_name_a, "--model_name_a", options.model_name_b, "--model_name_b")
    rubric = read_rubric(options.rubric, options.dataset) if options.rubric else RUBRICS[dataset or options.dataset]
    setup = options.setup(rubric)
    return estimate(pairs, setup, options) if options.dry_run else judge(pairs, setup, options)[1]


def judge(pairs: Sequence[Pair], setup: Setup, options: AskingOptions) -> tuple[list[dict[str, Any]], str]:
    """Judges pairs; writes and returns their rows, and one line with counts, tokens, cost and file.

    Raises UserError, which says what is kept, where the judge cannot go on or gives no verdict at all.
    """
    prices, endpoint = options.prices(), options.endpoint()
    if options.sk:
        logger.warning("--sk shows the key to everybody on this machine; better set OPENAI_API_KEY")
    if endpoint.base_url.startswith("http://") and not endpoint.is_local:
        logger.warning("%s is not encrypted: the key and the texts can be read on the way", endpoint.base_url)
    key, source = options.sk or os.environ.get("OPENAI_API_KEY"), "--sk" if options.sk else "OPENAI_API_KEY"
    endpoint = replace(endpoint, key=checked_key(key, source, endpoint))
    spending = Spending(prices, options.max_cost)
    try:
        from dschat.evaluation.judge.client import JudgeClient
    except ImportError as error:
        raise UserError("The judge needs the openai library: pip install 'ma-rlhf[judge]'.") from error
    client = JudgeClient(endpoint, options.replies(), spending, control_question(setup.rubric))
    rows = _judge(pairs, setup, endpoint, client, options)
    counts = Counter(row["verdict"] for row in rows)
    _report_invalid(rows, options)
    lost = f" and {spending.lost} whose answers did not arrive, by estimate" if spending.lost else ""
    return rows, (
        f"{setup.models[0]} against {setup.models[1]} on {setup.rubric.dataset}, {setup.rater}, "
        f"{'one order' if setup.single_order else 'both orders'}: {counts['A']} wins, {counts['tie']} ties, "
        f"{counts['B']} losses, {counts['invalid']} invalid of {counts.total()}; {spending.requests} requests{lost} "
        f"({client.cached} more from the cache), {spending.input_tokens} + {spending.output_tokens} tokens"
        f"{f', ${spending.cost:.4f}' if prices else ''}; {options.output}"
    )


def _report_invalid(rows: Sequence[dict[str, Any]], options: AskingOptions) -> None:
    """Names what was wrong with answers that gave no verdict; raises UserError where all are such."""
    invalid = [row for row in rows if row["verdict"] == "invalid"]
    if not invalid:
        return
    problems = Counter(order["problem"] for row in invalid for order in row.get("orders", ()) if "problem" in order)
    told = "; ".join(f"{problem.rstrip('.')} ({count} times)" for problem, count in problems.most_common(2))
    if len(invalid) == len(rows):
        raise UserError(
            f"no pair of {len(rows)} got a verdict: {told}. The answers are in {options.output}; try another "
            "--judge-model or --max-tokens with --overwrite."
        )
    logger.warning("%d of %d pairs got no verdict: %s", len(invalid), len(rows), told)


def _judge(
    pairs: Sequence[Pair], setup: Setup, endpoint: Endpoint, client: "JudgeClient", options: AskingOptions
) -> list[dict[str, Any]]:
    """Judges with a bar on the screen; an interrupted run goes on only with the settings that the verdicts hang on."""
    settings = {
        "dataset": setup.rubric.dataset,
        "judge-model": setup.rater,
        "base-url": endpoint.base_url,
        "max-tokens": endpoint.max_tokens,
        "single-order": setup.single_order,
        "seed": setup.seed if setup.single_order else None,
        "model_name_a": setup.models[0],
        "model_name_b": setup.models[1],
        **({"rubric": setup.rubric.digest} if setup.rubric.digest else {}),
    }
    bar = progress(len({pair.id for pair in pairs}), "judged", unit="pair")
    with closing(Journal(options.output, settings, options.overwrite)) as journal, bar:
        return judge_pairs(pairs, setup, client, journal, options.concurrency, bar.update)


def estimate(pairs: Sequence[Pair], setup: Setup, options: AskingOptions) -> str:
    """What a run would send, by questions that differ and are not in the cache."""
    prices, endpoint, cache = options.prices(), options.endpoint(), options.replies()
    asked = [question for pair in pairs for question in questions_of(pair, setup).values()]
    questions = {question.digest(endpoint): question for question in asked}
    new = [question for digest, question in questions.items() if cache.get(digest) is None]
    bodies = [json.dumps(Form().body(endpoint, question), ensure_ascii=False) for question in new]
    sent = sum(estimated_tokens(len(body.encode("utf-8", "replace"))) for body in bodies)
    answered = len(new) * setup.rubric.output_tokens
    return (
        f"dry run, nothing sent: {len(pairs)} pairs, {len(new)} requests to {endpoint.model} at {endpoint.base_url} "
        f"({len(questions) - len(new)} more are in the cache); estimated at 4 characters per token, without repeats "
        f"and repairs: {sent} tokens sent, {answered} answered"
        f"{f', about ${prices.cost(sent, answered):.2f}' if prices else '; --price-in and --price-out give the cost'}"
    )


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


def judge_turns(words: Sequence[str], description: str) -> tuple[TurnRates | None, Path, str]:
    """Judges every dialogue at every turn: win rates, None for a dry run; the file; a line. See `run_judge`."""
    options = parse_flags(TurnOptions, words, description)
    pairs = turn_pairs(options.model_name_a, "--model_name_a", options.model_name_b, "--model_name_b")
    setup = options.setup(DIALOGUES)
    if options.by_scores:
        rows, line = compare_scores(pairs, setup.models, options), str(options.output)
    elif options.dry_run:
        return None, options.output, estimate(pairs, setup, options)
    else:
        rows, line = judge(pairs, setup, options)
    places = ((f"{options.output}:{number}", row) for number, row in enumerate(rows, start=1))
    return rates_by_turn(places), options.output, line


def compare_scores(pairs: Sequence[Pair], models: tuple[str, str], options: TurnOptions) -> list[dict[str, Any]]:
    """The verdicts of the rows' own scores; writes and returns them. Raises UserError where a row has none."""
    rows = []
    for pair in pairs:
        for side in (pair.a, pair.b):
            if side.reward is None:
                raise UserError(f"{BY_SCORES}: {side.origin} has no column 'scores'; add one number per turn.")
        a, b = float(pair.a.reward or 0), float(pair.b.reward or 0)
        details = {"reward_a": a, "reward_b": b}
        verdict = compared(pair, score_verdict(a, b), "reward", "scores", models, DIALOGUES.dataset, details)
        rows.append(verdict.to_row())
    settings = {"by-scores": True, "model_name_a": models[0], "model_name_b": models[1]}
    with closing(Journal(options.output, settings, options.overwrite)) as journal:
        journal.finish(rows)
    return rows
