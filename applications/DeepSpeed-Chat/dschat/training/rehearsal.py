# SPDX-License-Identifier: Apache-2.0
"""The longest micro-batch of a run, forward and backward once before the first update.

A run whose longest texts do not fit into the GPU's memory then ends in its first minute, not when they come, after
hours. The pass leaves nothing behind: weights, gradients, optimiser states and random states are as they were.
"""

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from dschat.base.errors import UserError
from dschat.models.engines import Trained
from dschat.models.layout import PassSize
from dschat.run.distributed import device, is_main
from dschat.run.state import random_states, set_random_states
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)


def is_due() -> bool:
    """Whether a run rehearses: on a GPU only. On a CPU the pass would take long, and memory is shared anyway."""
    return device().type == "cuda"


@contextmanager
def rehearsal(
    engines: Mapping[str, Trained], rows: int, tokens: int, rows_flag: str, decoding_bytes: int = 0
) -> Iterator[None]:
    """Context in which an update has no effect, and running out of memory is explained.

    Args:
        engines: the engines that are trained, by name; they are in training mode.
        rows: sequences of the micro-batch.
        tokens: tokens of each sequence, padding included.
        rows_flag: the flag that says how many examples a micro-batch holds.
        decoding_bytes: memory that sampling keeps while models train; it is allocated during the update.

    Raises:
        UserError: the memory of the device does not suffice; it names the flags that help.
    """
    states = random_states()  # adapters with dropout use random numbers
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        sampling_memory = torch.empty(decoding_bytes, dtype=torch.uint8, device=device())
        with ExitStack() as stack:
            for engine in engines.values():
                engine.train()
                stack.enter_context(engine.rehearsing())
            yield
        del sampling_memory
    except torch.OutOfMemoryError as error:
        raise UserError(_explain_memory(rows, tokens, rows_flag, decoding_bytes, error)) from error
    set_random_states(states)
    if device().type != "cuda":
        return
    peak = torch.cuda.max_memory_allocated()
    if is_main():
        logger.info("the longest micro-batch (%d x %d tokens) fits: %.1f GB at the peak", rows, tokens, peak / 1e9)
    gc.collect()
    torch.cuda.empty_cache()  # generation allocates blocks of other sizes


def _explain_memory(rows: int, tokens: int, rows_flag: str, decoding_bytes: int, error: torch.OutOfMemoryError) -> str:
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    decoding = ""
    if decoding_bytes:
        decoding = f"; --decode_graphs off frees {decoding_bytes / 1e9:.1f} GB that sampling keeps"
    return (
        f"the longest micro-batch of this run, {rows} sequences of {tokens} tokens, does not fit into the memory of"
        f" the GPU beside models and optimiser states: lower --{rows_flag} or --max_tokens_per_micro_batch, give"
        " --gradient_checkpointing, shorten the texts, or shard with --zero_stage"
        f"{decoding}; `dschat plan` with the same flags says what each of them saves. ({reason})"
    )


def rows_of(size: PassSize, tokens: int) -> int:
    """The most sequences of `tokens` tokens each that a micro-batch may hold."""
    if size.tokens is None:
        return size.rows
    return max(1, min(size.rows, size.tokens // tokens))


def filled_rollout(ids: Sequence[int], rows: int, prompt: int, response: int) -> Rollout:
    """A rollout without padding whose rows all repeat the same ids.

    Args:
        ids: at least one, ids that the models know.
        rows: B.
        prompt: P, tokens of each prompt.
        response: R, tokens of each response.
    """
    total = prompt + response
    repeats = -(-total // len(ids))
    row = torch.tensor(ids, device=device()).repeat(repeats)[:total]
    mask = torch.ones(rows, total, dtype=torch.bool, device=device())
    return Rollout(
        input_ids=row.repeat(rows, 1),
        attention_mask=mask,
        response_mask=mask[:, :response].clone(),
        prompt_index=torch.zeros(rows, dtype=torch.long, device=device()),
        finished=mask[:, 0].clone(),
    )
