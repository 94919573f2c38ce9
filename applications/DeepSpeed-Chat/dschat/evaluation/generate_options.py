# SPDX-License-Identifier: Apache-2.0
"""Flags of every command that answers or scores with finished models, checked before anything slow is imported."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from dschat.base.steps import STEPS_BY_COMMAND
from dschat.data.compared_sets import COMPARED_SETS, compared_set
from dschat.data.known_sets import find_known
from dschat.data.rows import Split
from dschat.settings.commands import OverwriteFlags
from dschat.settings.common import SEED, ColumnFlags, OptimisationFlags
from dschat.settings.config import Config
from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, NOT_EMPTY, UP_TO_1, Range, default_of, flag
from dschat.settings.rules import Check, Rule, Rules, check_function_path

UNSHUFFLED = "webgpt"  # its validation rows are used whole, in their own order
PROTOCOL_SAMPLES = 2000  # default number of prompts, except for `UNSHUFFLED`
OWN_DATA = "for data of your own any name, with --data_path FILE"  # remedy for an unknown --dataset
REFERENCE = "reference"  # name of the file of --ref_scores
SPLIT_HELP = (
    "rows to read: evaluation rows (eval), training rows (train) or all; if not given, the data's evaluation rows, or"
    " those that a run behind the models held out of these data, or all if there are neither"
)
MODEL_HELP = "policy: a model's folder, step 3's output folder, or a hub id"
TRAINING_SEED: int = default_of(OptimisationFlags, "seed")
ACTORS = {"actor": "", "actor_ema": "-ema"}  # folder of a policy of step 3 → what its name adds to the run's
# Last folder of a preset's models, which does not tell them apart.
Dtype = Literal["fp32", "bf16", "fp16"]
Engine = Literal["continuous", "generate"]
# Numbers of responses to choose from in Chai et al., ICLR 2025, section 4.4.
PUBLISHED_NUMBERS = (4, 8, 16, 32)


def _is_temperature(value: float | str) -> bool:
    try:
        return math.isfinite(float(value)) and float(value) >= 0 and "_" not in str(value)
    except ValueError:
        return False


TEMPERATURE: Range = (_is_temperature, "0 (greedy) or a positive number, such as 0.8")
GPU_NUMBER: Range = (lambda value: value >= 0, "the number of a GPU, from 0; for the CPU give --device cpu")


# -- groups of flags


@dataclass(kw_only=True, frozen=True)
class ComputeFlags:
    """Device and precision of the models."""

    device: str | None = flag("device: cpu, cuda or cuda:N; if not given, the first GPU, or the CPU without one", None)
    dtype: Dtype | None = flag("dtype of the models; bf16 on a GPU and fp32 on a CPU if not given", None)


@dataclass(kw_only=True, frozen=True)
class GPUFlags:
    """The GPU by its number."""

    gpu: int | None = flag("number of the GPU to use; if not given 0, or the CPU without one", None, GPU_NUMBER)


@dataclass(kw_only=True, frozen=True)
class GenerationFlags:
    """Engine, batch size and length of generation."""

    batch_size: int = flag("prompts for which responses are generated at the same time", 16, AT_LEAST_1)
    rollout_engine: Engine = flag(
        "how responses are generated: by the built-in continuous batching (continuous), or by transformers' generate"
        " (slower)",
        "continuous",
    )
    max_new_tokens: int = flag("maximum response length in tokens", 512, AT_LEAST_1)


@dataclass(kw_only=True, frozen=True)
class TokenSamplerFlags:
    """How tokens are sampled, apart from the temperature."""

    top_k: int = flag("sample from the k most likely tokens; 0 = all", 50, AT_LEAST_0)
    top_p: float = flag("sample from the most likely tokens whose probabilities add up to this; 1 = all", 1.0, UP_TO_1)
    seed: int = flag("random seed of sampling", TRAINING_SEED, SEED)


@dataclass(kw_only=True, frozen=True)
class PromptFlags:
    """Number and length of the prompts to answer."""

    num_samples: int | None = flag("number of prompts; all if not given", None, AT_LEAST_1)
    max_prompt_len: int | None = flag("skip prompts longer than this, in tokens including BOS", None, AT_LEAST_1)


@dataclass(kw_only=True, frozen=True)
class DatasetFlags:
    """The data set that gives the prompts."""

    dataset: str = flag(
        f"data set whose validation prompts are used: {', '.join(COMPARED_SETS)}, or any name for --data_path"
    )
    data_path: str | None = flag(
        "file, folder or hub id to read prompts from, under any --dataset name; if not given, the published data set"
        " that --dataset names",
        None,
        NOT_EMPTY,
        path=True,
    )
    split: Split | None = flag(SPLIT_HELP, None)


@dataclass(kw_only=True, frozen=True)
class ProjectFlags:
    """The project folder, below which results lie."""

    proj_path: Path = flag(
        "folder below which results are written; data sets are read from its subfolder data, or from MA_RLHF_DATA",
        environment="PROJ_PATH",
    )
    name: str | None = flag("name of the result file, without .jsonl; the model's name if not given", None)

    def result_path(self, dataset: str, folder: str, model: str) -> Path:
        """The result file results/{dataset}/{folder}/{name}.jsonl; called after `model` without --name."""
        return self.proj_path / "results" / dataset / folder / f"{self.name or model}.jsonl"


@dataclass(kw_only=True, frozen=True)
class PolicyFlags:
    """The policy that answers."""

    model: str | None = flag(MODEL_HELP, path=True)


@dataclass(kw_only=True, frozen=True)
class ResponseFlags:
    """Temperature and number of the responses to a prompt."""

    # Text, because it names the folder of the result.
    temperature: str = flag("sampling temperature; 0 = greedy decoding", "0.8", TEMPERATURE)
    num_return: int = flag("responses per prompt", 1, AT_LEAST_1)

    @property
    def temperature_value(self) -> float:
        """The temperature as a number."""
        return float(self.temperature)

    @property
    def folder(self) -> str:
        """Folder of the result file."""
        return f"temperature={self.temperature.strip()}"


@dataclass(kw_only=True, frozen=True)
class ScoreFlags:
    """The reward model or function that scores responses."""

    reward_model: str | None = flag(
        "reward model that scores responses: folder or hub id of a sequence classifier with one label", None, path=True
    )
    reward_function: str | None = flag(
        "function that scores responses, instead of a reward model: module.py:function, called with lists of prompts,"
        " responses and rows as in training",
        None,
        path=True,
    )
    rm_template: bool = flag(
        "format prompt and response with the reward model's own chat template, as a user and an assistant message",
        False,
    )

    @property
    def has_scores(self) -> bool:
        """Whether something scores the responses."""
        return self.reward_model is not None or self.reward_function is not None


@dataclass(kw_only=True, frozen=True)
class ReferenceFlags:
    """Scores of the data set's own responses."""

    ref_scores: bool = flag(
        "score the data set's own chosen and rejected responses, instead of generating; written to reference.jsonl",
        False,
    )


