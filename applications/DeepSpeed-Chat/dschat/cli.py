# SPDX-License-Identifier: Apache-2.0
"""The command `dschat`: its subcommands, each of which imports only what it needs once its flags are checked."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from dschat.errors import UserError
from dschat.launch import OF_A_MACHINE, is_rank, launch, plan_processes, variables_of_a_rank
from dschat.main import run_main, run_script, run_training
from dschat.settings.common import CommonConfig
from dschat.settings.other_names import OTHER_COMMANDS
from dschat.settings.parse import PRINTS, Resolved, resolve


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    summary: str  # its line in `dschat --help`
    flags: str  # "module:class" of its flags, in this package; --help begins with its docstring
    run: str  # "module:function" of flags → the last lines of the output, or an exit status
    step: str = ""  # of a training step: what run.json calls it
    goes_on: bool = False  # after Ctrl-C the same command goes on where it stood

    def flags_class(self) -> type[Any]:
        """The dataclass of its flags."""
        found: type[Any] = resolve_name(f"dschat.{self.flags}")
        return found

    def function(self) -> Callable[..., Any]:
        """What it does; imports what that takes."""
        found: Callable[..., Any] = resolve_name(f"dschat.{self.run}")
        return found


COMMANDS: dict[str, Command] = {
    "sft": Command(
        "step 1: supervised fine-tuning", "settings.supervised:SFTConfig", "builders.steps:train_sft", "sft"
    ),
    "reward": Command(
        "step 2: a reward model", "settings.supervised:RewardConfig", "builders.steps:train_reward", "reward"
    ),
    "dpo": Command(
        "instead of steps 2 and 3: direct preference optimisation",
        "settings.supervised:DPOConfig",
        "builders.steps:train_dpo",
        "dpo",
    ),
    "ppo": Command(
        "step 3: PPO with macro actions, RLOO", "settings.ppo:PPOConfig", "builders.steps:train_ppo", "ppo"
    ),
    "refuel": Command(
        "REFUEL on pairs of dialogues", "settings.refuel:RefuelConfig", "builders.steps:train_refuel", "refuel"
    ),
    "refuel-online": Command(
        "REFUEL with the users of the data",
        "settings.refuel:RefuelOnlineConfig",
        "builders.steps:train_refuel_online",
        "refuel_online",
    ),
    "refuel-data generate": Command(
        "dialogues of a policy and a simulated user",
        "inference.refuel:GenerateOptions",
        "inference.dialogues:run_generate",
        goes_on=True,
    ),
    "refuel-data rank": Command(
        "their rewards, turn by turn", "inference.refuel:RankOptions", "inference.pairs:run_rank", goes_on=True
    ),
    "refuel-data tokenize": Command(
        "pairs of tokens that `refuel` trains on", "inference.refuel:MaskOptions", "inference.pairs:run_masks"
    ),
    "data check": Command(
        "what is wrong with data, before training", "data.options:CheckOptions", "data.__main__:run"
    ),
    "data preview": Command("rows as training sees them", "data.options:PreviewOptions", "data.__main__:run"),
    "data prepare": Command("filter and encode data once", "data.options:PrepareOptions", "data.__main__:run"),
    "plan": Command(
        "memory, updates and flags that fit, before anything runs", "settings.plan:PlanOptions", "plan.__main__:run"
    ),
    "generate": Command(
        "responses of a model, with rewards",
        "inference.options:InferenceOptions",
        "inference.scored:run_inference",
        goes_on=True,
    ),
    "best-of-n": Command(
        "the best of N responses by reward",
        "inference.options:BestOfOptions",
        "inference.scored:run_best_of_n",
        goes_on=True,
    ),
    "programs": Command(
        "programs of a model, run on tests in a sandbox",
        "inference.options:ProgramOptions",
        "inference.programs:run_programs",
        goes_on=True,
    ),
    "text": Command(
        "perplexity, ROUGE, accuracy of a reward model",
        "inference.options:TextOptions",
        "inference.text:run_text",
        goes_on=True,
    ),
    "sample": Command(
        "the rows that judges and people compare", "evaluation.options:SampleOptions", "evaluation.sampling:sample"
    ),
    "judge": Command(
        "a judge model compares two models",
        "evaluation.options:JudgeOptions",
        "evaluation.judge.run:run_judge",
        goes_on=True,
    ),
    "judge-turns": Command(
        "a judge compares dialogues turn by turn",
        "evaluation.options:TurnOptions",
        "reports.evaluations:run_turns",
        goes_on=True,
    ),
    "vote": Command(
        "people compare two models", "evaluation.options:VoteOptions", "evaluation.voting:vote", goes_on=True
    ),
    "report": Command(
        "win rates, agreement, pass@k, best of N", "evaluation.options:ReportOptions", "reports.evaluations:report"
    ),
    "pass-at-k": Command(
        "pass@k of programs that were run", "evaluation.options:PassOptions", "reports.evaluations:run_pass_at_k"
    ),
    "demo chat": Command("talk with a model", "demo.options:ChatOptions", "demo.__main__:run"),
    "demo summary": Command("summaries of posts (TL;DR)", "demo.options:SummaryOptions", "demo.__main__:run"),
    "macro-actions": Command(
        "where termination conditions cut responses",
        "settings.macro_actions:MacroActionsOptions",
        "show_macro_actions:run",
    ),
    "serve": Command("a reward model for --reward_url", "settings.commands:ServeOptions", "scoring.serve:serve"),
    "serve-vllm": Command("vLLM for --vllm_url", "settings.commands:ServeVllmOptions", "rollouts.serve:serve"),
    "push": Command("a model to the Hugging Face hub", "settings.commands:PushOptions", "run.hub:run_push"),
    "env": Command(
        "versions, GPUs and memory, for a report of a bug", "settings.commands:EnvOptions", "run.environment:describe"
    ),
    "quickstart": Command(
        "the whole pipeline on this machine, in minutes",
        "quickstart.options:QuickstartOptions",
        "quickstart.reviews:run",
    ),
    "quickstart programs": Command(
        "the same with rewards by execution", "quickstart.options:ProgramsOptions", "quickstart.programs:run"
    ),
    "quickstart learners": Command(
        "DPO, RLOO, PPO, MA-PPO side by side", "quickstart.options:LearnersOptions", "quickstart.learners:run"
    ),
    "quickstart reward-losses": Command(
        "the losses of step 2 side by side", "quickstart.options:RewardLossesOptions", "quickstart.reward_losses:run"
    ),
    "completion": Command(
        "what a shell needs to complete these", "settings.commands:CompletionOptions", "reference:completion"
    ),
}


def main(argv: Sequence[str] | None = None, may_launch: bool = True) -> int:
    """Runs a subcommand.

    Args:
        argv: its name, of one or two words, and its flags; those of the process if None.
        may_launch: training starts a process for each GPU.

    Returns:
        The exit status: 0; 2 after an error that the user can mend; 143 after SIGTERM, 130 after Ctrl-C; else 1.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"dschat {version('ma-rlhf')}")
        return 0
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if name is None:
        return _no_command(words)
    command, flags = COMMANDS[name], words[len(name.split()) :]
    if command.step:
        return _train(name, command, flags, may_launch)
    return run_script(partial(_run, name, command, flags), print, command.goes_on)


