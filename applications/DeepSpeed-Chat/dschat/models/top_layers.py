# SPDX-License-Identifier: Apache-2.0
"""Training the topmost layers of a causal LM alone: less memory, and a policy that stays near its start."""

from torch import nn
from transformers import PreTrainedModel

from dschat.errors import UserError


def train_top_layers(model: PreTrainedModel, count: int, flag: str) -> None:
    """Freezes everything but the last layers and the norm behind them.

    Embeddings and output head stay as they are, tied or not.

    Args:
        model: a causal LM, changed in place; its weights may be sharded.
        count: of layers, at least 1.
        flag: the command-line flag that asked for it, for messages.

    Raises:
        UserError: the model has fewer layers, or none that can be told.
    """
    total = int(model.config.get_text_config().num_hidden_layers)
    parent, layers = _layers_of(getattr(model, model.base_model_prefix), total)
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


def _layers_of(backbone: nn.Module, count: int) -> tuple[nn.Module | None, nn.ModuleList | None]:
    """The list of a backbone's layers, and the module that holds it."""
    for parent in backbone.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return parent, child
    return None, None
