# SPDX-License-Identifier: Apache-2.0
"""The reward of the best of N responses, from M ≥ N that were drawn independently of each other."""

import math
from collections.abc import Sequence

PUBLISHED = (4, 8, 16, 32)  # numbers of responses to choose from in Chai et al., ICLR 2025, section 4.4


def best_of_first(rewards: Sequence[float], n: int) -> float:
    """The highest reward of the first n responses.

    Args:
        rewards: (M,) in the order in which the responses were drawn.
        n: from 1 to M.
    """
    return max(rewards[:n])


def expected_best(rewards: Sequence[float], n: int) -> float:
    """The mean, over all subsets of n responses, of a subset's highest reward: unbiased, as `best_of_first` is.

    E[max of n] = Σ_i C(i − 1, n − 1) / C(M, n) · r_(i), where r_(1) ≤ … ≤ r_(M): the i-th smallest reward is the
    highest of those subsets whose other n − 1 members are among the i − 1 below it.

    Args:
        rewards: (M,) in any order.
        n: from 1 to M.
    """
    subsets = math.comb(len(rewards), n)
    return math.fsum(math.comb(below, n - 1) / subsets * reward for below, reward in enumerate(sorted(rewards)))
