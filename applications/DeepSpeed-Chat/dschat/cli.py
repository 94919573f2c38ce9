# SPDX-License-Identifier: Apache-2.0
"""The command `dschat`: its subcommands, and how a training step starts.

A subcommand imports what it needs once its flags are checked, so that `--help` is quick. `dschat ppo` on eight GPUs:
`main` → `train_step` → `launch` (dschat/launch.py) → `python -m dschat ppo …` in eight processes → `main` again, which
trains in each of them (`run_main` in dschat/main.py).
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

from dschat.base.errors import UserError
from dschat.base.extras import require_extra
from dschat.base.steps import STEPS
from dschat.cluster import Rank, adopt, is_worker, process_of
from dschat.launch import (
    GIVEN_VARIABLE,
    LAUNCH_ONLY_FLAGS,
    check_against_rank,
    launch,
    plan_launch,
    worker_environment,
)
from dschat.main import run_main, run_script, run_training
from dschat.settings.common import CommonConfig
from dschat.settings.other_names import command_suggestion
from dschat.settings.parse import PRINTS, Resolved, resolve
from dschat.settings.processes import LaunchFlags


@runtime_checkable
class NeedsPreparation(Protocol):
    """Options that set this process up for their command."""

    def prepare(self) -> None:
        """Sets environment variables, loggers and the like."""


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        summary: its line in `dschat --help`.
        flags: "module:class" of its flags, below dschat; --help begins with the docstring of that class. If the class
            has an attribute `other_words`, it gets the words that are no flags, instead of an error. Options that have
            a method `prepare` (`NeedsPreparation`) are prepared before the command runs.
        run: "module:function", below dschat. The function takes the flags and returns the last lines of output or an
            exit status. The function of a training step takes the flags and the run's output folder.
        step: name of a training step in run.json; empty for other commands.
        resumable: after Ctrl-C, repeating the command continues where it stopped.
        extras: of setup.py, which the command needs whatever its flags are (`dschat.base.extras`).
    """

    summary: str
    flags: str
    run: str
    step: str = ""
    resumable: bool = False
    extras: tuple[str, ...] = ()

    def flags_class(self) -> type[Any]:
        """Imports the dataclass of the command's flags."""
        flags_class: type[Any] = resolve_name(f"dschat.{self.flags}")
        return flags_class

    def function(self) -> Callable[..., Any]:
        """Imports the function that runs the command."""
        function: Callable[..., Any] = resolve_name(f"dschat.{self.run}")
        return function


