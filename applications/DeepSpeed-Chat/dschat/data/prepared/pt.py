# SPDX-License-Identifier: Apache-2.0
"""`.pt` files in SheepRL's layout: lists of rows of token ids. Nothing in such a file is ever executed.

A row for fine-tuning holds `prompt_len`, `input_ids` and `targets`, one for preferences `prompt_len`,
`chosen_input_ids` and `rejected_input_ids`.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.data.encoding import decode_response
from dschat.data.formats.rows import Row
from dschat.data.prepared.folder import EXAMPLE_PROMPT, PreparedExample, PreparedFolder
from dschat.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def read_pt(file: Path, tokenizer: PreTrainedTokenizerBase | None) -> list[PreparedExample]:
    """The rows of a file; texts are decoded from the ids, and empty without a tokenizer.

    Raises:
        UserError: it holds something else, or ids that the tokenizer does not have.
    """
    rows = _load(file)
    if not isinstance(rows, list) or not rows:
        raise UserError(f"--data_path {file}: it must hold a list of rows; prepare the data again.")
    return [_example(row, f"{file} row {number}", tokenizer) for number, row in enumerate(rows, start=1)]


def check_example_prompt(folder: PreparedFolder, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a folder whose example prompt has other ids with this tokenizer.

    Raises:
        UserError: it has.
    """
    file = folder.path / EXAMPLE_PROMPT
    if not file.is_file():
        logger.warning(
            "%s has neither prepared.json nor %s: nothing tells whether it was made with this tokenizer (%s)",
            *(folder.path, EXAMPLE_PROMPT, folder.tokenizer_name),
        )
        return
    found = _load(file)
    try:
        prompt, ids = found["prompt"], _ids(found["input_ids"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"--data_path {file}: it must hold prompt and input_ids; prepare the data again.") from error
    own = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    # A text for BOS may stand before it, which several tokens may spell.
    if ids[len(ids) - len(own) :] != own or len(ids) > len(own) + 16:
        raise UserError(
            f"--data_path {folder.path}: it was prepared with the tokenizer of {folder.tokenizer_name}, and the "
            f"model's, {tokenizer.name_or_path}, gives other ids to the prompt in {EXAMPLE_PROMPT}; give that model, "
            f"or prepare the data again with --tokenizer {tokenizer.name_or_path}."
        )


def _load(file: Path) -> Any:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"--data_path {file}: not readable as plain tensors, lists and texts ({reason}); what else a .pt file may "
            "hold is not opened, since it can be a program. Prepare the data again."
        ) from error


def _example(row: object, origin: str, tokenizer: PreTrainedTokenizerBase | None) -> PreparedExample:
    if not isinstance(row, Mapping):
        raise UserError(f"{origin}: it must hold prompt_len and ids; prepare the data again.")
    is_pair = "chosen_input_ids" in row
    try:
        length = int(row["prompt_len"])
        chosen = _ids(row["chosen_input_ids" if is_pair else "input_ids"])
        rejected = _ids(row["rejected_input_ids"]) if is_pair else None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{origin}: {error} is missing or no such value; prepare the data again.") from error
    highest = max([*chosen, *(rejected or ()), 0])
    if tokenizer is not None and highest >= len(tokenizer):
        raise UserError(
            f"{origin}: token {highest} is none of the {len(tokenizer)} of {tokenizer.name_or_path}: the data were "
            "prepared with another tokenizer; prepare them again."
        )
    if not 0 < length <= len(chosen) or (rejected is not None and rejected[:length] != chosen[:length]):
        raise UserError(f"{origin}: prompt_len {length} is no prompt of its ids; prepare the data again.")
    prompt_ids, chosen_ids = chosen[:length], chosen[length:]
    rejected_ids = None if rejected is None else rejected[length:]
    prompt = str(tokenizer.decode(prompt_ids, skip_special_tokens=True)) if tokenizer else ""
    texts = [decode_response(tokenizer, ids) if tokenizer and ids else None for ids in (chosen_ids, rejected_ids)]
    source = Row(prompt, None, texts[0], texts[1], {}, origin)
    return PreparedExample(prompt, texts[0] or "", texts[1], prompt_ids, chosen_ids, rejected_ids, source)


def _ids(value: Any) -> list[int]:
    """Ids of a tensor (n,) or (1, n), or of a list."""
    listed = value.tolist() if hasattr(value, "tolist") else list(value)
    return [int(number) for number in (listed[0] if listed and isinstance(listed[0], list) else listed)]
