# SPDX-License-Identifier: Apache-2.0
"""Flags of `dschat programs` and `dschat pass-at-k`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dschat.data.compared_sets import OWN_NAME
from dschat.evaluation.generate_options import (
    ANSWERING_RULES,
    RESPONSE_RULE,
    AnsweringOptions,
    ResponseFlags,
    model_name,
)
from dschat.settings.flags import AT_LEAST_1, check_values, flag
from dschat.settings.rewards import ProgramBlock, SandboxLevel
from dschat.settings.rules import Rule, Rules


@dataclass(kw_only=True, frozen=True)
class ProgramTestFlags:
    """How a response's program is found and run on the tests of its problem."""

    program_block: ProgramBlock = flag(
        "which fenced code block of a response is its program, the first or the last; blocks marked as Python take"
        " precedence over unmarked ones",
        "last",
    )
    sandbox_level: SandboxLevel = flag("minimum isolation level of the sandbox for programs", "namespaces")
    sandbox_workers: int = flag("programs that run at the same time", 4, AT_LEAST_1)
    max_tests: int | None = flag("run only the first N tests of a row; all if not given", None, AT_LEAST_1)


class ProgramOptions(AnsweringOptions):
    """Answer APPS's problems with a model and run the programs on the problems' tests, in a sandbox.

    Writes PROJ_PATH/results/DATASET/temperature=T/MODEL.jsonl: prompt, difficulty, and of each sample its response and
    what became of it. If it is interrupted, the same command continues it.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "dataset": "apps",
        "temperature": "1.0",
        "top_k": 5,
        "num_return": 5,
        "max_prompt_len": 600,
    }
    helps: ClassVar[dict[str, str]] = {
        "dataset": "data set whose problems are used: apps, or any name for the data of --data_path",
        "num_return": "programs generated per problem",
        "max_prompt_len": "skip problems longer than this, in tokens including BOS",
    }
    rules: ClassVar[Rules] = (
        *ANSWERING_RULES,
        RESPONSE_RULE,
        Rule(
            lambda options: OWN_NAME.fullmatch(options.dataset_name) is None,
            "--dataset {dataset}: the name of your own data may hold only letters, digits, '.', '-' and '_'.",
        ),
    )

    responses: ResponseFlags
    programs: ProgramTestFlags

    @property
    def result_path(self) -> Path:
        """The result file, called after the model."""
        return self.project.result_path(self.dataset_name, self.responses.folder, model_name(self.policy.model or ""))


@dataclass(kw_only=True, frozen=True)
class PassOptions:
    """pass@k of files that `dschat programs` wrote, by difficulty, with 95 % intervals over problems."""

    files: Sequence[Path] = flag("files that `dschat programs` wrote, one per model", positional=True)
    k: Sequence[int] = flag(
        "values of k: pass@k is the probability that at least one of k programs passes", (1, 5), AT_LEAST_1
    )

    def __post_init__(self) -> None:
        check_values(self)
