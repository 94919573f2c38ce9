# SPDX-License-Identifier: Apache-2.0
"""Numbers that are not finite: the first is named, its batch is written down, and the run stops or goes on without it.

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
MAX_WRITTEN = 10  # batches that a process writes down: a run that skips updates may have no end of them
SKIPPED_NONFINITE = "skipped/nonfinite"  # the metric: updates that were left out
PARTS = ("losses", "gradients", "gradient norms")  # of an update, see `Trained.nonfinite`
REMEDY = "Lower the learning rates, or use --dtype bf16 or fp32 if this is fp16."


BadRows = tuple[str, Tensor]  # name of some numbers; (B,) bool, rows in which they are not finite


class NonFinite:
    """What a run does with numbers that are not finite. Every rank must call its methods."""

    def __init__(
        self,
        action: str,
        run: Run,
        remedies: Mapping[str, str] | None = None,
    ) -> None:
        """Takes what it needs of a run.

        Args:
            action: --on_nonfinite.
            run: has the folder that batches are written to.
            remedies: what helps against numbers that are not finite, by the numbers' name.
        """
        self._skips = action == "skip"
        self._run = run
        self._remedies = remedies or {}

    def in_rollout(
        self,
        batch: PPOBatch | ScoredRollout,
        update: int,
        bad_logits: Tensor | None = None,
        auxiliary: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """Whether a rollout must be left out.

        Args:
            batch: the rollout's numbers.
            update: updates before it.
            bad_logits: shape ``(B,)``, bool: rows that were sampled from logits that are not finite.
            auxiliary: shape ``(B,)`` each: numbers of score sources and of the metric function, by name.

        Raises:
            UserError: the run stops at numbers that are not finite.
        """
        return self.in_rows(
            bad_rows(batch, bad_logits, auxiliary or {}),
            update,
            lambda: tensors_of(batch),
        )

    def in_rows(
        self,
        rows: Sequence[BadRows],
        update: int,
        tensors: Callable[[], dict[str, Tensor]],
    ) -> bool:
        """Whether rows that were sampled and scored must be left out.

        Args:
            rows: what may not be finite, in the order in which it was computed.
            update: updates before it.
            tensors: what is written down.

        Raises:
            UserError: the run stops at numbers that are not finite.
        """
        names = [name for name, _ in rows]
        is_bad = torch.stack([bad for _, bad in rows]).cpu()
        bad_names = is_bad.any(1).nonzero().flatten().tolist()
        if not bad_names:
            return self._agree(names, None, update, tensors, [])
        first = bad_names[0]
        return self._agree(
            names,
            first,
            update,
            tensors,
            is_bad[first].nonzero().flatten().tolist(),
        )

    def in_update(
        self,
        engines: Mapping[str, Trained],
        update: int,
        tensors: Callable[[], dict[str, Tensor]],
    ) -> bool:
        """Whether the engines left out the update that they have just finished.

        Args:
            engines: the engines by name.
            update: updates before this one.
            tensors: what is written down.

        Raises:
            UserError: the run stops at numbers that are not finite.
        """
        names: list[str] = []
        bad_names: list[int] = []
        for name, engine in engines.items():
            for part in PARTS:
                if engine.nonfinite == part:
                    bad_names.append(len(names))
                names.append(f"{part} of the {name}")
        return self._agree(
            names,
            bad_names[0] if bad_names else None,
            update,
            tensors,
            [],
        )

    def in_evaluation(
        self,
        metrics: Mapping[str, float],
        update: int,
    ) -> None:
        """Looks at means over all ranks. Raises UserError if the run stops at numbers that are not finite."""
        names = []
        for name, number in metrics.items():
            if not math.isfinite(number):
                names.append(name)
        if names:
            self._stop_or_warn(f"{after(update)}, {', '.join(names)} of the evaluation is not finite.", names)

    def _agree(
        self,
        names: Sequence[str],
        first_here: int | None,
        update: int,
        tensors: Callable[[], dict[str, Tensor]],
        rows: list[int],
    ) -> bool:
        """Whether any rank has numbers that are not finite; that rank writes its batch down.

        Args:
            names: what is checked, in the order in which it was computed.
            first_here: position of the first name that is not finite on this rank.
            update: updates before it.
            tensors: what is written down.
            rows: rows of this rank that are not finite.
        """
        first = first_over_ranks(first_here)
        if first is None:
            return False
        name = names[first[0]]
        bad_rank = first[1]
        rows = gather_objects(rows)[bad_rank]
        what = f"{after(update)}, {name} on rank {bad_rank} are not finite"
        if rows:
            what += f" in rows {rows[:8]} of the rollout"

        folder = broadcast_object(self._run.folder) / FOLDER
        stem = f"update-{update}-rank-{bad_rank}"
        record = {"update": update, "rank": bad_rank, "what": name, "rows": rows}
        is_written = rank() == bad_rank and _write(folder, stem, tensors(), record)
        barrier()  # for as long as writing takes: a process that ends would take the writing one with it
        is_written = gather_objects(is_written)[bad_rank]
        message = f"{what}; the batch is in {folder / stem}.safetensors." if is_written else f"{what}."
        self._stop_or_warn(message, [name])
        return True

    def _stop_or_warn(self, message: str, names: Sequence[str]) -> None:
        """Raises UserError with what helps against these names, or warns, as --on_nonfinite says."""
        if self._skips:
            if is_main():
                logger.warning("%s It is left out.", message)
            return
        remedies = []
        for name in names:
            remedy = self._remedies.get(name.removeprefix("eval/").removeprefix("numbers of "))
            if remedy is not None:
                remedies.append(remedy)
        remedy = " ".join(remedies) or REMEDY
        raise UserError(f"{message} {remedy} --on_nonfinite skip goes on without such batches.")


def bad_rows(
    batch: PPOBatch | ScoredRollout,
    bad_logits: Tensor | None,
    auxiliary: Mapping[str, Tensor],
) -> list[BadRows]:
    """Rows of a rollout whose numbers are not finite, in the order in which the numbers were computed.

    Numbers off the response do not count. For the arguments see `NonFinite.in_rollout`.
    """
    numbers: list[tuple[str, Tensor]] = []
    if isinstance(batch, PPOBatch):
        trajectory = batch.trajectory
        numbers.append(("logprobs", trajectory.logprobs))
        numbers.append(("ref_logprobs", trajectory.ref_logprobs))
        if trajectory.values is not None:
            numbers.append(("values", trajectory.values))
        scores = trajectory.scores
        teacher_logprobs = trajectory.teacher_logprobs
    else:
        numbers.append(("ref_logprobs", batch.ref_logprobs))
        scores = batch.scores
        teacher_logprobs = batch.teacher_logprobs
    if teacher_logprobs is not None:
        numbers.append(("teacher_logprobs", teacher_logprobs))
    for name, of_rows in auxiliary.items():
        numbers.append((f"numbers of {name}", of_rows))
    numbers.append(("scores", scores))
    if isinstance(batch, PPOBatch):
        numbers.append(("kl", batch.kl))
        numbers.append(("rewards", batch.rewards))

    rows = [(name, _not_finite(x, batch.response_mask)) for name, x in numbers]
    if bad_logits is not None:
        rows.insert(0, ("logits", bad_logits))
    if isinstance(batch, PPOBatch):
        advantages = _not_finite(batch.advantages, batch.response_mask)
        if batch.returns is not None:
            # Whitening carries one rank's NaN to the advantages of all; the returns tell where it came from.
            returns = _not_finite(batch.returns, batch.response_mask)
            rows.append(("advantages", advantages & returns))
            rows.append(("returns", returns))
        rows.append(("advantages", advantages))
    return rows


def _not_finite(x: Tensor, response_mask: Tensor) -> Tensor:
    """Rows with numbers that are not finite, (B,) bool, from numbers (B,), or (B, R) of which the response counts."""
    bad = ~torch.isfinite(x)
    return bad if bad.dim() == 1 else (bad & response_mask).any(1)


def _write(
    folder: Path,
    stem: str,
    tensors: Mapping[str, Tensor],
    record: Json,
) -> bool:
    """Writes a batch down, up to MAX_WRITTEN of them; whether it was. A run goes on the same way if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob(f"*-rank-{rank()}.json"))) >= MAX_WRITTEN:
            return False
        copies = {}
        for name, tensor in tensors.items():
            copies[name] = tensor.detach().cpu().clone()
        save_file(copies, folder / f"{stem}.safetensors")
        write_file(folder / f"{stem}.json", json.dumps(record, indent=1))
    except (OSError, SafetensorError) as error:
        logger.warning("%s could not be written: %s", folder / stem, error)
        return False
    return True
