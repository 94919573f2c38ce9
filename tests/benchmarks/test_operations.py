# SPDX-License-Identifier: Apache-2.0
"""The benchmark's operations and bytes of a Gemma are those that runs and plans count."""

import numpy as np
import pytest

from contenders import limits
from contenders.work import IterationWork, Size, make_actor
from dschat.models.layout import Lengths
from dschat.models.operations import cost_of, decoding_bytes


def test_the_benchmark_counts_the_same() -> None:
    """A text of n tokens sees n (n + 1) / 2 keys, of which the benchmark counts n² / 2; a policy and a scalar model.

    Of the bytes of 5 tokens a row, it counts 4 keys fewer for 4 steps than tokens that see themselves.
    """
    size = Size(100, 8, 2, 4, 1, head_dim=2, intermediate_size=16)
    work = IterationWork(size=size, batch=3, micro_batch=3, shortest_prompt=2, longest_prompt=4, response=5)
    cost = cost_of(make_actor(work))
    assert cost is not None
    prompts = np.array(work.prompt_lengths())
    lengths = prompts + work.response
    policy = cost.forward.operations(lengths, work.batch * work.response)
    scalar = cost.forward.operations(lengths, 0)
    own_keys = cost.forward.per_key[None] * int(lengths.sum()) / 2
    assert policy + scalar == pytest.approx(limits.forward_operations(work) + 2 * own_keys)

    responses = np.full(work.batch, work.response)
    read = decoding_bytes(cost, Lengths(prompts, responses), work.batch)
    step = work.batch / limits.rollout_limit(work, {"bytes_per_second": 1.0})
    # The benchmark: R - 1 steps with (R - 1) / 2 response tokens on average. Here: R steps read weights, R - 1 tokens
    # see R / 2 of them on average.
    more = cost.step_bytes + cost.cache_bytes[None] * work.batch * (work.response - 1) / 2
    assert read == pytest.approx((work.response - 1) * step + more)
