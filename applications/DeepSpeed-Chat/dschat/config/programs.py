# SPDX-License-Identifier: Apache-2.0
"""The flags of programs: responses that are run on tests instead of read by a reward model."""

from dataclasses import dataclass
from typing import Literal

from dschat.config import rules
from dschat.config.rules import default_of, flag
from dschat.errors import UserError

SandboxLevel = Literal["bubblewrap", "namespaces", "rlimits"]


@dataclass(kw_only=True)
class ProgramFlags:
    """How programs are run and scored."""

    _argument_group_name = "programs"

    reward_source: Literal["programs"] | None = flag(
        "programs: run the program in each response on the tests of its row (column input_output), in a sandbox,"
        " instead of a reward model",
        None,
    )
    program_reward: Literal["paper", "ratio"] = flag(
        "paper: -1 for a compile error, -0.6 for another error or a time-out, else -0.3 + 1.3 x share of tests passed;"
        " ratio: that share, tests that end in an error not passed",
        "paper",
    )
    sandbox_level: SandboxLevel = flag("the weakest walls that programs may run behind", "namespaces")
    sandbox_workers: int = flag("programs that one process runs at a time", 4)
    max_tests: int | None = flag("tests of a row that are run, the first; all if not given", None)
    drop_unsolvable: bool = flag("leave out rows whose own reference solution fails their tests", False)

    def check_programs(self) -> None:
        """Check these flags against each other. Raises UserError."""
        rules.check_numbers(self, ["sandbox_workers", "max_tests"], rules.AT_LEAST_1)
        if self.reward_source is not None:
            return
        for name in ("program_reward", "sandbox_level", "sandbox_workers", "max_tests", "drop_unsolvable"):
            value = getattr(self, name)
            if value != default_of(ProgramFlags, name):
                raise UserError(f"--{name} {value} does nothing on its own: add --reward_source programs, or drop it.")
