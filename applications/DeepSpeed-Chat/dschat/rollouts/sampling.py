# SPDX-License-Identifier: Apache-2.0
"""How responses are drawn: length, end ids, temperature, truncation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from dschat.config.ppo import PPOConfig
from dschat.models.tokenizer import end_token_id


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int
    end_ids: tuple[int, ...]  # any of them ends a response
    pad_id: int
    bos_id: int | None = None
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = all
    top_p: float = 1.0

    @classmethod
    def from_config(
        cls, config: PPOConfig, tokenizer: PreTrainedTokenizerBase, own_ends: Collection[int] = ()
    ) -> Sampling:
        """The sampling of a PPOConfig.

        EOS always ends a response; --end_of_conversation_token does, too, and so do the model's own end tokens.
        """
        end_ids = {end_token_id(tokenizer, config.end_of_conversation_token), tokenizer.eos_token_id}
        end_ids |= set(own_ends) - {tokenizer.pad_token_id}
        return cls(
            max_new_tokens=config.max_answer_seq_len,
            end_ids=tuple(sorted(end_ids)),
            pad_id=tokenizer.pad_token_id,
            bos_id=tokenizer.bos_token_id,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
        )

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids that are never sampled: pad and BOS, unless one of them ends responses (GPT-2's BOS is its EOS)."""
        return frozenset(i for i in (self.pad_id, self.bos_id) if i is not None) - frozenset(self.end_ids)

    def generation_config(self) -> GenerationConfig:
        """The same for transformers, every field that could leak in from a checkpoint given explicitly."""
        options: dict[str, bool | int | float] = {"do_sample": False}
        if self.temperature > 0:
            options = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            eos_token_id=list(self.end_ids),
            pad_token_id=self.pad_id,
            bos_token_id=self.bos_id,
            suppress_tokens=sorted(self.forbidden),
            num_beams=1,
            repetition_penalty=1.0,
            use_cache=True,
            **options,
        )
