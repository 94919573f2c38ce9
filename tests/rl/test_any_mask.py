# SPDX-License-Identifier: Apache-2.0
"""The package's conditions and GAE on masks of any kind: left padding, holes, numbers for bools, few bits."""

import math
import re
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import macro_actions
import rl_references as ref
from closeness import FORWARD, assert_near
from factories import make_tokenizer
from macro_actions import conditions
from rl_cases import PPL_MODES, PROPERTY, SEEDS, VALUE_FUNCTIONS, draw, mask_of, normal

README = Path(__file__).resolve().parents[2] / "applications" / "macro-actions" / "README.md"
MASKS = st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4)
KINDS = [torch.bool, torch.long, torch.float32, torch.bfloat16]
CONDITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fixed": lambda mask, _: macro_actions.fixed(mask, 3),
    "whole": lambda mask, _: macro_actions.fixed(mask, math.inf),
    **{f"ppl-{mode}": lambda mask, x, mode=mode: macro_actions.ppl(mask, x, mode) for mode in PPL_MODES},
    "surprise": lambda mask, logprobs: macro_actions.surprise(mask, logprobs, 0.5, 2),
    "isolated": lambda mask, _: conditions.isolate_last_token(macro_actions.fixed(mask, 3), mask),
}


def runs_of(row: list[bool]) -> list[tuple[int, int]]:
    """(start, end) of each run of a row's mask."""
    found, position = [], 0
    for kept, run in groupby(row):
        length = len(list(run))
        found += [(position, position + length)] if kept else []
        position += length
    return found


@pytest.mark.parametrize("name", CONDITIONS)
@PROPERTY
@given(masks=MASKS, seed=SEEDS)
def test_every_run_of_a_mask_is_cut_as_a_response_of_its_own(name, masks, seed) -> None:
    condition = CONDITIONS[name]
    mask = torch.tensor(masks)
    numbers = -draw(mask, seed).abs()
    expected = torch.zeros_like(mask)
    for row, start, end in ((r, *run) for r, kept in enumerate(masks) for run in runs_of(kept)):
        whole = torch.ones(1, end - start, dtype=torch.bool)
        expected[row, start:end] = condition(whole, numbers[row : row + 1, start:end])[0]
    assert torch.equal(condition(mask, numbers), expected)


@PROPERTY
@given(masks=MASKS, seed=SEEDS)
def test_random_lengths_of_a_run_follow_from_its_number_wherever_it_is(masks, seed) -> None:
    """A row's runs, moved to the left with one hole between two of them, are cut alike."""
    for number, row in enumerate(masks):
        runs = runs_of(row)
        closed = [kept for start, end in runs for kept in [*[True] * (end - start), False]] or [False]
        seeds = torch.tensor([seed + number])
        ends = macro_actions.randomized(torch.tensor([row]), (1, 2, 3), 2, seeds)
        moved = macro_actions.randomized(torch.tensor([closed]), (1, 2, 3), 2, seeds)
        assert ends[torch.tensor([row])].tolist() == moved[torch.tensor([closed])].tolist()


