# SPDX-License-Identifier: Apache-2.0
"""The randomized termination condition: which lengths it consumes, how evenly it draws, and what a draw depends on."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rl_references as ref
from dschat.rl.termination import make_row_seeds, randomized_ngram_ends
from rl_cases import PROPERTY, SEEDS, mask_of, width_of


@PROPERTY
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    repeat=st.integers(1, 3),
    menu=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    seed=SEEDS,
)
def test_randomized_consumes_a_permutation_of_the_multiset(lengths, repeat, menu, seed) -> None:
    width = width_of(lengths)
    seeds = make_row_seeds(seed, torch.arange(len(lengths)), 0)
    ends = randomized_ngram_ends(mask_of(lengths, width), repeat, tuple(menu), seeds)
    for row, length in zip(ends.tolist(), lengths, strict=True):
        found = ref.lengths_of(row, length)
        multiset = Counter(menu * repeat)
        total = sum(menu) * repeat
        if length > total:
            assert found[-1] == length - total and Counter(found[:-1]) == multiset
        elif length == total:
            assert Counter(found) == multiset
        elif found:
            left = multiset - Counter(found[:-1])
            assert left.total() == multiset.total() - len(found) + 1
            assert found[-1] <= max(left)


def test_randomized_defaults_to_the_lengths_of_the_paper() -> None:
    seeds = make_row_seeds(1, torch.arange(8), 0)
    ends = randomized_ngram_ends(mask_of([60] * 8, 60), 3, row_seeds=seeds)
    for row in ends.tolist():
        assert Counter(ref.lengths_of(row, 60)) == {2: 3, 3: 3, 5: 3, 10: 3}
    assert torch.equal(ends, randomized_ngram_ends(mask_of([60] * 8, 60), 3, (2, 3, 5, 10), seeds))


def test_randomized_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first = randomized_ngram_ends(mask_of([30], 30), 3, row_seeds=torch.tensor([5]))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(first, randomized_ngram_ends(mask_of([30], 30), 3, row_seeds=torch.tensor([5])))
    torch.set_rng_state(before)


def test_randomized_without_seeds_still_depends_on_the_row_number_only() -> None:
    first = randomized_ngram_ends(mask_of([20, 9], 20), 1)
    torch.manual_seed(5)
    assert torch.equal(first, randomized_ngram_ends(mask_of([20, 9], 20), 1))


@pytest.mark.parametrize(("repeat", "menu"), [(0, (2, 3)), (1, (2, 0)), (1, ())])
def test_an_impossible_multiset_raises(repeat, menu) -> None:
    with pytest.raises(ValueError, match="lengths"):
        randomized_ngram_ends(mask_of([3], 3), repeat, menu, torch.tensor([0]))


def orders(menu: tuple[int, ...], repeat: int, seeds: torch.Tensor) -> list[tuple[int, ...]]:
    """The permutation that each seed draws."""
    total = sum(menu) * repeat
    ends = randomized_ngram_ends(mask_of([total] * len(seeds), total), repeat, menu, seeds)
    return [tuple(ref.lengths_of(row, total)) for row in ends.tolist()]


def chi_square(counts: Counter, cells: int) -> float:
    """Pearson's statistic against the uniform distribution over `cells` outcomes."""
    expected = counts.total() / cells
    return sum((n - expected) ** 2 for n in counts.values()) / expected + (cells - len(counts)) * expected


# The 99.9 % quantiles of chi-square with 5, 23 and 35 degrees of freedom are 20.5, 49.7 and 66.6.
@pytest.mark.parametrize(
    ("menu", "repeat", "cells", "limit"), [((2, 3, 5), 1, 6, 20.5), ((1, 2, 3, 4), 1, 24, 49.7), ((1, 2), 2, 6, 20.5)]
)
def test_randomized_draws_every_order_equally_often(menu, repeat, cells, limit) -> None:
    seeds = make_row_seeds(1234, torch.arange(4800), 0)
    assert chi_square(Counter(orders(menu, repeat, seeds)), cells) < limit


def test_randomized_is_independent_between_epochs_and_seeds_and_neighbours() -> None:
    index = torch.arange(7200)
    base = orders((2, 3, 5), 1, make_row_seeds(0, index, 0))
    next_epoch = orders((2, 3, 5), 1, make_row_seeds(0, index, 1))
    next_seed = orders((2, 3, 5), 1, make_row_seeds(1, index, 0))
    for other in (next_epoch, next_seed, base[1:]):
        assert chi_square(Counter(zip(base, other, strict=False)), 36) < 66.6


def test_row_seeds_belong_to_seed_prompt_and_epoch() -> None:
    index = torch.tensor([5, 0, 17, 5])
    seeds = make_row_seeds(1234, index, 2)
    assert seeds.dtype == torch.long and seeds.shape == (4,)
    assert seeds[0] == seeds[3]
    assert torch.equal(seeds, make_row_seeds(1234, index, 2))
    assert torch.equal(seeds[[2, 1]], make_row_seeds(1234, index[[2, 1]], 2))
    assert index.tolist() == [5, 0, 17, 5]


def test_row_seeds_do_not_collide() -> None:
    everything = [make_row_seeds(s, torch.arange(1000), e) for s in (0, 1, 1234) for e in (0, 1)]
    assert torch.cat(everything).unique().numel() == 6000


def test_samples_of_a_prompt_are_cut_otherwise_and_the_first_as_an_only_one() -> None:
    index = torch.arange(2400).repeat_interleave(3)
    seeds = make_row_seeds(1234, index, 1, torch.arange(3).repeat(2400))
    assert torch.equal(seeds[::3], make_row_seeds(1234, torch.arange(2400), 1))
    assert seeds.unique().numel() == 7200
    first, second, third = (orders((2, 3, 5), 1, seeds[number::3]) for number in range(3))
    for pair in ((first, second), (first, third), (second, third)):
        assert chi_square(Counter(zip(*pair, strict=True)), 36) < 66.6


def test_recorded_row_seeds() -> None:
    """Those of runs that were written down before prompts had several samples."""
    assert make_row_seeds(1234, torch.tensor([0, 17]), 2).tolist() == [163159799697974965, -3908457143100387744]
