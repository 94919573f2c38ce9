# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing: activations are computed again in the backward pass."""

from typing import Any


def enable_gradient_checkpointing(model: Any) -> None:
    """Switches it on in a Hugging Face model; it acts in training mode."""
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.23
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
