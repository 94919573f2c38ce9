# SPDX-License-Identifier: Apache-2.0
"""The command `dschat`: its subcommands, each of which imports only what it needs once its flags are checked."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from dschat.common.script import run_script
from dschat.config.common import CommonConfig
from dschat.config.parse import Resolved, resolve
from dschat.launch import is_rank, launch, plan_processes
from dschat.main import run_main


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    summary: str  # its line in `dschat --help`
    flags: str  # "module:class" of its flags, whose docstring its --help begins with
    run: str  # "module:function" of flags → the last lines of the output, or an exit status
    step: str = ""  # of a training step: what run.json calls it
    goes_on: bool = False  # after Ctrl-C the same command goes on where it stood


COMMANDS: dict[str, Command] = {
    "sft": Command("step 1: supervised fine-tuning", "dschat.config.supervised:SFTConfig",
                   "dschat.builders.steps:train_sft", "sft"),
    "reward": Command("step 2: a reward model", "dschat.config.supervised:RewardConfig",
                      "dschat.builders.steps:train_reward", "reward"),
    "dpo": Command("instead of steps 2 and 3: direct preference optimisation", "dschat.config.supervised:DPOConfig",
                   "dschat.builders.steps:train_dpo", "dpo"),
    "ppo": Command("step 3: PPO with macro actions, RLOO", "dschat.config.ppo:PPOConfig",
                   "dschat.builders.steps:train_ppo", "ppo"),
    "refuel": Command("REFUEL on pairs of dialogues", "dschat.config.refuel:RefuelConfig",
                      "dschat.builders.steps:train_refuel", "refuel"),
    "refuel-online": Command("REFUEL with the users of the data", "dschat.config.refuel:RefuelOnlineConfig",
                             "dschat.builders.steps:train_refuel_online", "refuel_online"),
    "refuel-data generate": Command("dialogues of a policy and a simulated user", "dschat.inference.refuel:GenerateOptions",
                                    "dschat.inference.dialogues:run_generate", goes_on=True),
    "refuel-data rank": Command("their rewards, turn by turn", "dschat.inference.refuel:RankOptions",
                                "dschat.inference.pairs:run_rank", goes_on=True),
    "refuel-data tokenize": Command("pairs of tokens that `refuel` trains on", "dschat.inference.refuel:MaskOptions",
                                    "dschat.inference.pairs:run_masks"),
    "data check": Command("what is wrong with data, before training", "dschat.data.options:CheckOptions",
                          "dschat.data.__main__:run"),
    "data preview": Command("rows as training sees them", "dschat.data.options:PreviewOptions",
                            "dschat.data.__main__:run"),
    "data prepare": Command("filter and encode data once", "dschat.data.options:PrepareOptions",
                            "dschat.data.__main__:run"),
    "plan": Command("memory, updates and flags that fit, before anything runs", "dschat.config.plan:PlanOptions",
                    "dschat.plan.__main__:run"),
    "generate": Command("responses of a model, with rewards", "dschat.inference.options:InferenceOptions",
                        "dschat.inference.scored:run_inference", goes_on=True),
    "best-of-n": Command("the best of N responses by reward", "dschat.inference.options:BestOfOptions",
                         "dschat.inference.scored:run_best_of_n", goes_on=True),
    "programs": Command("programs of a model, run on tests in a sandbox", "dschat.inference.options:ProgramOptions",
                        "dschat.inference.programs:run_programs", goes_on=True),
    "text": Command("perplexity, ROUGE, accuracy of a reward model", "dschat.inference.options:TextOptions",
                    "dschat.inference.text:run_text", goes_on=True),
    "sample": Command("the rows that judges and people compare", "dschat.evaluation.options:SampleOptions",
                      "dschat.evaluation.commands:sample"),
    "judge": Command("a judge model compares two models", "dschat.evaluation.options:JudgeOptions",
                     "dschat.evaluation.judge.run:run_judge", goes_on=True),
    "judge-turns": Command("a judge compares dialogues turn by turn", "dschat.evaluation.options:TurnOptions",
                           "dschat.evaluation.judge.run:run_turns", goes_on=True),
    "vote": Command("people compare two models", "dschat.evaluation.options:VoteOptions",
                    "dschat.evaluation.commands:vote", goes_on=True),
    "report": Command("win rates, agreement, pass@k, best of N", "dschat.evaluation.options:ReportOptions",
                      "dschat.evaluation.commands:report"),
    "pass-at-k": Command("pass@k of programs that were run", "dschat.evaluation.options:PassOptions",
                         "dschat.evaluation.commands:pass_at_k"),
    "demo chat": Command("talk with a model", "dschat.demo.options:ChatOptions", "dschat.demo.__main__:run"),
    "demo summary": Command("summaries of posts (TL;DR)", "dschat.demo.options:SummaryOptions",
                            "dschat.demo.__main__:run"),
    "macro-actions": Command("where termination conditions cut responses", "dschat.config.macro_actions:MacroActionsOptions",
                             "dschat.show_macro_actions:run"),
    "serve": Command("a reward model for --reward_url", "dschat.config.commands:ServeOptions",
                     "dschat.scoring.serve:serve"),
    "serve-vllm": Command("vLLM for --vllm_url", "dschat.config.commands:ServeVllmOptions",
                          "dschat.rollouts.serve:serve"),
    "push": Command("a model to the Hugging Face hub", "dschat.config.commands:PushOptions", "dschat.run.hub:run_push"),
    "env": Command("versions, GPUs and memory, for a report of a bug", "dschat.config.commands:EnvOptions",
                   "dschat.run.environment:describe"),
    "quickstart": Command("the whole pipeline on this machine, in minutes", "dschat.quickstart.options:QuickstartOptions",
                          "dschat.quickstart.reviews:run"),
    "quickstart programs": Command("the same with rewards by execution", "dschat.quickstart.options:ProgramsOptions",
                                   "dschat.quickstart.programs:run"),
    "quickstart learners": Command("DPO, RLOO, PPO, MA-PPO side by side", "dschat.quickstart.options:LearnersOptions",
                                   "dschat.quickstart.learners:run"),
    "quickstart reward-losses": Command("the losses of step 2 side by side",
                                        "dschat.quickstart.options:RewardLossesOptions",
                                        "dschat.quickstart.reward_losses:run"),
    "completion": Command("what a shell needs to complete these", "dschat.config.commands:CompletionOptions",
                          "dschat.reference:completion"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None, may_launch: bool = True) -> int:
    """Runs a subcommand.

    Args:
        argv: its name, of one or two words, and its flags; those of the process if None.
        may_launch: training starts a process for each GPU.

    Returns:
        The exit status: 0; 2 after an error that the user can mend; 143 after SIGTERM, 130 after Ctrl-C; else 1.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if name is None:
        return _no_command(words)
    command, flags = COMMANDS[name], words[len(name.split()) :]
    if command.step:
        return _train(name, command, flags, may_launch)
    return run_script(partial(_run, name, command, flags), print, command.goes_on)


