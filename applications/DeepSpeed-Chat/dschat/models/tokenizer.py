# SPDX-License-Identifier: Apache-2.0
"""The tokenizer, its pad and end tokens decided once for the whole run."""

import logging
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from dschat.errors import UserError
from dschat.models.load import explain_missing

logger = logging.getLogger(__name__)

# Tokens that common vocabularies hold in reserve; any of them can pad without changing what the model knows.
RESERVED_PAD_TOKENS = (
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_0|>",
    "<unused0>",
    "<|extra_0|>",
)


def open_tokenizer(path: str, flag: str) -> Any:
    """Opens a tokenizer, folder or hub id, as it is. Raises UserError where there is none, which names the flag."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(explain_missing("tokenizer", path, flag, error)) from error


def load_tokenizer(path: str, flag: str, may_add_pad: bool = False) -> Any:
    """Opens the tokenizer at ``path`` and makes sure that pad, eos and bos are usable, pad and eos distinct.

    `may_add_pad` chooses or adds a pad token where there is none distinct from eos (step 1), so that the tokenizer's
    length may exceed the model's embeddings. Raises UserError: nothing to load, no eos token, or pad = eos where none
    may be chosen.
    """
    tokenizer = open_tokenizer(path, flag)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{flag} {path}: the tokenizer has no eos token, so responses could never end. Set `eos_token` in its "
            "tokenizer_config.json to a token of its vocabulary."
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        if not may_add_pad:
            raise UserError(
                f"{flag} {path}: pad and eos are the same token (or pad is missing), so the end of a response cannot "
                "be told from padding. Use a model made by step 1, which chooses a pad token of its own."
            )
        _choose_pad(tokenizer)
    return tokenizer


def end_token_id(tokenizer: Any, end_of_conversation_token: str | None) -> int:
    """Id of the token that ends a response: eos, or the one given by ``--end_of_conversation_token``. Raises UserError
    where the given text is not a single token, or pads.
    """
    if end_of_conversation_token is None:
        return tokenizer.eos_token_id
    ids = tokenizer.encode(end_of_conversation_token, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise UserError(
            f"--end_of_conversation_token {end_of_conversation_token!r} is {len(ids)} tokens for this tokenizer; it "
            f"must be exactly one. Use a token of the vocabulary, for instance {tokenizer.eos_token!r}."
        )
    if ids[0] in {tokenizer.pad_token_id, tokenizer.bos_token_id} - {tokenizer.eos_token_id}:
        raise UserError(
            f"--end_of_conversation_token {end_of_conversation_token!r} is this tokenizer's pad or BOS token, so the "
            f"end of a response could not be told from padding. Use another, for instance {tokenizer.eos_token!r}."
        )
    return ids[0]


def own_end_ids(path: str) -> list[int]:
    """The end tokens of the checkpoint's generation config: a chat model may have several, also beside EOS."""
    try:
        return end_ids_of(GenerationConfig.from_pretrained(path))
    except (OSError, ValueError):
        return []


def end_ids_of(generation: GenerationConfig) -> list[int]:
    """The ids that end a response."""
    end = generation.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def require_same_tokenizer(first: Any, second: Any, first_flag: str, second_flag: str) -> None:
    """Raises UserError unless the critic's tokenizer gives the actor's ids: vocabulary, bos, eos and pad."""
    if not same_ids(first, second) or first.pad_token_id != second.pad_token_id:
        raise UserError(
            f"{first_flag} and {second_flag} have different tokenizers, but the critic reads the actor's token ids. "
            "Train the critic's start (step 2) from the same base as the actor (step 1); or name it as "
            f"--reward_model_name_or_path alone, which is then read through text, and leave {second_flag} out: the "
            "critic starts from the actor."
        )


def same_ids(first: Any, second: Any) -> bool:
    """Whether two tokenizers mean the same by every id; what they pad with is not read, and may be one's alone."""
    vocabularies = [dict(tokenizer.get_vocab()) for tokenizer in (first, second)]
    for tokenizer, own, other in ((first, *vocabularies), (second, *vocabularies[::-1])):
        if tokenizer.pad_token is not None and tokenizer.pad_token not in other:
            own.pop(tokenizer.pad_token, None)
    special = ("bos_token_id", "eos_token_id")
    return vocabularies[0] == vocabularies[1] and all(getattr(first, n) == getattr(second, n) for n in special)


def _choose_pad(tokenizer: Any) -> None:
    """Takes a reserved token of the vocabulary as pad, or adds ``<pad>``."""
    vocabulary = tokenizer.get_vocab()
    unusable = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token}
    for token in RESERVED_PAD_TOKENS:
        if token in vocabulary and token not in unusable:
            tokenizer.pad_token = token
            logger.warning("the tokenizer had no pad token of its own: using the reserved token %s", token)
            return
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    logger.warning("the tokenizer had no pad token of its own: added <pad>; the embeddings grow by one row")
