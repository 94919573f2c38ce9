# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model are trained, and whether its activations are recomputed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from dschat.base.errors import UserError
from dschat.models.layers import find_layers
from dschat.models.opening import Placement
from dschat.models.parameters import whole_numel, whole_shape
from dschat.models.vocabulary import untrained_ids


@dataclass(frozen=True)
class Finetuning:
    """Which parameters of a model are trained."""

    last_layer: bool = False  # train the output layer alone
    mlps: bool = False  # train the MLPs of the decoder layers and the output layer alone
    rank: int = 0  # of LoRA adapters; then only they and a score head are trained; 0: no adapters
    # Options of the adapters, see `add_lora`.
    targets: tuple[str, ...] | None = None
    alpha: int | None = None
    dropout: float = 0.0


EVERYTHING = Finetuning()
MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "fc1", "fc2")  # in a decoder layer, of most families


def choose_trained(model: Any, what: Finetuning, base: str) -> None:
    """Adds adapters to a causal LM or classifier if asked for, and freezes what is not trained.

    The weights may be sharded. An adapter's config records `base`, the model's path.

    Raises:
        UserError: no layer matches the targets, or there is no output layer.
    """
    if what.rank:
        from dschat.models.lora import add_lora

        add_lora(model, what.rank, what.targets, base, what.alpha, what.dropout)
    elif what.last_layer:
        head = getattr(model, "score", None) or model.get_output_embeddings()
        if head is None:
            raise UserError(
                f"--finetune_mode last_layer: it is not known which layer of {base} is the last one. Use all or lora."
            )
        model.requires_grad_(False)
        head.requires_grad_(True)
    elif what.mlps:
        _train_mlps(model, base)


def _train_mlps(model: Any, base: str) -> None:
    """Freezes a classifier but for its head and the MLPs of its decoder layers (the critic of SAO).

    Raises:
        UserError: there are no decoder layers, or a layer has no child of one of the usual names.
    """
    decoder = find_layers(model)
    layers = [] if decoder is None else list(decoder.layers)
    mlps = []
    for layer in layers:
        mlps += [child for name, child in layer.named_children() if name in MLP_NAMES]
    if not layers or len(mlps) < len(layers):
        raise UserError(
            f"--critic_trains mlp: it is not known which modules of {base} are MLPs (names {', '.join(MLP_NAMES)})."
            " Use all."
        )
    model.requires_grad_(False)
    for module in (*mlps, model.score):
        module.requires_grad_(True)


def require_trainable_tokens(
    model: Any, tokenizer: PreTrainedTokenizerBase, texts: Iterable[Iterable[int]], placement: Placement, where: str
) -> None:
    """Checks that no added token of the training data has an untrained embedding that is frozen.

    Such tokens have equal embeddings, so that the model could never tell them apart. Every rank must call it.

    Args:
        model: after `choose_trained`.
        tokenizer: its tokenizer.
        texts: the ids of texts to train on; read only if there may be such a token.
        placement: where the model's weights are.
        where: flag and path, for messages.

    Raises:
        UserError: there is such a token.
    """
    embeddings = model.get_input_embeddings()
    if embeddings.weight.requires_grad:
        return
    added_ids = set(tokenizer.added_tokens_decoder) - {tokenizer.pad_token_id}  # padding is not read
    with placement.gathered(model, embeddings):
        candidates = set(untrained_ids(embeddings.weight, sorted(added_ids)))
    used_ids: set[int] = set()
    for text in texts if candidates else ():
        used_ids |= candidates.intersection(text)
    if used_ids:
        raise UserError(
            f"{where}: the training data hold tokens whose embeddings are untrained and would stay frozen, all"
            f" nearly equal: {', '.join(tokenizer.convert_ids_to_tokens(sorted(used_ids)))}. Train all weights"
            " (--finetune_mode all, without --lora_dim), which trains the embeddings; LoRA can follow in later steps."
        )


def describe_trained(module: nn.Module) -> str:
    """What of a model is trained: `trains 1,024 of 99,999 parameters`, and the layers that have adapters."""
    trained = sum(whole_numel(parameter) for parameter in module.parameters() if parameter.requires_grad)
    total = sum(whole_numel(parameter) for parameter in module.parameters())
    words = f"trains {trained:,} of {total:,} parameters"
    adapted = [name for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)]
    if adapted:
        kinds = sorted({name.rpartition(".")[2] for name in adapted})
        words += f", with adapters on {len(adapted)} layers ({', '.join(kinds)})"
    return words


def train_top_layers(model: PreTrainedModel, count: int, flag: str) -> None:
    """Freezes everything but the last `count` ≥ 1 layers of a causal LM and the norm after them.

    Embeddings and output head are frozen, tied or not; the weights may be sharded.

    Raises:
        UserError: the model has fewer layers, or its layers cannot be identified.
    """
    decoder = find_layers(model)
    if decoder is None:
        raise UserError(
            f"{flag}: it is not known where a {type(model).__name__} keeps its layers; leave the flag out, or use "
            "--lora_dim."
        )
    layer_count = len(decoder.layers)
    if count > layer_count:
        raise UserError(f"{flag} {count}: the model has {layer_count} layers; give at most that, or 0 for everything.")
    model.requires_grad_(False)
    for layer in list(decoder.layers)[-count:]:
        layer.requires_grad_(True)
    for name, module in decoder.parent.named_children():
        # Besides the layers, the parent has norms, and embeddings, whose weights are matrices.
        is_norm = all(len(whole_shape(parameter)) == 1 for parameter in module.parameters())
        if module is not decoder.layers and is_norm and "emb" not in name:
            module.requires_grad_(True)


def enable_gradient_checkpointing(model: Any, every: int = 1) -> None:
    """Has a Hugging Face model recompute its layers' activations in the backward pass, in training mode.

    The first of every `every` layers is recomputed, the others keep their activations; 1 recomputes all. This is
    `every_n_layers` of transformers 5.23, and does not need that version.

    Raises:
        UserError: the family's layers cannot be recomputed one by one.
    """
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.23
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    if every == 1:
        return
    layers = []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            layers.append(module)
    if not layers:
        raise UserError(
            f"--gradient_checkpointing_every {every}: the layers of a {type(model).__name__} are recomputed all or"
            " not at all; leave the flag out."
        )
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % every == 0