@dataclass(kw_only=True, frozen=True)
class SweepFlags:
    """Temperatures, and numbers of responses to choose from."""

    best_of: Sequence[int] = flag("values of N: the best of N responses is chosen", PUBLISHED_NUMBERS, AT_LEAST_1)
    temperatures: Sequence[float] = flag(
        "sampling temperatures at which N responses per prompt are generated",
        (0.2, 0.4, 0.6, 0.8, 1.0, 1.2),
        TEMPERATURE,
        may_be_empty=True,
    )
    single_temperatures: Sequence[float] = flag(
        "sampling temperatures at which one response per prompt is generated; 0 = greedy decoding",
        (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
        TEMPERATURE,
        may_be_empty=True,
    )

    @property
    def responses_per_prompt(self) -> dict[float, int]:
        """Temperature → number of responses per prompt, the lowest temperature first."""
        counts = dict.fromkeys(self.single_temperatures, 1)
        counts.update(dict.fromkeys(self.temperatures, max(self.best_of)))
        return dict(sorted(counts.items()))


@dataclass(kw_only=True, frozen=True)
class TextFlags:
    """Models and texts of `dschat text`."""

    model: Sequence[str] = flag(
        "policies to measure: models' folders, step 3's output folders, or hub ids", (), path=True
    )
    reward_model: Sequence[str] = flag("reward models of step 2 to measure: folders or hub ids", (), path=True)
    checkpoints: Path | None = flag(
        "output folder of a run whose models are all measured: models/step-N and the final one", None
    )
    data: str = flag("data set to measure on, given as to --data_path of training", path=True)
    output: Path = flag("folder to write rows and report to")
    split: Split | None = flag(SPLIT_HELP, None)
    no_rouge: bool = flag("skip ROUGE, for which responses must be generated (the slowest part)", False)
    sft_on_prompt: bool = flag(
        "loss over prompt and response, not the response alone; with --checkpoints the run's, if not given", False
    )
    train_on: Literal["all", "last"] = flag(
        "which assistant messages of a conversation have a loss: all, or only the last; with --checkpoints the run's,"
        " if not given",
        "last",
    )
    max_seq_len: int = flag(
        "maximum length of prompt and response in tokens; longer ones are truncated as in training; with"
        " --checkpoints the run's, if not given",
        1024,
        AT_LEAST_1,
    )
    end_of_conversation_token: str | None = flag(
        "token that ends a response, instead of EOS; with --checkpoints the run's, if not given", None, NOT_EMPTY
    )


@dataclass(kw_only=True, frozen=True)
class BenchmarkFlags:
    """Model and benchmarks of `dschat evaluate`."""

    model: str = flag(MODEL_HELP, positional=True, path=True)
    tasks: Sequence[str] = flag(
        "benchmarks by their names in lm_eval, such as gsm8k,mmlu; separated by commas or blanks; * = any characters",
        range=NOT_EMPTY,
    )
    include_path: Path | None = flag("folder of your own task files (.yaml), whose Python functions are run", None)
    num_fewshot: int | None = flag(
        "solved examples before each question, except in tasks that always have none; if not given, the task's own"
        " number",
        None,
        AT_LEAST_0,
    )
    limit: int | None = flag("number of rows of each task, the first ones; all if not given", None, AT_LEAST_1)
    batch_size: int = flag("rows per forward pass", 16, AT_LEAST_1)
    apply_chat_template: bool = flag("write prompts as messages, by the model's chat template", False)
    output_dir: Path = flag("folder to write the results to, as MODEL.jsonl")


# -- rules between flags


def _names_no_file(options: "AnsweringOptions") -> bool:
    name = options.project.name
    if name is None:
        return False
    return name in ("", "..") or Path(name).name != name or name.endswith(".jsonl")


def _check_dataset(options: "ScoredOptions") -> None:
    """Raise UserError if --dataset names no data set; otherwise say, once, which one it is."""
    _ = options.dataset_name  # cached


def _check_reward_function(options: "ScoredOptions") -> None:
    if options.scores.reward_function is not None:
        check_function_path("reward_function", options.scores.reward_function)


ANSWERING_RULES: "tuple[Rule[AnsweringOptions] | Check[AnsweringOptions], ...]" = (
    Rule(_names_no_file, "--name {name}: give the file's name without a folder and without .jsonl."),
)
RESPONSE_RULE: Rule[Any] = Rule(
    lambda options: options.responses.num_return > 1 and options.responses.temperature_value == 0,
    "--num_return {num_return}: --temperature 0 gives the same response every time. Leave --num_return out, or give a"
    " --temperature above 0.",
)
SCORE_RULES: "tuple[Rule[ScoredOptions] | Check[ScoredOptions], ...]" = (
    Check(_check_dataset),
    Rule(
        lambda options: options.scores.reward_model is not None and options.scores.reward_function is not None,
        "--reward_model and --reward_function both score the responses: give one of them.",
    ),
    Check(_check_reward_function),
    Rule(
        lambda options: options.scores.rm_template and options.scores.reward_model is None,
        "--rm_template says how a reward model reads texts: give --reward_model, or drop it.",
    ),
)
INFERENCE_RULES: "tuple[Rule[InferenceOptions], ...]" = (
    Rule(
        lambda options: options.policy.model is None and not options.reference.ref_scores,
        "--model is missing: give the policy's folder, or --ref_scores to score the data set.",
    ),
    Rule(
        lambda options: options.reference.ref_scores and not options.scores.has_scores,
        "--ref_scores needs scores: give --reward_model or --reward_function module.py:function.",
    ),
    Rule(
        lambda options: options.responses.num_return > 1 and not options.scores.has_scores,
        "--num_return {num_return} keeps the response with the highest score, so it needs scores: give --reward_model"
        " or --reward_function module.py:function.",
    ),
    Rule(
        lambda options: (
            options.reference.ref_scores and options.scores.reward_model is None and options.policy.model is None
        ),
        "--ref_scores with --reward_function also needs --model, whose chat template formats the prompts.",
    ),
    Rule(
        lambda options: options.responses.num_return > 1 and options.reference.ref_scores,
        "--num_return {num_return}: --ref_scores generates no responses. Leave one of the two out.",
    ),
)
BEST_OF_RULES: "tuple[Rule[BestOfOptions], ...]" = (
    Rule(
        lambda options: not options.sweep.temperatures and not options.sweep.single_temperatures,
        "--temperatures and --single_temperatures: give at least one of them a number.",
    ),
    Rule(
        lambda options: not options.scores.has_scores,
        "the best response is that with the highest score: give --reward_model or --reward_function.",
    ),
    Rule(
        lambda options: 0 in options.sweep.temperatures and max(options.sweep.best_of) > 1,
        "--temperatures 0 gives the same response every time, also with --best_of {most}. Give 0 to"
        " --single_temperatures instead.",
        words=lambda options: {"most": max(options.sweep.best_of)},
    ),
)


# -- commands


def quiet_transformers() -> None:
    """Silences the progress bars and messages of transformers; the commands have their own."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


class ModelOptions(Config):
    """Flags of every command that opens models or tokenizers."""

    def prepare(self) -> None:
        """Silences transformers, so that only the command's own progress bar is shown."""
        quiet_transformers()


class AnsweringOptions(ModelOptions):
    """Flags of every command that answers a data set's prompts into a file below --proj_path."""

    helps: ClassVar[dict[str, str]] = {"device": "device: cpu, cuda or cuda:N; takes precedence over --gpu"}
    rules: ClassVar[Rules] = ANSWERING_RULES

    policy: PolicyFlags
    data: DatasetFlags
    prompts: PromptFlags
    sampler: TokenSamplerFlags
    generation: GenerationFlags
    hardware: GPUFlags
    compute: ComputeFlags
    project: ProjectFlags
    result: OverwriteFlags
    columns: ColumnFlags

    def prepare(self) -> None:
        """Read data sets below --proj_path, unless MA_RLHF_DATA says otherwise."""
        super().prepare()
        os.environ.setdefault("MA_RLHF_DATA", str(self.project.proj_path / "data"))

    @cached_property
    def dataset_name(self) -> str:
        """Name of the data set in results."""
        known_set = find_known(self.data.dataset)
        return self.data.dataset if known_set is None else known_set.name

    @property
    def prompt_count(self) -> int | None:
        """Number of prompts to take; None = all."""
        return self.prompts.num_samples

    @property
    def result_path(self) -> Path:
        """The result file."""
        raise NotImplementedError


class ScoredOptions(AnsweringOptions):
    """Flags of every command with a reward model or a function that scores."""

    helps: ClassVar[dict[str, str]] = {
        "num_samples": f"number of prompts; if not given {PROTOCOL_SAMPLES}, and all for webgpt"
    }
    rules: ClassVar[Rules] = (*ANSWERING_RULES, *SCORE_RULES)

    scores: ScoreFlags

    @cached_property
    def dataset_name(self) -> str:
        """Name of the data set in results.

        Raises:
            UserError: there is no such data set.
        """
        return compared_set(self.data.dataset, self.data.data_path is not None, OWN_DATA)

    @property
    def prompt_count(self) -> int | None:
        """Number of prompts to use; by default that of the protocol; None = all."""
        if self.prompts.num_samples is None and self.dataset_name != UNSHUFFLED:
            return PROTOCOL_SAMPLES
        return self.prompts.num_samples


class InferenceOptions(ScoredOptions):
    """Answer a data set's held-out prompts with a model; a reward model or a function may score the responses.

    Writes PROJ_PATH/results/DATASET/temperature=T/MODEL.jsonl: prompt, response, finished and, where they are scored,
    reward. If it is interrupted, the same command continues it.
    """

    defaults: ClassVar[dict[str, Any]] = {"model": None}
    helps: ClassVar[dict[str, str]] = {
        "model": f"{MODEL_HELP}; not needed with --ref_scores",
        "num_return": "responses generated per prompt, of which the one with the highest reward is kept",
    }
    rules: ClassVar[Rules] = (*ScoredOptions.rules, RESPONSE_RULE, *INFERENCE_RULES)

    reference: ReferenceFlags
    responses: ResponseFlags

    @property
    def result_path(self) -> Path:
        """The result file, called after the model or `reference`."""
        name = REFERENCE if self.reference.ref_scores else model_name(self.policy.model or "")
        return self.project.result_path(self.dataset_name, self.responses.folder, name)


class BestOfOptions(ScoredOptions):
    """Rewards of the best of N responses at several temperatures, and of a single response at each.

    Writes into PROJ_PATH/results/DATASET/best-of-n: MODEL.jsonl with all responses and their rewards, a row for each
    prompt and temperature; MODEL.md and MODEL.json, the table; MODEL.png, the curves. If it is interrupted, the same
    command continues it.
    """

    rules: ClassVar[Rules] = (*ScoredOptions.rules, *BEST_OF_RULES)

    sweep: SweepFlags

    @property
    def result_path(self) -> Path:
        """The file of the responses, called after the model."""
        return self.project.result_path(self.dataset_name, "best-of-n", model_name(self.policy.model or ""))


class TextOptions(ModelOptions):
    """Perplexity and ROUGE of policies, loss and accuracy of reward models, on a split of a data set.

    Writes into the folder of --output: rows.jsonl, a row for each model and text; report.md and report.json.
    If it is interrupted, the same command continues it.
    """

    helps: ClassVar[dict[str, str]] = {
        "device": "device: cpu, cuda or cuda:N; takes precedence over --gpu",
        "num_samples": "number of rows of the split to measure on, the same for every model; all if not given",
        "max_new_tokens": "maximum response length in tokens, for ROUGE",
        "batch_size": "rows per forward pass",
    }
    rules: ClassVar[Rules] = (
        Rule(
            lambda options: not (options.text.model or options.text.reward_model or options.text.checkpoints),
            "Nothing to measure: give --model, --reward_model or --checkpoints.",
        ),
    )

    text: TextFlags
    prompts: PromptFlags
    generation: GenerationFlags
    hardware: GPUFlags
    compute: ComputeFlags
    result: OverwriteFlags
    columns: ColumnFlags


class BenchmarkOptions(ModelOptions):
    """Benchmarks of EleutherAI's lm-evaluation-harness, such as GSM8K, MMLU or ARC.

    Writes OUTPUT_DIR/MODEL.jsonl: a row for each task and metric with value, standard error, number of rows, and
    versions of task and harness. `dschat report` compares such files.
    """

    benchmarks: BenchmarkFlags
    compute: ComputeFlags
    result: OverwriteFlags


def model_name(path: str) -> str:
    """Name of a model, a folder or hub id, in result paths: the folder's.

    A run's policy has the run's name: `RUN` for actor/, `RUN-ema` for actor_ema/, `RUN-step-40` for models/step-40/.
    The training scripts' presets write into PRESET/sft, PRESET/reward, PRESET/dpo, PRESET/ppo and PRESET/ppo-VARIANT.
    There the folder alone does not tell models apart, and the one above joins it: `tldr-gemma-2b-ppo`.
    """
    folder = Path(os.path.abspath(path))
    part = ""  # which of a run's models it is
    if folder.name in ACTORS:
        part = ACTORS[folder.name]
        folder = folder.parent
    if folder.parent.name == "models" and folder.name.startswith("step-"):
        part = f"-{folder.name}{part}"
        folder = folder.parent.parent
    is_step = folder.name in STEPS_BY_COMMAND or folder.name.startswith("ppo-")
    if folder.parent.name and is_step:
        return f"{folder.parent.name}-{folder.name}{part}"
    return f"{folder.name}{part}"
