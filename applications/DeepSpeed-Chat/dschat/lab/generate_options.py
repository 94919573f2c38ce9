# SPDX-License-Identifier: Apache-2.0
"""The flags of every command that answers or scores with finished models, checked before anything slow is imported."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dschat.base.errors import UserError
from dschat.data.hub import COMPARED_SETS, compared_set
from dschat.lab.best_of import PUBLISHED
from dschat.lab.options import CheckedFlags, ComparedFlags, JudgeOptions, ReportOptions
from dschat.settings.commands import ResultFlags, ServeOptions, ServerFlags
from dschat.settings.common import ColumnFlags, DataFlags, EngineFlags, OptimisationFlags
from dschat.settings.flags import AT_LEAST_1, REQUIRED, Range, default_of, flag, flags_of, like
from dschat.settings.rewards import ProgramBlock, ProgramFlags, RewardFlags, SandboxLevel
from dschat.settings.rollouts import RolloutFlags, SamplingFlags
from dschat.settings.rules import check_function_path
from dschat.settings.supervised import ModelFlags

UNSHUFFLED = "webgpt"  # its validation rows are used whole, in their own order
PROTOCOL_SAMPLES = 2000  # of the other sets
REFERENCE = "reference"  # name of the file of --ref_scores
MODEL_HELP = "policy: folder or hub id, with or without /actor"
TRAINING_SEED: int = default_of(OptimisationFlags, "seed")
Dtype = Literal["fp32", "bf16", "fp16"]
Engine = Literal["continuous", "generate"]


def _is_temperature(value: float | str) -> bool:
    try:
        return math.isfinite(float(value)) and float(value) >= 0
    except ValueError:
        return False


TEMPERATURE: Range = (_is_temperature, "0 (greedy) or a positive number, such as 0.8")


class QuietFlags(CheckedFlags):
    """Flags of a command that opens models or tokenizers."""

    def prepare(self) -> None:
        """Leaves the screen to our own bar and messages."""
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()


@dataclass(kw_only=True)
class ComputeFlags(QuietFlags):
    """Where models compute."""

    device: str | None = like(ServeOptions, "device")
    dtype: Dtype | None = like(
        EngineFlags, "dtype", help="of the models; bf16 on a GPU and fp32 on a CPU if not given"
    )


@dataclass(kw_only=True)
class PromptFlags(ComputeFlags):
    """Flags of every command that answers a data set's prompts."""

    gpu: int | None = flag(
        "number of the GPU; 0 where there is one if not given",
        None,
        (lambda value: value >= 0, "the number of a GPU, from 0; for the CPU give --device cpu"),
    )
    device: str | None = like(ComputeFlags, "device", help="cpu, cuda or cuda:N; decides over --gpu")
    batch_size: int = like(ServeOptions, "batch_size", help="prompts answered at once")
    rollout_engine: Engine = like(
        RolloutFlags,
        "rollout_engine",
        help="what draws responses: continuous (our own batching) or generate (transformers'; slower)",
    )
    num_samples: int | None = like(ResultFlags, "num_samples")
    max_new_tokens: int = flag("longest response in tokens", 512, AT_LEAST_1)
    max_prompt_len: int | None = flag("leave out prompts of more tokens, BOS included", None, AT_LEAST_1)
    prompt_key: str = like(ColumnFlags, "prompt_key")
    chosen_key: str = like(ColumnFlags, "chosen_key")
    rejected_key: str = like(ColumnFlags, "rejected_key")
    response_key: str = like(ColumnFlags, "response_key")
    messages_key: str = like(ColumnFlags, "messages_key")
    apply_chat_template: bool = like(ColumnFlags, "apply_chat_template")

    @property
    def keys(self) -> ColumnFlags:
        """How the data set's columns are read."""
        return ColumnFlags(**{name: getattr(self, name) for name in flags_of(ColumnFlags)})


@dataclass(kw_only=True)
class PolicyOptions(PromptFlags):
    """Flags of every command whose file lies below --proj_path."""

    proj_path: Path = flag(
        "results go below it, data sets are read from its folder data unless MA_RLHF_DATA is set",
        environment="PROJ_PATH",
    )
    top_k: int = like(RolloutFlags, "top_k", 50)
    top_p: float = like(RolloutFlags, "top_p")
    seed: int = like(OptimisationFlags, "seed", help="of the draws; the choice of prompts does not depend on it")
    data_path: str | None = like(
        DataFlags,
        "data_path",
        None,
        "where to read the data set: file, folder or hub id; its own place if not given; your own may have any"
        " --dataset name",
    )
    name: str | None = flag("name of the result file, without .jsonl; the model's if not given", None)
    overwrite: bool = like(ResultFlags, "overwrite")

    def __post_init__(self) -> None:
        super().__post_init__()
        stem = self.name
        if stem is not None and (stem in ("", "..") or Path(stem).name != stem or stem.endswith(".jsonl")):
            raise UserError(f"--name {self.name}: give the file's name without a folder and without .jsonl.")

    def prepare(self) -> None:
        """Looks for data sets below --proj_path."""
        super().prepare()
        os.environ.setdefault("MA_RLHF_DATA", str(self.proj_path / "data"))

    @property
    def samples(self) -> int | None:
        """Number of prompts to take; None = all."""
        return self.num_samples

    def path_of(self, dataset: str, folder: str, name: str) -> Path:
        """The result file: results/{dataset}/{folder}/{name}.jsonl below `proj_path`."""
        return self.proj_path / "results" / dataset / folder / f"{self.name or name}.jsonl"


