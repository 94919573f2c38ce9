# SPDX-License-Identifier: Apache-2.0
"""The flags of an inference run, checked before anything slow is imported, and where its file goes."""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dschat.common.script import add_flags, flag
from dschat.config.rollouts import engine_name
from dschat.data.hub import COMPARED_SETS, compared_set
from dschat.data.rows import DataKeys
from dschat.errors import UserError
from dschat.evaluation.best_of import PUBLISHED
from dschat.inference.values import check_known, check_positive, check_temperature, flag_of, model_name
from dschat.scoring.programs.sandbox import LEVELS, Level

ENGINES = ("continuous", "generate")
DTYPES = ("fp32", "bf16", "fp16")
UNSHUFFLED = "webgpt"  # its validation rows are used whole, in their own order
PROTOCOL_SAMPLES = 2000  # of the other sets
REFERENCE = "reference"  # name of the file of --ref-scores


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Flags of every run that draws responses. A field is a flag: its name, type, default and help line."""

    proj_path: Path = flag(
        "results go below it, data sets are read from its folder data unless MA_RLHF_DATA is set ($PROJ_PATH)"
    )
    gpu: int | None = flag("number of the GPU (0 where there is one)", None)
    device: str | None = flag("cpu, cuda or cuda:N; decides over --gpu", None)
    dtype: str | None = flag("of the models: fp32, bf16 or fp16 (bf16 on a GPU, fp32 on a CPU)", None)
    batch_size: int = flag("prompts answered at once (%(default)s)", 16)
    rollout_engine: str = flag(
        "what draws responses: continuous (our own batching) or generate (transformers'; slower) (%(default)s)",
        "continuous",
    )
    num_samples: int | None = flag("prompts (all)", None)
    top_k: int = flag("draw from so many of the likeliest tokens, 0 = all (%(default)s)", 50)
    top_p: float = flag("draw from the likeliest tokens of this share, 1 = all (%(default)s)", 1.0)
    max_new_tokens: int = flag("longest response in tokens (%(default)s)", 512)
    max_prompt_len: int | None = flag("leave out prompts of more tokens, BOS included (no limit)", None)
    seed: int = flag("of the draws (%(default)s); the choice of prompts does not depend on it", 1234)
    data_path: str | None = flag(
        "where to read the data set: file, folder or hub id (its own place); your own may have any --dataset name",
        None,
    )
    prompt_key: str = flag("column of the prompt (%(default)s)", DataKeys.prompt)
    chosen_key: str = flag("column of the preferred response (%(default)s)", DataKeys.chosen)
    rejected_key: str = flag("column of the other response (%(default)s)", DataKeys.rejected)
    response_key: str = flag("column of the response in data without preferences (%(default)s)", DataKeys.response)
    messages_key: str = flag("column of a conversation (%(default)s)", DataKeys.messages)
    name: str | None = flag("name of the result file, without .jsonl (the model's)", None)
    overwrite: bool = flag("start anew, dropping a finished file or a run begun without this flag", False)

    def __post_init__(self) -> None:
        """Refuses values that make no sense. Raises UserError, which names the flag and what to change."""
        object.__setattr__(self, "rollout_engine", engine_name(self.rollout_engine))
        for name, known in (("dtype", (None, *DTYPES)), ("rollout_engine", ENGINES)):
            check_known(name, getattr(self, name), known)
        for name in ("batch_size", "max_new_tokens", "num_samples", "max_prompt_len"):
            check_positive(name, getattr(self, name))
        stem = self.name
        if stem is not None and (stem in ("", "..") or Path(stem).name != stem or stem.endswith(".jsonl")):
            raise UserError(f"--name {self.name}: give the file's name without a folder and without .jsonl.")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k}: must be 0 (all tokens) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p}: must be above 0 and at most 1 (all tokens).")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed {self.seed}: must be between 0 and {2**32 - 1}.")
        if self.gpu is not None and self.gpu < 0:
            raise UserError(f"--gpu {self.gpu}: must be the number of a GPU, from 0; for the CPU give --device cpu.")

    @property
    def keys(self) -> DataKeys:
        """The data set's column names."""
        return DataKeys(self.prompt_key, self.chosen_key, self.rejected_key, self.response_key, self.messages_key)

    def path_of(self, dataset: str, folder: str, name: str) -> Path:
        """The result file: results/{dataset}/{folder}/{name}.jsonl below `proj_path`."""
        return self.proj_path / "results" / dataset / folder / f"{self.name or name}.jsonl"


