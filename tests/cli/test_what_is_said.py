# SPDX-License-Identifier: Apache-2.0
"""What a run says on the terminal, and to its trackers."""

import re

from cli_runs import run_forked


def test_a_bf16_run_says_what_matters_and_nothing_else(tmp_path, sft_flags):
    """What is trained, evaluations, where data and models are. DeepSpeed's figures of memory are not there."""
    flags = sft_flags | {"per_device_train_batch_size": 16, "dtype": "bf16", "eval_interval": 1}
    done = run_forked("sft", flags | {"output_dir": tmp_path / "out"}, tmp_path).expect(0)
    assert done.stdout == ""
    stamps, lines = zip(
        *(re.fullmatch(r"(\S+ \S+) (.*)", line).groups() for line in done.stderr.splitlines()), strict=True
    )
    assert stamps == tuple(sorted(stamps)) and re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", stamps[0])
    cache, rows, first, model, *evaluations, saved, last = lines
    assert cache.startswith("tokenised data ")
    assert re.fullmatch(r"demonstrations: \d+ of \d+ training rows, \d+ of \d+ evaluation rows.*", rows)
    assert first.startswith("global batch 16")
    start = re.escape(f"the policy starts from {flags['model_name_or_path']}: ")
    trained = re.fullmatch(f"{start}trains ([0-9,]+) of ([0-9,]+) parameters", model)
    assert trained is not None and trained[1] == trained[2]
    if "held-out rows: differences" in evaluations[0]:
        del evaluations[0]
    assert [line.split(",")[0] for line in [*evaluations, last]] == [
        "after 0 updates",
        "after 1 update",
        "after 2 updates",
    ]
    assert "perplexity" in last and "−" in last
    assert saved == f"models saved in {tmp_path / 'out'}"
