# SPDX-License-Identifier: Apache-2.0
"""Writes a prepared folder, with a picture of its lengths: beside its place, then renamed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dschat.base.atomic import reporting, writing_folder
from dschat.base.jsonl import write_rows
from dschat.data.prepared.folder import ARGUMENTS, EXAMPLE_PROMPT, INFO, PLOT, SKIPPED, PreparedExample, split_files
from dschat.data.tokenised import columns_of, features_of, library

IGNORE_INDEX = -1  # the target of a prompt's token in .pt files
BINS = 30  # of a histogram

Splits = Mapping[str, Sequence[PreparedExample]]


def write_folder(
    folder: Path, info: Mapping[str, Any], splits: Splits, skipped: Sequence[tuple[PreparedExample, str]] | None
) -> None:
    """Writes everything; what the folder held before stays until then.

    Args:
        folder: to write.
        info: for `prepared.json`.
        splits: the rows; a split without any gets no file.
        skipped: rows that were left out, and why; None = do not write them.

    Raises:
        UserError: it cannot be written.
    """
    with reporting(f"--output {folder}"), writing_folder(folder) as beside:
        own = {split: examples for split, examples in splits.items() if examples}
        (_write_pt if info["format"] == "pt" else _write_arrow)(beside, info, own)
        if skipped is not None:
            write_rows(beside / SKIPPED, (_told(example, reason) for example, reason in skipped))
        (beside / PLOT).write_bytes(lengths_picture(splits, info))
        (beside / INFO).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


def _told(example: PreparedExample, reason: str) -> dict[str, object]:
    row = example.row
    texts = {"prompt": example.prompt, "chosen": example.chosen, "rejected": example.rejected}
    return {"reason": reason, "origin": row.origin, **{name: text for name, text in texts.items() if text is not None}}


def _write_arrow(folder: Path, info: Mapping[str, Any], splits: Splits) -> None:
    from datasets import Dataset, DatasetDict

    features = features_of(PreparedExample)
    tables = {name: Dataset.from_dict(columns_of(PreparedExample, rows), features) for name, rows in splits.items()}
    with library(show=False):
        DatasetDict(tables).save_to_disk(folder)


def _pt_row(example: PreparedExample, mask_prompt: bool) -> dict[str, object]:
    """A row of a .pt file: whole sequences, and the length of the prompt in them."""
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


def _write_pt(folder: Path, info: Mapping[str, Any], splits: Splits) -> None:
    import torch

    for split, examples in splits.items():
        (file,) = split_files(folder, info["stage"], split, "pt")
        _save_tensors([_pt_row(example, info["mask_prompt"]) for example in examples], file)
    limits = dict(info["arguments"])
    limits = {**limits.pop("limits"), **limits}
    told = {**limits, "tokenizer_name": info["tokenizer"]["name"], "ignore_index": IGNORE_INDEX}
    (folder / ARGUMENTS).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    prompt = info["example_prompt"]
    ids = {name: torch.tensor([prompt[name]]) for name in ("input_ids", "attention_mask")}
    _save_tensors({"prompt": prompt["prompt"], **ids}, folder / EXAMPLE_PROMPT)


def _save_tensors(content: object, file: Path) -> None:
    """`torch.save`, whose error on a full disk is a plain RuntimeError. Raises OSError where it cannot write."""
    import torch

    try:
        torch.save(content, file)
    except RuntimeError as error:
        raise OSError(f"{file}: {error}") from error


def lengths_of_parts(examples: Sequence[PreparedExample]) -> dict[str, list[int]]:
    """Tokens of prompts, responses and whole rows, by name; the two responses of a pair count apart."""
    responses = {"response": [len(example.chosen_ids) for example in examples]}
    if examples and examples[0].rejected_ids is not None:
        responses = {
            "chosen response": responses["response"],
            "rejected response": [len(example.rejected_ids or ()) for example in examples],
        }
    whole = [len(example) for example in examples]
    return {"prompt": [len(example.prompt_ids) for example in examples], **responses, "prompt and response": whole}


def lengths_picture(splits: Mapping[str, Sequence[PreparedExample]], info: Mapping[str, Any]) -> bytes:
    """A PNG with a histogram for each part, the splits as shares of their own rows."""
    from matplotlib.figure import Figure

    from dschat.base.pictures import COLOURS, plain_axes, plain_legend, png

    found = {split: lengths_of_parts(examples) for split, examples in splits.items() if examples}
    names = list(found["train"])
    figure = Figure(figsize=(4.2 * len(names), 3.6), layout="constrained")
    for number, name in enumerate(names):
        ax = figure.add_subplot(1, len(names), number + 1)
        plain_axes(ax, name, "tokens", "% of the rows" if number == 0 else "")
        longest = max(max(lengths[name]) for lengths in found.values())
        edges = np.linspace(0, longest + 1, min(BINS, longest + 1) + 1)
        for colour, (split, lengths) in zip(COLOURS, found.items(), strict=False):
            counts, _ = np.histogram(lengths[name], edges)
            label = f"{split} ({len(lengths[name]):,})"
            ax.stairs(100 * counts / len(lengths[name]), edges, color=colour, label=label, linewidth=1.6)
    plain_legend(figure.axes[-1])
    limits = info["arguments"]["limits"]
    told = f"{info['source']['name']}, {info['stage']}: cut to {limits['max_length']} tokens"
    figure.suptitle(told, fontsize=11, x=0.01, ha="left", parse_math=False)
    return png(figure)
