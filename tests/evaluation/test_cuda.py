# SPDX-License-Identifier: Apache-2.0
"""On CUDA: bf16 by default, rewards close to those in fp32 on the CPU."""

import pytest
import torch

from cli_runs import read_jsonl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_reference_scores_in_bf16_are_close_to_those_in_fp32(run):
    exact = read_jsonl(run(dataset="hh-rlhf", ref_scores=True))
    flags = {"dataset": "hh-rlhf", "ref_scores": True, "device": None, "gpu": 0, "overwrite": True}
    rounded = read_jsonl(run(**flags))
    for a, b in zip(rounded, exact, strict=True):
        assert a["response"] == b["response"]
        assert a["reward"] == pytest.approx(b["reward"], abs=0.1)
