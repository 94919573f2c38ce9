# SPDX-License-Identifier: Apache-2.0
"""What DPO and REFUEL share: log-probs of whole responses, also those of the policy before training, which are kept.

The reference is the policy as it was before the first update, so that no second model is ever in memory: its log-probs
are computed once, by the engine itself, and kept in a file with what they depend on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dschat.base.atomic import writing
from dschat.base.errors import UserError
from dschat.base.fingerprints import contents_hash
from dschat.base.kept import changed_names
from dschat.base.progress import progress
from dschat.data.collate import collate_preferences
from dschat.data.examples import PreferenceExample
from dschat.models.engines import PolicyForward, TrainedPolicy
from dschat.models.layout import PassSize
from dschat.run.distributed import barrier, broadcast_object, device, gather_objects, is_main
from dschat.run.stop import raise_if_stopped
from dschat.training.evaluation import shares

logger = logging.getLogger(__name__)

CONTENT = "logprobs"
FOLDER = "reference"  # below the run's
Pair = TypeVar("Pair", bound=PreferenceExample)


def pair_logprobs(
    model: PolicyForward, examples: Sequence[PreferenceExample], pad_id: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Σ log π(y_j | x, y_<j) over the tokens of the chosen and of the rejected responses: (B,) float32 each,
    differentiable.

    `pad_id` fills the gaps, unseen; the temperature divides the logits.
    """
    batch = {name: x.to(device()) for name, x in collate_preferences(examples, pad_id).items()}
    logprobs, _ = model(batch["input_ids"], None, batch["targets"], temperature, with_entropy=False)
    sums = logprobs.new_zeros(2 * len(examples)).index_add(0, batch["sequence"], logprobs)
    chosen, rejected = sums.chunk(2)
    return chosen, rejected


def pair_texts(examples: Sequence[PreferenceExample]) -> list[tuple[int, int]]:
    """Tokens of the text of each response with its prompt, and of the response alone."""
    texts = []
    for example in examples:
        for response in (example.chosen_ids, example.rejected_ids):
            texts.append((len(example.prompt_ids) + len(response), len(response)))
    return texts


def with_reference(
    engine: TrainedPolicy,
    examples: Sequence[Pair],
    pad_id: int,
    size: PassSize,
    temperature: float,
    file: Path,
    model: str,
) -> list[Pair]:
    """The same pairs with the log-probs of the policy before training, which a file keeps.

    `model` is the policy's `dschat.base.fingerprints.model_hash`; for the rest see `reference_logprobs`.
    """
    identity = describe_reference(examples, model, next(engine.module.parameters()).dtype, temperature)
    return with_logprobs(examples, reference_logprobs(engine, examples, pad_id, size, temperature, file, identity))


def with_logprobs(examples: Sequence[Pair], logprobs: Tensor) -> list[Pair]:
    """The pairs with the log-probs (n, 2) of their responses under the policy before training."""
    both = zip(examples, logprobs.tolist(), strict=True)
    return [replace(example, ref_logprobs=(chosen, rejected)) for example, (chosen, rejected) in both]


def describe_reference(
    examples: Sequence[PreferenceExample], model: str, dtype: torch.dtype, temperature: float
) -> dict[str, str]:
    """What reference log-probs depend on, by name; `model` is the policy's `dschat.base.fingerprints.model_hash`."""
    ids = (json.dumps([example.prompt_ids, example.chosen_ids, example.rejected_ids]) for example in examples)
    return {
        "the data": contents_hash(ids),
        "the model": model,
        "the number format": str(dtype).removeprefix("torch."),
        "the kind of device": device().type,
        "the temperature": str(temperature),
    }


def reference_logprobs(
    engine: TrainedPolicy,
    examples: Sequence[PreferenceExample],
    pad_id: int,
    size: PassSize,
    temperature: float,
    file: Path,
    identity: Mapping[str, str],
) -> Tensor:
    """Log-probs of the policy before training, (n, 2) float32 on the host, of chosen and rejected responses.

    From the file if it holds them, which is made where it is missing. A pass holds so many pairs. Every rank must call
    it.

    Raises UserError where the file is of another `identity`: other data, another model, number format, kind of device
    or temperature.
    """
    kept = broadcast_object(_read(file, identity) if is_main() else None)
    if kept is not None:
        if isinstance(kept, str):
            raise UserError(kept)
        return kept
    numbers = _compute(engine, examples, pad_id, size, temperature)
    if is_main():
        try:
            with writing(file) as beside:
                save_file({CONTENT: numbers}, beside, metadata=dict(identity))
        except (OSError, SafetensorError) as error:
            logger.warning("%s could not be written, the log-probs are computed again next time: %s", file, error)
    barrier()
    return numbers


def _read(file: Path, identity: Mapping[str, str]) -> Tensor | str | None:
    """What the file holds; why it is not used; None where there is none."""
    if not file.exists():
        return None
    remedy = f"Remove {file} to compute them anew, or give another folder."
    try:
        with safe_open(file, "pt") as content:
            saved = content.metadata() or {}
            numbers: Tensor = content.get_tensor(CONTENT)
    except (OSError, SafetensorError) as error:
        return f"{file}: the reference log-probs cannot be read: {error}. {remedy}"
    changed = changed_names(saved, identity)
    if changed:
        return f"{file}: these reference log-probs are not of this run: {', '.join(changed)} differ. {remedy}"
    return numbers


@torch.no_grad()
def _compute(
    engine: TrainedPolicy, examples: Sequence[PreferenceExample], pad_id: int, size: PassSize, temperature: float
) -> Tensor:
    engine.eval()
    batches = shares(examples, size, 2)
    own: dict[int, tuple[float, float]] = {}
    for rows in progress(desc="reference", disable=not is_main(), unit="batch", iterable=batches):
        raise_if_stopped()
        # A rank that has run out of pairs takes part in every forward pass all the same.
        chosen, rejected = pair_logprobs(engine, [examples[i] for i in rows or [0]], pad_id, temperature)
        own |= dict(zip(rows, zip(chosen.tolist(), rejected.tolist(), strict=True), strict=False))
    numbers = {row: both for part in gather_objects(own) for row, both in part.items()}
    return torch.tensor([numbers[row] for row in range(len(examples))], dtype=torch.float32).view(-1, 2)
