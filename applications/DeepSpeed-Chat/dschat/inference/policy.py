# SPDX-License-Identifier: Apache-2.0
"""The policy: where its model lies, and its responses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.data.sources import HUB_NAME
from dschat.errors import UserError
from dschat.models.limits import position_limit
from dschat.models.load import load_causal_lm
from dschat.models.tokenizer import own_end_ids
from dschat.rollouts.engine import Draw
from dschat.rollouts.generate import choose_engine
from dschat.rollouts.sampling import Sampling, row_seed

BELOW = "actor"  # folder of the policy below a step-3 output folder


class SamplingFlags(Protocol):
    """The flags that drawing depends on, beside the temperature."""

    @property
    def max_new_tokens(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def rollout_engine(self) -> str: ...


@dataclass(frozen=True)
class SampledResponse:
    """What the policy drew."""

    text: str  # without special tokens
    tokens: int  # its length as it was drawn, the end token included
    finished: bool  # whether it ended by itself; else it was cut at --max-new-tokens


class Policy:
    """A causal LM with its tokenizer and way of sampling."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        seed: int,
        draw: Draw,
    ) -> None:
        self.causal_lm, self._tokenizer, self._sampling, self._seed = causal_lm, tokenizer, sampling, seed
        self._draw = draw

    def respond(self, examples: Sequence[PromptExample], draws: int = 1) -> list[list[SampledResponse]]:
        """So many responses to each prompt, all drawn in one pool.

        A response's seed is made from --seed, its prompt's number and its own number among those of the prompt.

        Returns:
            A list for each draw, in the order of the prompts.
        """
        wanted = [(draw, example) for draw in range(draws) for example in examples]
        prompts = [example.prompt_ids for _, example in wanted]
        seeds = [row_seed(self._seed, example.index, draw) for draw, example in wanted]
        rollout = self._draw(prompts, self._sampling, seeds).rollout
        responses = []
        for ids, finished in zip(rollout.response_rows(), rollout.finished.tolist(), strict=True):
            text = decode_response(self._tokenizer, ids[:-1] if finished else ids)
            responses.append(SampledResponse(text, len(ids), finished))
        return [responses[first : first + len(examples)] for first in range(0, len(responses), len(examples))]

    def at(self, temperature: float) -> "Policy":
        """The same model, drawing at another temperature."""
        sampling = replace(self._sampling, temperature=temperature)
        return Policy(self.causal_lm, self._tokenizer, sampling, self._seed, self._draw)

    def check_lengths(self, longest_prompt: int) -> None:
        """Raises UserError where the longest prompt and response together are longer than the model can read."""
        limit, longest_response = position_limit(self.causal_lm), self._sampling.max_new_tokens
        if limit is None or longest_prompt + longest_response <= limit:
            return
        remedy = "Lower --max-new-tokens"
        if longest_response < limit:
            remedy += f", or leave long prompts out with --max-prompt-len {limit - longest_response}"
        raise UserError(
            f"--model: it reads at most {limit} tokens, but the longest prompt has {longest_prompt} and "
            f"--max-new-tokens is {longest_response}. {remedy}."
        )


def load_policy(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    options: SamplingFlags,
    temperature: float,
    device: torch.device,
    dtype: torch.dtype,
) -> Policy:
    """Opens the policy at a path from `locate_policy`; raises UserError where there is no such model."""
    causal_lm = load_causal_lm(path, "--model", dtype, tokenizer).to(device).eval()
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        end_ids=tuple(sorted({tokenizer.eos_token_id, *own_end_ids(path)})),
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
        temperature=temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    engine = choose_engine(options.rollout_engine, options.batch_size, causal_lm, "--rollout-engine")
    return Policy(causal_lm, tokenizer, sampling, options.seed, engine.draw_from(causal_lm))


def locate_policy(path: str) -> str:
    """What transformers can open: `path`, a folder or hub id, or the `actor` below it where there is no model.

    `path` comes back unchanged where nothing better is found, for the loader to refuse.
    """
    folder = Path(path)
    if folder.is_dir():
        is_output = (folder / BELOW).is_dir() and not any(folder.glob("*.safetensors"))
        return str(folder / BELOW) if is_output else path
    above = path.removesuffix(f"/{BELOW}")
    repository = above if HUB_NAME.fullmatch(above) else path  # somebody's repository may be called so itself
    if not HUB_NAME.fullmatch(repository) or (repository == path and _is_model(path)):
        return path
    from huggingface_hub import snapshot_download

    try:  # the hub, or what an earlier download left in the cache
        folder = Path(snapshot_download(repository, allow_patterns=[f"{BELOW}/*"])) / BELOW
    except (OSError, ValueError):
        return path
    return str(folder) if folder.is_dir() else path


def _is_model(repository: str) -> bool:
    try:
        AutoConfig.from_pretrained(repository, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return False
    return True
