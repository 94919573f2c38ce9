# SPDX-License-Identifier: Apache-2.0
"""A causal LM whose forward gives log-probabilities of the response, never the full logits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from dschat.models.float32_linear import keep_float32
from dschat.models.positions import position_ids
from dschat.rl.logprobs import token_logprobs


class PolicyModel(nn.Module):
    """Actor or reference. ``inner`` is the Hugging Face causal LM, which is what gets saved.

    All computation goes through ``forward`` (or ``generate``), so that DeepSpeed's hooks see every use of a parameter.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.inner: Any = causal_lm
        keep_float32(causal_lm.get_output_embeddings())
        self.to_logits = logits_function(causal_lm)
        self.vocab_size = causal_lm.config.get_text_config().vocab_size

    @property
    def output_head(self) -> nn.Module | None:
        """The layer that is applied chunk by chunk, so unequally often on ranks whose responses differ in length."""
        return self.inner.get_output_embeddings()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, num_response: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the last ``num_response`` positions.

        Args:
            input_ids: (B, P+R) long, prompts padded on the left, responses on the right.
            attention_mask: (B, P+R) bool.
            num_response: R.
            temperature: divides the logits.

        Returns:
            logprobs (B, R) and entropy (B, R, without gradient), float32; meaningless where nothing is attended.
        """
        backbone = getattr(self.inner, self.inner.base_model_prefix)
        output = backbone(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            use_cache=False,
            **position_ids(backbone, attention_mask),
        )
        states = output.last_hidden_state[:, -num_response - 1 : -1]
        targets = input_ids[:, -num_response:]
        return token_logprobs(states, targets, self.to_logits, self.vocab_size, temperature)


def logits_function(causal_lm: Any) -> Callable[[Tensor], Tensor]:
    """Hidden states → logits exactly as the model's own forward does it: head, soft-capping, scaling and all.

    The result runs the forward method of a shallow copy of the model whose backbone hands its input through. The copy
    shares the head with the original and owns nothing.

    Args:
        causal_lm: a Hugging Face causal LM.

    Returns:
        A function (N, H) → (N, V).
    """
    head = copy.copy(causal_lm)
    head._modules = {**causal_lm._modules, causal_lm.base_model_prefix: _PassThrough()}
    takes_cache = "use_cache" in inspect.signature(causal_lm.forward).parameters

    def to_logits(hidden: Tensor) -> Tensor:
        options = {"use_cache": False} if takes_cache else {}
        return head.forward(inputs_embeds=hidden[None], **options).logits[0]

    return to_logits


class _PassThrough(nn.Module):
    """Stands where the backbone was: returns what it is given."""

    @property
    def decoder(self) -> _PassThrough:
        """OPT calls its backbone's decoder."""
        return self

    def forward(self, *args: object, inputs_embeds: Tensor, **kwargs: object) -> _States:
        return _States(last_hidden_state=inputs_embeds)


class _States(BaseModelOutputWithPast):
    """A backbone's output with nothing but the states: whatever else a model's forward asks for is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
