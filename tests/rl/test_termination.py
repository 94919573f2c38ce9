# SPDX-License-Identifier: Apache-2.0
"""Termination conditions against scalar references written from the rules; how evenly `randomized` draws."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rl_references as ref
from macro_actions.conditions import ends_from_lengths, fixed, isolate_last_token, make_row_seeds, ppl, randomized
from rl_cases import PADDING, PPL_MODES, PROPERTY, ROW_LENGTHS, SEEDS, draw, ends_of, mask_of, width_of


@PROPERTY
@given(lengths=ROW_LENGTHS, padding=PADDING, seed=SEEDS)
def test_a_batch_equals_its_rows_alone_and_padding_changes_nothing(lengths, padding, seed) -> None:
    mask = mask_of(lengths, width_of(lengths, padding))
    logprobs = -draw(mask, seed).abs()
    seeds = make_row_seeds(seed, torch.arange(len(lengths)), 0)

    def ends_of_rows(rows: slice, width: int) -> torch.Tensor:
        own, numbers = mask[rows, :width], logprobs[rows, :width]
        return torch.stack([fixed(own, 5), ppl(own, numbers), randomized(own, (2, 3, 1), 1, seeds[rows])])

    batch = ends_of_rows(slice(None), mask.shape[1])
    for row, length in enumerate(lengths):
        width = max(1, length)
        alone = ends_of_rows(slice(row, row + 1), width)
        assert torch.equal(batch[:, row, :width], alone[:, 0]) and not batch[:, row, width:].any()


# fixed


def test_fixed_by_hand() -> None:
    mask = mask_of([7, 3, 0, 6], 7)
    assert torch.equal(fixed(mask, 3), ends_of([[3, 3, 1], [3], [], [3, 3]], 7))


# ppl


# nll 4 0 1 3: chunk and prefix have means 4, 2, 1.67, then 3 > 1.67 cuts; token cuts before 1 and before 3.
# nll 2 1 1 3 2 5 5 0 6:
#   chunk   2; 1 (mean 1.5); 1 (1.33); 3 raises it -> new chunk 3; 2 (2.5); 5 -> new; 5 ties; 0; 6 -> new
#   prefix  means 2, 1.5, 1.33, 1.75 cut, 1.8 cut, 2.33 cut, 2.71 cut, 2.375, 2.78 cut
#   token   cuts where nll goes up: before 3, the first 5, and 6
@pytest.mark.parametrize(
    ("mode", "short", "long"),
    [("chunk", [3, 1], [3, 2, 3, 1]), ("prefix", [3, 1], [3, 1, 1, 1, 2, 1]), ("token", [2, 1, 1], [3, 2, 3, 1])],
)
def test_ppl_by_hand(mode, short, long) -> None:
    for nll, lengths in (([4.0, 0, 1, 3], short), ([2.0, 1, 1, 3, 2, 5, 5, 0, 6], long)):
        mask = mask_of([len(nll)], len(nll))
        assert torch.equal(ppl(mask, -torch.tensor([nll]), mode), ends_of([lengths], len(nll)))


@pytest.mark.parametrize("mode", PPL_MODES)
@pytest.mark.parametrize("nll", [0.1, 0.7, 1 / 3, 2.3025851])
def test_a_tie_does_not_cut_whatever_the_rounding(mode, nll) -> None:
    ends = ppl(torch.ones(1, 512, dtype=torch.bool), torch.full((1, 512), -nll), mode)
    assert ends.sum() == 1 and ends[0, -1]


# spans, and the last token on its own


def test_spans_that_miss_the_end_of_the_response_still_fill_it() -> None:
    """The last response token always ends a macro action; nothing ends beyond it."""
    mask = mask_of([5, 5, 2, 0], 6)
    assert torch.equal(ends_from_lengths([[2], [3, 4], [], [1]], mask), ends_of([[2, 3], [3, 2], [2], []], 6))


def test_isolate_last_token_by_hand() -> None:
    mask = mask_of([5, 1, 0, 3], 5)
    ends = ends_of([[2, 3], [1], [], [1, 1, 1]], 5)
    assert torch.equal(isolate_last_token(ends, mask), ends_of([[2, 2, 1], [1], [], [1, 1, 1]], 5))


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
    ends = randomized(mask_of(lengths, width), tuple(menu), repeat, seeds)
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
    ends = randomized(mask_of([60] * 8, 60), row_seeds=seeds)
    for row in ends.tolist():
        assert Counter(ref.lengths_of(row, 60)) == {2: 3, 3: 3, 5: 3, 10: 3}
    assert torch.equal(ends, randomized(mask_of([60] * 8, 60), (2, 3, 5, 10), 3, seeds))


def test_randomized_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first = randomized(mask_of([30], 30), row_seeds=torch.tensor([5]))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(first, randomized(mask_of([30], 30), row_seeds=torch.tensor([5])))
    torch.set_rng_state(before)


def orders(menu: tuple[int, ...], repeat: int, seeds: torch.Tensor) -> list[tuple[int, ...]]:
    """The permutation that each seed draws."""
    total = sum(menu) * repeat
    ends = randomized(mask_of([total] * len(seeds), total), menu, repeat, seeds)
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
