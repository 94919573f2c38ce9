# SPDX-License-Identifier: Apache-2.0
"""A causal LM whose forward gives log-probabilities of the response, never the full logits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from dschat.models.backbone import last_hidden_state
from dschat.models.compiled import Compiler
from dschat.models.heads import keep_float32
from dschat.models.vocabulary import missing_ids_of
from macro_actions.logprobs import Head, LogitKernels, token_logprobs


class PolicyModel(nn.Module):
    """Actor or reference. ``inner`` is the Hugging Face causal LM, which is what gets saved.

    All computation goes through ``forward`` (or generation), so that DeepSpeed's hooks see every use of a parameter.
    """

    def __init__(self, causal_lm: Any, all_rows: bool = False) -> None:
        """`all_rows`: ids that the tokenizer lacks stay in the softmax, as in step 1."""
        super().__init__()
        self.inner: Any = causal_lm
        self._all_rows = all_rows
        keep_float32(causal_lm.get_output_embeddings())
        self.to_logits = logits_function(causal_lm)
        self.kernels = LogitKernels()
        self.vocab_size = causal_lm.config.get_text_config().vocab_size

    @property
    def output_head(self) -> nn.Module | None:
        """The layer that is applied chunk by chunk, so unequally often on ranks whose responses differ in length."""
        return self.inner.get_output_embeddings()

    def compile_with(self, compiler: Compiler) -> None:
        """Has the passes over logits compiled, as the decoder layers are."""
        plain = LogitKernels()
        self.kernels = LogitKernels(compiler.compile(plain.softmax), compiler.compile(plain.gradient))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        targets: Tensor | int,
        temperature: float = 1.0,
        with_entropy: bool = True,
        smoothing: float = 0.0,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of some tokens, and their entropies without gradient: (N,) or (B, R), float32.

        `input_ids` (B, T) long; `attention_mask` (B, T) bool, True on real tokens, None where every row begins in the
        first column, so that no token comes after padding. `targets` (N,) long are the places of the tokens in
        ``input_ids.flatten()``, none in a first column; or R for the last R columns of every row. The temperature
        divides the logits; for `smoothing` see `macro_actions.logprobs.Head`. `position_ids` (B, T) long, 0 where a
        text begins, are of rows that hold several.

        Meaningless where nothing is attended. Without the entropy, its tensor is empty. Ids that the tokenizer lacks
        have no probability, see `dschat.models.vocabulary`.
        """
        states = last_hidden_state(self.inner, input_ids, attention_mask, position_ids)
        shape: tuple[int, ...] = (-1,)
        if isinstance(targets, int):
            shape = (len(input_ids), targets)
            places = torch.arange(input_ids.numel(), device=input_ids.device).view_as(input_ids)
            targets = places[:, places.shape[1] - targets :].flatten()
        backbone = self.inner.base_model_prefix
        parameters = [p for name, m in self.inner.named_children() if name != backbone for p in m.parameters()]
        missing = None if self._all_rows else missing_ids_of(self.inner)
        head = Head(self.to_logits, parameters, self.vocab_size, temperature, smoothing, missing, self.kernels)
        chosen = input_ids.flatten()[targets]
        logprobs, entropy = token_logprobs(states.flatten(0, 1)[targets - 1], chosen, head, with_entropy)
        return logprobs.view(shape), entropy.view(shape) if with_entropy else entropy


def logits_function(causal_lm: Any) -> Callable[[Tensor], Tensor]:
    """Hidden states (N, H) → logits (N, V) exactly as the model's own forward does it: head, soft-capping, scaling and
    all.

    The result runs the forward method of a shallow copy of the model whose backbone hands its input through. The copy
    shares the head with the original and owns nothing.
    """
    head = copy.copy(causal_lm)
    head._modules = {**causal_lm._modules, causal_lm.base_model_prefix: _PassThrough()}
    takes_cache = "use_cache" in inspect.signature(causal_lm.forward).parameters

    def to_logits(hidden: Tensor) -> Tensor:
        options = {"use_cache": False} if takes_cache else {}
        return head.forward(inputs_embeds=hidden[None], **options).logits.squeeze(0)

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
