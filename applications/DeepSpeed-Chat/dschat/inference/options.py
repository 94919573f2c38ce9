# SPDX-License-Identifier: Apache-2.0
"""The flags of every command that answers or scores with finished models, checked before anything slow is imported.

A field is a flag: its name, type, default and help line. A rule is looked up by the flag's name, whichever command
has it; what is about several flags stands with the command.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from dschat.common.script import add_flags, flag, run_script
from dschat.config.rules import engine_name
from dschat.data.hub import COMPARED_SETS, compared_set
from dschat.data.rows import DataKeys
from dschat.errors import UserError
from dschat.evaluation.best_of import PUBLISHED
from dschat.scoring.programs.sandbox import LEVELS, Level

ENGINES = ("continuous", "generate")
DTYPES = ("fp32", "bf16", "fp16")
SPLITS = ("eval", "train")
UNSHUFFLED = "webgpt"  # its validation rows are used whole, in their own order
PROTOCOL_SAMPLES = 2000  # of the other sets
REFERENCE = "reference"  # name of the file of --ref-scores
TRAINING_SEED = 1234  # training's default
MODEL_HELP = "policy: folder or hub id, with or without /actor"

Rule = tuple[Callable[[Any], bool], str]  # whether a value is sensible, and what it must be in words


def _one_of(known: Iterable[str]) -> Rule:
    return set(known).__contains__, f"must be one of {', '.join(known)}."


def _is_temperature(value: float | str) -> bool:
    try:
        return math.isfinite(float(value)) and float(value) >= 0
    except ValueError:
        return False


AT_LEAST_0: Rule = (lambda value: value >= 0, "must be 0 or more.")
AT_LEAST_1: Rule = (lambda value: value >= 1, "must be at least 1.")
TEMPERATURE: Rule = (_is_temperature, "must be 0 (greedy) or a positive number, such as 0.8.")
COUNTS = (
    *("batch_size", "best_of", "concurrency", "max_length", "max_new_tokens", "max_prompt_len", "max_seq_len"),
    *("max_tests", "max_tries", "num_return", "num_samples", "num_turns", "sandbox_workers", "total_length"),
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(COUNTS, AT_LEAST_1),
    **dict.fromkeys(("temperature", "temperatures", "single_temperatures"), TEMPERATURE),
    "dtype": _one_of(DTYPES),
    "rollout_engine": _one_of(ENGINES),
    "sandbox_level": _one_of(LEVELS),
    "split": _one_of(SPLITS),
    "num_data": (lambda value: value >= 0, "must be 0 (all) or more."),
    "test_rows": AT_LEAST_0,
    "top_k": (lambda value: value >= 0, "must be 0 (all tokens) or more."),
    "top_p": (lambda value: 0 < value <= 1, "must be above 0 and at most 1 (all tokens)."),
    "seed": (lambda value: 0 <= value < 2**32, f"must be between 0 and {2**32 - 1}."),
    "gpu": (lambda value: value >= 0, "must be the number of a GPU, from 0; for the CPU give --device cpu."),
    "timeout": (lambda value: 0 < value < math.inf, "must be a number of seconds above 0."),
}


class CheckedFlags:
    """Flags that refuse values that make no sense when they are made: UserError names the flag and what to change."""

    def __post_init__(self) -> None:
        """Looks at each flag by itself; subclasses add what is about several of them."""
        if "rollout_engine" in vars(self):
            object.__setattr__(self, "rollout_engine", engine_name(vars(self)["rollout_engine"]))
        self.check_values(RULES)

    def check_values(self, rules: dict[str, Rule]) -> None:
        """Raises UserError for the first flag that breaks its rule; one that is not given breaks none."""
        for name, (is_sensible, words) in rules.items():
            value = vars(self).get(name)
            for each in value if isinstance(value, list | tuple) else [value]:
                if each is not None and not is_sensible(each):
                    shown = f"{each:g}" if isinstance(value, list | tuple) else each
                    raise UserError(f"{flag_of(name)} {shown}: {words}")


@dataclass(frozen=True, kw_only=True)
class ComputeFlags(CheckedFlags):
    """Where models compute."""

    device: str | None = flag("cpu, cuda or cuda:N (a GPU where there is one)", None)
    dtype: str | None = flag("of the models: fp32, bf16 or fp16 (bf16 on a GPU, fp32 on a CPU)", None)


@dataclass(frozen=True, kw_only=True)
class PromptFlags(ComputeFlags):
    """Flags of every command that answers a data set's prompts."""

    gpu: int | None = flag("number of the GPU (0 where there is one)", None)
    device: str | None = flag("cpu, cuda or cuda:N; decides over --gpu", None)
    batch_size: int = flag("prompts answered at once (%(default)s)", 16)
    rollout_engine: str = flag(
        "what draws responses: continuous (our own batching) or generate (transformers'; slower) (%(default)s)",
        "continuous",
    )
    num_samples: int | None = flag("prompts (all)", None)
    max_new_tokens: int = flag("longest response in tokens (%(default)s)", 512)
    max_prompt_len: int | None = flag("leave out prompts of more tokens, BOS included (no limit)", None)
    prompt_key: str = flag("column of the prompt (%(default)s)", DataKeys.prompt)
    chosen_key: str = flag("column of the preferred response (%(default)s)", DataKeys.chosen)
    rejected_key: str = flag("column of the other response (%(default)s)", DataKeys.rejected)
    response_key: str = flag("column of the response in data without preferences (%(default)s)", DataKeys.response)
    messages_key: str = flag("column of a conversation (%(default)s)", DataKeys.messages)

    @property
    def keys(self) -> DataKeys:
        """The data set's column names."""
        return DataKeys(self.prompt_key, self.chosen_key, self.rejected_key, self.response_key, self.messages_key)


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(PromptFlags):
    """Flags of every command whose file lies below --proj-path."""

    proj_path: Path = flag(
        "results go below it, data sets are read from its folder data unless MA_RLHF_DATA is set ($PROJ_PATH)"
    )
    top_k: int = flag("draw from so many of the likeliest tokens, 0 = all (%(default)s)", 50)
    top_p: float = flag("draw from the likeliest tokens of this share, 1 = all (%(default)s)", 1.0)
    seed: int = flag("of the draws (%(default)s); the choice of prompts does not depend on it", 1234)
    data_path: str | None = flag(
        "where to read the data set: file, folder or hub id (its own place); your own may have any --dataset name",
        None,
    )
    name: str | None = flag("name of the result file, without .jsonl (the model's)", None)
    overwrite: bool = flag("start anew, dropping a finished file or a run begun without this flag", False)

    def __post_init__(self) -> None:
        """Looks at the name of the file as well."""
        super().__post_init__()
        stem = self.name
        if stem is not None and (stem in ("", "..") or Path(stem).name != stem or stem.endswith(".jsonl")):
            raise UserError(f"--name {self.name}: give the file's name without a folder and without .jsonl.")

    def path_of(self, dataset: str, folder: str, name: str) -> Path:
        """The result file: results/{dataset}/{folder}/{name}.jsonl below `proj_path`."""
        return self.proj_path / "results" / dataset / folder / f"{self.name or name}.jsonl"


