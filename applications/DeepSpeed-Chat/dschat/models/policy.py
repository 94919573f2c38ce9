# SPDX-License-Identifier: Apache-2.0
"""A causal LM whose forward returns log-probabilities of the response, never the full logits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from dschat.models.backbone import last_hidden_state
from dschat.models.heads import keep_float32
from dschat.models.vocabulary import missing_ids_of
from macro_actions.logprobs import Head, LogitKernels, token_logprobs

if TYPE_CHECKING:
    from dschat.models.compiled import Compiler


class PolicyModel(nn.Module):
    """Actor or reference. ``inner`` is the Hugging Face causal LM, which is saved.

    All computation goes through ``forward`` or generation, so that DeepSpeed's hooks see every use of a parameter.
    """

    def __init__(self, causal_lm: Any, all_rows: bool = False) -> None:
        """Wraps a causal LM.

        Args:
            causal_lm: a Hugging Face model.
            all_rows: the softmax is over all rows of the output layer, as in step 1. Otherwise ids that the tokenizer
                lacks have no probability, see `dschat.models.vocabulary`.
        """
        super().__init__()
        self.inner: Any = causal_lm
        self._all_rows = all_rows
        keep_float32(causal_lm.get_output_embeddings())
        self.to_logits = logits_function(causal_lm)
        self.kernels = LogitKernels()
        self.vocab_size = causal_lm.config.get_text_config().vocab_size

    @property
    def output_head(self) -> nn.Module | None:
        """The output layer, applied chunk by chunk: ranks with different response lengths use it unequally often."""
        return self.inner.get_output_embeddings()

    def compile_with(self, compiler: Compiler) -> None:
        """Compiles the passes over logits with the compiler of the decoder layers."""
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
        """Log-probs of the target tokens, and the entropies of their distributions without gradient.

        Args:
            input_ids: (B, T) long.
            attention_mask: (B, T) bool, True on real tokens. None if no row is padded on the left.
            targets: (N,) long, indices of the target tokens in ``input_ids.flatten()``, never a row's first token. Or
                an int R: the last R columns of every row.
            temperature: divides the logits.
            with_entropy: whether to compute entropies; otherwise their tensor is empty.
            smoothing: see `macro_actions.logprobs.Head`.
            position_ids: (B, T) long, 0 where a sequence begins, for rows that pack several.

        Returns:
            Log-probs and entropies, (N,) or (B, R) float32. Values at padding are meaningless.
        """
        states = last_hidden_state(self.inner, input_ids, attention_mask, position_ids)
        shape: tuple[int, ...] = (-1,)
        if isinstance(targets, int):
            shape = (len(input_ids), targets)
            indices = torch.arange(input_ids.numel(), device=input_ids.device).view_as(input_ids)
            targets = indices[:, indices.shape[1] - targets :].flatten()
        missing = None if self._all_rows else missing_ids_of(self.inner)
        head = Head(
            self.to_logits, self._head_parameters(), self.vocab_size, temperature, smoothing, missing, self.kernels
        )
        target_ids = input_ids.flatten()[targets]
        previous_states = states.flatten(0, 1)[targets - 1]
        logprobs, entropy = token_logprobs(previous_states, target_ids, head, with_entropy)
        if with_entropy:
            entropy = entropy.view(shape)
        return logprobs.view(shape), entropy

    def _head_parameters(self) -> list[nn.Parameter]:
        """All parameters outside the backbone."""
        parameters: list[nn.Parameter] = []
        for name, module in self.inner.named_children():
            if name != self.inner.base_model_prefix:
                parameters.extend(module.parameters())
        return parameters


def logits_function(causal_lm: Any) -> Callable[[Tensor], Tensor]:
    """A function from hidden states (N, H) to logits (N, V), with the model's own head, soft-capping and scaling.

    It calls the forward method of a shallow copy of the model whose backbone returns its input. The copy shares the
    head with the original.
    """
    head = copy.copy(causal_lm)
    head._modules = {**causal_lm._modules, causal_lm.base_model_prefix: _PassThrough()}
    takes_cache = "use_cache" in inspect.signature(causal_lm.forward).parameters

    def to_logits(hidden: Tensor) -> Tensor:
        options = {"use_cache": False} if takes_cache else {}
        return head.forward(inputs_embeds=hidden[None], **options).logits.squeeze(0)

    return to_logits


class _PassThrough(nn.Module):
    """Replaces the backbone: returns its input."""

    @property
    def decoder(self) -> _PassThrough:
        """OPT calls the attribute `decoder` of its backbone."""
        return self

    def forward(self, *args: object, inputs_embeds: Tensor, **kwargs: object) -> _States:
        return _States(last_hidden_state=inputs_embeds)


class _States(BaseModelOutputWithPast):
    """A backbone's output with hidden states alone; every other attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