def train(config: CommonConfig) -> dict[str, float]:
    """Trains what a configuration says, in this process, or as one of a launcher's.

    Args:
        config: SFTConfig, RewardConfig, DPOConfig, PPOConfig, RefuelConfig or RefuelOnlineConfig.

    Returns:
        The metrics of the last evaluation, by name (docs/metrics.md); models and records are in `config.output_dir`.

    Raises:
        UserError: a value, the data or a model cannot be used; says what to change.
        SystemExit: after SIGTERM or Ctrl-C, when a checkpoint is written.
    """
    steps = [command for command in COMMANDS.values() if command.step]
    command = next((command for command in steps if command.flags_class() is type(config)), None)
    if command is None:
        raise UserError(f"{type(config).__name__} is no configuration of a training step.")
    config.validate()
    config.check_installed()
    return run_training(command.step, config, command.function)


def _run(name: str, command: Command, words: Sequence[str]) -> str | int:
    """Reads the flags, then imports what they are for."""
    kind = command.flags_class()
    takes_more = hasattr(kind, "rest")
    told = resolve(kind, words, command=name, all_known=not takes_more)
    options = told.config
    if takes_more:
        options.rest = told.rest
    if hasattr(options, "prepare"):
        options.prepare()
    found: str | int = command.function()(options)
    return found


def _train(name: str, command: Command, words: Sequence[str], may_launch: bool) -> int:
    """Trains in this process, or starts one for each GPU, which are then told every flag without files."""
    rank = is_rank() or not may_launch

    def read(processes: int | None = None, environ: Mapping[str, str] | None = None) -> Resolved[CommonConfig]:
        found = resolve(command.flags_class(), words, command=name, processes=processes, environ=environ)
        if found.preset and not os.environ.get("MA_RLHF_DATA"):
            os.environ["MA_RLHF_DATA"] = str(Path(os.environ.get("PROJ_PATH") or Path.cwd()) / "data")
        return found

    if rank:
        return run_main(command.step, lambda: read(environ=variables_of_a_rank()).config, command.function)
    status: list[int] = []

    def start() -> str:
        # What is printed are the sizes for the processes that there will be.
        quiet = [word for word in words if word not in PRINTS]
        found = resolve(command.flags_class(), quiet, command=name, processes=1, checks=False)
        processes = plan_processes(found.config.launch)
        if processes.alone:
            return ""
        told = read(processes.count)
        told.config.plan_batches(processes.count)
        status.append(launch(processes, [*name.split(), "--deepspeed", *told.words(without=OF_A_MACHINE)]))
        return ""

    failed = run_script(start, print)
    if failed or status:
        return failed or status[0]
    return run_main(command.step, lambda: read(1).config, command.function)


def _no_command(words: Sequence[str]) -> int:
    """Lists the subcommands, all or those below a word; status 2 where an unknown one was asked for."""
    asked = next((word for word in words if not word.startswith("-")), "")
    below = {name: command for name, command in COMMANDS.items() if name.startswith(f"{asked} ")}
    shown = below or COMMANDS
    width = max(map(len, shown))
    lines = [f"usage: dschat {asked + ' ' if below else ''}COMMAND [flags]", ""]
    lines += [f"  {name:<{width}}  {command.summary}" for name, command in shown.items()]
    lines += ["", "`dschat COMMAND --help` lists its flags; --config FILE reads them from YAML."]
    wanted = not words or {"-h", "--help"} & {*words}
    if not below and asked:
        near = OTHER_COMMANDS.get(asked) or next(iter(get_close_matches(asked, COMMANDS, n=1)), "")
        print(f"dschat: error: {asked} is no command{f'; did you mean {near}?' if near else ''}", file=sys.stderr)
        return 2
    print("\n".join(lines), file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else 2