@dataclass(frozen=True, kw_only=True)
class TemperatureOptions(PolicyOptions):
    """Flags of a command that draws at one temperature."""

    temperature: str = flag("of sampling; 0 = greedy (%(default)s)", "0.8")  # text: it names a folder
    num_return: int = flag("responses to a prompt (%(default)s)", 1)

    def __post_init__(self) -> None:
        """Greedy responses are all the same."""
        super().__post_init__()
        if self.num_return > 1 and self.temperature_value == 0:
            raise UserError(
                f"--num-return {self.num_return}: --temperature 0 gives the same response every time. Leave"
                " --num-return out, or change that flag."
            )

    @property
    def temperature_value(self) -> float:
        """The temperature as a number."""
        return float(self.temperature)

    @property
    def temperature_folder(self) -> str:
        """Of the result file."""
        return f"temperature={self.temperature.strip()}"


@dataclass(frozen=True, kw_only=True)
class ScoredOptions(PolicyOptions):
    """Flags of every command with a reward model."""

    dataset: str = flag(
        f"validation set that gives the prompts: {', '.join(COMPARED_SETS)}, or a name for the data of --data-path"
    )
    reward_model: str = flag("folder or hub id of a sequence classifier with one label")
    rm_template: bool = flag("put prompt and response through the reward model's chat template", False)
    num_samples: int | None = flag(f"prompts ({PROTOCOL_SAMPLES}; webgpt: all)", None)

    def __post_init__(self) -> None:
        """Takes the data set by its name in the registry."""
        remedy = "for data of your own any name, with --data-path FILE"
        object.__setattr__(self, "dataset", compared_set(self.dataset, self.data_path is not None, remedy))
        super().__post_init__()

    @property
    def samples(self) -> int | None:
        """Number of prompts to take; None = all."""
        if self.num_samples is not None:
            return self.num_samples
        return None if self.dataset == UNSHUFFLED else PROTOCOL_SAMPLES


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(ScoredOptions, TemperatureOptions):
    """What inference_with_rewards.py is told."""

    model: str | None = flag(f"{MODEL_HELP} (not needed with --ref-scores)", None)
    ref_scores: bool = flag("score the data set's own chosen and rejected responses, into reference.jsonl", False)
    num_return: int = flag("draw so many responses to a prompt, keep the best by reward (%(default)s)", 1)

    def __post_init__(self) -> None:
        """A policy draws, or nothing is drawn."""
        super().__post_init__()
        if self.model is None and not self.ref_scores:
            raise UserError("--model is missing: give the policy's folder, or --ref-scores to score the data set.")
        if self.num_return > 1 and self.ref_scores:
            raise UserError(
                f"--num-return {self.num_return}: --ref-scores draws no responses. Leave --num-return out, or change"
                " that flag."
            )

    @property
    def result_path(self) -> Path:
        """The file, called after the model or `reference`."""
        name = REFERENCE if self.ref_scores else model_name(self.model or "")
        return self.path_of(self.dataset, self.temperature_folder, name)


