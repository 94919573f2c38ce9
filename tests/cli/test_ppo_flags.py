# SPDX-License-Identifier: Apache-2.0
"""The flags that change what step 3 does: forked, a few updates each."""

import json

from cli_runs import check_names, evaluation_rows, files_under, read_jsonl, training_rows
from closeness import near
from metric_conditions import CRITIC, OWN_SAMPLING, SEVERAL, SKIP

# -- flags of step 3


def test_several_sources_of_scores(run, prompt_flags, sft, reward, functions, tmp_path):
    """score = characters of the subreddit / 2 - words + the reward model's; the last response has none."""
    file = tmp_path / "counts.py"
    file.write_text(
        "def words(prompts, responses, rows):\n"
        "    return [float(len(text.split())) for text in responses[:-1]] + [None]\n"
    )
    own = {
        "actor_model_name_or_path": sft,
        "reward_function": [f"{functions}:subreddit", f"{file}:words"],
        "reward_model_name_or_path": reward,
        "reward_weights": ["words=-1", "subreddit=0.5"],
        "on_reward_error": "skip",
    }
    result = run("ppo", prompt_flags | own).expect(0)
    assert "the critic starts from the actor, with a zero value head" in result.stderr
    assert "score = 0.5 × subreddit − 1 × words + 1 × reward_model" in result.stderr
    samples = read_jsonl(tmp_path / "out" / "samples" / "update-000004.jsonl")
    scored = [sample for sample in samples if not sample["unscored"]]
    assert len(scored) == len(samples) - 1
    for sample in scored:
        parts = 0.5 * sample["subreddit"] - sample["words"] + sample["reward_model"]
        assert sample["score"] == near(parts)
    check_names(tmp_path / "out", CRITIC, SEVERAL, SKIP, OWN_SAMPLING, source=["subreddit", "words", "reward_model"])


def test_the_other_variants_together(run, ppo_flags, tmp_path):
    flags = {
        "adaptive_kl_target": 0.5,
        "adaptive_kl_horizon": 100,
        "kl_ctl": 0.1,
        "macro_reward": "mean",
        "isolate_last_token": True,
        "policy_ratio": "macro_mean",
        "ppo_epochs": 2,
        "top_p": 0.9,
        "print_answers": True,
        "tensorboard_path": tmp_path / "board",
        "enable_tensorboard": True,
    }
    screen = run("ppo", ppo_flags | flags).expect(0).stderr
    rows = training_rows(tmp_path / "out")
    assert [row["update"] for row in rows] == [4, 8] and rows[0]["objective/kl_coef"] == 0.1
    assert rows[1]["objective/kl_coef"] < 0.1  # the KL is below its target
    assert list((tmp_path / "board").glob("events*")) and not (tmp_path / "out" / "tensorboard").exists()
    assert screen.count("response: ") >= 4 and "--top_k 0 and --top_p 0.9" in screen
    for sample in read_jsonl(tmp_path / "out" / "samples" / "update-000000.jsonl"):
        actions = [token["macro_action"] for token in sample.get("tokens", [])]
        assert actions[-1:] != actions[-2:-1]


def test_a_run_without_a_critic(run, prompt_flags, sft, reward, tmp_path):
    """RLOO: 32 prompts in rollouts of 8 with 2 responses, updates of 8 responses: 4 rollouts of 2 updates."""
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
    check_names(out, OWN_SAMPLING)
    (first, *_, last) = evaluation_rows(out)
    assert first["update"] == 0 and last["update"] == 8 and first["eval/kl"] < 1e-3 < last["eval/kl"]
    assert json.loads((out / "run.json").read_text())["batches"]["samples_per_prompt"] == 2
    assert "advantage" not in read_jsonl(out / "samples" / "update-000008.jsonl")[0]["tokens"][0]
