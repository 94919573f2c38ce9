# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's limits in proportion to a small model, so that a test meets what a run of billions of weights meets.

DeepSpeed fetches, releases, sums and steps in pieces whose sizes are constants: 1e9 weights live at a time, 5e7
fetched ahead, 1e9 in a sub-group of the optimiser. A model of a few thousand weights crosses none of them.
"""

import json
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

LIMITS = (
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
    "reduce_bucket_size",
    "allgather_bucket_size",
)
REMEDY = "give ZeRO 3 limits that the model reaches, by as_large_as(7e9, model)"
PREFIX = "real-size-"  # of the folder of such files
HIDDEN = 64  # of the widest model of the tests: its vectors may stay whole, its matrices not
SMALLEST = 6e9  # weights: what a test of ZeRO 3 must be in proportion to, at least


def as_large_as(weights: float, model: Any, whole: int = 0) -> str:
    """A --deepspeed_config under which a model is treated as DeepSpeed treats one with so many weights.

    Args:
        weights: of the model that is stood in for, such as 7e9.
        model: the one that is trained, or its folder.
        whole: elements of the largest parameter that stays whole on every process. Of a 7B model these are the vectors
            of its hidden size, and no matrix.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    defaults = {field.alias or name: field.default for name, field in DeepSpeedZeroConfig.model_fields.items()}
    share = number_of_weights(model) / weights
    limits = {name: 2 * max(1, round(defaults[name] * share / 2)) for name in LIMITS}  # DeepSpeed wants even numbers
    return _file(json.dumps({"zero_optimization": limits | {"stage3_param_persistence_threshold": whole}}))


def number_of_weights(model: Any) -> int:
    """Of a model, in parts or not, or of the safetensors files of its folder."""
    if not isinstance(model, str | Path):
        return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    from safetensors import safe_open

    total = 0
    for file in Path(model).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            total += sum(opened.get_tensor(name).numel() for name in opened.keys())
    return total


def require_real_size() -> None:
    """From here on, this process makes no ZeRO 3 engine with limits that its model does not reach."""
    import deepspeed

    make = deepspeed.initialize

    def checked(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        engine = made[0]
        if engine.zero_optimization_stage() == 3:
            weights = number_of_weights(engine.module)
            for limit, default in (
                (engine.zero_max_live_parameters(), 1e9),
                (engine.zero_max_reuse_distance(), 1e9),
                (engine.zero_prefetch_bucket_size(), 5e7),
            ):
                assert limit * SMALLEST <= default * weights + 2 * SMALLEST, f"{limit} of {weights} weights: {REMEDY}"
            assert engine.zero_param_persistence_threshold() <= HIDDEN, f"matrices stay whole: {REMEDY}"
        return made

    deepspeed.initialize = checked


def check_words(words: Sequence[str]) -> None:
    """A command line with ZeRO 3 must name the file of `as_large_as`; the quickstart, which takes none, is a toy."""
    line = " ".join(map(str, words))
    is_large = "--deepspeed_config" in line and PREFIX in line or "quickstart" in words
    assert is_large or not re.search(r"zero_stage[ =]3\b", line), f"{line}: {REMEDY}"


@cache
def _folder() -> Any:
    return tempfile.TemporaryDirectory(prefix=PREFIX)  # goes with this process


@cache
def _file(content: str) -> str:
    with tempfile.NamedTemporaryFile("w", dir=_folder().name, suffix=".json", delete=False) as file:
        file.write(content)
    return file.name
