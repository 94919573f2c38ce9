# SPDX-License-Identifier: Apache-2.0
"""`.pt` files of a prepared folder, in the layout of SheepRL's preparation.

A file is a list of rows. For fine-tuning a row has `prompt_len`, `input_ids` and `targets`; for preferences
`prompt_len`, `chosen_input_ids` and `rejected_input_ids`. Only plain tensors, lists and texts are loaded: nothing in
such a file is ever executed.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.data.encoding import decode_response
from dschat.data.examples import EncodedRow
from dschat.data.prepared.folder import ARGUMENTS, PreparedFolder
from dschat.data.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

EXAMPLE_PROMPT = "example_prompt.pt"
IGNORE_INDEX = -1  # target of a prompt's token
MAX_BOS_TOKENS = 16  # tokens that a text for BOS before the example prompt may take


def write_pt(folder: Path, info: Mapping[str, Any], splits: Mapping[str, Sequence[EncodedRow]]) -> None:
    """Writes a file for each split, `args.json` and `example_prompt.pt`, the first training prompt. Raises OSError."""
    import torch

    mask_prompt = info["flags"]["mask_prompt"]
    for split, examples in splits.items():
        file = folder / f"{info['stage']}_{split}.pt"
        _save_tensors([_row_of(example, mask_prompt) for example in examples], file)
    arguments = {**info["flags"], "tokenizer_name": info["tokenizer"]["name"], "ignore_index": IGNORE_INDEX}
    (folder / ARGUMENTS).write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")
    first = splits["train"][0]
    ids = torch.tensor([first.prompt_ids])
    prompt = {"prompt": first.prompt, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    _save_tensors(prompt, folder / EXAMPLE_PROMPT)


def _row_of(example: EncodedRow, mask_prompt: bool) -> dict[str, object]:
    """A row of a file: whole sequences, and the length of the prompt in them."""
    import torch

    prompt = example.prompt_ids
    chosen = torch.tensor([*prompt, *example.chosen_ids])
    if example.rejected_ids is not None:
        rejected = torch.tensor([*prompt, *example.rejected_ids])
        return {"prompt_len": len(prompt), "chosen_input_ids": chosen, "rejected_input_ids": rejected}
    targets = chosen.clone()
    if mask_prompt:
        targets[: len(prompt)] = IGNORE_INDEX
    return {"prompt_len": len(prompt), "input_ids": chosen, "targets": targets}


def _save_tensors(content: object, file: Path) -> None:
    """`torch.save`, which raises a plain RuntimeError on a full disk. Raises OSError instead."""
    import torch

    try:
        torch.save(content, file)
    except RuntimeError as error:
        raise OSError(f"{file}: {error}") from error


def read_pt(file: Path, is_pair: bool, tokenizer: PreTrainedTokenizerBase | None) -> list[EncodedRow]:
    """The rows of a file, which holds pairs or single responses.

    Texts, which reward functions get, are decoded from the ids; without a tokenizer they are empty.

    Raises:
        UserError: the file holds something else, or ids that the tokenizer does not have.
    """
    vocabulary = None if tokenizer is None else set(tokenizer.get_vocab().values())
    rows = []
    try:
        for number, row in enumerate(_load(file), start=1):
            prompt_length = int(row["prompt_len"])
            chosen = _ids(row["chosen_input_ids" if is_pair else "input_ids"])
            rejected = _ids(row["rejected_input_ids"]) if is_pair else chosen
            if not 0 < prompt_length <= len(chosen) or rejected[:prompt_length] != chosen[:prompt_length]:
                raise ValueError(f"row {number}: prompt_len {prompt_length} does not fit its ids")
            origin = f"{file} row {number}"
            unknown = set() if vocabulary is None else {*chosen, *rejected} - vocabulary
            if tokenizer is not None and unknown:
                raise UserError(
                    f"{origin}: token {max(unknown)} is none of the {len(tokenizer)} of {tokenizer.name_or_path}: the "
                    "data were prepared with another tokenizer; prepare them again."
                )
            rejected_ids = rejected[prompt_length:] if is_pair else None
            rows.append(_decoded(tokenizer, chosen[:prompt_length], chosen[prompt_length:], rejected_ids, origin))
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"--data_path {file}: not rows of prompt_len and ids ({reason}); prepare the data again."
        ) from error
    return rows


def _decoded(
    tokenizer: PreTrainedTokenizerBase | None,
    prompt_ids: list[int],
    chosen_ids: list[int],
    rejected_ids: list[int] | None,
    origin: str,
) -> EncodedRow:
    """A row with the texts of its ids; without a tokenizer they are empty."""
    prompt = ""
    chosen = None
    rejected = None
    if tokenizer is not None:
        prompt = str(tokenizer.decode(prompt_ids, skip_special_tokens=True))
        chosen = decode_response(tokenizer, chosen_ids) if chosen_ids else None
        rejected = decode_response(tokenizer, rejected_ids) if rejected_ids else None
    row = Row(prompt, None, chosen, rejected, {}, origin)
    return EncodedRow(prompt, chosen or "", rejected, prompt_ids, chosen_ids, rejected_ids, row)


def check_example_prompt(folder: PreparedFolder, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a folder if the tokenizer gives other ids to its example prompt. Raises UserError."""
    file = folder.path / EXAMPLE_PROMPT
    if not file.is_file():
        logger.warning(
            "%s has neither prepared.json nor %s: nothing tells whether it was made with this tokenizer (%s)",
            folder.path,
            EXAMPLE_PROMPT,
            folder.tokenizer_name,
        )
        return
    content = _load(file)
    try:
        ids = tokenizer(content["prompt"], add_special_tokens=False)["input_ids"]
        saved_ids = _ids(content["input_ids"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"--data_path {file}: it must hold prompt and input_ids; prepare the data again.") from error
    num_bos_tokens = len(saved_ids) - len(ids)
    if saved_ids[num_bos_tokens:] != ids or num_bos_tokens > MAX_BOS_TOKENS:
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


def _ids(value: Any) -> list[int]:
    """Ids of a tensor of shape ``(n,)`` or ``(1, n)``, or of a list."""
    numbers = value.tolist() if hasattr(value, "tolist") else list(value)
    if numbers and isinstance(numbers[0], list):
        numbers = numbers[0]
    return [int(number) for number in numbers]
