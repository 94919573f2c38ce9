# SPDX-License-Identifier: Apache-2.0
"""The self-check of --packing: examples that share a row do not see each other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.data.collate import collate_packed
from dschat.data.examples import SFTExample
from dschat.models.backbone import reads_positions
from dschat.models.engines import TrainedPolicy
from dschat.training.iteration import on_device
from dschat.training.selfcheck import check_weights, tolerance_of


@torch.no_grad()
def check_packing(engine: TrainedPolicy, examples: Sequence[SFTExample], pad_id: int) -> None:
    """Checks that log-probs of examples that share a row are those of each alone.

    Raises:
        UserError: they are not, or the model does not read where an example begins.
    """
    model = engine.module.inner
    family = model.config.model_type
    remedy = f"{family} models cannot keep packed examples apart. Leave --packing out."
    if not reads_positions(getattr(model, model.base_model_prefix)):
        raise UserError(f"--packing: {remedy}")
    ordered = sorted(examples, key=len, reverse=True)
    together = _row_logprobs(engine, ordered, pad_id, with_positions=True)
    # An example alone is computed as training without --packing computes it, without explicit positions.
    alone = torch.cat([_row_logprobs(engine, [example], pad_id, with_positions=False) for example in ordered])
    difference = float((together - alone).abs().max())
    size = float(alone.abs().max())
    check_weights(engine, difference)
    if not difference <= tolerance_of(engine, size):
        raise UserError(
            f"--packing: log-probs differ by up to {difference:.3g} from those of an example alone. {remedy}"
        )


def _row_logprobs(engine: TrainedPolicy, examples: Sequence[SFTExample], pad_id: int, with_positions: bool) -> Tensor:
    """Log-probs of all tokens of examples that share one row, (N,)."""
    width = sum(len(example) for example in examples)
    batch = collate_packed(examples, pad_id, width, sft_on_prompt=True)
    batch = on_device(batch)
    positions = batch["position_ids"] if with_positions else None
    logprobs, _ = engine(batch["input_ids"], None, batch["targets"], with_entropy=False, position_ids=positions)
    return logprobs
