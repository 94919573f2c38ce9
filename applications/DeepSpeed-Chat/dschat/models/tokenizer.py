# SPDX-License-Identifier: Apache-2.0
"""Opens tokenizers and chooses their pad and end tokens, once for the whole run."""

import logging
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from dschat.base.errors import UserError
from dschat.models.adapters import file_place, named_base
from dschat.models.open_errors import explaining, refuse_pointers
from dschat.models.score_template import original_template
from dschat.models.vocabulary import id_count

logger = logging.getLogger(__name__)

# Reserved tokens of common vocabularies, which can pad without changing what the model has learnt.
RESERVED_PAD_TOKENS = (
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|padding|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_0|>",
    "<unused0>",
    "<|extra_0|>",
)
ADDED_PAD = "<pad>"
VOCABULARY_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
# A dialogue with contents that no chat template writes by itself.
PROBE = [{"role": "user", "content": "QZXU"}, {"role": "assistant", "content": "QZXA"}]


def open_tokenizer(path: str, flag: str) -> Any:
    """Opens the tokenizer of a folder or hub id; for an adapter alone, it may be its base's.

    The chat template that is saved with a reward model is replaced by the one that it was trained with.

    Raises:
        UserError: there is none, or transformers has no fast version of it; the message names the flag.
    """
    tokenizer_path = file_place(path, "tokenizer_config.json", flag)
    refuse_pointers(tokenizer_path, f"{flag} {path}")
    with explaining("tokenizer", tokenizer_path, named_base(path, flag)):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise UserError(
            f"{flag} {path}: transformers reads this tokenizer ({type(tokenizer).__name__}) by Python code, and only "
            "those that it reads from a tokenizer.json, or converts to one, are supported. Use another model."
        )
    tokenizer.chat_template = original_template(tokenizer.chat_template)
    tokenizer.length_when_opened = len(tokenizer)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes a tokenizer, with the vocabulary files of the folder that it was opened from.

    transformers reads tokenizer.json and writes it alone; programs such as llama.cpp read ``tokenizer.model``. The
    files are left out if the run has added a token, which they would lack.
    """
    tokenizer.save_pretrained(folder)
    if len(tokenizer) != getattr(tokenizer, "length_when_opened", None):
        return
    for name in VOCABULARY_FILES:
        source = _vocabulary_file(tokenizer.name_or_path, name)
        if source is not None and not (folder / name).exists():
            shutil.copyfile(source, folder / name)


def _vocabulary_file(place: str, name: str) -> str | None:
    """The path of a file in a tokenizer's folder or in the hub's cache; None if there is none."""
    try:
        return cached_file(place, name, local_files_only=True)
    except OSError:
        return None


def load_tokenizer(path: str, flag: str, for_classifier: bool = False, end_token: str | None = None) -> Any:
    """Opens the tokenizer at ``path`` and makes sure that it can pad, by the same rule in every step.

    An existing pad token that ends no turn is kept. If there is none, or it is EOS, `end_token` or a token with which
    the chat template ends turns, a reserved token of the vocabulary or the unknown token is chosen. If there is none
    of them, EOS pads, since masks tell padding from ends. Only a classifier that a step saves needs a pad token other
    than EOS, because transformers scores the last token that is not padding; then ``<pad>`` is added, unless the
    vocabulary has holes, and the model may lack a row for it.

    Args:
        path: folder or hub id.
        flag: that gave the path.
        for_classifier: the tokenizer will be saved with a classifier.
        end_token: --end_of_conversation_token, which cannot pad.

    Raises:
        UserError: there is no tokenizer, or it has no EOS token.
    """
    tokenizer = open_tokenizer(path, flag)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{flag} {path}: the tokenizer has no eos token, so responses could never end. Set `eos_token` in its "
            "tokenizer_config.json to a token of its vocabulary."
        )
    reason = _no_padding(tokenizer, end_token)
    if reason is not None:
        _choose_padding(tokenizer, for_classifier, end_token, f"{flag} {path}: {reason}")
    return tokenizer


def _choose_padding(tokenizer: Any, for_classifier: bool, end_token: str | None, reason: str) -> None:
    """Sets the pad token by the rule of `load_tokenizer`, and logs it behind the reason."""
    unused_token = _unused_token(tokenizer, end_token)
    has_holes = id_count(tokenizer) != len(tokenizer)  # an added token would get another token's id
    if unused_token is None and for_classifier and not has_holes:
        tokenizer.add_special_tokens({"pad_token": ADDED_PAD})
        added = "%s, and no reserved token: %s is added, with the id %d"
        logger.warning(added, reason, ADDED_PAD, tokenizer.pad_token_id)
        return
    tokenizer.pad_token = unused_token or tokenizer.eos_token
    logger.info("%s: %s pads", reason, tokenizer.pad_token)


def _unused_token(tokenizer: Any, end_token: str | None) -> str | None:
    """A reserved token or the unknown one, if it can pad; None if there is none. See `load_tokenizer`."""
    vocabulary = tokenizer.get_vocab()
    excluded = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, end_token}
    for token in (*RESERVED_PAD_TOKENS, tokenizer.unk_token):
        if token in vocabulary and token not in excluded and not _ends_turns(tokenizer, token):
            return str(token)
    return None


def _no_padding(tokenizer: Any, end_token: str | None) -> str | None:
    """Why a tokenizer's own pad token cannot pad; None if it can.

    A further end token of the generation config may pad: Qwen's does, and ends no turn.
    """
    pad = tokenizer.pad_token
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        return "the tokenizer has no pad token of its own"
    if pad == end_token or _ends_turns(tokenizer, pad):
        return f"the tokenizer's pad token {pad} also ends responses"
    return None


def _ends_turns(tokenizer: Any, token: str) -> bool:
    """Whether the chat template writes a token after an assistant's turn; or anywhere, if it refuses a dialogue."""
    template = str(tokenizer.chat_template or "")
    if not template:
        return False
    from dschat.models.templates import TemplateRefusal, apply_template

    try:
        text = apply_template(tokenizer, PROBE, add_generation_prompt=False)
    except TemplateRefusal:
        return token in template
    return token in text.partition(PROBE[-1]["content"])[2]


