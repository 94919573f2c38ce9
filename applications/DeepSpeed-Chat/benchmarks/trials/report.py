# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of the groups."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from contenders.tables import table
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dschat.common.pictures import COLOURS
from dschat.run_report.summary import final, trailing_mean
from trials.figures import Row, curves_of, is_token_ppo, read_group
from trials.measures import KL_LEVELS, Curve, Interval, over_seeds
from trials.plan import Group
from trials.pool import Results

DASHES = ("--", "-.", ":")  # of what is not token PPO


def learning_table(rows: Sequence[Row]) -> str:
    """How fast, and how far."""
    varies = any(abs(row.last["length"] - rows[0].last["length"]) > 0.05 for row in rows)
    head = ["", "seeds", "updates to PPO's final score", "times faster", "faster on", "final gold", "minus PPO's"]
    head += ["at PPO's length", "length"] if varies else []
    head += ["KL", "λ_eff", "EV, first / last", "rms A", "rms return", "s"]
    lines = []
    for row in rows:
        reached = f" ({row.reached}/{len(row.seeds)})" if row.reached < len(row.seeds) else ""
        own = [_text(row.gold_at_length, 3), f"{row.last['length']:.1f}"] if varies else []
        explained = f"{row.explained_first:.2f} / {row.last['explained_variance_middle']:.2f}"
        lines.append(
            [
                row.setting,
                str(len(row.seeds)),
                _text(row.updates, 0) + reached,
                _text(row.speed_up, 2),
                f"{row.faster}/{len(row.seeds)}",
                _text(row.gold, 3),
                _text(row.gain, 3),
                *own,
                f"{row.last['kl']:.1f}",
                f"{row.last['lambda_eff']:.3f}",
                explained,
                f"{row.last['advantage_rms']:.2f}",
                f"{row.last['return_rms']:.2f}",
                f"{row.seconds:.0f}",
            ]
        )
    return table(head, lines)


def kl_table(rows: Sequence[Row]) -> str:
    """Gold at equal KL, and how far above the best token PPO of the same group that is."""
    head = ["", *(f"KL {level:g}" for level in KL_LEVELS), *(f"minus best PPO, KL {level:g}" for level in KL_LEVELS)]
    lines = []
    for row in rows:
        levels = [_counted(interval, len(row.seeds)) for interval in row.at_kl]
        lines.append([row.setting, *levels, *(_signed(interval) for interval in row.over_best)])
    return table(head, lines)


def _text(interval: Interval | None, digits: int) -> str:
    return "–" if interval is None else interval.text(digits)


def _counted(interval: Interval | None, seeds: int) -> str:
    if interval is None:
        return "–"
    return f"{interval.value:.3f}" + (f" ({interval.seeds}/{seeds})" if interval.seeds < seeds else "")


def _signed(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    ends = "" if interval.low is None else f" [{interval.low:+.3f}, {interval.high:+.3f}]"
    return f"{interval.value:+.3f}{ends}"


def draw(groups: Sequence[Group], results: Results) -> bytes:
    """Gold over updates, above gold over KL, side by side for some groups; bands are 95 % intervals over seeds."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning", "font.size": 9}):
        width = max(8.4, 4.2 * len(groups))  # room for the names below
        figure = Figure(figsize=(width, 7.2), layout="constrained")
        axes = figure.subplots(2, len(groups), squeeze=False, sharey="col")
        for column, group in enumerate(groups):
            _draw_group(list(axes[:, column]), group, results)
            axes[0, column].set_title(f"{group.name} ({group.task})", fontsize=10, fontweight="bold")
        handles: dict[str, Any] = {}
        for ax in axes.flatten():
            handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=int(width // 2.8), frameon=False
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _draw_group(axes: Sequence[Axes], group: Group, results: Results) -> None:
    over_updates, over_kl = axes
    found = read_group(group, results)
    for i, (name, runs) in enumerate(found.items()):
        if not runs:
            continue
        curves = [curves_of(run) for run in runs.values()]
        gold = np.stack([trailing_mean(run["gold"]) for run in curves])
        kl = np.stack([trailing_mean(run["kl"]) for run in curves])
        dash = "-" if is_token_ppo(group.settings[name]) else DASHES[i // len(COLOURS)]
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": dash}
        updates, mean = np.arange(1, gold.shape[1] + 1), gold.mean(0)
        over_updates.plot(updates, mean, label=name, linewidth=1.6, **style)
        low, high = _band(gold)
        over_updates.fill_between(updates, low, high, color=style["color"], alpha=0.13, linewidth=0)
        over_kl.plot(kl.mean(0), mean, linewidth=1.6, **style)
        if i == 0:
            level = float(np.mean([final(run["gold"]) for run in curves]))
            label = f"where {name} ends"
            over_updates.axhline(level, color="#444444", linestyle=":", linewidth=1.2, label=label)
    over_updates.set_xlabel("updates")
    over_kl.set_xlabel("KL to SFT, nats per response")
    for ax in axes:
        ax.set_ylabel("gold score")
        ax.grid(color="#e3e3e3", linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)


def _band(gold: Curve) -> tuple[Curve, Curve]:
    """95 % bootstrap intervals of the mean over seeds, at every fifth update and between them in straight lines."""
    places = np.unique(np.append(np.arange(0, gold.shape[1], 5), gold.shape[1] - 1))
    found = [over_seeds(gold[:, place].tolist()) for place in places]
    ends = [(i.value, i.value) if i.low is None else (i.low, i.high) for i in found if i is not None]
    low, high = np.array(ends, dtype=np.float64).T
    every = np.arange(gold.shape[1])
    return np.interp(every, places, low), np.interp(every, places, high)