COMMANDS: dict[str, Command] = {
    **{step.command: Command(step.summary, step.flags, step.train, step.name) for step in STEPS.values()},
    "refuel-data generate": Command(
        "sample dialogues of a policy with a simulated user",
        "refuel.data_options:GenerateOptions",
        "refuel.generate:run_generate",
        resumable=True,
    ),
    "refuel-data rank": Command(
        "score these dialogues at the end of each turn",
        "refuel.data_options:RankOptions",
        "refuel.rank:run_rank",
        resumable=True,
    ),
    "refuel-data tokenize": Command(
        "tokenize scored dialogues into the pairs that `refuel` trains on",
        "refuel.data_options:MaskOptions",
        "refuel.rank:run_masks",
    ),
    "data check": Command("check data before training", "data.options:CheckOptions", "data.command:check"),
    "data preview": Command("show rows as training sees them", "data.options:PreviewOptions", "turns.preview:run"),
    "data prepare": Command("filter and encode data once", "data.options:PrepareOptions", "data.command:prepare"),
    "plan": Command(
        "memory and number of updates of a run before it starts, and flags that make it fit",
        "plan.options:PlanOptions",
        "plan.command:run",
    ),
    "generate": Command(
        "generate responses to a data set's prompts, and score them",
        "evaluation.generate_options:InferenceOptions",
        "evaluation.generate:run_inference",
        resumable=True,
        extras=("evaluation",),
    ),
    "best-of-n": Command(
        "generate N responses per prompt, and report the best reward of N",
        "evaluation.generate_options:BestOfOptions",
        "evaluation.generate:run_best_of_n",
        resumable=True,
        extras=("evaluation",),
    ),
    "programs": Command(
        "generate programs, and run their tests in a sandbox",
        "programs.options:ProgramOptions",
        "programs.command:run_programs",
        resumable=True,
        extras=("evaluation", "programs"),
    ),
    "text": Command(
        "perplexity and ROUGE of policies, accuracy of reward models",
        "evaluation.generate_options:TextOptions",
        "evaluation.text:run_text",
        resumable=True,
        extras=("evaluation",),
    ),
    "evaluate": Command(
        "benchmarks of the lm-evaluation-harness, such as gsm8k and mmlu",
        "evaluation.generate_options:BenchmarkOptions",
        "evaluation.benchmarks:run_benchmarks",
        extras=("bench",),
    ),
    "sample": Command(
        "choose rows for judges and people to compare",
        "evaluation.options:SampleOptions",
        "evaluation.sampling:sample",
    ),
    "judge": Command(
        "compare two models by a judge model",
        "judge.options:JudgeOptions",
        "judge.command:run_judge",
        resumable=True,
        extras=("evaluation",),
    ),
    "judge-turns": Command(
        "compare dialogues turn by turn, by a judge model",
        "judge.options:TurnOptions",
        "judge.turn_report:run_turns",
        resumable=True,
        extras=("evaluation",),
    ),
    "vote": Command(
        "compare two models by people's votes",
        "evaluation.options:VoteOptions",
        "evaluation.vote.command:vote",
        resumable=True,
        extras=("evaluation",),
    ),
    "report": Command(
        "compare runs; report win rates and agreement, pass@k, or best of N",
        "evaluation.options:ReportOptions",
        "evaluation.report:report",
        extras=("evaluation",),
    ),
    "pass-at-k": Command(
        "pass@k of programs that `programs` has run",
        "programs.options:PassOptions",
        "programs.pass_at_k:run_pass_at_k",
        extras=("evaluation",),
    ),
    "demo chat": Command(
        "chat with a model, on a web page or in the terminal", "demo.options:ChatOptions", "demo.command:run"
    ),
    "demo summary": Command(
        "summarise posts (TL;DR) with a model, on a web page", "demo.options:SummaryOptions", "demo.command:run"
    ),
    "macro-actions": Command(
        "show where termination conditions end macro actions",
        "evaluation.panel_options:MacroActionsOptions",
        "evaluation.show_macro_actions:run",
    ),
    "serve": Command(
        "serve a reward model, for --reward_url",
        "settings.commands:ServeOptions",
        "scoring.serve:serve",
        extras=("serve",),
    ),
    "serve-vllm": Command("serve vLLM, for --vllm_url", "vllm.options:ServeVllmOptions", "vllm.serve:serve"),
    "push": Command("upload a model to the Hugging Face hub", "settings.commands:PushOptions", "run.hub:run_push"),
    "export": Command("write the models of a checkpoint", "settings.commands:ExportOptions", "export:run_export"),
    "env": Command(
        "versions, GPUs and memory, for a bug report", "settings.commands:EnvOptions", "run.environment:describe"
    ),
    "quickstart": Command(
        "run the whole pipeline on this machine, in minutes",
        "quickstart.options:QuickstartOptions",
        "quickstart.command:run",
        extras=("evaluation",),
    ),
    "quickstart programs": Command(
        "run steps 1 and 3 on programs that are rewarded by their tests",
        "quickstart.options:ProgramsOptions",
        "quickstart.programs:run",
        extras=("evaluation", "programs"),
    ),
    "quickstart turns": Command(
        "run steps 1 and 3 on episodes of several turns with environments",
        "quickstart.options:TurnsOptions",
        "quickstart.turns:run",
        extras=("evaluation",),
    ),
    "completion": Command(
        "print the completion script of bash or zsh", "settings.commands:CompletionOptions", "reference:completion"
    ),
}


