# SPDX-License-Identifier: Apache-2.0
"""What the steps learn from and what of a model they train, through the mains: packing, losses, modes, adapters."""

import json
import re

import pytest

from cli_runs import evaluation_rows


def test_the_seed_decides_how_a_reward_model_starts(run, reward_flags, tmp_path):
    """Scores differ before the first update, and step 2 says at its end that a margin is too small for step 3."""
    flags = reward_flags | {"learning_rate": 1e-7}
    first = {}
    for name, seed in (("first", 1), ("other", 2)):
        result = run("reward", flags | {"seed": seed, "output_dir": tmp_path / name})
        result.expect(0)
        first[name] = evaluation_rows(tmp_path / name)[0]["eval/margin"]
        width = json.loads((tmp_path / name / "config.json").read_text())["hidden_size"]
        assert f"a new score head, initialised from N(0, 1 / {width + 1})" in result.stderr
        assert re.search("the scores of a pair differ by only|the rejected response of a pair scores", result.stderr)
    assert first["first"] != 0 and first["first"] != first["other"]


@pytest.mark.parametrize("loss", ["last_token", "per_sample"])
def test_reward_losses(loss, run, reward_flags, tmp_path):
    flags = {"reward_loss": loss, "center_rewards_coefficient": 0.01, "end_of_conversation_token": "e"}
    result = run("reward", reward_flags | flags)
    result.expect(0)
    before_end = loss != "per_sample"
    assert ("eval/end_accuracy" in evaluation_rows(tmp_path / "out")[-1]) == before_end
    assert (f"--reward_loss {loss} does not train the number at the last token" in result.stderr) == before_end
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["reward_loss"], config["end_of_response"]) == (loss, "e")
