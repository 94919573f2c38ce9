# SPDX-License-Identifier: Apache-2.0
"""The published data sets: their names, where they lie on the Hugging Face hub, how many rows they have.

Three of the four repositories hold a loading script, which `datasets` 4 and later refuse and which nobody should run.
What is loaded instead are data files: those that the hub made of them (branch refs/convert/parquet), or the originals.
"""

import logging
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat.errors import UserError

OWN_NAME = re.compile(r"\w[\w.-]*")

logger = logging.getLogger(__name__)

DATA_VARIABLE = "MA_RLHF_DATA"  # folder with local copies, one folder or file per short name
PARQUET_BRANCH = "refs/convert/parquet"
COPY_SUFFIXES = ("", ".jsonl", ".parquet", ".json")


@dataclass(frozen=True)
class KnownSet:
    """A published data set.

    Attributes:
        name: short name; local copies are called so.
        aliases: further short names.
        hub_id: owner/name on the hub.
        train_rows: rows of its training split.
        eval_rows: rows of its evaluation split; None where it has none.
        load: first argument of `datasets.load_dataset`: the repository, or the builder of its files.
        load_options: the other arguments.
        revision: branch that holds the files.
        include: pattern of the files among those of the branch.
        compared_as: what results on it, and the rubric by which they are compared, are called; empty where responses
            are not compared with each other.
    """

    name: str
    aliases: tuple[str, ...]
    hub_id: str
    train_rows: int
    eval_rows: int | None
    load: str
    load_options: Mapping[str, Any] = field(default_factory=dict)
    revision: str = "main"
    include: str = "*"
    compared_as: str = ""

    @property
    def counts(self) -> tuple[int, int | None]:
        """Rows of its training and evaluation splits."""
        return self.train_rows, self.eval_rows

    def names(self) -> tuple[str, ...]:
        """Everything that `--data_path` calls it, in lower case."""
        return (self.name, *self.aliases, self.hub_id.lower())

    def fetch_command(self, folder: str | Path) -> str:
        """Shell command that downloads it into `folder`, which can then be read offline."""
        revision = () if self.revision == "main" else ("--revision", self.revision)
        return fetch_command(self.hub_id, folder, (*revision, "--include", self.include))


KNOWN_SETS = (
    KnownSet(
        name="tldr",
        aliases=("summarize",),
        hub_id="openai/summarize_from_feedback",
        train_rows=92_858,
        eval_rows=86_086,
        # The name of the configuration fails on this branch; without a folder `comparisons` and `axis` are mixed.
        load="openai/summarize_from_feedback",
        load_options={"revision": PARQUET_BRANCH, "data_dir": "comparisons"},
        revision=PARQUET_BRANCH,
        include="comparisons/*.parquet",
        compared_as="summarize",
    ),
    KnownSet(
        name="hh",
        aliases=("hh-rlhf",),
        hub_id="Dahoas/full-hh-rlhf",
        train_rows=112_052,
        eval_rows=12_451,
        load="Dahoas/full-hh-rlhf",
        include="*.parquet",
        compared_as="hh-rlhf",
    ),
    KnownSet(
        name="webgpt",
        aliases=(),
        hub_id="openai/webgpt_comparisons",
        train_rows=19_578,
        eval_rows=None,
        load="openai/webgpt_comparisons",
        load_options={"revision": PARQUET_BRANCH, "data_dir": "default/train"},
        revision=PARQUET_BRANCH,
        include="default/train/*.parquet",
        compared_as="webgpt",
    ),
    KnownSet(
        name="apps",
        aliases=(),
        hub_id="codeparrot/apps",
        train_rows=5_000,
        eval_rows=5_000,
        # The parquet branch holds each problem twice: under `all` and under its difficulty.
        load="json",
        load_options={
            "data_files": {part: f"hf://datasets/codeparrot/apps/{part}.jsonl" for part in ("train", "test")}
        },
        include="*.jsonl",
    ),
)
COMPARED_SETS = tuple(known.compared_as for known in KNOWN_SETS if known.compared_as)


def find_known(path: str) -> KnownSet | None:
    """The published set that a `--data_path` names, by hub id or short name in any case; None if it names none."""
    return next((known for known in KNOWN_SETS if path.lower() in known.names()), None)


def compared_set(text: str, own: bool = False, remedy: str = "leave the flag out") -> str:
    """What results call the set that a `--dataset` names.

    Args:
        text: hub id or any short name of a published set; or a name for data of one's own.
        own: data of one's own may be meant.
        remedy: how they are given where they are not, for messages.

    Returns:
        One of COMPARED_SETS; or the name of one's own set, which is then said.

    Raises:
        UserError: there is no such set, its responses are not compared, or the name of one's own is no folder's.
    """
    known = find_known(text)
    if known is not None and known.compared_as:
        return known.compared_as
    if known is not None or not own:
        raise UserError(f"--dataset {text}: unknown; give {', '.join(COMPARED_SETS)}, or {remedy}.")
    if not OWN_NAME.fullmatch(text):
        raise UserError(f"--dataset {text}: a name of your own must be letters, digits, ., - and _, no path.")
    logger.info("--dataset %s: a data set of your own (published ones: %s)", text, ", ".join(COMPARED_SETS))
    return text


def data_folder() -> Path | None:
    """The folder of local copies, $MA_RLHF_DATA; None where the variable is unset or empty."""
    value = os.environ.get(DATA_VARIABLE)
    return Path(value).expanduser() if value else None


def local_copy(known: KnownSet) -> Path | None:
    """The local folder or file of a published set: `tldr`, `tldr.jsonl` and so on in `data_folder`; None if absent."""
    folder = data_folder()
    if folder is None:
        return None
    candidates = (folder / f"{known.name}{suffix}" for suffix in COPY_SUFFIXES)
    return next((path for path in candidates if path.exists()), None)


def fetch_command(hub_id: str, folder: str | Path, options: tuple[str, ...] = ()) -> str:
    """Shell command that downloads a data set of the hub into `folder`."""
    return shlex.join(["hf", "download", hub_id, "--repo-type", "dataset", *options, "--local-dir", os.fspath(folder)])


def describe_counts(train_rows: int, eval_rows: int | None) -> str:
    """Row counts in words; no evaluation rows where they are None."""
    return f"{train_rows:,} training and {'no' if eval_rows is None else format(eval_rows, ',')} evaluation rows"
