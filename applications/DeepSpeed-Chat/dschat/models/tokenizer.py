# SPDX-License-Identifier: Apache-2.0
"""The tokenizer, its pad and end tokens decided once for the whole run."""

import logging
from collections.abc import Collection
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.models.load import explain_missing
from dschat.models.lora import file_place, named_base
from dschat.models.templates import TemplateRefusal, apply_template
from dschat.models.vocabulary import id_count

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
ADDED_PAD = "<pad>"
# A dialogue whose texts no chat template writes by itself.
PROBE = [{"role": "user", "content": "QZXU"}, {"role": "assistant", "content": "QZXA"}]


def open_tokenizer(path: str, flag: str) -> Any:
    """Opens a tokenizer, folder or hub id, as it is; that of an adapter alone may lie with its base.

    Raises UserError where there is none, which names the flag.
    """
    place = file_place(path, "tokenizer_config.json", flag)
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(explain_missing("tokenizer", place, named_base(path, flag), error)) from error


def load_tokenizer(path: str, flag: str, for_classifier: bool = False, end_token: str | None = None) -> Any:
    """Opens the tokenizer at ``path`` and makes sure that it can pad, in every step by the same rule.

    A pad token of its own that ends no turn is left alone. Where there is none, or it is eos, what the chat template
    ends turns with, or `end_token`, the first of these is chosen: a token that the vocabulary holds in reserve, the
    unknown token, another special token that neither ends nor writes turns. Where there is none of them, eos pads:
    masks tell padding from ends. But the classifier that a step saves (`for_classifier`) needs a pad token of its own,
    since transformers reads its score at the last token that is not padding: then ``<pad>`` is added, unless the
    vocabulary has holes, and the model may lack a row for it.

    `end_token` is --end_of_conversation_token, which cannot pad. Raises UserError: nothing to load, or no eos token.
    """
    tokenizer = open_tokenizer(path, flag)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{flag} {path}: the tokenizer has no eos token, so responses could never end. Set `eos_token` in its "
            "tokenizer_config.json to a token of its vocabulary."
        )
    end_ids = {*own_end_ids(path)}
    reason = _no_padding(tokenizer, end_token)
    if reason is not None:
        token = _unused_token(tokenizer, end_ids, end_token)
        if token is not None:
            tokenizer.pad_token = token
            logger.info("%s %s: %s: %s pads", flag, path, reason, token)
        elif for_classifier and id_count(tokenizer) == len(tokenizer):  # else it would get another token's id
            tokenizer.add_special_tokens({"pad_token": ADDED_PAD})
            logger.warning(
                "%s %s: %s, and there is none in reserve: %s is added, with the id %d",
                *(flag, path, reason, ADDED_PAD, tokenizer.pad_token_id),
            )
        else:
            tokenizer.pad_token = tokenizer.eos_token
            logger.info("%s %s: %s: %s pads", flag, path, reason, tokenizer.eos_token)
    return tokenizer


def _no_padding(tokenizer: Any, end_token: str | None) -> str | None:
    """Why a tokenizer's own pad token cannot pad; None where it can.

    One that the generation config names as an end token, beside EOS, still pads: Qwen's does, and ends no turn.
    """
    pad = tokenizer.pad_token
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        return "the tokenizer has no pad token of its own"
    if pad == end_token or _ends_turns(tokenizer, pad):
        return f"the tokenizer's pad token {pad} also ends responses"
    return None


def _ends_turns(tokenizer: Any, token: str) -> bool:
    """Whether the chat template writes a token behind an assistant's turn; anywhere, if it refuses a dialogue."""
    template = str(tokenizer.chat_template or "")
    if not template:
        return False
    try:
        text = apply_template(tokenizer, PROBE, add_generation_prompt=False)
    except TemplateRefusal:
        return token in template
    return token in text.partition(PROBE[-1]["content"])[2]


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
        return end_ids_of(GenerationConfig.from_pretrained(file_place(path, "generation_config.json", "")))
    except (OSError, ValueError):
        return []


def end_ids_of(generation: GenerationConfig) -> list[int]:
    """The ids that end a response."""
    end = generation.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def require_same_tokenizer(first: Any, second: Any, first_flag: str, second_flag: str) -> None:
    """Raises UserError unless the critic's tokenizer gives the actor's ids: vocabulary, bos and eos.

    What they pad with may differ, since the critic reads masks.
    """
    if not same_ids(first, second):
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


def _unused_token(tokenizer: Any, end_ids: Collection[int], end_token: str | None) -> str | None:
    """A token of the vocabulary that can pad; None where there is none. See `load_tokenizer`."""
    vocabulary = tokenizer.get_vocab()
    excluded = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, end_token}
    excluded |= {token for token, number in vocabulary.items() if number in end_ids}
    for token in (*RESERVED_PAD_TOKENS, tokenizer.unk_token):
        if token in vocabulary and token not in excluded and not _ends_turns(tokenizer, token):
            return str(token)
    # The last ones: the first special tokens are those that write turns. The very last may be a token that was added
    # as this one's pad, which `tokenizer_fingerprint` leaves out.
    specials = {token for token in tokenizer.all_special_tokens if token in vocabulary}
    specials |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    template = str(tokenizer.chat_template or "")
    ordered = sorted(specials - excluded, key=lambda token: -vocabulary[token])
    last = max(vocabulary.values())
    for token in ordered:
        if token not in template and vocabulary[token] != last:
            return token
    return None


def token_texts(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text that each token adds to the response; together they are the decoded response, special tokens shown.

    A token that ends inside a character (bytes of an emoji) adds nothing until the one that completes it.
    """
    texts, done = [], ""
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if text.endswith("�") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(done) :])
        done = text
    return texts