def _run(name: str, command: Command, words: Sequence[str]) -> str | int:
    """Reads the flags, then imports what they are for."""
    options = resolve(resolve_name(command.flags), words, command=name).config
    if hasattr(options, "prepare"):
        options.prepare()
    found: str | int = resolve_name(command.run)(options)
    return found


def _train(name: str, command: Command, words: Sequence[str], may_launch: bool) -> int:
    """Trains in this process, or starts one for each GPU, which are then told every flag without files."""
    rank = is_rank() or not may_launch

    def read(processes: int | None = None) -> Resolved[CommonConfig]:
        return resolve(resolve_name(command.flags), words, command=name, processes=processes)

    if rank:
        return run_main(command.step, lambda: read().config, command.run)
    status: list[int] = []

    def start() -> str:
        found = resolve(resolve_name(command.flags), words, command=name, processes=1, checks=False)
        if found.preset:
            place = Path(os.environ.get("PROJ_PATH") or Path.cwd())
            os.environ.setdefault("MA_RLHF_DATA", str(place / "data"))
        processes = plan_processes(found.config)
        if processes.alone:
            return ""
        told = read(processes.count)
        told.config.plan_batches(processes.count)
        status.append(launch(processes, [*name.split(), "--deepspeed", *told.words]))
        return ""

    failed = run_script(start, print)
    if failed or status:
        return failed or status[0]
    return run_main(command.step, lambda: read(1).config, command.run)


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
        near = get_close_matches(asked, COMMANDS, n=1)
        print(f"dschat: error: {asked} is no command{f'; did you mean {near[0]}?' if near else ''}", file=sys.stderr)
        return 2
    print("\n".join(lines), file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else 2
