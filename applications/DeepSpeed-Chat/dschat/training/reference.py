# SPDX-License-Identifier: Apache-2.0
"""Log-probs of whole responses, for DPO and REFUEL: of the policy, and of the policy before training, the reference.

No second model is ever in memory: the reference's log-probs are computed once, by the engine itself before the first
update, and kept in a file with what they depend on.
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
from torch import Tensor

from dschat.base.atomic import writing
from dschat.base.changes import changed_names
from dschat.base.fingerprints import contents_hash
from dschat.base.progress import progress
from dschat.data.collate import collate_preferences
from dschat.data.examples import PreferenceExample
from dschat.models.engines import PolicyForward, TrainedPolicy
from dschat.models.layout import PassSize
from dschat.models.tensor_files import save_tensors
from dschat.run.distributed import barrier, broadcast_object, device, gather_objects, is_main
from dschat.run.stop import raise_if_stopped
from dschat.training.evaluation import local_eval_batches
from dschat.training.iteration import on_device

logger = logging.getLogger(__name__)

CONTENT = "logprobs"
REFERENCE_FOLDER = "reference"  # below the run's output folder
Pair = TypeVar("Pair", bound=PreferenceExample)


def pair_logprobs(
    model: PolicyForward, examples: Sequence[PreferenceExample], pad_id: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Σ log π(y_j | x, y_<j) of the chosen and of the rejected responses: (B,) float32 each, differentiable.

    Args:
        model: the policy.
        examples: B pairs.
        pad_id: fills ids.
        temperature: divides the logits.
    """
    batch = on_device(collate_preferences(examples, pad_id))
    logprobs, _ = model(batch["input_ids"], None, batch["targets"], temperature, with_entropy=False)
    sums = logprobs.new_zeros(2 * len(examples)).index_add(0, batch["sequence"], logprobs)
    chosen, rejected = sums.chunk(2)
    return chosen, rejected


def pair_lengths(examples: Sequence[PreferenceExample]) -> list[int]:
    """Tokens of each response with its prompt."""
    lengths = []
    for example in examples:
        for response in (example.chosen_ids, example.rejected_ids):
            lengths.append(len(example.prompt_ids) + len(response))
    return lengths


def with_reference(
    engine: TrainedPolicy,
    examples: Sequence[Pair],
    pad_id: int,
    size: PassSize,
    temperature: float,
    file: Path,
    model: str,
) -> list[Pair]:
    """Pairs with the log-probs of the policy before training, which a file keeps.

    `model` is the policy's `dschat.base.fingerprints.model_hash`; for the other arguments see `reference_logprobs`.
    """
    identity = describe_reference(examples, model, next(engine.module.parameters()).dtype, temperature)
    return with_logprobs(examples, reference_logprobs(engine, examples, pad_id, size, temperature, file, identity))


def with_logprobs(examples: Sequence[Pair], logprobs: Tensor) -> list[Pair]:
    """The pairs with the log-probs (n, 2) of their responses under the policy before training."""
    pairs = []
    for example, (chosen, rejected) in zip(examples, logprobs.tolist(), strict=True):
        pairs.append(replace(example, ref_logprobs=(chosen, rejected)))
    return pairs


def describe_reference(
    examples: Sequence[PreferenceExample], model: str, dtype: torch.dtype, temperature: float
) -> dict[str, str]:
    """The settings that reference log-probs depend on, by name; `model` is the policy's `model_hash`."""
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
    """Log-probs of the policy before training, (n, 2) float32 on the host. Every rank must call it.

    They are read from the file, or computed and written there, also in place of those of another identity.

    Args:
        engine: engine of the policy before its first update.
        examples: n pairs.
        pad_id: fills ids.
        size: size of a forward pass.
        temperature: divides the logits.
        file: keeps the log-probs.
        identity: what they depend on, see `describe_reference`.

    Returns:
        The log-probs of the chosen and of the rejected responses.
    """
    saved = broadcast_object(_read(file, identity) if is_main() else None)
    if saved is not None:
        return saved
    numbers = _compute(engine, examples, pad_id, size, temperature)
    if is_main():
        try:
            with writing(file) as new_file:
                save_tensors({CONTENT: numbers}, new_file, metadata=identity)
        except (OSError, SafetensorError) as error:
            logger.warning("%s could not be written, the log-probs are computed again next time: %s", file, error)
    barrier()
    return numbers


def _read(file: Path, identity: Mapping[str, str]) -> Tensor | None:
    """Log-probs from the file; None if there is none that can be read and was made with this identity."""
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as content:
            saved_identity = content.metadata() or {}
            numbers: Tensor = content.get_tensor(CONTENT)
    except (OSError, SafetensorError) as error:
        logger.warning("%s cannot be read, the reference log-probs are computed anew: %s", file, error)
        return None
    changed = changed_names(saved_identity, identity)
    if changed:
        logger.warning("%s: the reference log-probs are computed anew; changed: %s", file, ", ".join(changed))
        return None
    return numbers


@torch.no_grad()
def _compute(
    engine: TrainedPolicy, examples: Sequence[PreferenceExample], pad_id: int, size: PassSize, temperature: float
) -> Tensor:
    """Reference log-probs (n, 2) of all pairs, each rank computing its share."""
    engine.eval()
    batches = local_eval_batches(examples, size, 2)
    local: dict[int, tuple[float, float]] = {}
    for numbers in progress(desc="reference", disable=not is_main(), unit="batch", iterable=batches):
        raise_if_stopped()
        # A rank that has run out of pairs takes part in every forward pass all the same.
        pairs = [examples[number] for number in numbers or [0]]
        chosen, rejected = pair_logprobs(engine, pairs, pad_id, temperature)
        both = zip(chosen.tolist(), rejected.tolist(), strict=True)
        local |= dict(zip(numbers, both, strict=False))
    logprobs: dict[int, tuple[float, float]] = {}
    for of_rank in gather_objects(local):
        logprobs |= of_rank
    in_order = [logprobs[number] for number in range(len(examples))]
    return torch.tensor(in_order, dtype=torch.float32).view(-1, 2)
