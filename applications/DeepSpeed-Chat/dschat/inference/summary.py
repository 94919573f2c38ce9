# SPDX-License-Identifier: Apache-2.0
"""The last line of a run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.common.statistics import Estimate, mean_estimate


@dataclass(frozen=True)
class Summary:
    """What a run gave.

    Attributes:
        path: the file.
        rows: number of its rows.
        dropped: number of prompts left out.
        reward: of the responses.
        length: mean number of tokens of a response, the end token included; None with --ref-scores.
        eos_rate: share of the responses that ended by themselves; None with --ref-scores.
        rejected: reward of the other responses, with --ref-scores.
        accuracy: share of the rows whose chosen response has the higher reward, with --ref-scores.
    """

    path: Path
    rows: int
    dropped: int
    reward: Estimate
    length: float | None = None
    eos_rate: float | None = None
    rejected: Estimate | None = None
    accuracy: float | None = None

    def text(self) -> str:
        """One line."""
        parts = [f"reward {self.reward.text(4)}"]
        if self.rejected is not None:
            parts += [f"rejected {self.rejected.text(4)}", f"chosen above rejected {self.accuracy:.1%}"]
        else:
            parts += [f"length {self.length:.1f} tokens", f"EOS rate {self.eos_rate:.1%}"]
        parts.append(f"{self.rows} rows" + (f" ({self.dropped} prompts left out)" if self.dropped else ""))
        return f"mean {', '.join(parts)}: {self.path}"


def summarise(path: Path, kept: Sequence[Mapping[str, Any]], dropped: int) -> Summary:
    """The summary of a file.

    Args:
        path: the file.
        kept: rows of the journal: "row", as written to the file, and "tokens", None with --ref-scores.
        dropped: number of prompts left out.
    """
    rows = [entry["row"] for entry in kept]
    reward = mean_estimate([row["reward"] for row in rows])
    if "rejected_reward" in rows[0]:
        higher = [row["reward"] > row["rejected_reward"] for row in rows]
        rejected = mean_estimate([row["rejected_reward"] for row in rows])
        return Summary(path, len(rows), dropped, reward, rejected=rejected, accuracy=statistics.fmean(higher))
    length = statistics.fmean(entry["tokens"] for entry in kept)
    eos_rate = statistics.fmean(row["finished"] for row in rows)
    return Summary(path, len(rows), dropped, reward, length, eos_rate)