@dataclass(frozen=True, kw_only=True)
class BestOfOptions(ScoredOptions):
    """What best_of_n.py is told."""

    model: str = flag(MODEL_HELP)
    best_of: Sequence[int] = flag("numbers of responses to choose from (4 8 16 32)", PUBLISHED, nargs="+")
    temperatures: Sequence[float] = flag(
        "at which so many are drawn (0.2 0.4 0.6 0.8 1.0 1.2)", (0.2, 0.4, 0.6, 0.8, 1.0, 1.2), nargs="*"
    )
    single_temperatures: Sequence[float] = flag(
        "of a single response to a prompt; 0 = greedy (0 0.2 0.4 0.6 0.8 1.0)",
        (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
        nargs="*",
    )

    def __post_init__(self) -> None:
        """Numbers and temperatures ascend, and greedy responses are not chosen among."""
        super().__post_init__()
        for name in ("best_of", "temperatures", "single_temperatures"):
            values: Sequence[float] = getattr(self, name)
            if any(value >= following for value, following in zip(values, values[1:], strict=False)):
                given = " ".join(f"{value:g}" for value in values)
                raise UserError(f"{flag_of(name)} {given}: give each number once, the smallest first.")
        if not self.temperatures and not self.single_temperatures:
            raise UserError("--temperatures and --single-temperatures: give at least one of them a number.")
        if 0 in self.temperatures and max(self.best_of) > 1:
            raise UserError(
                f"--temperatures 0: gives the same response every time, also with --best-of {max(self.best_of)}. "
                "Give 0 to --single-temperatures instead."
            )

    @property
    def draws(self) -> dict[float, int]:
        """Temperature → responses that are drawn to each prompt, the lowest temperature first."""
        single = dict.fromkeys(self.single_temperatures, 1)
        return dict(sorted((single | dict.fromkeys(self.temperatures, max(self.best_of))).items()))

    @property
    def result_path(self) -> Path:
        """The file of the responses, called after the model."""
        return self.path_of(self.dataset, "best-of-n", model_name(self.model))


@dataclass(frozen=True, kw_only=True)
class ProgramOptions(TemperatureOptions):
    """What inference_with_programs.py is told."""

    model: str = flag(MODEL_HELP)
    dataset: str = flag("published set, or a name for the data of --data-path (%(default)s)", "apps")
    temperature: str = flag("of sampling; 0 = greedy (%(default)s)", "1.0")
    top_k: int = flag("draw from so many of the likeliest tokens, 0 = all (%(default)s)", 5)
    num_return: int = flag("programs for a problem (%(default)s)", 5)
    max_prompt_len: int | None = flag("leave out problems of more tokens, BOS included (%(default)s)", 600)
    sandbox_level: str = flag("minimum isolation level of the programs' sandbox (%(default)s)", "namespaces")
    sandbox_workers: int = flag("programs that are run at a time (%(default)s)", 4)
    max_tests: int | None = flag("tests of a problem that are run, the first (all)", None)

    @property
    def level(self) -> Level:
        """The minimum isolation level."""
        return next(level for level in LEVELS if level == self.sandbox_level)

    @property
    def samples(self) -> int | None:
        """Number of problems to take; None = all."""
        return self.num_samples

    @property
    def result_path(self) -> Path:
        """The file, called after the model."""
        return self.path_of(self.dataset, self.temperature_folder, model_name(self.model))


@dataclass(frozen=True, kw_only=True)
class TextOptions(PromptFlags):
    """What `python -m dschat.evaluation.text` is told: what is measured, and on what."""

    model: Sequence[str] = flag("policies: folders or hub ids, with or without /actor", (), nargs="+")
    reward_model: Sequence[str] = flag("reward models of step 2: folders or hub ids", (), nargs="+")
    checkpoints: Path | None = flag("output folder of a run: all of its models, models/step-N and the final one", None)
    data: str = flag("data set: as --data_path of training")
    output: Path = flag("folder for rows.jsonl, report.md, report.json and report.png")
    split: str = flag("eval, the held-out rows, or train (%(default)s)", "eval")
    seed: int | None = flag(
        f"of the 5 %% held out where the data have no evaluation rows ({TRAINING_SEED}; the run's of --checkpoints)",
        None,
    )
    num_samples: int | None = flag("texts: so many of the split, the same for every model (all)", None)
    no_rouge: bool = flag("do not answer the prompts, which takes longest", False)
    all_tokens: bool = flag("perplexity of prompts, too, as --sft_on_prompt trains; else of responses alone", False)
    max_seq_len: int = flag("longest text in tokens; the rest is cut, as in training (%(default)s)", 1024)
    max_new_tokens: int = flag("longest response in tokens, for ROUGE (%(default)s)", 512)
    end_of_conversation_token: str | None = flag("token that ends a response instead of EOS, as in training", None)
    batch_size: int = flag("texts computed at once (%(default)s)", 16)
    overwrite: bool = flag("start anew, dropping a finished report or a run begun without this flag", False)

    # Greedy responses depend on none of these.
    top_k = 0
    top_p = 1.0

    def __post_init__(self) -> None:
        """There is something to measure."""
        super().__post_init__()
        if not (self.model or self.reward_model or self.checkpoints):
            raise UserError("Nothing to measure: give --model, --reward-model or --checkpoints.")


Options = TypeVar("Options")


def parse_flags(options: type[Options], words: Sequence[str], description: str) -> Options:
    """The options of a command line; --proj-path may come from $PROJ_PATH. Raises UserError, see the class."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    project = os.environ.get("PROJ_PATH")
    add_flags(parser, options, **({"proj_path": project} if project else {}))
    return options(**vars(parser.parse_args(words)))


def run_command(
    options: type[Any], run: str, description: str, say: Callable[[str], object], goes_on: bool = True
) -> int:
    """A whole command: reads its flags, runs, says what that returns; the exit status, see `run_script`.

    Args:
        options: class of its flags.
        run: "module:function" that does it, given the flags; imported once they are checked, since that is slow.
        description: in --help.
        say: writes a line to stdout: print.
        goes_on: after Ctrl-C the same command goes on where it stood.
    """

    def command() -> str:
        given = parse_flags(options, sys.argv[1:], description)
        if isinstance(given, PolicyOptions):
            os.environ.setdefault("MA_RLHF_DATA", str(given.proj_path / "data"))
        import transformers

        transformers.utils.logging.disable_progress_bar()  # the screen is for our own bar and messages
        transformers.utils.logging.set_verbosity_error()
        return str(resolve_name(run)(given))

    return run_script(command, say, goes_on)


def flag_of(field: str) -> str:
    """`num_return` → `--num-return`."""
    return "--" + field.replace("_", "-")


def model_name(path: str) -> str:
    """Name of a model, a folder or hub id, in result paths: the folder's, or that above `actor`.

    The training scripts' presets write into PRESET/sft, PRESET/reward, PRESET/dpo, PRESET/ppo and PRESET/ppo-VARIANT.
    There the folder alone does not tell models apart, and the one above joins it: `tldr-gemma-2b-ppo`.
    """
    folder = Path(os.path.abspath(path))
    if folder.name == "actor":
        folder = folder.parent
    known = ("sft", "reward", "dpo", "ppo", "refuel")
    if folder.parent.name and (folder.name in known or folder.name.startswith("ppo-")):
        return f"{folder.parent.name}-{folder.name}"
    return folder.name
