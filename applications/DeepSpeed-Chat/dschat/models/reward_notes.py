# SPDX-License-Identifier: Apache-2.0
"""What training records about a model for the commands that read it.

Step 2 records in a reward model's config.json what its score means, and step 3 in a critic's which bins it has. A LoRA
adapter has no config.json; a file beside it holds the same, and a hash of the base that it was trained on.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from dschat.base.atomic import write_file
from dschat.base.errors import UserError

logger = logging.getLogger(__name__)

# Keys in config.json.
LOSS_KEY = "reward_loss"
END_KEY = "end_of_response"  # the token that ended a response, as text
RANGE_KEY = "value_range"  # lower and upper bound of the bins of a critic's head (--value_head hl_gauss)
NOTED_KEYS = (LOSS_KEY, END_KEY, RANGE_KEY)
NOTES = "adapter_notes.json"  # the same keys and BASE_KEY, in an adapter's folder
BASE_KEY = "base_hash"  # `dschat.base.fingerprints.model_hash` of the folder that an adapter was trained on


def note_end_token(model: Any, tokenizer: PreTrainedTokenizerBase, end_id: int) -> None:
    """Records in a classifier's config the token that ends a response in training: its score is the number there."""
    setattr(model.config, END_KEY, str(tokenizer.convert_ids_to_tokens(end_id)))


def noted_end_token(config: PreTrainedConfig | None) -> str | None:
    """The token that ended a response in training, as text; None for models of other programs."""
    token: str | None = getattr(config, END_KEY, None)
    return token


def noted_end_id(token: str, tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """The id of a noted end token.

    Raises:
        UserError: the tokenizer lacks the token; the message begins with the model's `name`.
    """
    token_id = tokenizer.get_vocab().get(token)
    if token_id is None:
        raise UserError(
            f"{name}: its responses ended with {token} in training ({END_KEY} in config.json), which its tokenizer "
            "lacks. Put the tokenizer that it was trained with into its folder."
        )
    return int(token_id)


def warn_of_other_end(config: PreTrainedConfig | None, end_token: str, name: str) -> None:
    """Warns that responses of a run end with another token than those that a reward model was trained on."""
    trained_token = noted_end_token(config)
    if trained_token is not None and trained_token != end_token:
        logger.warning(
            "%s was trained on responses that end with %s, but here they end with %s: its score is read at a token at "
            "which it was not trained. Give --end_of_conversation_token in both steps, or in neither.",
            name,
            trained_token,
            end_token,
        )


def save_adapter_notes(config: PreTrainedConfig, base_hash: str | None, adapter: Path) -> None:
    """Writes what the config of a model with a LoRA adapter records, and the hash of its base, beside the adapter."""
    notes: dict[str, object] = {}
    for key in NOTED_KEYS:
        if hasattr(config, key):
            notes[key] = getattr(config, key)
    if base_hash is not None:
        notes[BASE_KEY] = base_hash
    if notes:
        write_file(adapter / NOTES, json.dumps(notes, indent=2) + "\n")


def add_adapter_notes(config: PreTrainedConfig, adapter: Path) -> None:
    """Copies what `save_adapter_notes` wrote of a config into the config of the adapter's base."""
    notes = read_adapter_notes(adapter)
    for key in NOTED_KEYS:
        if key in notes:
            setattr(config, key, notes[key])


def read_adapter_notes(adapter: Path) -> dict[str, object]:
    """What `save_adapter_notes` wrote; {} for adapters of other programs.

    Raises:
        UserError: the file cannot be read.
    """
    file = adapter / NOTES
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} cannot be read: {error}. Copy the model again, or remove the file.") from error
