# SPDX-License-Identifier: Apache-2.0
"""--compile from the command line, with generated code, on a CPU."""

import json

import pytest

from cli_runs import read_jsonl, result_of, start_forked
from closeness import UPDATE, near

MINUTES = 20 * 60.0  # seconds; code for a CPU is generated slowly


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"lora_dim": 2}, {"gradient_checkpointing": True}], ids=str)
def test_step_3_with_compiled_layers_is_step_3(flags, ppo_flags, tmp_path):
    """The self-checks hold; rollouts and the two updates of one are those of layers that are not compiled."""
    rows = {}
    for choice in ("off", "on"):
        folder = tmp_path / choice
        words = {"compile": choice, "decode_graphs": "on", "max_steps": 2, "output_dir": folder, "dtype": "fp32"}
        process = start_forked("ppo", ppo_flags | flags | words, tmp_path)
        result = result_of(process, tmp_path, MINUTES).expect(0)
        assert "not compiled" not in result.stderr
        layers = json.loads((folder / "run.json").read_text())["layers"]
        assert all(words.startswith("compiled" if choice == "on" else "eager") for words in layers.values()), layers
        # A layer with adapters is left as it is in memory.
        is_merged = "not merged" not in layers["actor"]
        assert is_merged == ("lora_dim" not in flags or choice == "off")
        rows[choice] = [row for row in read_jsonl(folder / "metrics.jsonl") if "val/ratio" in row]
    for name in ("response/length", "objective/scores", "policy/entropy", "val/ratio", "loss/value"):
        assert rows["on"][0][name] == near(rows["off"][0][name], UPDATE)
