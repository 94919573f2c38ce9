# SPDX-License-Identifier: Apache-2.0
"""A critic whose head has an output for each bin of bounded returns (--value_head hl_gauss).

Its config.json records the range of the bins. It opens with the same range again, and as nothing but a critic.
"""

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.models.classifiers import load_critic
from dschat.models.opening import LoadOptions, Placement
from dschat.models.pretrained import open_config
from dschat.models.reward_notes import RANGE_KEY
from macro_actions.value_bins import ValueBins

logger = logging.getLogger(__name__)

VALUE_EXAMPLE = """\
from macro_actions.value_bins import ValueBins

bins = ValueBins.between(*model.config.value_range)
inputs = tokenizer("prompt and a part of a response", return_tensors="pt")
print(bins.expectation(model(**inputs).logits))  # the value of the state after the last token"""


def load_binned_critic(
    bins: ValueBins,
    path: str,
    flag: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    load_options: LoadOptions,
    may_grow: bool,
) -> Any:
    """Opens the start of a critic as `load_critic` does, and gives it a head with bins if it has none.

    Raises:
        UserError: as `load_critic`; or the model is a critic with another range.
    """
    trained_range = getattr(open_config(path, flag), RANGE_KEY, None)
    wanted_range = [bins.low, bins.high]
    if trained_range not in (None, wanted_range):
        words = " ".join(f"{limit:g}" for limit in trained_range)
        raise UserError(f"{flag} {path}: a critic with bins for other returns: give --value_range {words}.")
    outputs = 1 if trained_range is None else bins.count
    model = load_critic(path, flag, dtype, tokenizer, load_options, may_grow, outputs)
    if trained_range is None:
        add_bins(model, bins, load_options.placement)
        logger.info(
            "%s %s: a value head with %d bins from %g to %g; values begin at %g plus the number of the head before it",
            *(flag, path, bins.count, bins.low, bins.high, (bins.low + bins.high) / 2),
        )
    return model


def add_bins(model: Any, bins: ValueBins, placement: Placement) -> None:
    """Replaces a classifier's head with one output by a head with bins, and records their range in its config.

    The first values are the middle of the range plus the number of the old head, see `ValueBins.head_from`; from a new
    head, of zeros, they are the middle. Every rank must call it.
    """
    old = model.score
    with placement.gathered(model, old):
        head = nn.Linear(old.in_features, bins.count, bias=False, device="meta")
        head.weight = nn.Parameter(bins.head_from(old.weight.detach()))
        model.score = head
    model.config.num_labels = bins.count
    model.num_labels = bins.count
    setattr(model.config, RANGE_KEY, [bins.low, bins.high])


def value_example() -> str:
    """Lines for the model card that compute a value."""
    return VALUE_EXAMPLE
