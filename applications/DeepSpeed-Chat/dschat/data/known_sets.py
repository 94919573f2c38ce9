# SPDX-License-Identifier: Apache-2.0
"""Published data sets by name: where the hub has them, how many rows they hold, and where local copies are."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA_VARIABLE = "MA_RLHF_DATA"  # names the folder of local copies: one folder or file per short name
PARQUET_BRANCH = "refs/convert/parquet"
ANTHROPIC = "Anthropic/hh-rlhf"
COPY_SUFFIXES = ("", ".jsonl", ".parquet", ".json")


@dataclass(frozen=True)
class KnownSet:
    """A published data set."""

    name: str  # short name, also of local copies
    hub_id: str  # owner/name on the hub
    train_rows: int  # rows of the training split
    eval_rows: int | None  # rows of the evaluation split; None if there is none
    aliases: tuple[str, ...] = ()  # other short names
    builder: str = ""  # of its files, the first argument of `datasets.load_dataset`; empty for the repository itself
    load_options: Mapping[str, Any] = field(default_factory=dict)  # the other arguments
    revision: str = "main"  # branch that holds the files
    include: str = "*"  # pattern of the files on that branch
    compared_as: str = ""  # name of its results and of its rubric; empty if responses are not compared with each other
    subset: str = ""  # folder of the repository that holds it; empty for the whole repository
    of_paper: bool = True  # whether the paper's runs used it; then the steps share its rows by default

    @property
    def title(self) -> str:
        """Its name in messages and records: the repository, and the part of it."""
        return f"{self.hub_id}/{self.subset}" if self.subset else self.hub_id

    @property
    def counts(self) -> tuple[int, int | None]:
        """Rows of the training and evaluation splits."""
        return self.train_rows, self.eval_rows

    def names(self) -> tuple[str, ...]:
        """All names by which `--data_path` may refer to it, in lower case."""
        return (self.name, *self.aliases, self.title.lower())

    def fetch_command(self, folder: str | Path) -> str:
        """Shell command that downloads it to `folder`, which can then be read offline."""
        revision = () if self.revision == "main" else ("--revision", self.revision)
        return fetch_command(self.hub_id, folder, (*revision, "--include", self.include))


def _anthropic(subset: str, train_rows: int, eval_rows: int) -> KnownSet:
    """One of the four parts of Anthropic's HH-RLHF, in a folder of its own; the name of the folder is its name."""
    return KnownSet(
        subset,
        ANTHROPIC,
        train_rows,
        eval_rows,
        load_options={"data_dir": subset},
        include=f"{subset}/*.jsonl.gz",
        subset=subset,
        of_paper=False,
    )


KNOWN_SETS = (
    KnownSet(
        "tldr",
        "openai/summarize_from_feedback",
        train_rows=92_858,
        eval_rows=86_086,
        aliases=("summarize",),
        # The configuration's name fails on this branch, and without a folder `comparisons` and `axis` are mixed.
        load_options={"revision": PARQUET_BRANCH, "data_dir": "comparisons"},
        revision=PARQUET_BRANCH,
        include="comparisons/*.parquet",
        compared_as="summarize",
    ),
    KnownSet(
        "hh",
        "Dahoas/full-hh-rlhf",
        train_rows=112_052,
        eval_rows=12_451,
        aliases=("hh-rlhf",),
        include="*.parquet",
        compared_as="hh-rlhf",
    ),
    KnownSet(
        "webgpt",
        "openai/webgpt_comparisons",
        train_rows=19_578,
        eval_rows=None,
        load_options={"revision": PARQUET_BRANCH, "data_dir": "default/train"},
        revision=PARQUET_BRANCH,
        include="default/train/*.parquet",
        compared_as="webgpt",
    ),
    KnownSet(
        "apps",
        "codeparrot/apps",
        train_rows=5_000,
        eval_rows=5_000,
        # The parquet branch holds each problem twice: under `all` and under its difficulty.
        builder="json",
        load_options={
            "data_files": {
                "train": "hf://datasets/codeparrot/apps/train.jsonl",
                "test": "hf://datasets/codeparrot/apps/test.jsonl",
            }
        },
        include="*.jsonl",
    ),
    KnownSet(
        "gsm8k", "openai/gsm8k", 7_473, 1_319, load_options={"name": "main"}, include="main/*.parquet", of_paper=False
    ),
    # All four parts; the folder red-team-attempts holds no comparisons.
    KnownSet("anthropic-hh", ANTHROPIC, 160_800, 8_552, include="h*/*.jsonl.gz", of_paper=False),
    _anthropic("harmless-base", 42_537, 2_312),
    _anthropic("helpful-base", 43_835, 2_354),
    _anthropic("helpful-online", 22_007, 1_137),
    _anthropic("helpful-rejection-sampled", 52_421, 2_749),
)


def find_known(path: str) -> KnownSet | None:
    """The published set that a `--data_path` names, by hub id or short name in any case; None if it names none."""
    for known_set in KNOWN_SETS:
        if path.lower() in known_set.names():
            return known_set
    return None


def data_folder() -> Path | None:
    """The folder of local copies, $MA_RLHF_DATA; None if the variable is unset or empty."""
    value = os.environ.get(DATA_VARIABLE)
    return Path(value).expanduser() if value else None


def local_copy(known: KnownSet) -> Path | None:
    """The local folder or file of a published set: `tldr`, `tldr.jsonl` and so on in `data_folder`; None if absent."""
    folder = data_folder()
    if folder is None:
        return None
    for suffix in COPY_SUFFIXES:
        path = folder / f"{known.name}{suffix}"
        if path.exists():
            return path
    return None


def fetch_command(hub_id: str, folder: str | Path, options: tuple[str, ...] = ()) -> str:
    """Shell command that downloads a data set of the hub into `folder`."""
    command = ["hf", "download", hub_id, "--repo-type", "dataset", *options]
    return shlex.join([*command, "--local-dir", os.fspath(folder)])


def describe_counts(train_rows: int, eval_rows: int | None) -> str:
    """Row counts in words: "92,858 training and no evaluation rows"."""
    eval_count = "no" if eval_rows is None else f"{eval_rows:,}"
    return f"{train_rows:,} training and {eval_count} evaluation rows"
