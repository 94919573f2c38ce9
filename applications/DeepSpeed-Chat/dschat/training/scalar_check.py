# SPDX-License-Identifier: Apache-2.0
"""The self-check of reward models and critics, before the first update."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dschat.models.backbone import position_inputs
from dschat.models.engines import Scalar
from dschat.models.scalar import last_scores
from dschat.training.selfcheck import (
    PADDING,
    ROWS,
    check_attention_parity,
    check_modes,
    largest,
    ragged_rows,
    require_close,
)


@torch.no_grad()
def check_scalar(engine: Scalar, tokens: tuple[Tensor, Tensor], pad_id: int) -> None:
    """Checks that scores are those of the Hugging Face classifier, whatever the padding and the mode.

    Args:
        engine: engine of the scalar model.
        tokens: input_ids (B, T) long and attention_mask (B, T) bool, of which the first two rows are used.
        pad_id: fills ids.

    Raises:
        UserError: they differ by more than rounding explains.
    """
    input_ids = tokens[0][:ROWS]
    attention_mask = tokens[1][:ROWS]

    # The classifier's own forward.
    numbers = engine(input_ids, attention_mask)
    scores = last_scores(numbers, attention_mask)
    size = largest(numbers, attention_mask)
    all_rows = torch.ones_like(scores, dtype=torch.bool)
    classifier_scores = engine.module.numbers(_classifier_outputs(engine.module.inner, input_ids, attention_mask))
    others = "those of the classifier's own forward"
    require_close("scores", others, scores, classifier_scores, all_rows, engine, size)

    # Padding on both sides.
    padded_ids = F.pad(input_ids, PADDING, value=pad_id)
    padded_mask = F.pad(attention_mask, PADDING, value=False)
    padded_scores = last_scores(engine(padded_ids, padded_mask), padded_mask)
    require_close("scores with padding", "those without", padded_scores, scores, all_rows, engine, size)

    # Training mode, and the attention that a flag names.
    check_modes(engine, "scores", attention_mask, lambda: engine(input_ids, attention_mask))
    ids, seen = ragged_rows(padded_ids, padded_mask)
    check_attention_parity(engine, "scores", seen, lambda: engine(ids, seen), size)


def _classifier_outputs(classifier: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B,) or (B, K) float32: outputs of the forward of transformers, which finds last tokens by the pad token.

    Rows are read alone and without padding where the model has no pad token.
    """
    if classifier.config.pad_token_id is None:
        scores_alone = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            output = classifier(input_ids=ids[mask][None], use_cache=False)
            scores_alone.append(output.logits[0].squeeze(-1))
        return torch.stack(scores_alone).float()
    positions = position_inputs(classifier, attention_mask)
    output = classifier(input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False, **positions)
    scores: Tensor = output.logits.squeeze(-1).float()
    return scores
