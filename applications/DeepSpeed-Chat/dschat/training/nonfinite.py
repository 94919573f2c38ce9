# SPDX-License-Identifier: Apache-2.0
"""Numbers that are not finite: the first is named, what it came from is kept, and the run stops or goes on without it.

Every process must take the same turn, though only one may have such a number. So there is one agreement per rollout
and one per optimiser update.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dschat.base.atomic import write_file
from dschat.base.errors import UserError
from dschat.models.engines import Trained
from dschat.run.distributed import barrier, broadcast_object, first_over_ranks, gather_objects, is_main, rank
from dschat.run.metrics import after
from dschat.run.output import Run
from dschat.run.state import Json
from macro_actions.types import PPOBatch, ScoredRollout, tensors_of

logger = logging.getLogger(__name__)

FOLDER = "nonfinite"
MOST_KEPT = 10  # batches that a process writes down: where updates are skipped there may be no end of them
SKIPPED_NONFINITE = "skipped/nonfinite"  # the metric: updates that were left out
PARTS = ("losses", "gradients", "gradient norms")  # of an update, see `Trained.nonfinite`
REMEDY = "Lower the learning rates, or use --dtype bf16 or fp32 if this is fp16."


class NonFinite:
    """What a run does with numbers that are not finite. Every rank must call its methods."""

    def __init__(self, action: str, run: Run, remedies: Mapping[str, str] | None = None) -> None:
        """Takes --on_nonfinite, the run that batches are written down for, and what helps by the numbers' name."""
        self._skips, self._run, self._remedies = action == "skip", run, remedies or {}

    def in_rollout(
        self,
        batch: PPOBatch | ScoredRollout,
        update: int,
        bad_logits: Tensor | None = None,
        auxiliary: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """Whether a rollout must be left out after so many updates; UserError if the run stops at that.

        `bad_logits` (B,) bool are rows that were sampled from logits that are not finite; `auxiliary` (B,) the numbers
        of several sources of scores and of the metric function, by name.
        """
        return self.in_rows(bad_rows(batch, bad_logits, auxiliary or {}), update, lambda: tensors_of(batch))

    def in_rows(
        self, found: Sequence[tuple[str, Tensor]], update: int, tensors: Callable[[], dict[str, Tensor]]
    ) -> bool:
        """Whether what was drawn and scored must be left out after so many updates; UserError if the run stops at
        that.

        `found` names what may not be finite, in the order in which it was computed, with (B,) bool for each; `tensors`
        are written down.
        """
        names, rows = [name for name, _ in found], torch.stack([bad for _, bad in found]).cpu()
        bad = rows.any(1)
        own = int(bad.int().argmax()) if bool(bad.any()) else None
        numbers = [] if own is None else rows[own].nonzero().flatten().tolist()
        return self._meet(names, own, update, tensors, numbers)

    def in_update(self, engines: Mapping[str, Trained], update: int, tensors: Callable[[], dict[str, Tensor]]) -> bool:
        """Whether the update that the engines have just come to the end of was left out; UserError if the run stops at
        that.

        So many updates were before it; `tensors` are written down.
        """
        names = [f"{part} of the {name}" for name in engines for part in PARTS]
        seen = [engine.nonfinite == part for engine in engines.values() for part in PARTS]
        return self._meet(names, seen.index(True) if any(seen) else None, update, tensors, [])

    def in_evaluation(self, metrics: Mapping[str, float], update: int) -> None:
        """Looks at means over all ranks. Raises UserError if the run stops at numbers that are not finite."""
        names = [name for name, number in metrics.items() if not math.isfinite(number)]
        if names:
            self._stop_or_warn(f"{after(update)}, {', '.join(names)} of the evaluation is not finite.", names)

    def _meet(
        self,
        names: Sequence[str],
        own: int | None,
        update: int,
        tensors: Callable[[], dict[str, Tensor]],
        rows: list[int],
    ) -> bool:
        """Finds out which rank has what; the number of the first name that is not finite on this rank is ``own``."""
        first = first_over_ranks(own)
        if first is None:
            return False
        name, owner = names[first[0]], first[1]
        rows = gather_objects(rows)[owner]
        what = f"{after(update)}, {name} on rank {owner} are not finite"
        what += f" in rows {rows[:8]} of the rollout" if rows else ""
        folder = broadcast_object(self._run.folder) / FOLDER
        stem = f"update-{update}-rank-{owner}"
        record = {"update": update, "rank": owner, "what": name, "rows": rows}
        written = rank() == owner and _write(folder, stem, tensors(), record)
        barrier()  # for as long as that takes: a process that ends would take the writing one with it
        kept = gather_objects(written)[owner]
        self._stop_or_warn(f"{what}; the batch is in {folder / stem}.safetensors." if kept else f"{what}.", [name])
        return True

    def _stop_or_warn(self, message: str, names: Sequence[str]) -> None:
        if not self._skips:
            known = (name.removeprefix("eval/").removeprefix("numbers of ") for name in names)
            remedy = " ".join(self._remedies[name] for name in known if name in self._remedies) or REMEDY
            raise UserError(f"{message} {remedy} --on_nonfinite skip goes on without such batches.")
        if is_main():
            logger.warning("%s It is left out.", message)


def bad_rows(
    batch: PPOBatch | ScoredRollout, bad_logits: Tensor | None, auxiliary: Mapping[str, Tensor]
) -> list[tuple[str, Tensor]]:
    """What of a rollout is not finite, in the order in which it was computed: names, and (B,) bool for each.

    What lies off the response does not count. For the arguments see `NonFinite.in_rollout`.
    """
    found = [] if bad_logits is None else [("logits", bad_logits)]
    others = [(f"numbers of {name}", ~torch.isfinite(x)) for name, x in auxiliary.items()]
    if isinstance(batch, ScoredRollout):
        found += [("ref_logprobs", _bad(batch.ref_logprobs, batch)), *others]
        found += [("scores", ~torch.isfinite(batch.scores))]
    else:
        trajectory = batch.trajectory
        advantages = _bad(batch.advantages, batch)
        values, returns = (None if x is None else _bad(x, batch) for x in (trajectory.values, batch.returns))
        found += [
            ("logprobs", _bad(trajectory.logprobs, batch)),
            ("ref_logprobs", _bad(trajectory.ref_logprobs, batch)),
            *([] if values is None else [("values", values)]),
            *others,
            ("scores", ~torch.isfinite(trajectory.scores)),
            ("kl", _bad(batch.kl, batch)),
            ("rewards", _bad(batch.rewards, batch)),
            # Whitening carries one rank's NaN to the advantages of all; the returns tell where it came from.
            *([] if returns is None else [("advantages", advantages & returns), ("returns", returns)]),
            ("advantages", advantages),
        ]
    return found


def _bad(x: Tensor, batch: PPOBatch | ScoredRollout) -> Tensor:
    """(B, R) → (B,) bool: numbers of the response that are not finite."""
    return (~torch.isfinite(x) & batch.response_mask).any(1)


def _write(folder: Path, stem: str, tensors: Mapping[str, Tensor], record: Json) -> bool:
    """Writes a batch down, if there are not many; the run's course does not depend on whether that works."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob(f"*-rank-{rank()}.json"))) >= MOST_KEPT:
            return False
        save_file({name: x.detach().cpu().clone() for name, x in tensors.items()}, folder / f"{stem}.safetensors")
        write_file(folder / f"{stem}.json", json.dumps(record, indent=1))
    except (OSError, SafetensorError) as error:
        logger.warning("%s could not be written: %s", folder / stem, error)
        return False
    return True
