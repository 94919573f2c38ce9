# SPDX-License-Identifier: Apache-2.0
"""The policy: where its model is, and its responses."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.encoding import decode_sampled
from dschat.data.examples import PromptExample
from dschat.evaluation.generate_options import ComputeFlags, GenerationFlags, TokenSamplerFlags
from dschat.evaluation.runner import enough_memory
from dschat.models.limits import position_limit
from dschat.models.load import load_causal_lm
from dschat.models.opening import choose_device, choose_dtype
from dschat.models.tokenizer import own_end_ids
from dschat.rollouts.continuous import choose_engine
from dschat.rollouts.engine import ResponseSampler
from dschat.rollouts.sampling import Sampling, row_seed

ACTOR = "actor"  # folder of the policy below a step-3 output folder
STEP = re.compile(r"step-(\d+)")  # folder of a model that was saved during a run


@dataclass(frozen=True)
class Compute:
    """Device and dtype of the models."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def chosen(cls, flags: ComputeFlags, gpu: int | None = None) -> "Compute":
        """Device and dtype that the flags ask for; see `choose_device` and `choose_dtype`."""
        device = choose_device(gpu, flags.device)
        return cls(device, choose_dtype(flags.dtype, device))

    @property
    def settings(self) -> dict[str, str]:
        """Entries for the settings of a run."""
        return {"device": self.device.type, "dtype": str(self.dtype).removeprefix("torch.")}


@dataclass(frozen=True)
class SampledResponse:
    """A response of the policy.

    Attributes:
        text: without special tokens.
        tokens: sampled tokens, the end token included.
        finished: whether it ended by itself; else it was cut at --max_new_tokens.
    """

    text: str
    tokens: int
    finished: bool


@dataclass(frozen=True)
class SamplingPolicy:
    """A causal LM with its tokenizer, sampling parameters and engine."""

    causal_lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    seed: int
    sampler: ResponseSampler

    def respond(self, examples: Sequence[PromptExample], num_responses: int = 1) -> list[list[SampledResponse]]:
        """Sample `num_responses` responses to each prompt, all in one pool.

        The seed of a response follows from --seed, the number of its prompt, and its number among the responses to it.

        Returns:
            One list per number of a response, each in the order of the prompts.

        Raises:
            UserError: the model's logits are not finite.
        """
        prompts: list[list[int]] = []
        seeds: list[int] = []
        for number in range(num_responses):
            for example in examples:
                prompts.append(example.prompt_ids)
                seeds.append(row_seed(self.seed, example.index, number))

        generation = self.sampler(prompts, self.sampling, seeds)
        num_bad = int(generation.bad_rows.sum())
        if num_bad:
            raise UserError(
                f"--model: its logits are not finite for {num_bad} of {len(prompts)} responses. Give --dtype fp32 or"
                " bf16, or another checkpoint: in training this one may have diverged."
            )
        rollout = generation.rollout
        responses = []
        for ids, finished in zip(rollout.response_rows(), rollout.finished.tolist(), strict=True):
            text = decode_sampled(self.tokenizer, ids, finished)
            responses.append(SampledResponse(text, len(ids), finished))
        responses_by_number: list[list[SampledResponse]] = []
        for start in range(0, len(responses), len(examples)):
            responses_by_number.append(responses[start : start + len(examples)])
        return responses_by_number

    def at(self, temperature: float) -> "SamplingPolicy":
        """Copy that samples at another temperature from the same model."""
        return replace(self, sampling=replace(self.sampling, temperature=temperature))

    def check_lengths(self, longest_prompt: int) -> None:
        """Raise UserError if the longest prompt and response together exceed the model's context length."""
        limit = position_limit(self.causal_lm)
        longest_response = self.sampling.max_new_tokens
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
    flag: str,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationFlags,
    sampler: TokenSamplerFlags,
    temperature: float,
    where: Compute,
    ends: Collection[int] = (),
) -> SamplingPolicy:
    """Load the causal LM at a path from `locate_policy`, and choose the engine that samples from it.

    Args:
        path: folder or hub id.
        flag: that named it, for messages.
        tokenizer: tokenizer of the model.
        generation: engine, batch size and longest response.
        sampler: seed, top-k and top-p.
        temperature: 0 is greedy.
        where: device and dtype.
        ends: ids that end a response, in addition to EOS and the checkpoint's own end ids.

    Raises:
        UserError: there is no such model, or the GPU's memory does not hold it.
    """
    with enough_memory(f"{flag}: the GPU's memory does not hold {path}"):
        causal_lm = load_causal_lm(path, flag, where.dtype, tokenizer).to(where.device)
    end_ids = {tokenizer.eos_token_id, *ends, *own_end_ids(path)}
    sampling = Sampling(
        max_new_tokens=generation.max_new_tokens,
        end_ids=tuple(sorted(end_ids)),
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
        temperature=temperature,
        top_k=sampler.top_k,
        top_p=sampler.top_p,
    )
    engine = choose_engine(generation.rollout_engine, generation.batch_size, causal_lm, "--rollout_engine")
    return SamplingPolicy(causal_lm, tokenizer, sampling, sampler.seed, engine.sampler_for(causal_lm))


def locate_policy(path: str) -> str:
    """The path that transformers can open: a folder or hub id, or the folder `actor` below it if it holds no model."""
    folder = Path(path)
    is_output = (folder / ACTOR).is_dir() and not any(folder.glob("*.safetensors"))
    return str(folder / ACTOR) if is_output else path
