# SPDX-License-Identifier: Apache-2.0
"""The flags of text metrics, checked before anything slow is imported, and the models that they name."""

import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dschat.common.script import flag
from dschat.config.rollouts import engine_name
from dschat.data.rows import DataKeys
from dschat.errors import UserError
from dschat.inference.options import DTYPES, ENGINES, check_known, check_positive, model_name

logger = logging.getLogger(__name__)

SPLITS = ("eval", "train")
SEED = 1234  # training's default
FLAGS_FILE = "train_config.json"  # which every run writes
STEP = re.compile(r"step-(\d+)")
POLICY = "actor"  # of step 3's output
Kind = Literal["policy", "reward"]


@dataclass(frozen=True)
class Subject:
    """A model to be measured.

    Attributes:
        kind: what it is.
        name: in table and rows.
        path: folder or hub id.
        flag: that named it.
        update: optimiser updates it had; None if that is not known.
    """

    kind: Kind
    name: str
    path: str
    flag: str
    update: int | None = None


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What is measured, and on what. A field is a flag: its name, type, default and help line."""

    model: Sequence[str] = flag("policies: folders or hub ids, with or without /actor", (), nargs="+")
    reward_model: Sequence[str] = flag("reward models of step 2: folders or hub ids", (), nargs="+")
    checkpoints: Path | None = flag("output folder of a run: all of its models, models/step-N and the final one", None)
    data: str = flag("data set: as --data_path of training")
    output: Path = flag("folder for rows.jsonl, report.md, report.json and report.png")
    split: str = flag("eval, the held-out rows, or train (%(default)s)", "eval")
    seed: int = flag(
        f"of the 5 %% held out where the data have no evaluation rows ({SEED}; the run's of --checkpoints)", None
    )
    num_samples: int | None = flag("texts: so many of the split, the same for every model (all)", None)
    no_rouge: bool = flag("do not answer the prompts, which takes longest", False)
    all_tokens: bool = flag("perplexity of prompts, too, as --sft_on_prompt trains; else of responses alone", False)
    max_seq_len: int = flag("longest text in tokens; the rest is cut, as in training (%(default)s)", 1024)
    max_new_tokens: int = flag("longest response in tokens, for ROUGE (%(default)s)", 512)
    max_prompt_len: int | None = flag("leave out prompts of more tokens, BOS included (no limit)", None)
    end_of_conversation_token: str | None = flag("token that ends a response instead of EOS, as in training", None)
    batch_size: int = flag("texts computed at once (%(default)s)", 16)
    rollout_engine: str = flag("what draws responses: continuous or generate (%(default)s)", "continuous")
    gpu: int | None = flag("number of the GPU (0 where there is one)", None)
    device: str | None = flag("cpu, cuda or cuda:N; decides over --gpu", None)
    dtype: str | None = flag("of the models: fp32, bf16 or fp16 (bf16 on a GPU, fp32 on a CPU)", None)
    prompt_key: str = flag("column of the prompt (%(default)s)", DataKeys.prompt)
    chosen_key: str = flag("column of the preferred response (%(default)s)", DataKeys.chosen)
    rejected_key: str = flag("column of the other response (%(default)s)", DataKeys.rejected)
    response_key: str = flag("column of the response in data without preferences (%(default)s)", DataKeys.response)
    messages_key: str = flag("column of a conversation (%(default)s)", DataKeys.messages)
    overwrite: bool = flag("start anew, dropping a finished report or a run begun without this flag", False)

    # Greedy responses depend on none of these.
    top_k = 0
    top_p = 1.0

    def __post_init__(self) -> None:
        """Refuses values that make no sense. Raises UserError, which names the flag and what to change."""
        if not (self.model or self.reward_model or self.checkpoints):
            raise UserError("Nothing to measure: give --model, --reward-model or --checkpoints.")
        object.__setattr__(self, "rollout_engine", engine_name(self.rollout_engine))
        for name, known in (("split", SPLITS), ("dtype", (None, *DTYPES)), ("rollout_engine", ENGINES)):
            check_known(name, getattr(self, name), known)
        for name in ("num_samples", "max_seq_len", "max_new_tokens", "max_prompt_len", "batch_size"):
            check_positive(name, getattr(self, name))
        if self.seed is None:
            object.__setattr__(self, "seed", run_seed(self.checkpoints) if self.checkpoints else SEED)
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed {self.seed}: must be between 0 and {2**32 - 1}.")

    @property
    def keys(self) -> DataKeys:
        """The data set's column names."""
        return DataKeys(self.prompt_key, self.chosen_key, self.rejected_key, self.response_key, self.messages_key)

    def subjects(self) -> list[Subject]:
        """The models, in the order of the flags, a run's by updates. Raises UserError where two share a name."""
        found = [Subject("policy", model_name(path), path, "--model") for path in self.model]
        found += [Subject("reward", model_name(path), path, "--reward-model") for path in self.reward_model]
        found += run_models(self.checkpoints) if self.checkpoints else []
        ((name, count),) = Counter(each.name for each in found).most_common(1)
        if count > 1:
            raise UserError(f"Two of the models are called {name}: rename a folder, or measure them one by one.")
        return found


def run_seed(folder: Path) -> int:
    """The seed that a run split its data by; training's default, with a warning, where that is not known."""
    try:
        seed = json.loads((folder / FLAGS_FILE).read_text(encoding="utf-8"))["seed"]
    except (OSError, ValueError, KeyError, TypeError):
        seed = None
    if isinstance(seed, int):
        return seed
    logger.warning(
        "--checkpoints %s: its %s tells no seed; %d is taken. Give the run's --seed: with another, held-out rows of"
        " data without evaluation rows may be rows that it was trained on.",
        *(folder, FLAGS_FILE, SEED),
    )
    return SEED


def run_models(folder: Path) -> list[Subject]:
    """The models that a run has kept, by updates; the final one last.

    Raises:
        UserError: there is no run, or it has kept no models yet.
    """
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--checkpoints {folder}: no run of ours, its run.json cannot be read: {error}.") from error
    kind: Kind = "reward" if record.get("step") == "reward" else "policy"
    last = record.get("batches", {}).get("total_updates")
    places = {int(m[1]): place for place in (folder / "models").glob("*") if (m := STEP.fullmatch(place.name))}
    found = [
        Subject(kind, f"step-{update}", str(_model_in(place)), "--checkpoints", update)
        for update, place in sorted(places.items())
    ]
    final = _model_in(folder)
    if (final / "config.json").is_file() or (kind == "reward" and (final / "adapter").is_dir()):
        found = [each for each in found if each.update != last]
        found.append(Subject(kind, "final", str(final), "--checkpoints", last))
    if not found:
        raise UserError(
            f"--checkpoints {folder}: the run has kept no models yet. With --save_models 50, training keeps them "
            "after every 50 updates."
        )
    return found


def _model_in(folder: Path) -> Path:
    return folder / POLICY if (folder / POLICY).is_dir() else folder
