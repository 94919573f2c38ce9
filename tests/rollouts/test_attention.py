# SPDX-License-Identifier: Apache-2.0
"""Attention of one token per row by two matrix products, beside the formula written out in float64."""

import pytest
import torch

from closeness import FORMULA, assert_near
from dschat.rollouts.attention import attend_by_products


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}], ids=str)
def test_one_token_by_hand(groups, scaling, options):
    """Every query head sees the columns of its group that the mask shows, capped, beside a column without a value."""
    generator = torch.Generator().manual_seed(0)
    rows, heads, width, columns = 3, 4, 8, 7
    query = torch.randn(rows, heads, 1, width, generator=generator)
    key, value = torch.randn(2, rows, groups, columns, width, generator=generator)
    seen = torch.arange(columns) >= torch.tensor([0, 2, 5])[:, None]
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None, None]
    attended, _ = attend_by_products(torch.nn.Module(), query, key, value, mask, scaling, **options)
    assert attended.shape == (rows, 1, heads, width)
    for row in range(rows):
        for head in range(heads):
            group = head // (heads // groups)
            logits = (key[row, group].double() @ query[row, head, 0].double()) * (scaling or width**-0.5)
            if "softcap" in options:
                logits = 2.0 * torch.tanh(logits / 2.0)
            powers = logits.exp() * seen[row]
            total = powers.sum()
            if "s_aux" in options:
                total += options["s_aux"][head].double().exp()
            assert_near(attended[row, 0, head], (powers / total) @ value[row, group].double(), 4 * FORMULA)
