# SPDX-License-Identifier: Apache-2.0
"""Which weights of a model are trained."""

from dataclasses import dataclass
from typing import Any

from dschat.errors import UserError
from dschat.models.lora import add_lora


@dataclass(frozen=True)
class Finetuning:
    """What of a model is trained.

    Attributes:
        last_layer: the output layer alone.
        rank: of LoRA adapters, which are then trained alone, with a score head; 0 = none.
        targets, alpha, dropout: of the adapters; see `add_lora`.
    """

    last_layer: bool = False
    rank: int = 0
    targets: tuple[str, ...] | None = None
    alpha: int | None = None
    dropout: float = 0.0


EVERYTHING = Finetuning()


def choose_trained(model: Any, what: Finetuning, base: str) -> None:
    """Freezes what is not trained, and adds what is to be.

    Args:
        model: Hugging Face causal LM or classifier, changed in place; its weights may be sharded.
        what: of it is trained.
        base: path of the model, recorded in an adapter's config.

    Raises:
        UserError: no layer matches the targets, or there is no output layer.
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