def end_token_id(tokenizer: Any, end_of_conversation_token: str | None) -> int:
    """The id of the token that ends a response: EOS, or that of ``--end_of_conversation_token``.

    Raises:
        UserError: the flag's text is not a single token, or is the pad or BOS token.
    """
    if end_of_conversation_token is None:
        return tokenizer.eos_token_id
    ids = tokenizer.encode(end_of_conversation_token, add_special_tokens=False)
    # In GPT-2's and OPT's vocabularies EOS is the unknown token as well.
    is_unknown = ids == [tokenizer.unk_token_id] and end_of_conversation_token != tokenizer.eos_token
    if len(ids) != 1 or is_unknown:
        problem = "unknown to" if is_unknown else f"{len(ids)} tokens for"
        raise UserError(
            f"--end_of_conversation_token {end_of_conversation_token!r} is {problem} this tokenizer; it "
            f"must be exactly one token. Use one of the vocabulary, for instance {tokenizer.eos_token!r}."
        )
    if ids[0] in {tokenizer.pad_token_id, tokenizer.bos_token_id} - {tokenizer.eos_token_id}:
        raise UserError(
            f"--end_of_conversation_token {end_of_conversation_token!r} is this tokenizer's pad or BOS token, so the "
            f"end of a response could not be told from padding. Use another, for instance {tokenizer.eos_token!r}."
        )
    return ids[0]


def own_end_ids(path: str) -> list[int]:
    """The end tokens of a model's generation config; a chat model may have several besides EOS."""
    try:
        return end_ids_of(GenerationConfig.from_pretrained(file_place(path, "generation_config.json", "")))
    except (OSError, ValueError):
        return []


def end_ids_of(generation: GenerationConfig) -> list[int]:
    """The ids that end a response."""
    end_ids = generation.eos_token_id
    if end_ids is None:
        return []
    return [end_ids] if isinstance(end_ids, int) else list(end_ids)


def token_texts(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text that each token adds to a response, with special tokens; joined, they are the decoded response.

    A token that ends inside a character (bytes of an emoji) adds "", and the one that completes it adds the character.
    """
    texts: list[str] = []
    done = ""
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if text.endswith("�") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(done) :])
        done = text
    return texts
