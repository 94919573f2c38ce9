# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.data check` of a prepared folder: what it says of itself, and its lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dschat.data.inspect.histogram import summary, text_histogram
from dschat.data.prepared.command import summary_of
from dschat.data.prepared.folder import PreparedFolder
from dschat.data.prepared.lengths import lengths_of_parts
from dschat.data.prepared.read import check_folder, read_split
from dschat.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepared_report(folder: PreparedFolder, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Describes a prepared folder, in lines.

    Args:
        folder: to describe.
        tokenizer: of a model that is to be trained on it; says whether it fits.

    Raises:
        UserError: a file cannot be read.
    """
    title = str(folder.path)
    lines = [title, "=" * len(title), "prepared data with splits of their own: --data_split does not cut them"]
    parts = {split: lengths_of_parts(read_split(folder, split)) for split in folder.files}
    if folder.info:
        lines += summary_of(folder.info)
    else:
        rows = ", ".join(f"{len(lengths['prompt']):,} {split}" for split, lengths in parts.items())
        lines += [f"for        {folder.stage}, tokenizer {folder.tokenizer_name}, pt files", f"rows       {rows}"]
    if tokenizer is not None:
        try:
            check_folder(folder, tokenizer, None, None)
            lines.append(f"tokenizer  {tokenizer.name_or_path} gives the same ids")
        except UserError as error:
            lines.append(f"tokenizer  {error}")
    for name in parts["train"]:
        lines += ["", f"length of {name}, in tokens"]
        for split, lengths in parts.items():
            bars = text_histogram(lengths[name]) if split == "train" else []
            lines += [f"  {line}" for line in [f"{split}: {summary(lengths[name])}", *bars]]
    return "\n".join(lines)
