# SPDX-License-Identifier: Apache-2.0
"""Rules between the flags of REFUEL with users from data."""

import pytest

from dschat.config.parse import parse
from dschat.config.refuel import RefuelOnlineConfig
from dschat.errors import UserError

WORDS = ["--data_path", "rows.jsonl", "--output_dir", "out", "--base_model", "m"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "score.py").write_text("def f(dialogues, rows): ...\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the score comes from --reward_model or from --reward_function"),
        ("--reward_model r --reward_function score.py:f", "the score comes from --reward_model or from"),
        ("--reward_function score.py:g", "score.py does not define g"),
        ("--reward_model r --trained_layers 4 --lora_dim 8", "--trained_layers and --lora_dim both"),
        ("--reward_model r --total_episodes 10 --num_train_epochs 2", "--total_episodes and --num_train_epochs both"),
        (
            "--reward_model r --print_sample_output_freq 2 --eval_interval 9",
            "--print_sample_output_freq and --eval_in",
        ),
        ("--reward_model r --task.total_length 512", "--max_seq_len 512 leaves no room"),
        ("--reward_model r --adaptive_kl_target 6 --kl_coef 0", "--adaptive_kl_target cannot steer --kl_coef 0"),
        ("--reward_model r --adaptive_kl_horizon 6", "--adaptive_kl_horizon 6 does nothing on its own"),
        ("--reward_model r --refuel.eta 0", "--eta 0.0 is out of range"),
        ("--reward_model r --noptepochs 0", "--noptepochs 0 is out of range"),
        ("--reward_model r --task.penalty_reward_value nan", "--penalty_reward_value nan is out of range"),
        ("--reward_model r --max_turns 0", "--max_turns 0 is out of range"),
        ("--reward_model r --global_batch_size 7 --per_device_train_batch_size 2", "--global_batch_size 7 cannot"),
    ],
)
def test_what_is_not_possible_is_said(words, message):
    with pytest.raises(UserError) as caught:
        parse(RefuelOnlineConfig, [*WORDS, *words.split()]).plan_batches(1)
    assert message in str(caught.value)


def test_offload_works_at_every_stage():
    for stage in ("0", "2", "3"):
        parse(RefuelOnlineConfig, [*WORDS, "--reward_model", "r", "--offload", "--zero_stage", stage])


def test_flags_without_a_meaning_here_warn_once_and_say_why(caplog):
    given = ["--task.cluster", "a100", "--wandb_project_name", "p", "--track", "--wandb_project_name", "q"]
    config = parse(RefuelOnlineConfig, [*WORDS, "--reward_model", "r", *given])
    assert config == parse(RefuelOnlineConfig, [*WORDS, "--reward_model", "r"])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert all(" does nothing here: " in message for message in messages)
    assert messages[0].startswith("--task.cluster") and "not kept" in messages[0]
