# SPDX-License-Identifier: Apache-2.0
"""Writes a prepared folder. It appears when it is complete."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dschat.base.atomic import reporting, writing_folder
from dschat.base.jsonl import write_rows
from dschat.data.prepared.folder import INFO, SKIPPED, PreparedExample
from dschat.data.prepared.pt_files import write_pt
from dschat.data.tokenised import table_of

Splits = Mapping[str, Sequence[PreparedExample]]


def write_folder(
    folder: Path, info: Mapping[str, Any], splits: Splits, skipped: Sequence[tuple[PreparedExample, str]] | None
) -> None:
    """Writes the whole folder; its earlier content stays until then.

    Args:
        folder: to write.
        info: the content of `prepared.json`.
        splits: the rows; a split without rows gets no file.
        skipped: rows that were left out, and the reasons; None = do not write them.

    Raises:
        UserError: it cannot be written.
    """
    with reporting(f"--output {folder}"), writing_folder(folder) as new_folder:
        filled_splits = {split: examples for split, examples in splits.items() if examples}
        if info["format"] == "pt":
            write_pt(new_folder, info, filled_splits)
        else:
            _write_arrow(new_folder, filled_splits)
        if skipped is not None:
            write_rows(new_folder / SKIPPED, [_skipped_row(example, reason) for example, reason in skipped])
        (new_folder / INFO).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


def _skipped_row(example: PreparedExample, reason: str) -> dict[str, object]:
    row: dict[str, object] = {"reason": reason, "origin": example.row.origin}
    for name in ("prompt", "chosen", "rejected"):
        text = getattr(example, name)
        if text is not None:
            row[name] = text
    return row


def _write_arrow(folder: Path, splits: Splits) -> None:
    """Writes the splits as the library `datasets` does."""
    import datasets
    from datasets.table import InMemoryTable

    tables = {}
    for split, examples in splits.items():
        tables[split] = datasets.Dataset(InMemoryTable(table_of(PreparedExample, examples)))
    were_shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        datasets.DatasetDict(tables).save_to_disk(folder)
    finally:
        if were_shown:
            datasets.enable_progress_bars()


def lengths_of_parts(examples: Sequence[PreparedExample]) -> dict[str, list[int]]:
    """Lengths in tokens of prompts, responses and whole rows, by name; the two responses of a pair are two parts."""
    prompts: list[int] = []
    chosen: list[int] = []
    rejected: list[int] = []
    totals: list[int] = []
    for example in examples:
        prompts.append(len(example.prompt_ids))
        chosen.append(len(example.chosen_ids))
        if example.rejected_ids is not None:
            rejected.append(len(example.rejected_ids))
        totals.append(len(example))
    if rejected:
        responses = {"chosen response": chosen, "rejected response": rejected}
    else:
        responses = {"response": chosen}
    return {"prompt": prompts, **responses, "prompt and response": totals}