@dataclass(kw_only=True)
class TemperatureOptions(PolicyOptions):
    """Flags of a command that draws at one temperature."""

    # Text: it names a folder.
    temperature: str = like(SamplingFlags, "temperature", "0.8", "of sampling; 0 = greedy", TEMPERATURE)
    num_return: int = flag("responses to a prompt", 1, AT_LEAST_1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_return > 1 and self.temperature_value == 0:
            raise UserError(
                f"--num_return {self.num_return}: --temperature 0 gives the same response every time. Leave"
                " --num_return out, or change that flag."
            )

    @property
    def temperature_value(self) -> float:
        """The temperature as a number."""
        return float(self.temperature)

    @property
    def temperature_folder(self) -> str:
        """Of the result file."""
        return f"temperature={self.temperature.strip()}"


@dataclass(kw_only=True)
class ScoredOptions(PolicyOptions):
    """Flags of every command with a reward model."""

    dataset: str = like(
        JudgeOptions,
        "dataset",
        REQUIRED,
        f"validation set that gives the prompts: {', '.join(COMPARED_SETS)}, or a name for the data of --data_path",
    )
    reward_model: str | None = flag(
        "scores responses: folder or hub id of a sequence classifier with one label", None, path=True
    )
    reward_function: str | None = like(
        RewardFlags,
        "reward_function",
        help="scores responses in place of a reward model: module.py:function, called as in training with lists of"
        " prompts, responses and rows",
    )
    rm_template: bool = like(RewardFlags, "rm_template")
    num_samples: int | None = like(
        PromptFlags, "num_samples", help=f"prompts; {PROTOCOL_SAMPLES}, and of webgpt all, if not given"
    )

    def __post_init__(self) -> None:
        remedy = "for data of your own any name, with --data_path FILE"
        self.dataset = compared_set(self.dataset, self.data_path is not None, remedy)
        super().__post_init__()
        if self.reward_model is not None and self.reward_function is not None:
            raise UserError("--reward_model and --reward_function both score the responses: give one of them.")
        if self.reward_function is not None:
            check_function_path("reward_function", self.reward_function)
        if self.rm_template and self.reward_model is None:
            raise UserError("--rm_template says how a reward model reads texts: give --reward_model, or drop it.")

    @property
    def has_scores(self) -> bool:
        """Whether something scores the responses."""
        return self.reward_model is not None or self.reward_function is not None

    @property
    def samples(self) -> int | None:
        """See `PolicyOptions.samples`; without --num_samples those of the protocol."""
        return PROTOCOL_SAMPLES if self.num_samples is None and self.dataset != UNSHUFFLED else self.num_samples


@dataclass(kw_only=True)
class InferenceOptions(ScoredOptions, TemperatureOptions):
    """Answer a data set's held-out prompts with a model; a reward model or a function may score the responses.

    Writes PROJ_PATH/results/DATASET/temperature=T/MODEL.jsonl: prompt, response, finished and, where they are scored,
    reward. Killed and started again with the same flags, it goes on where it stood.
    """

    model: str | None = like(ServerFlags, "model", None, f"{MODEL_HELP}; not needed with --ref_scores")
    ref_scores: bool = flag("score the data set's own chosen and rejected responses, into reference.jsonl", False)
    num_return: int = like(
        TemperatureOptions, "num_return", help="draw so many responses to a prompt, keep the best by reward"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None and not self.ref_scores:
            raise UserError("--model is missing: give the policy's folder, or --ref_scores to score the data set.")
        if not self.has_scores and (self.ref_scores or self.num_return > 1):
            what = "--ref_scores" if self.ref_scores else f"--num_return {self.num_return}, which keeps the best one,"
            raise UserError(f"{what} needs scores: give --reward_model or --reward_function module.py:function.")
        if self.ref_scores and self.reward_model is None and self.model is None:
            raise UserError(
                "--ref_scores with --reward_function: give --model, too; its chat template writes the prompts."
            )
        if self.num_return > 1 and self.ref_scores:
            raise UserError(
                f"--num_return {self.num_return}: --ref_scores draws no responses. Leave --num_return out, or change"
                " that flag."
            )

    @property
    def result_path(self) -> Path:
        """The file, called after the model or `reference`."""
        name = REFERENCE if self.ref_scores else model_name(self.model or "")
        return self.path_of(self.dataset, self.temperature_folder, name)


@dataclass(kw_only=True)
class BestOfOptions(ScoredOptions):
    """Rewards of the best of N responses at several temperatures, and of a single response at each.

    Writes into PROJ_PATH/results/DATASET/best-of-n: MODEL.jsonl with all responses and their rewards, a row for each
    prompt and temperature; MODEL.md and MODEL.json, the table; MODEL.png, the curves. Killed and started again with
    the same flags, it goes on where it stood.
    """

    model: str = like(InferenceOptions, "model", REQUIRED, MODEL_HELP)
    best_of: Sequence[int] = like(ReportOptions, "best_of", PUBLISHED, "numbers of responses to choose from")
    temperatures: Sequence[float] = flag(
        "at which so many are drawn", (0.2, 0.4, 0.6, 0.8, 1.0, 1.2), TEMPERATURE, nargs="*"
    )
    single_temperatures: Sequence[float] = flag(
        "of a single response to a prompt; 0 = greedy", (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), TEMPERATURE, nargs="*"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("best_of", "temperatures", "single_temperatures"):
            values: Sequence[float] = getattr(self, name)
            if any(value >= following for value, following in zip(values, values[1:], strict=False)):
                given = " ".join(f"{value:g}" for value in values)
                raise UserError(f"--{name} {given}: give each number once, the smallest first.")
        if not self.temperatures and not self.single_temperatures:
            raise UserError("--temperatures and --single_temperatures: give at least one of them a number.")
        if not self.has_scores:
            raise UserError(
                "the best response is that with the highest score: give --reward_model or --reward_function."
            )
        if 0 in self.temperatures and max(self.best_of) > 1:
            raise UserError(
                f"--temperatures 0: gives the same response every time, also with --best_of {max(self.best_of)}. "
                "Give 0 to --single_temperatures instead."
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


@dataclass(kw_only=True)
class ProgramOptions(TemperatureOptions):
    """Answer APPS's problems with a model and run the programs on the problems' tests, in a sandbox.

    Writes PROJ_PATH/results/DATASET/temperature=T/MODEL.jsonl: prompt, difficulty, and of each sample its response and
    what became of it. Killed and started again with the same flags, it goes on where it stood.
    """

    model: str = like(BestOfOptions, "model")
    dataset: str = like(ScoredOptions, "dataset", "apps", "published set, or a name for the data of --data_path")
    temperature: str = like(TemperatureOptions, "temperature", "1.0")
    top_k: int = like(PolicyOptions, "top_k", 5)
    num_return: int = like(TemperatureOptions, "num_return", 5, "programs for a problem")
    max_prompt_len: int | None = like(
        PromptFlags, "max_prompt_len", 600, "leave out problems of more tokens, BOS included"
    )
    program_block: ProgramBlock = like(ProgramFlags, "program_block")
    sandbox_level: SandboxLevel = like(ProgramFlags, "sandbox_level")
    sandbox_workers: int = like(ProgramFlags, "sandbox_workers", help="programs that are run at a time")
    max_tests: int | None = like(ProgramFlags, "max_tests")

    @property
    def result_path(self) -> Path:
        """The file, called after the model."""
        return self.path_of(self.dataset, self.temperature_folder, model_name(self.model))


@dataclass(kw_only=True)
class TextOptions(PromptFlags):
    """Perplexity and ROUGE of policies, loss and accuracy of reward models, on a split of a data set.

    Writes into the folder of --output: rows.jsonl, a row for each model and text; report.md, report.json, report.png.
    Killed and started again with the same flags, it goes on where it stood.
    """

    model: Sequence[str] = like(
        InferenceOptions, "model", (), "policies: folders or hub ids, with or without /actor", nargs="+"
    )
    reward_model: Sequence[str] = like(
        ScoredOptions, "reward_model", (), "reward models of step 2: folders or hub ids", nargs="+"
    )
    checkpoints: Path | None = flag("output folder of a run: all of its models, models/step-N and the final one", None)
    data: str = flag("data set: as --data_path of training", path=True)
    output: Path = like(ComparedFlags, "output", help="where the result is written")
    split: Literal["eval", "train"] = flag("eval, the held-out rows, or train", "eval")
    seed: int | None = like(
        PolicyOptions,
        "seed",
        None,
        f"of the 5 %% held out where the data have no evaluation rows; {TRAINING_SEED}, or the run's of --checkpoints,"
        " if not given",
    )
    num_samples: int | None = like(
        PromptFlags, "num_samples", help="texts: so many of the split, the same for every model; all if not given"
    )
    no_rouge: bool = flag("do not answer the prompts, which takes longest", False)
    all_tokens: bool = flag("perplexity of prompts, too, as --sft_on_prompt trains; else of responses alone", False)
    max_seq_len: int = like(ModelFlags, "max_seq_len", help="longest text in tokens; the rest is cut, as in training")
    max_new_tokens: int = like(PromptFlags, "max_new_tokens", help="longest response in tokens, for ROUGE")
    end_of_conversation_token: str | None = like(DataFlags, "end_of_conversation_token")
    batch_size: int = like(PromptFlags, "batch_size", help="texts computed at once")
    overwrite: bool = like(PolicyOptions, "overwrite")

    # Greedy responses depend on none of these.
    top_k = 0
    top_p = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.model or self.reward_model or self.checkpoints):
            raise UserError("Nothing to measure: give --model, --reward_model or --checkpoints.")


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
