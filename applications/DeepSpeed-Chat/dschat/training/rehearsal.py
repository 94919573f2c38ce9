# SPDX-License-Identifier: Apache-2.0
"""The longest micro-batch of a run, forward and backward once before the first update.

A GPU's memory then ends in the first minute of a run, and not after hours, when the longest texts happen to come. The
pass leaves nothing behind: weights, gradients, optimiser states and random states are as they were.
"""

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from dschat.base.errors import UserError
from dschat.models.engines import Trained, TrainedPolicy
from dschat.models.layout import PassSize
from dschat.rollouts.engine import RolloutEngine
from dschat.rollouts.generate import ContinuousEngine
from dschat.run.distributed import device, is_main
from dschat.run.state import random_states, set_random_states
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)


def is_due() -> bool:
    """Whether a run rehearses: on a GPU, whose memory ends it. A CPU's is shared, and the pass would take long."""
    return device().type == "cuda"


@contextmanager
def rehearsal(
    engines: Mapping[str, Trained], rows: int, tokens: int, rows_flag: str, decoding_bytes: int = 0
) -> Iterator[None]:
    """Inside, an update of engines in training mode is computed without effect, and memory that ends is explained.

    Args:
        engines: what is trained, by name.
        rows: texts of the micro-batch.
        tokens: of each, padding included.
        rows_flag: the flag that says how many examples a micro-batch holds.
        decoding_bytes: memory that sampling keeps while models train; it is taken for as long as the update lasts.

    Raises:
        UserError: the memory of the device does not suffice; it names the flags that help.
    """
    states = random_states()  # adapters with dropout draw from them
    try:
        room = torch.empty(decoding_bytes, dtype=torch.uint8, device=device())
        with ExitStack() as stack:
            for engine in engines.values():
                engine.train()
                stack.enter_context(engine.rehearsing())
            yield
        del room
    except torch.OutOfMemoryError as error:
        raise UserError(_message(rows, tokens, rows_flag, decoding_bytes, error)) from error
    set_random_states(states)
    if device().type != "cuda":
        return
    peak = torch.cuda.max_memory_allocated()
    if is_main():
        logger.info("the longest micro-batch (%d x %d tokens) fits: %.1f GB at the peak", rows, tokens, peak / 1e9)
    gc.collect()
    torch.cuda.empty_cache()  # generation begins with other sizes


def _message(rows: int, tokens: int, rows_flag: str, decoding_bytes: int, error: torch.OutOfMemoryError) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    gigabytes = decoding_bytes / 1e9
    decoding = f"; --decode_graphs off frees {gigabytes:.1f} GB that sampling keeps" if decoding_bytes else ""
    return (
        f"the longest micro-batch of this run, {rows} texts of {tokens} tokens, does not fit into the memory of the"
        f" GPU beside models and optimiser states: lower --{rows_flag} or --max_tokens_per_micro_batch, give"
        " --gradient_checkpointing, shorten the texts, or shard with --zero_stage"
        f"{decoding}; `dschat plan` with the same flags says what each of them saves. ({reason})"
    )


def decoding_bytes(rollouts: RolloutEngine, policy: TrainedPolicy, prompts: int, tokens: int) -> int:
    """Memory that sampling keeps on this process's device while models train.

    Args:
        rollouts: what samples from the policy.
        policy: its engine.
        prompts: of a rollout on this process, each counted once per response.
        tokens: of the longest prompt and response together.
    """
    if not isinstance(rollouts, ContinuousEngine):
        return 0
    return rollouts.kept_bytes(policy.module.inner, prompts, tokens)


def rows_of(size: PassSize, tokens: int) -> int:
    """Texts of so many tokens each that a micro-batch holds at most."""
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
    line = torch.tensor(ids, device=device()).repeat(-(-total // len(ids)))[:total]
    everywhere = torch.ones(rows, total, dtype=torch.bool, device=device())
    return Rollout(
        input_ids=line.repeat(rows, 1),
        attention_mask=everywhere,
        response_mask=everywhere[:, :response].clone(),
        prompt_index=torch.zeros(rows, dtype=torch.long, device=device()),
        finished=everywhere[:, 0].clone(),
    )