def test_at_most_joins_neighbours_but_never_over_a_hole() -> None:
    """Of five macro actions the first three and the last two are joined, of six the first and the last three."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1, 1]])
    ends = conditions.at_most(macro_actions.fixed(mask, 1), mask, 2)
    assert ends.long().tolist() == [[0, 0, 1, 0, 1, 0, 0], [0, 1, 0, 1, 0, 0, 1]]


def test_given_lengths_count_over_holes() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1]])
    ends = conditions.ends_from_lengths([[1, 2]], mask)
    assert ends.long().tolist() == [[0, 1, 1, 0, 1, 0, 1]]


def test_random_lengths_of_a_second_run_are_other_ones_and_depend_on_the_rows_seed_alone() -> None:
    mask = torch.ones(2, 41, dtype=torch.bool)
    mask[:, 20] = False
    seeds = torch.tensor([7, 8])
    ends = macro_actions.randomized(mask, (1, 2, 3, 4, 5), 3, seeds)
    assert not torch.equal(ends[0, :20], ends[0, 21:]) and not torch.equal(ends[0, 21:], ends[1, 21:])
    assert torch.equal(macro_actions.randomized(mask[1:], (1, 2, 3, 4, 5), 3, seeds[1:]), ends[1:])
    assert torch.equal(macro_actions.randomized(mask, (2, 3)), macro_actions.randomized(mask, (2, 3)))


def test_a_macro_action_never_spans_a_hole_whatever_the_ends_say() -> None:
    macro = macro_actions.segment(torch.tensor([[0, 0, 0, 1, 0, 0]]), torch.tensor([[1, 1, 0, 0, 1, 1]]))
    assert macro.index.tolist() == [[0, 0, -1, -1, 1, 1]] and macro.lengths.tolist() == [[2, 2]]


def by_hand(values: list[float], rewards: list[float], lengths: list[int], gamma: float, lam: float, function: str):
    """Advantage and return of every token of one response, in plain floats."""
    pooled = [ref.pool(values, lengths, function), [sum(part) for part in ref.chunks(rewards, lengths)]]
    advantages, returns = ref.gae(*pooled, gamma, lam)
    width = len(values)
    return ref.broadcast(advantages, lengths, width), ref.broadcast(returns, lengths, width)


@PROPERTY
@given(function=st.sampled_from(VALUE_FUNCTIONS), masks=MASKS, seed=SEEDS)
def test_gae_follows_the_macro_actions_of_a_row_over_holes(function, masks, seed) -> None:
    mask = torch.tensor(masks)
    values, rewards = draw(mask, seed), draw(mask, seed + 1)  # NaN off the mask
    ends = macro_actions.fixed(mask, 2)
    advantages, returns = macro_actions.macro_gae(values, rewards, ends, mask.float(), 0.9, 0.7, function)
    for row, kept in enumerate(masks):
        lengths = [n for start, end in runs_of(kept) for n in ref.fixed_lengths(end - start, 2)]
        own = mask[row]
        expected = by_hand(values[row][own].tolist(), rewards[row][own].tolist(), lengths, 0.9, 0.7, function)
        assert_near(advantages[row][own], expected[0])
        assert_near(returns[row][own], expected[1])
        assert not advantages[row][~own].any() and not returns[row][~own].any()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_values_of_few_bits_are_computed_in_float32(kind) -> None:
    mask = mask_of([30, 17], 30)
    values, rewards = normal((2, 30), 0).to(kind), normal((2, 30), 1).to(kind)
    ends = macro_actions.fixed(mask, 4)
    exact = torch.promote_types(kind, torch.float32)
    few, precise = (values, rewards), (values.to(exact), rewards.to(exact))
    found = [*macro_actions.macro_gae(*few, ends, mask), *macro_actions.gae(*few, mask, 1.0, 0.95)]
    expected = [*macro_actions.macro_gae(*precise, ends, mask), *macro_actions.gae(*precise, mask, 1.0, 0.95)]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == exact and torch.equal(one, other)


@pytest.mark.parametrize("ratio", ["macro", "macro_mean"])
def test_log_probabilities_of_few_bits_are_pooled_in_float32(ratio) -> None:
    """A sum in bfloat16, of eight bits, would be off by more than what a clip range is."""
    few = (-2 * torch.rand(8, 200, generator=torch.Generator().manual_seed(0))).bfloat16()
    mask = torch.ones_like(few)
    macro = macro_actions.segment(macro_actions.fixed(mask, math.inf), mask)
    found = macro_actions.macro_logprobs(few, macro, ratio)
    expected = few.double().mean(1) if ratio == "macro_mean" else few.double().sum(1)
    assert found.dtype == torch.float32
    assert_near(found[:, 0], expected, FORWARD)


def test_no_gradient_runs_through_advantages_and_returns() -> None:
    values, mask = torch.ones(1, 4, requires_grad=True), torch.ones(1, 4)
    found = macro_actions.macro_gae(values, values, macro_actions.fixed(mask, 2), mask)
    assert not any(x.requires_grad for x in found)


def test_shapes_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match=r"must be \(B, R\) each, not .*\(2, 3\).*\(2, 4\)"):
        macro_actions.macro_gae(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 4))


def test_parsing_reads_the_tokens_of_each_run() -> None:
    tokenizer = make_tokenizer()
    texts = ("the quick fox saw a lazy dog. It slept.", "a dog.")
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    ids = torch.tensor([[0, *first, 0, 0, 0, *second, 0]])
    mask = torch.tensor([[0, *[1] * len(first), 0, 0, 0, *[1] * len(second), 0]])

    def ends_of(mask: Tensor, ids: Tensor) -> list[int]:
        return macro_actions.parsing(mask, ids, tokenizer, cutoff=5, parser="chunker")[0].int().tolist()

    one, other = (ends_of(torch.ones(1, len(row)), torch.tensor([row])) for row in (first, second))
    assert ends_of(mask, ids) == [0, *one, 0, 0, 0, *other, 0] and sum(one) == 2
    with pytest.raises(ValueError, match="cutoff must be at least 3"):
        macro_actions.parsing(mask, ids, tokenizer, cutoff=2, parser="chunker")


def test_parsing_without_its_package_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "constituent_treelib", None)
    monkeypatch.setitem(sys.modules, "constituent_treelib.parsing", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install ./Constituent-Treelib 'applications/macro-actions\["):
        macro_actions.parsing(torch.ones(1, 2), torch.ones(1, 2), object(), parser="chunker")


def test_the_examples_of_the_readme_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 2
    names: dict[str, object] = {}
    for example in examples:
        exec(example, names)


def test_what_the_package_offers_is_in_its_readme() -> None:
    text = README.read_text(encoding="utf-8")
    assert [name for name in macro_actions.__all__ if not re.search(rf"`{name}\b", text)] == []
