# SPDX-License-Identifier: Apache-2.0
"""A picture of the lengths of prepared rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dschat.data.prepared.folder import PreparedExample

BINS = 30


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

    from dschat.common.pictures import COLOURS, plain_axes, plain_legend, png

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
