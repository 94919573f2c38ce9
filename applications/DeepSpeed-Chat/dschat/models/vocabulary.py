# SPDX-License-Identifier: Apache-2.0
"""Token ids for which a tokenizer has no token, or a model no row in its embeddings.

Published models often have more rows than their tokenizers have ids (Qwen2.5-7B: 152,064 rows, 151,665 ids), and a
vocabulary may have holes. An id without a token can neither be decoded nor be scored by a model with fewer rows. So
`mask_missing_ids` removes these ids from a policy's distribution: their logits are −inf, and the probabilities of the
others add up to 1.

Also here: whether two tokenizers have the same ids, whether embeddings have enough rows, and which rows are untrained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from dschat.base.errors import UserError

MISSING_IDS = "missing_ids"  # buffer of a causal LM, not saved
SAMPLED_ROWS = 4096  # rows of embeddings whose median decides what is untrained
# Rows closer to a centre (the mean of all rows, or zero) than this fraction of the median distance from it, or of the
# centre's own norm if that is larger, are untrained. transformers puts new rows at about 3e-5 of the distance from the
# mean, and a mean in bfloat16 is rounded by up to 2^-9 of its norm.
UNTRAINED = 2**-8


def id_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of rows that embeddings need: the highest id + 1; more than ``len(tokenizer)`` if there are holes."""
    return max(tokenizer.get_vocab().values()) + 1


def row_count(config: PreTrainedConfig) -> int:
    """Rows of the embeddings of a model with this config."""
    return int(config.get_text_config().vocab_size)


def require_same_tokenizer(
    actor_tokenizer: PreTrainedTokenizerBase,
    scorer_tokenizer: PreTrainedTokenizerBase,
    actor_flag: str,
    scorer_flag: str,
) -> None:
    """Raises UserError unless the tokenizer of a critic or reward model has the actor's vocabulary, BOS and EOS.

    Pad tokens may differ, since scorers read masks.
    """
    if not same_ids(actor_tokenizer, scorer_tokenizer):
        raise UserError(
            f"{actor_flag} and {scorer_flag} have different tokenizers, but the critic reads the actor's token ids. "
            "Train the critic's start (step 2) from the same base as the actor (step 1); or name it as "
            f"--reward_model_name_or_path alone, which is then read through text, and leave {scorer_flag} out: the "
            "critic starts from the actor."
        )


def same_ids(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers agree on every id; a pad token may exist in one of them only."""
    return vocabulary_difference(first, second) is None


def vocabulary_difference(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> str | None:
    """What differs between two tokenizers, naming one token, for messages; None if they are `same_ids`."""
    first_vocabulary = dict(first.get_vocab())
    second_vocabulary = dict(second.get_vocab())
    if first.pad_token is not None and first.pad_token not in second_vocabulary:
        first_vocabulary.pop(first.pad_token, None)
    if second.pad_token is not None and second.pad_token not in first_vocabulary:
        second_vocabulary.pop(second.pad_token, None)

    tokens = sorted(first_vocabulary.keys() | second_vocabulary.keys())
    differing = [token for token in tokens if first_vocabulary.get(token) != second_vocabulary.get(token)]
    if differing:
        token = differing[0]
        ids = f"{first_vocabulary.get(token, 'missing')} and {second_vocabulary.get(token, 'missing')}"
        return f"{len(differing)} of their tokens differ, such as {token!r}: {ids}"
    if first.bos_token_id != second.bos_token_id or first.eos_token_id != second.eos_token_id:
        return "their BOS or EOS differ"
    return None


def missing_ids(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[int]:
    """The ids below `rows` that a tokenizer does not have, ascending."""
    return sorted(set(range(rows)) - set(tokenizer.get_vocab().values()))


def mask_missing_ids(causal_lm: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Removes the ids that a tokenizer lacks from a causal LM's distribution: its forward sets their logits to −inf.

    A model without such ids is not changed. Log-probs are computed without the model's own forward and use
    `missing_ids_of`.
    """
    missing = missing_ids(tokenizer, row_count(causal_lm.config))
    if not missing:
        return
    device = causal_lm.get_input_embeddings().weight.device
    causal_lm.register_buffer(MISSING_IDS, torch.tensor(missing, device=device), persistent=False)
    causal_lm.register_forward_hook(_mask_logits)


class HasBuffers(Protocol):
    """A module with buffers."""

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]: ...


def missing_ids_of(causal_lm: HasBuffers) -> Tensor | None:
    """The ids that `mask_missing_ids` removed, (K,) long; None if there are none."""
    return dict(causal_lm.named_buffers(recurse=False)).get(MISSING_IDS)


def _mask_logits(causal_lm: nn.Module, inputs: object, output: Any) -> Any:
    missing = missing_ids_of(causal_lm)
    assert missing is not None  # the hook comes with the buffer
    logits = output.logits
    if logits.requires_grad:
        output.logits = logits.index_fill(-1, missing, -torch.inf)
    else:
        logits.index_fill_(-1, missing, -torch.inf)
    return output


def lacks_rows(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether embeddings lack a row for one of a tokenizer's ids."""
    return id_count(tokenizer) > row_count(config)


def require_rows(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raises UserError if a scorer lacks rows for ids of the tokenizer whose texts it reads.

    `name` is the scorer's flag and path.
    """
    if lacks_rows(config, tokenizer):
        raise UserError(
            f"{name}: its embeddings have {row_count(config)} rows, but the tokenizer of what it reads has ids up to "
            f"{id_count(tokenizer) - 1}, which it could not look up. Train it (step 2) from a model with at least as "
            "many rows as the tokenizer has ids; the output of step 1 has."
        )


def require_no_growth(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raises UserError if an adapter would be saved alone (--no_merge_lora) while embeddings must grow.

    The added rows would not be in any file. `name` is the flag and path of the base.
    """
    if lacks_rows(config, tokenizer):
        raise UserError(
            f"--no_merge_lora: {name} has embeddings of {row_count(config)} rows, and its tokenizer ids up to "
            f"{id_count(tokenizer) - 1}. The rows that are added for them would not be in the adapter's folder. Leave "
            "--no_merge_lora out, or train step 1 without adapters first, which saves the added rows."
        )


@torch.no_grad()
def untrained_ids(embeddings: Tensor, ids: Sequence[int]) -> list[int]:
    """Those of some ids whose rows are where no training has put them: at the mean of all rows, or at zero.

    transformers' ``resize_token_embeddings`` draws new rows closely around the mean of the others. Reserved tokens of
    published models are often near zero. Rows drawn from a wide distribution cannot be told from trained ones.

    Args:
        embeddings: shape ``(V, H)``.
        ids: below V.
    """
    if not ids:
        return []
    mean = embeddings.mean(0, dtype=torch.float32)
    some_rows = embeddings[:: 1 + len(embeddings) // SAMPLED_ROWS].float()
    rows = embeddings[list(ids)].float()
    is_untrained = torch.zeros(len(ids), dtype=torch.bool, device=embeddings.device)
    for centre in (mean, torch.zeros_like(mean)):
        typical_distance = (some_rows - centre).norm(dim=1).median()
        tolerance = UNTRAINED * torch.maximum(typical_distance, centre.norm())
        is_untrained |= (rows - centre).norm(dim=1) <= tolerance
    return [token_id for token_id, untrained in zip(ids, is_untrained.tolist(), strict=True) if untrained]
