# SPDX-License-Identifier: Apache-2.0
"""Step 3 with --advantage_estimator rloo, forked: what a run leaves and what reads it."""

import json
from html import unescape

from cli_runs import check_names, evaluation_rows, files_under, read_jsonl, training_rows
from dschat.reports.runs import build_report


def test_a_run_without_a_critic(run, prompt_flags, sft, reward, ppo, tmp_path):
    """32 prompts in rollouts of 8 with 2 responses, updates of 8 responses: 4 rollouts of 2 updates."""
    flags = {k: v for k, v in prompt_flags.items() if not k.startswith("critic")}
    own = {"actor_model_name_or_path": sft, "reward_model_name_or_path": reward, "advantage_estimator": "rloo"}
    own |= {"samples_per_prompt": 2, "per_device_generation_batch_size": 8, "save_steps": 4, "eval_interval": 4}
    result = run("ppo", flags | own).expect(0)
    assert "of no effect" not in result.stderr
    out = tmp_path / "out"
    files = files_under(out)
    assert "actor/model.safetensors" in files and not [file for file in files if "critic" in file]
    rows = training_rows(out)
    assert [(row["update"], row["samples"]) for row in rows] == [(2, 16), (4, 32), (6, 48), (8, 64)]
    check_names(out)
    (first, *_, last) = evaluation_rows(out)
    assert first["update"] == 0 and last["update"] == 8 and first["eval/kl"] < 1e-3 < last["eval/kl"]
    assert json.loads((out / "run.json").read_text())["batches"]["samples_per_prompt"] == 2
    assert "advantage" not in read_jsonl(out / "samples" / "update-000008.jsonl")[0]["tokens"][0]

    alone = build_report({"RLOO": out}, tmp_path / "alone").text()
    assert "Critic's explained variance" not in unescape((tmp_path / "alone" / "report.html").read_text())
    both = build_report({"RLOO": out, "PPO": ppo}, tmp_path / "both").text()
    assert "Critic's explained variance" in unescape((tmp_path / "both" / "report.html").read_text())
    (row,) = (line.split() for line in alone.splitlines() if line.startswith("RLOO ") and " 64 " in line)
    assert row[1:3] == ["8", "64"] and row[-2:] == ["–", "–"] and "PPO" in both