@dataclass(frozen=True, kw_only=True)
class TemperatureOptions(PolicyOptions):
    """Flags of a run that draws at one temperature."""

    temperature: str = flag("of sampling; 0 = greedy (%(default)s)", "0.8")  # text: it names a folder
    num_return: int = flag("responses to a prompt (%(default)s)", 1)

    def __post_init__(self) -> None:
        """Refuses values that make no sense. Raises UserError, which names the flag and what to change."""
        super().__post_init__()
        check_positive("num_return", self.num_return)
        greedy = self.temperature_value == 0
        if self.num_return > 1 and greedy:
            raise UserError(
                f"--num-return {self.num_return}: --temperature 0 gives the same response every time. Leave"
                " --num-return out, or change that flag."
            )

    @property
    def temperature_value(self) -> float:
        """The temperature as a number; raises UserError where it is none, or negative."""
        try:
            value = float(self.temperature)
        except ValueError:
            value = math.nan
        check_temperature("temperature", value, self.temperature)
        return value

    @property
    def temperature_folder(self) -> str:
        """Of the result file."""
        return f"temperature={self.temperature.strip()}"


@dataclass(frozen=True, kw_only=True)
class ScoredOptions(PolicyOptions):
    """Flags of every run with a reward model."""

    dataset: str = flag(
        f"validation set that gives the prompts: {', '.join(COMPARED_SETS)}, or a name for the data of --data-path"
    )
    reward_model: str = flag("folder or hub id of a sequence classifier with one label")
    rm_template: bool = flag("put prompt and response through the reward model's chat template", False)
    num_samples: int | None = flag(f"prompts ({PROTOCOL_SAMPLES}; webgpt: all)", None)

    def __post_init__(self) -> None:
        """Refuses values that make no sense. Raises UserError, which names the flag and what to change."""
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
    """What a run with a reward model is told."""

    model: str | None = flag("policy: folder or hub id, with or without /actor (not needed with --ref-scores)", None)
    ref_scores: bool = flag("score the data set's own chosen and rejected responses, into reference.jsonl", False)
    num_return: int = flag("draw so many responses to a prompt, keep the best by reward (%(default)s)", 1)

    def __post_init__(self) -> None:
        """Refuses values that make no sense. Raises UserError, which names the flag and what to change."""
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
    """What a sweep over numbers of responses and temperatures is told."""

    model: str = flag("policy: folder or hub id, with or without /actor")
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
        """Refuses values that make no sense. Raises UserError, which names the flag and what to change."""
        super().__post_init__()
        for name in ("best_of", "temperatures", "single_temperatures"):
            values: Sequence[float] = getattr(self, name)
            if any(value >= following for value, following in zip(values, values[1:], strict=False)):
                given = " ".join(f"{value:g}" for value in values)
                raise UserError(f"{flag_of(name)} {given}: give each number once, the smallest first.")
        for number in self.best_of:
            check_positive("best_of", number)
        for name in ("temperatures", "single_temperatures"):
            for value in getattr(self, name):
                check_temperature(name, value)
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
    """What a run that executes the responses is told."""

    model: str = flag("policy: folder or hub id, with or without /actor")
    dataset: str = flag("published set, or a name for the data of --data-path (%(default)s)", "apps")
    temperature: str = flag("of sampling; 0 = greedy (%(default)s)", "1.0")
    top_k: int = flag("draw from so many of the likeliest tokens, 0 = all (%(default)s)", 5)
    num_return: int = flag("programs for a problem (%(default)s)", 5)
    max_prompt_len: int | None = flag("leave out problems of more tokens, BOS included (%(default)s)", 600)
    sandbox_level: str = flag("minimum isolation level of the programs' sandbox (%(default)s)", "namespaces")
    sandbox_workers: int = flag("programs that are run at a time (%(default)s)", 4)
    max_tests: int | None = flag("tests of a problem that are run, the first (all)", None)

    def __post_init__(self) -> None:
        """Refuses values that make no sense. Raises UserError, which names the flag and what to change."""
        super().__post_init__()
        check_known("sandbox_level", self.sandbox_level, LEVELS)
        for name in ("sandbox_workers", "max_tests"):
            check_positive(name, getattr(self, name))

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


Options = TypeVar("Options")


def parse_flags(options: type[Options], words: Sequence[str], description: str) -> Options:
    """The options of a command line; --proj-path may come from $PROJ_PATH. Raises UserError, see the class."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    project = os.environ.get("PROJ_PATH")
    add_flags(parser, options, **({"proj_path": project} if project else {}))
    return options(**vars(parser.parse_args(words)))
