# SPDX-License-Identifier: Apache-2.0
"""Figures as Markdown, and into a document."""

import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

PHASES = ("generation", "scoring", "training", "rest")


def step3_table(rows: Mapping[str, Any]) -> str:
    """The table of one kind of work, and where the time of ours went, if that was traced."""
    head = ["", "speed", *(f"{name}, s" for name in PHASES), "macro actions", "positions", "peak, MB", "length"]
    lines = []
    for name, row in rows.items():
        if "not_measured" in row:
            lines.append([name, f"not measured: {row['not_measured']}", *[""] * (len(head) - 2)])
        elif "percent" not in row:
            lines.append([name, *_numbers(row)])
    profiles = [profile_table(row) for row in rows.values() if "percent" in row]
    return "\n\n".join([table(head, lines), *profiles])


def _numbers(row: Mapping[str, Any]) -> list[str]:
    cpu, inside = row["cpu_seconds"], row["inside_cpu_seconds"].get("macro actions")
    return [
        f"{row['speed']:.2f}" if "speed" in row else f"{row['tokens_per_cpu_second']:.0f} tokens/s",
        *(f"{cpu.get(phase, 0.0):.2f}" for phase in PHASES),
        "" if inside is None else f"{100 * inside / cpu['total']:.2f} %",
        " / ".join(f"{positions:.2f}" for positions in row["positions_per_token"].values()),
        f"{row['peak_mb']:.0f}",
        f"{row['tokens'] / row['batch']:.0f}",
    ]


def profile_table(profile: Mapping[str, Any]) -> str:
    """Where the time of an iteration went, in percent; of everything else, what takes 0.5 % or more."""
    groups = [[name, f"{percent:.1f} %"] for name, percent in profile["percent"].items()]
    items = [[f"· {name}", f"{x:.1f} %"] for name, x in profile["items"]["everything else"].items() if x >= 0.5]
    return f"Where the time of ours went:\n\n{table(['', 'of the iteration'], [*groups, *items])}"


def growth_table(figures: Mapping[str, Any], unit: str, phases: Sequence[str]) -> str:
    """Time and memory by the quantity that grows; how fast they grow at the end."""
    head = [unit, "CPU s", *(f"{phase}, s" for phase in phases), "wall s", "peak, MB"]
    rows = [
        [
            f"{point['value']:,}",
            f"{point['cpu_seconds']:.2f}",
            *(f"{point['phases'][phase]:.2f}" for phase in phases),
            f"{point['wall_seconds']:.2f}",
            f"{point['peak_mb']:.0f}",
        ]
        for point in figures["points"]
    ]
    power = figures["exponent"]
    end = f"At the end: CPU time grows with the power {power['cpu_seconds']}, memory with {power['peak_mb']}."
    return f"{table(head, rows)}\n\n{end}"


def gpu_table(figures: Mapping[str, Any]) -> str:
    """How near rollouts and training come to their limits, and the phases' shares, by batch."""
    limits = figures["limits"]
    measured = (
        f"Measured limits: {limits['bytes_per_second'] / 1e9:,.0f} GB/s, "
        f"{limits['operations_per_second'] / 1e12:,.1f} TFLOP/s."
    )
    head = ["prompts", "rollout, tokens/s", "of its limit", "training, TFLOP/s", "of its limit"]
    head += [*(f"{phase}, share" for phase in PHASES), "iteration, s", "peak, GB"]
    rows = [
        [
            f"{row['batch']}",
            f"{row['rollout_tokens_per_second']:,.0f}",
            f"{100 * row['rollout_tokens_per_second'] / row['rollout_limit']:.0f} %",
            f"{row['training_operations_per_second'] / 1e12:,.1f}",
            f"{100 * row['training_operations_per_second'] / row['training_limit']:.0f} %",
            *(f"{100 * row['share'][phase]:.0f} %" for phase in PHASES),
            f"{row['wall_seconds']:.1f}",
            f"{row['peak_mb'] / 1e3:.1f}",
        ]
        for row in figures["batches"]
    ]
    return f"{measured}\n\n{table(head, rows)}"


def origin(machine: Mapping[str, Any]) -> str:
    """Where figures come from: this process's command line, machine and today's date."""
    command = " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    where = [*machine["gpus"], f"{machine['cpu_cores']} cores of {machine['cpu']}"]
    versions = f"{machine['system']}, Python {machine['python']}, torch {machine['torch']}"
    return f"`{command}`\n\n{', '.join(where)}; {versions}; {date.today().isoformat()}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_section(document: Path, name: str, text: str) -> None:
    """Puts text between the comments <!-- name --> and <!-- /name --> of a document.

    Raises:
        ValueError: it has no such comments.
    """
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    content = document.read_text(encoding="utf-8")
    before, found, rest = content.partition(first)
    _, end, after = rest.partition(last)
    if not found or not end:
        raise ValueError(f"{document} has no section between {first} and {last}")
    document.write_text(f"{before}{first}\n{text}\n{last}{after}", encoding="utf-8")
