# SPDX-License-Identifier: Apache-2.0
"""Flags of the comparison of models: by judges and people, and their reports."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dschat.base.errors import UserError
from dschat.data.hub import compared_set
from dschat.data.options import PrepareOptions
from dschat.lab.judge.costs import Prices
from dschat.lab.judge.rubrics import Rubric
from dschat.lab.judge.verdicts import Setup, has_verdict
from dschat.lab.responses import model_names
from dschat.rollouts.chat_servers import Endpoint, ReplyCache, checked_address
from dschat.settings.commands import ResultFlags, ServerFlags, ServeVllmOptions
from dschat.settings.common import DataFlags, OptimisationFlags
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, Range, check_values, flag, like

DEFAULT_JUDGE = "gpt-4o-2024-05-13"
DEFAULT_SERVER = "https://api.openai.com/v1"
BY_SCORES = "--by_scores"
COUNT: Range = (lambda number: 1 <= number <= 1_000_000, "a whole number of at least 1")
SECONDS: Range = (lambda value: 0 < value < math.inf, "a number of seconds above 0")


class CheckedFlags:
    """Flags that are checked when they are made: UserError names the flag whose value makes no sense."""

    def __post_init__(self) -> None:
        """Looks at each flag by itself; subclasses add what is about several of them."""
        check_values(self)


@dataclass(kw_only=True)
class ComparedFlags(CheckedFlags):
    """Two files of responses, and where what is found goes."""

    model_name_a: Path = flag("responses of the first model (.jsonl)", aliases=["--model_a"])
    model_name_b: Path = flag("responses of the second model (.jsonl)", aliases=["--model_b"])
    output: Path = like(PrepareOptions, "output", help="verdicts, as JSON Lines in the order of the first file")
    seed: int = like(OptimisationFlags, "seed", 42, "of the choice of sides and rows", AT_LEAST_0)


@dataclass(kw_only=True)
class AskingOptions(ComparedFlags):
    """What every run of a judge is told."""

    overwrite: bool = like(
        ResultFlags, "overwrite", help="make --output anew, also if it is there or was begun without this flag"
    )
    judge_model: str = flag("name of the judge", DEFAULT_JUDGE)
    base_url: str | None = flag(
        "an OpenAI-compatible server; OpenAI's if not given", None, environment="OPENAI_BASE_URL"
    )
    sk: str | None = flag("the key; better: the environment variable OPENAI_API_KEY", None, secret=True, nargs="?")
    single_order: bool = flag("show each pair once, sides by chance, not in both orders", False)
    max_tokens: int = like(ServeVllmOptions, "max_tokens", 1024, "longest answer in tokens", COUNT)
    dry_run: bool = flag("estimate tokens and cost, send and write nothing", False)
    price_in: float | None = flag("US dollars per million tokens sent", None, AT_LEAST_0)
    price_out: float | None = flag("US dollars per million tokens answered", None, AT_LEAST_0)
    max_cost: float | None = flag(
        "stop before this run costs more dollars; every start counts from 0", None, AT_LEAST_0
    )
    cache: Path | None = flag("answers of earlier runs; .judge-cache beside --output if not given", None)
    concurrency: int = flag("requests at the same time", 8, COUNT)
    timeout: float = flag("seconds to wait for an answer", 120.0, SECONDS)
    max_tries: int = flag("times to send a request", 8, COUNT)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, file in (("model_name_a", self.model_name_a), ("model_name_b", self.model_name_b)):
            if file.resolve() == self.output.resolve():
                raise UserError(f"--output {self.output} is the file of --{name}; give another one.")

    def prices(self) -> Prices | None:
        """What the two prices say; None where neither is given. Raises UserError where one is missing."""
        if self.price_in is not None and self.price_out is not None:
            return Prices(self.price_in, self.price_out)
        if self.max_cost is not None:
            raise UserError("--max_cost needs the prices of the model: give --price_in and --price_out.")
        if self.price_in is not None or self.price_out is not None:
            raise UserError("--price_in and --price_out: give both, or neither.")
        return None

    def endpoint(self) -> Endpoint:
        """Whom to ask; raises UserError where --base_url is no bare address."""
        url = checked_address(self.base_url or DEFAULT_SERVER, "--base_url")
        return Endpoint(self.judge_model, url, self.max_tokens, self.timeout, self.max_tries)

    def setup(self, rubric: Rubric) -> Setup:
        """What all pairs of the run share; models are called after their files."""
        first, second = model_names([self.model_name_a, self.model_name_b])
        return Setup(rubric, self.judge_model, (first, second), self.single_order, self.seed)

    def replies(self) -> ReplyCache:
        """The answers of earlier runs."""
        return ReplyCache(self.cache or self.output.parent / ".judge-cache", has_verdict)


@dataclass(kw_only=True)
class JudgeOptions(AskingOptions):
    """Let a judge model compare the responses of two models, pair by pair.

    Killed and started again with the same flags, it goes on where it stood.
    """

    dataset: str = flag("rubric: summarize, hh-rlhf (hh) or webgpt; with --rubric a name for the results", "summarize")
    rubric: Path | None = flag("file of your own rubric (.toml or .json), see docs/evaluation.md", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "for data of your own any name, with --rubric FILE, which says how they are compared"
        self.dataset = compared_set(self.dataset, self.rubric is not None, remedy)


@dataclass(kw_only=True)
class TurnOptions(AskingOptions):
    """Win rate by turn: which of two policies serves the user better in dialogues, as they stand after each turn.

    A row of a file is a finished dialogue: {"number": 0, "messages": [{"role": "user", "content": "…"}, …]}. Rows of
    both files with the same number begin with the same message. A judge model sees both dialogues up to each turn;
    with --by_scores, the rows' own scores decide. Killed and started again, the same command goes on where it stood.
    """

    model_name_a: Path = like(ComparedFlags, "model_name_a", help="finished dialogues of the first policy")
    model_name_b: Path = like(ComparedFlags, "model_name_b", help="finished dialogues of the second policy")
    output: Path = like(
        ComparedFlags, "output", help="verdicts, as JSON Lines by dialogue and turn; table and picture go beside it"
    )
    by_scores: bool = flag("no judge: the higher number of the rows' column scores wins each turn", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by_scores and self.dry_run:
            raise UserError(f"{BY_SCORES} asks no judge and costs nothing: leave --dry_run out.")


@dataclass(kw_only=True)
class VoteOptions(ComparedFlags):
    """People compare the responses of two models: in the terminal, or with --web in a browser.

    Every vote is saved at once. The same command goes on where the rater stopped.
    """

    output: Path = like(ComparedFlags, "output", help="file of the votes (.jsonl); votes in it are kept")
    dataset: str = like(
        JudgeOptions, "dataset", "", "summarize, hh-rlhf or webgpt: its guidelines are shown; or your own name"
    )
    rater: str | None = flag("name of the person who votes; the login name if not given, and --web asks", None)
    web: bool = flag("vote in a browser on this machine (needs the extra ui)", False)
    port: int | None = like(ServerFlags, "port", None, "of --web; the first free one from 7860 if not given")


@dataclass(kw_only=True)
class SampleOptions:
    """Draw the rows of a file of responses that judges and people compare; the same prompts of every model."""

    data_path: Path = like(DataFlags, "data_path", help="responses (.jsonl)", aliases=["--data_file"])
    save_path: Path = flag("where they go", aliases=["--save_file"])
    dataset: str = like(JudgeOptions, "dataset", help="summarize (by subreddit), hh-rlhf, webgpt or your own name")
    num: int = flag("rows to draw", 50)
    seed: int = like(ComparedFlags, "seed")


@dataclass(kw_only=True)
class PassOptions(CheckedFlags):
    """pass@k of files that `dschat programs` wrote, by difficulty, with 95 % intervals over problems."""

    files: Sequence[Path] = flag("one per model", positional=True)
    k: Sequence[int] = flag("programs that are looked at", (1, 5), AT_LEAST_1)


@dataclass(kw_only=True)
class ReportOptions(CheckedFlags):
    """Win rates, position, length and agreement, from files of verdicts and of scored responses: table, JSON, plot.

    Files of programs that were run (`dschat programs`) give pass@1 and pass@5 instead; sweeps (`dschat best-of-n`),
    one per model, the rewards of the best of N; verdicts by turn (`dschat judge-turns`) the win rates: in tables and
    curves.
    """

    files: Sequence[Path] = like(
        PassOptions,
        "files",
        help="verdicts of judges and people, and responses with rewards (of both models), in any mixture; or programs;"
        " or sweeps; or verdicts by turn",
    )
    output: Path = like(ComparedFlags, "output", help="folder for report.json and report.png")
    reward_margin: float = flag("rewards that differ by no more are a tie", 0.0)
    dataset: str = like(
        JudgeOptions,
        "dataset",
        "",
        "summarize, hh-rlhf, webgpt or your own name: data set of the files that name none; apps for programs and"
        " ultrainteract for verdicts by turn show the published figures as well",
    )
    best_of: Sequence[int] | None = flag(
        "of sweeps: numbers of responses to choose from; 4 8 16 32 as far as drawn, and all, if not given",
        None,
        AT_LEAST_1,
    )
