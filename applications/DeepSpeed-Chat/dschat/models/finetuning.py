# SPDX-License-Identifier: Apache-2.0
"""What of a model is trained, and whether its activations are kept."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dschat.base.errors import UserError
from dschat.models.layers import layers_of
from dschat.models.lora import add_lora


@dataclass(frozen=True)
class Finetuning:
    """What of a model is trained."""

    last_layer: bool = False  # the output layer alone
    rank: int = 0  # of LoRA adapters, which are then trained alone, with a score head; 0 = none
    # Of the adapters; see `add_lora`.
    targets: tuple[str, ...] | None = None
    alpha: int | None = None
    dropout: float = 0.0


EVERYTHING = Finetuning()


def choose_trained(model: Any, what: Finetuning, base: str) -> None:
    """Freezes what is not trained of a causal LM or classifier, whose weights may be sharded, and adds what is to be.

    An adapter's config records `base`, the model's path. Raises UserError: no layer matches the targets, or there is
    no output layer.
    """
    if what.rank:
        add_lora(model, what.rank, what.targets, base, what.alpha, what.dropout)
    elif what.last_layer:
        head = getattr(model, "score", None) or model.get_output_embeddings()
        if head is None:
            raise UserError(
                f"--finetune_mode last_layer: it is not known which layer of {base} is the last one. Use all or lora."
            )
        model.requires_grad_(False)
        head.requires_grad_(True)


def train_top_layers(model: PreTrainedModel, count: int, flag: str) -> None:
    """Freezes everything but the last layers of a causal LM, at least one, and the norm behind them.

    Embeddings and output head stay as they are, tied or not; weights may be sharded. Raises UserError where the model
    has fewer layers, or none that can be told.
    """
    total = int(model.config.get_text_config().num_hidden_layers)
    parent, layers = layers_of(getattr(model, model.base_model_prefix), total)
    if parent is None or layers is None:
        raise UserError(
            f"{flag}: it is not known where a {type(model).__name__} keeps its layers; leave the flag out, or use "
            "--lora_dim."
        )
    if count > total:
        raise UserError(f"{flag} {count}: the model has {total} layers; give at most that, or 0 for everything.")
    model.requires_grad_(False)
    for layer in list(layers)[-count:]:
        layer.requires_grad_(True)
    for name, module in parent.named_children():
        # Beside the layers stand embeddings, whose weights are matrices, and norms.
        vectors = all(len(getattr(p, "ds_shape", p.shape)) == 1 for p in module.parameters())
        if module is not layers and vectors and "emb" not in name:
            module.requires_grad_(True)


def enable_gradient_checkpointing(model: Any, every: int = 1) -> None:
    """Has a Hugging Face model recompute its layers' activations in the backward pass; it acts in training mode.

    Of `every` so many layers the first is recomputed, the others keep their activations; 1 = all are recomputed. This
    is what `every_n_layers` means in transformers 5.23, and does not need that version.

    Raises UserError where a family's layers cannot be recomputed one by one.
    """
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.23
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    if every == 1:
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"--gradient_checkpointing_every {every}: the layers of a {type(model).__name__} are recomputed all or"
            " not at all; leave the flag out."
        )
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % every == 0
