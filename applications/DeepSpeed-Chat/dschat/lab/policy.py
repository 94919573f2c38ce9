# SPDX-License-Identifier: Apache-2.0
"""The policy: where its model lies, what it computes on, and its responses."""

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.data.sources import HUB_NAME
from dschat.lab.generate_options import ComputeFlags, PolicyOptions, PromptFlags, TextOptions
from dschat.lab.refuel.options import GenerateOptions
from dschat.models.limits import position_limit
from dschat.models.load import load_causal_lm
from dschat.models.opening import choose_dtype
from dschat.models.tokenizer import own_end_ids
from dschat.rollouts.engine import ResponseSampler
from dschat.rollouts.generate import choose_engine
from dschat.rollouts.sampling import Sampling, row_seed

logger = logging.getLogger(__name__)

ACTOR = "actor"  # folder of the policy below a step-3 output folder
FLAGS_FILE = "train_config.json"  # which every run writes
STEP = re.compile(r"step-(\d+)")  # folder of a model that was kept along the way


@dataclass(frozen=True)
class Compute:
    """Where and in what models compute."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def chosen(cls, options: ComputeFlags) -> "Compute":
        """What the flags say; see `choose_device` and `choose_dtype`."""
        gpu = options.gpu if isinstance(options, PromptFlags) else None
        device = choose_device(gpu, options.device)
        return cls(device, choose_dtype(options.dtype, device))

    @property
    def settings(self) -> dict[str, str]:
        """For the settings of a run."""
        return {"device": self.device.type, "dtype": str(self.dtype).removeprefix("torch.")}


@dataclass(frozen=True)
class SampledResponse:
    """What the policy drew."""

    text: str  # without special tokens
    tokens: int  # its length as it was drawn, the end token included
    finished: bool  # whether it ended by itself; else it was cut at --max_new_tokens


@dataclass(frozen=True)
class SamplingPolicy:
    """A causal LM with its tokenizer and way of sampling."""

    causal_lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    seed: int
    sampler: ResponseSampler  # what draws from the model

    def respond(self, examples: Sequence[PromptExample], draws: int = 1) -> list[list[SampledResponse]]:
        """So many responses to each prompt, all drawn in one pool.

        A response's seed is made from --seed, its prompt's number and its own number among those of the prompt.

        Returns:
            A list for each draw, in the order of the prompts.
        """
        wanted = [(draw, example) for draw in range(draws) for example in examples]
        prompts = [example.prompt_ids for _, example in wanted]
        seeds = [row_seed(self.seed, example.index, draw) for draw, example in wanted]
        rollout = self.sampler(prompts, self.sampling, seeds).rollout
        responses = []
        for ids, finished in zip(rollout.response_rows(), rollout.finished.tolist(), strict=True):
            text = decode_response(self.tokenizer, ids[:-1] if finished else ids)
            responses.append(SampledResponse(text, len(ids), finished))
        return [responses[first : first + len(examples)] for first in range(0, len(responses), len(examples))]

    def at(self, temperature: float) -> "SamplingPolicy":
        """The same model, drawing at another temperature."""
        return replace(self, sampling=replace(self.sampling, temperature=temperature))

    def check_lengths(self, longest_prompt: int) -> None:
        """Raises UserError where the longest prompt and response together are longer than the model can read."""
        limit, longest_response = position_limit(self.causal_lm), self.sampling.max_new_tokens
        if limit is None or longest_prompt + longest_response <= limit:
            return
        remedy = "Lower --max_new_tokens"
        if longest_response < limit:
            remedy += f", or leave long prompts out with --max_prompt_len {limit - longest_response}"
        raise UserError(
            f"--model: it reads at most {limit} tokens, but the longest prompt has {longest_prompt} and "
            f"--max_new_tokens is {longest_response}. {remedy}."
        )


def load_policy(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    options: PolicyOptions | TextOptions,
    temperature: float,
    where: Compute,
) -> SamplingPolicy:
    """Opens the policy at a path from `locate_policy`; raises UserError where there is no such model."""
    causal_lm, sampling, draw = load_sampler(path, "--model", tokenizer, options, temperature, where)
    return SamplingPolicy(causal_lm, tokenizer, sampling, options.seed or 0, draw)


def load_sampler(
    path: str,
    flag: str,
    tokenizer: PreTrainedTokenizerBase,
    options: PolicyOptions | TextOptions | GenerateOptions,
    temperature: float,
    where: Compute,
    ends: Collection[int] = (),
) -> tuple[PreTrainedModel, Sampling, ResponseSampler]:
    """Opens the causal LM at a path from `locate_policy`, which a flag named, to draw from.

    `ends` are ids that end a response beside EOS and the checkpoint's own; at temperature 0 draws are greedy.

    Returns:
        The model, how it draws, and what draws.
    """
    causal_lm = load_causal_lm(path, flag, where.dtype, tokenizer).to(where.device).eval()
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        end_ids=tuple(sorted({tokenizer.eos_token_id, *ends, *own_end_ids(path)})),
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
        temperature=temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    engine = choose_engine(options.rollout_engine, options.batch_size, causal_lm, "--rollout_engine")
    return causal_lm, sampling, engine.sampler_for(causal_lm)


def locate_policy(path: str) -> str:
    """What transformers can open: `path`, a folder or hub id, or the `actor` below it where there is no model.

    `path` comes back unchanged where nothing better is found, for the loader to refuse.
    """
    folder = Path(path)
    if folder.is_dir():
        is_output = (folder / ACTOR).is_dir() and not any(folder.glob("*.safetensors"))
        return str(folder / ACTOR) if is_output else path
    above = path.removesuffix(f"/{ACTOR}")
    repository = above if HUB_NAME.fullmatch(above) else path  # somebody's repository may be called so itself
    if not HUB_NAME.fullmatch(repository) or (repository == path and _is_model(path)):
        return path
    from huggingface_hub import snapshot_download

    try:  # the hub, or what an earlier download left in the cache
        folder = Path(snapshot_download(repository, allow_patterns=[f"{ACTOR}/*"])) / ACTOR
    except (OSError, ValueError):
        return path
    return str(folder) if folder.is_dir() else path


def _is_model(repository: str) -> bool:
    try:
        AutoConfig.from_pretrained(repository, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return False
    return True


def choose_device(gpu: int | None = None, device: str | None = None) -> torch.device:
    """The device that the flags ask for; with neither flag the first GPU, or else the CPU.

    Args:
        gpu: --gpu. Number 0 falls back to the CPU, with a warning, where there is no GPU at all.
        device: --device, which decides over `gpu`: "cpu", "cuda" or "cuda:N".
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"PyTorch finds {count or 'no'} GPU{'s' if count > 1 else ''} here{', numbered from 0' if count else ''}"
    if device == "cpu":
        return torch.device("cpu")
    if device is not None:
        named = re.fullmatch(r"cuda(?::(\d+))?", device)
        if named is None:
            raise UserError(f"--device {device}: must be cpu, cuda or cuda:N with the number of a GPU.")
        number = int(named[1] or 0)
        if number >= count:
            remedy = "check the driver, CUDA_VISIBLE_DEVICES and that PyTorch was installed with CUDA"
            raise UserError(f"--device {device}: {found}. Give --device cpu, or {remedy}.")
        return torch.device("cuda", number)
    if gpu is not None and gpu >= max(1, count):
        raise UserError(f"--gpu {gpu}: {found}. Give one that exists, or --device cpu.")
    if count:
        return torch.device("cuda", gpu or 0)
    if gpu is not None:
        logger.warning("--gpu %d: there is no GPU here, computing on the CPU", gpu)
    return torch.device("cpu")
