# SPDX-License-Identifier: Apache-2.0
"""What a run does when numbers are NaN or infinite: it stops, or it leaves out that rollout or update and continues.

The first quantity that is not finite is named, and the batch is written to the run's folder. If one process meets such
a number, all processes stop or skip together: they agree once per rollout and once per optimiser update.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from dschat.base.atomic import write_file
from dschat.base.errors import UserError
from dschat.base.jsonl import json_value
from dschat.models.engines import Trained
from dschat.models.tensor_files import save_tensors
from dschat.run.distributed import barrier, broadcast_object, first_over_ranks, gather_objects, is_main, rank
from dschat.run.metrics import after
from dschat.run.output import Run
from dschat.run.state import Json
from macro_actions.types import PPOBatch, ScoredRollout, Trajectory, tensors_of

logger = logging.getLogger(__name__)

FOLDER = "nonfinite"  # below the run's output folder
MAX_WRITTEN = 10  # batches that a process writes at most; a run that skips updates may meet many
SKIPPED_NONFINITE = "skipped/nonfinite"  # the metric that counts updates left out
PARTS = ("losses", "gradients", "gradient norms")  # parts of an update, see `Trained.nonfinite`
MAX_NAMED_ROWS = 8  # row numbers in a message
REMEDY = "Lower the learning rates, or use --dtype bf16 or fp32 if this is fp16."


class BadRows(NamedTuple):
    """The rows of a batch in which a quantity is not finite."""

    quantity: str
    is_bad: Tensor  # (B,) bool


class NonFinite:
    """Checks a run's numbers, and stops the run or reports what to leave out. Every rank must call its methods."""

    def __init__(self, action: str, run: Run, remedies: Mapping[str, str] | None = None) -> None:
        """Prepares the checks of a run.

        Args:
            action: --on_nonfinite: "stop" or "skip".
            run: the run, whose folder gets the batches.
            remedies: name of a quantity → what helps if it is not finite; REMEDY for the others.
        """
        self._skips = action == "skip"
        self._run = run
        self._remedies = remedies or {}

    def check_rollout(
        self,
        batch: PPOBatch | ScoredRollout,
        update: int,
        bad_logits: Tensor | None = None,
        auxiliary: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """Checks a rollout; returns whether it must be left out.

        Args:
            batch: the rollout.
            update: updates before it.
            bad_logits: shape ``(B,)``, bool: rows that were sampled from logits that are not finite.
            auxiliary: shape ``(B,)`` each: numbers of score sources and of the metric function, by name.

        Raises:
            UserError: numbers are not finite, and --on_nonfinite is stop.
        """
        quantities = bad_rows(batch, bad_logits, auxiliary or {})
        return self.check_rows(quantities, update, lambda: tensors_of(batch))

    def check_rows(self, quantities: Sequence[BadRows], update: int, tensors: Callable[[], dict[str, Tensor]]) -> bool:
        """Checks sampled and scored rows; returns whether they must be left out.

        Args:
            quantities: quantities with their bad rows, in the order in which they were computed.
            update: updates before these rows.
            tensors: returns the batch, which is written to a file.

        Raises:
            UserError: numbers are not finite, and --on_nonfinite is stop.
        """
        names = [name for name, _ in quantities]
        is_bad = torch.stack([bad for _, bad in quantities]).cpu()
        bad_positions = is_bad.any(1).nonzero().flatten().tolist()
        if not bad_positions:
            return self._agree(names, None, update, tensors, [])
        first = bad_positions[0]
        rows = is_bad[first].nonzero().flatten().tolist()
        return self._agree(names, first, update, tensors, rows)

    def check_update(
        self, engines: Mapping[str, Trained], update: int, tensors: Callable[[], dict[str, Tensor]]
    ) -> bool:
        """Checks the update that engines have just finished; returns whether they left it out.

        Args:
            engines: the engines by name.
            update: updates before this one.
            tensors: returns the batch, which is written to a file.

        Raises:
            UserError: numbers are not finite, and --on_nonfinite is stop.
        """
        names: list[str] = []
        bad_positions: list[int] = []
        for name, engine in engines.items():
            for part in PARTS:
                if engine.nonfinite == part:
                    bad_positions.append(len(names))
                names.append(f"{part} of the {name}")
        first = bad_positions[0] if bad_positions else None
        return self._agree(names, first, update, tensors, [])

    def check_evaluation(self, metrics: Mapping[str, float], update: int) -> None:
        """Checks the metrics of an evaluation, which are means over all ranks.

        Raises:
            UserError: a metric is not finite, and --on_nonfinite is stop.
        """
        names = [name for name, value in metrics.items() if not math.isfinite(value)]
        if names:
            message = f"{after(update)}, {', '.join(names)} of the evaluation is not finite."
            self._stop_or_warn(message, names, "Training continues.")

    def _agree(
        self,
        names: Sequence[str],
        local_first: int | None,
        update: int,
        tensors: Callable[[], dict[str, Tensor]],
        local_rows: list[int],
    ) -> bool:
        """Whether a quantity is not finite on any rank; if so, that rank writes its batch, and all stop or warn.

        Args:
            names: quantities in the order in which they were computed, equal on all ranks.
            local_first: position of this rank's first quantity that is not finite; None if all are finite.
            update: updates before the batch.
            tensors: returns the batch.
            local_rows: this rank's rows in which that quantity is not finite.
        """
        # The earliest quantity of all ranks, and the first rank that has it.
        first = first_over_ranks(local_first)
        if first is None:
            return False
        position, bad_rank = first
        name = names[position]
        rows = gather_objects(local_rows)[bad_rank]
        message = f"{after(update)}, {name} on rank {bad_rank} are not finite"
        if rows:
            message += f" in rows {rows[:MAX_NAMED_ROWS]} of the rollout"

        # That rank writes its batch. The others wait, because a process that ends would end the writing one, too.
        folder = broadcast_object(self._run.folder) / FOLDER
        stem = f"update-{update}-rank-{bad_rank}"
        record = {"update": update, "rank": bad_rank, "quantity": name, "rows": rows}
        is_written = rank() == bad_rank and _write_batch(folder, stem, tensors(), record)
        barrier()
        is_written = gather_objects(is_written)[bad_rank]
        if is_written:
            message += f"; the batch is in {folder / stem}.safetensors"

        self._stop_or_warn(f"{message}.", [name], "It is left out.")
        return True

    def _stop_or_warn(self, message: str, names: Sequence[str], consequence: str) -> None:
        """Raises UserError with what helps against these quantities.

        With --on_nonfinite skip, logs the message and its consequence instead.
        """
        if self._skips:
            if is_main():
                logger.warning("%s %s", message, consequence)
            return
        remedies = []
        for name in names:
            quantity = name.removeprefix("eval/").removeprefix("numbers of ")
            if quantity in self._remedies:
                remedies.append(self._remedies[quantity])
        remedy = " ".join(remedies) or REMEDY
        raise UserError(f"{message} {remedy} --on_nonfinite skip continues without such batches.")


def bad_rows(
    batch: PPOBatch | ScoredRollout, bad_logits: Tensor | None, auxiliary: Mapping[str, Tensor]
) -> list[BadRows]:
    """Quantities of a rollout with the rows in which they are not finite, in the order in which they were computed.

    Positions off the response do not count. For the arguments see `NonFinite.check_rollout`.
    """
    # Quantities up to the rewards, each checked by itself.
    scored = batch.trajectory if isinstance(batch, PPOBatch) else batch
    numbers: list[tuple[str, Tensor | None]] = [("ref_logprobs", scored.ref_logprobs)]
    if isinstance(scored, Trajectory):
        numbers = [("logprobs", scored.logprobs), *numbers, ("values", scored.values)]
    numbers.append(("teacher_logprobs", scored.teacher_logprobs))
    for name, values in auxiliary.items():
        numbers.append((f"numbers of {name}", values))
    numbers.append(("scores", scored.scores))
    if isinstance(batch, PPOBatch):
        numbers += [("kl", batch.kl), ("rewards", batch.rewards)]

    quantities: list[BadRows] = []
    if bad_logits is not None:
        quantities.append(BadRows("logits", bad_logits))
    for name, x in numbers:
        if x is not None:
            quantities.append(BadRows(name, _not_finite(x, batch.response_mask)))

    # Advantages and returns. Normalisation carries a NaN of one rank to the advantages of all; the returns, which are
    # not normalised, show on which rank and in which rows it arose.
    if isinstance(batch, PPOBatch):
        bad_advantages = _not_finite(batch.advantages, batch.response_mask)
        if batch.returns is not None:
            bad_returns = _not_finite(batch.returns, batch.response_mask)
            quantities.append(BadRows("advantages", bad_advantages & bad_returns))
            quantities.append(BadRows("returns", bad_returns))
        quantities.append(BadRows("advantages", bad_advantages))
    return quantities


def _not_finite(x: Tensor, response_mask: Tensor) -> Tensor:
    """Rows with numbers that are not finite.

    Args:
        x: shape ``(B,)``, or ``(B, R)``, of which only response positions count.
        response_mask: shape ``(B, R)``, bool.

    Returns:
        Shape ``(B,)``, bool.
    """
    bad = ~torch.isfinite(x)
    return bad if bad.dim() == 1 else (bad & response_mask).any(1)


def _write_batch(folder: Path, stem: str, tensors: Mapping[str, Tensor], record: Json) -> bool:
    """Writes a batch and its record, unless this rank has written MAX_WRITTEN of them.

    Returns:
        Whether the batch was written. A file that cannot be written is only a warning.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob(f"*-rank-{rank()}.json"))) >= MAX_WRITTEN:
            return False
        copies = {}
        for name, tensor in tensors.items():
            copies[name] = tensor.detach().cpu().clone()
        save_tensors(copies, folder / f"{stem}.safetensors")
        write_file(folder / f"{stem}.json", json.dumps(json_value(record), indent=1))
    except (OSError, SafetensorError) as error:
        logger.warning("%s could not be written: %s", folder / stem, error)
        return False
    return True