def main(argv: Sequence[str] | None = None, may_launch: bool = True) -> int:
    """Runs a subcommand.

    Args:
        argv: the subcommand, of one or two words, and its flags; the process's arguments if None.
        may_launch: a training step starts one process per GPU; otherwise it trains in this process.

    Returns:
        The exit status: 0; 2 after an error that the user can correct; 143 after SIGTERM, 130 after Ctrl-C; else 1.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"dschat {version('ma-rlhf')}")
        return 0
    name = command_name(words)
    if name is None:
        return run_script(partial(_list_commands, words))
    flags = words[len(name.split()) :]
    if COMMANDS[name].step:
        return train_step(name, flags, may_launch)
    return run_script(partial(_run_command, name, flags), COMMANDS[name].resumable)


def command_name(words: Sequence[str]) -> str | None:
    """The subcommand that a command line begins with; None if there is no such command."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name
    return None


def _run_command(name: str, words: Sequence[str]) -> str | int:
    """Reads the flags of a command that does not train, then runs it."""
    command = COMMANDS[name]
    flags_class = command.flags_class()
    takes_unknown_flags = hasattr(flags_class, "other_words")
    resolved = resolve(flags_class, words, command=name, all_known=not takes_unknown_flags)
    for extra in command.extras:
        require_extra(extra, f"dschat {name}")
    options = resolved.config
    if takes_unknown_flags:
        options.other_words = resolved.other_words
    if isinstance(options, NeedsPreparation):
        options.prepare()
    result: str | int = command.function()(options)
    return result


# -- training


def train(config: CommonConfig) -> dict[str, float]:
    """Runs the training step of a configuration in this process; starts no others.

    For several processes, start the program with a launcher; each of its processes calls this function.

    Args:
        config: SFTConfig, RewardConfig, DPOConfig, PPOConfig, RefuelConfig or RefuelOnlineConfig.

    Returns:
        The metrics of the last evaluation, by name (docs/metrics.md); models and records are in `config.output_dir`.

    Raises:
        UserError: a value, the data or a model cannot be used; says what to change.
        SystemExit: after SIGTERM or Ctrl-C, when a checkpoint is written.
    """
    for command in COMMANDS.values():
        if command.step and command.flags_class() is type(config):
            config.validate()
            config.check_installed()
            return run_training(command.step, config, command.function)
    raise UserError(
        f"{type(config).__name__} is not the configuration of a training step; give an SFTConfig, RewardConfig,"
        " DPOConfig, PPOConfig, RefuelConfig or RefuelOnlineConfig."
    )


def train_step(name: str, words: Sequence[str], may_launch: bool) -> int:
    """Runs a training step: in this process if a launcher has started it, otherwise in one new process per GPU.

    Args:
        name: the subcommand.
        words: its flags.
        may_launch: new processes may be started; otherwise this process trains.

    Returns:
        The exit status.
    """
    values_of_launcher = os.environ.pop(GIVEN_VARIABLE, None)
    if values_of_launcher:
        return _train_as_given(name, json.loads(values_of_launcher))
    if is_worker(os.environ) or not may_launch:
        return train_in_process(name, words, environ=worker_environment())
    return run_script(partial(_launch_or_train, name, words))


def _launch_or_train(name: str, words: Sequence[str]) -> int:
    """Starts one process per GPU, or trains in this process if it is the only one or a rank. Returns the status."""
    flags = _read_launch_flags(name, words)
    process = process_of(os.environ)
    if isinstance(process, Rank):
        check_against_rank(flags, process)
        adopt(process, flags.master_addr, flags.master_port)
        return train_in_process(name, words, environ=worker_environment())
    plan = plan_launch(flags, process)
    if plan.world_size == 1 and not flags.log_dir:
        return train_in_process(name, words, processes=1)

    resolved = read_config(name, words, plan.world_size)
    set_data_folder(resolved)
    resolved.config.plan_batches(plan.world_size)  # batch sizes that do not fit are reported once, before the start
    # Ranks get all values, so that none of them depends on a file or an environment variable of its machine.
    content = {"words": [*name.split(), *words], "flags": resolved.given(without=LAUNCH_ONLY_FLAGS)}
    return launch(plan, name.split(), flags.log_dir, json.dumps(content, default=str))


def _train_as_given(name: str, given: Mapping[str, Any]) -> int:
    """Trains as a rank with the values that `_launch_or_train` has read. Returns the exit status."""
    sys.argv[1:] = given["words"]  # for the record of the run
    command = COMMANDS[name]

    def read() -> CommonConfig:
        config: CommonConfig = command.flags_class()(**given["flags"])
        config.validate()
        config.check_installed()
        return config

    return run_main(command.step, read, command.function)


