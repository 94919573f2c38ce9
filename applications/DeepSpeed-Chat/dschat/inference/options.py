# SPDX-License-Identifier: Apache-2.0
"""What an inference run is told, checked before anything slow is imported, and where its file goes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from dschat.data.formats.rows import DataKeys
from dschat.errors import UserError
from dschat.evaluation.pairs.dataset_names import DATASETS

DTYPES = ("fp32", "bf16", "fp16")
UNSHUFFLED = "webgpt"  # its validation rows are used whole, in their own order
PROTOCOL_SAMPLES = 2000  # of the other sets
REFERENCE = "reference"  # name of the file of --ref-scores
STAGES = ("sft", "reward", "ppo")  # what the training scripts call a model's folder, in one with the preset's name
PPO_VARIANT = "ppo-"
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class InferenceOptions:
    """The flags of inference_with_rewards.py, by the same names.

    Attributes:
        proj_path: folder that the results go below.
        dataset: one of DATASETS.
        reward_model: folder or hub id of a sequence classifier with one label.
        model: folder or hub id of the policy, with or without `actor` below it; may be None with `ref_scores`.
        temperature: as it was typed, since it names a folder; 0 = greedy.
        gpu: number of the CUDA device.
        device: "cpu", "cuda" or "cuda:N"; decides over `gpu`.
        dtype: one of DTYPES; None = bf16 on CUDA, fp32 on a CPU.
        batch_size: prompts that are answered, and texts that are scored, at once.
        ref_scores: score the data set's own responses instead of generating.
        num_samples: prompts; None = PROTOCOL_SAMPLES, or all of webgpt.
        num_return: responses per prompt, of which the one with the highest reward is kept.
        top_k: 0 = all.
        top_p: 1 = all.
        max_new_tokens: longest response.
        max_prompt_len: longest prompt in tokens, BOS included; longer ones are left out; None = no limit.
        seed: of the draws.
        rm_template: the reward model reads its own chat template.
        data_path: where the data set is read instead.
        prompt_key: column of the prompt; this and the next four as in `DataKeys`.
        chosen_key: column of the preferred response.
        rejected_key: column of the other response.
        response_key: column of the response in data without preferences.
        messages_key: column of a conversation.
        name: what the file is called, without its suffix; None = after the model.
        overwrite: drop a finished file or an interrupted run.
    """

    proj_path: Path
    dataset: str
    reward_model: str
    model: str | None = None
    temperature: str = "0.8"
    gpu: int | None = None
    device: str | None = None
    dtype: str | None = None
    batch_size: int = 16
    ref_scores: bool = False
    num_samples: int | None = None
    num_return: int = 1
    top_k: int = 50
    top_p: float = 1.0
    max_new_tokens: int = 512
    max_prompt_len: int | None = None
    seed: int = 1234
    rm_template: bool = False
    data_path: str | None = None
    prompt_key: str = DataKeys.prompt
    chosen_key: str = DataKeys.chosen
    rejected_key: str = DataKeys.rejected
    response_key: str = DataKeys.response
    messages_key: str = DataKeys.messages
    name: str | None = None
    overwrite: bool = False

    def check(self) -> None:
        """Refuses values that make no sense.

        Raises:
            UserError: names the flag and what to change.
        """
        _check_choice("--dataset", self.dataset, DATASETS)
        if self.dtype is not None:
            _check_choice("--dtype", self.dtype, DTYPES)
        if self.model is None and not self.ref_scores:
            raise UserError("--model is missing: give the policy's folder, or --ref-scores to score the data set.")
        for name in ("batch_size", "num_return", "max_new_tokens", "num_samples", "max_prompt_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{flag_of(name)} {value}: must be at least 1.")
        if self.name is not None and not _is_file_stem(self.name):
            raise UserError(f"--name {self.name}: give the file's name without a folder and without .jsonl.")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k}: must be 0 (all tokens) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p}: must be above 0 and at most 1 (all tokens).")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UserError(f"--seed {self.seed}: must be between 0 and {LARGEST_SEED}.")
        if self.gpu is not None and self.gpu < 0:
            raise UserError(f"--gpu {self.gpu}: must be the number of a GPU, from 0; for the CPU give --device cpu.")
        greedy = self.temperature_value == 0
        if self.num_return > 1 and (greedy or self.ref_scores):
            why = "--temperature 0 gives the same response every time" if greedy else "--ref-scores draws no responses"
            raise UserError(f"--num-return {self.num_return}: {why}. Leave --num-return out, or change that flag.")

    @property
    def temperature_value(self) -> float:
        """The temperature as a number.

        Raises:
            UserError: it is none, or negative.
        """
        try:
            value = float(self.temperature)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"--temperature {self.temperature}: must be 0 (greedy) or a positive number, such as 0.8.")
        return value

    @property
    def samples(self) -> int | None:
        """Number of prompts to take; None = all."""
        if self.num_samples is not None:
            return self.num_samples
        return None if self.dataset == UNSHUFFLED else PROTOCOL_SAMPLES

    @property
    def keys(self) -> DataKeys:
        """The data set's column names."""
        return DataKeys(self.prompt_key, self.chosen_key, self.rejected_key, self.response_key, self.messages_key)

    @property
    def result_path(self) -> Path:
        """The file: results/{dataset}/temperature={t}/{name, or the model's name}.jsonl below `proj_path`."""
        name = self.name or (REFERENCE if self.ref_scores else model_name(self.model or ""))
        folder = self.proj_path / "results" / self.dataset / f"temperature={self.temperature.strip()}"
        return folder / f"{name}.jsonl"


def flag_of(field: str) -> str:
    """`num_return` → `--num-return`."""
    return "--" + field.replace("_", "-")


def model_name(path: str) -> str:
    """Name of a model in result paths: its folder's, or the parent's where the folder is called `actor`.

    A folder that is called as the presets call theirs (STAGES, PPO_VARIANT) says little: the one above joins it, as in
    `tldr-gemma-2b-ppo`.

    Args:
        path: folder or hub id.
    """
    folder = Path(os.path.abspath(path))
    if folder.name == "actor":
        folder = folder.parent
    if folder.parent.name and (folder.name in STAGES or folder.name.startswith(PPO_VARIANT)):
        return f"{folder.parent.name}-{folder.name}"
    return folder.name


def _is_file_stem(name: str) -> bool:
    return name not in ("", "..") and Path(name).name == name and not name.endswith(".jsonl")


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{flag} {value}: must be one of {', '.join(choices)}.")