def train_in_process(
    name: str, words: Sequence[str], processes: int | None = None, environ: Mapping[str, str] | None = None
) -> int:
    """Runs a training step in this process. Returns the exit status; see `read_config` for the arguments."""

    def read() -> CommonConfig:
        resolved = read_config(name, words, processes, environ)
        set_data_folder(resolved)
        return resolved.config

    command = COMMANDS[name]
    return run_main(command.step, read, command.function)


def read_config(
    name: str, words: Sequence[str], processes: int | None = None, environ: Mapping[str, str] | None = None
) -> Resolved[CommonConfig]:
    """Reads and checks the flags of a training step.

    Args:
        name: the subcommand.
        words: its flags.
        processes: number of processes of the run, by which a preset's global batch is divided. None: the launcher's.
        environ: environment variables that flags are read from. None: those of this process.

    Raises:
        UserError: a flag or a combination of flags is not possible.
    """
    flags_class: type[CommonConfig] = COMMANDS[name].flags_class()
    return resolve(flags_class, words, command=name, processes=processes, environ=environ)


def set_data_folder(resolved: Resolved[CommonConfig]) -> None:
    """Sets MA_RLHF_DATA, below which presets name their data, to $PROJ_PATH/data or ./data, unless it is set.

    Only for a run of a preset; processes that it starts inherit the variable.
    """
    if resolved.preset and not os.environ.get("MA_RLHF_DATA"):
        project = os.environ.get("PROJ_PATH") or Path.cwd()
        os.environ["MA_RLHF_DATA"] = str(Path(project) / "data")


def _read_launch_flags(name: str, words: Sequence[str]) -> LaunchFlags:
    """The flags that decide how many processes are started, and where.

    Nothing is checked yet, because checks of other flags need the number of processes. --print_config is ignored here:
    `read_config` follows, and prints the batch sizes of all processes.
    """
    quiet_words = [word for word in words if word not in PRINTS]
    flags_class: type[CommonConfig] = COMMANDS[name].flags_class()
    return resolve(flags_class, quiet_words, command=name, processes=1, checks=False).config.launch


# -- help


def _list_commands(words: Sequence[str]) -> int:
    """Lists the subcommands, or those that begin with the first word, for a command line without a subcommand.

    Returns:
        The exit status: 0 without words or with --help; 2 after a command that does not exist, which is named on
        stderr; 2 if a subcommand of two words lacks the second, or if there are only unknown flags.
    """
    first = next((word for word in words if not word.startswith("-")), "")
    name_behind = next(filter(COMMANDS.__contains__, words), None)  # the first word is none
    if name_behind is not None and words[0].startswith("-"):
        print(f"dschat: error: flags come behind the command: dschat {name_behind} --help", file=sys.stderr)
        return 2
    group = {name: command for name, command in COMMANDS.items() if name.startswith(f"{first} ")}
    if first and not group:
        similar = next(iter(get_close_matches(first, COMMANDS, n=1)), "")
        hint = command_suggestion(first) or (f"did you mean {similar}?" if similar else "")
        print(f"dschat: error: there is no command {first}{'; ' if hint else ''}{hint}", file=sys.stderr)
        return 2

    # `data` alone asks which commands begin with it; `data chek` names one that does not exist.
    second = ""
    if group:
        second = next(iter(words[words.index(first) + 1 :]), "")
    is_unknown = bool(second) and not second.startswith("-")
    if is_unknown:
        print(f"dschat: error: there is no command {first} {second}", file=sys.stderr)

    commands = group or COMMANDS
    width = max(map(len, commands))
    lines = [f"usage: dschat {first + ' ' if group else ''}COMMAND [flags]", ""]
    for name, command in commands.items():
        lines.append(f"  {name:<{width}}  {command.summary}")
    lines += ["", "`dschat COMMAND --help` lists its flags; --config FILE reads them from YAML."]
    asked_for = not words or (not is_unknown and ("-h" in words or "--help" in words))
    print("\n".join(lines), file=sys.stdout if asked_for else sys.stderr)
    return 0 if asked_for else 2
