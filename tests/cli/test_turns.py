# SPDX-License-Identifier: Apache-2.0
"""Step 3 with --environment: episodes of several turns from the command line."""

import shutil

import pytest

from cli_runs import check_names, message_of, read_jsonl, training_rows, write_jsonl
from metric_conditions import CRITIC, EPISODES, OWN_SAMPLING

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{{ m.content }}\nTL;DR: {% endif %}{% endfor %}"
)
POSTS = ("my dog ate my homework", "a cat sat on the mat", "how do i cook an egg", "the bus is late again")
# Replies are short, and their number depends on the seed.
GAMES = """
class Talk:
    def reset(self, row, seed):
        self.turns = 1 + seed % 3
        return row["messages"]

    def step(self, messages, reply):
        self.turns -= 1
        return [{"role": "user", "content": "and then?"}], len(reply) / 10, self.turns == 0
"""


@pytest.fixture
def flags(ppo_flags, sft, tmp_path):
    """Two rollouts of 8 conversations, with a model that has a chat template."""
    model = tmp_path / "model"
    shutil.copytree(sft, model, ignore=shutil.ignore_patterns("checkpoints", "models", "tensorboard", "samples"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = []
    for number in range(16):
        content = f"{POSTS[number % 4]} {number}"
        rows.append({"messages": [{"role": "user", "content": content}]})
    write_jsonl(tmp_path / "talks" / "train.jsonl", rows)
    write_jsonl(tmp_path / "talks" / "test.jsonl", rows[:4])
    (tmp_path / "games.py").write_text(GAMES)
    own = {
        "data_path": tmp_path / "talks",
        "data_split": "0,0,1",
        "actor_model_name_or_path": model,
        "critic_model_name_or_path": None,
        "max_prompt_seq_len": 100,
        "max_answer_seq_len": 48,
        "per_device_generation_batch_size": 8,
        "per_device_training_batch_size": 8,
        "eval_interval": 1,
    }
    return ppo_flags | own


def test_episodes_of_several_turns(run, flags, tmp_path):
    own = {"environment": f"{tmp_path / 'games.py'}:Talk", "termination_condition": "turn", "gamma": 0.9}
    own |= {"max_turn_seq_len": 10, "missing_eos_penalty": 0.5}
    run("ppo", flags | own).expect(0)
    rows = training_rows(tmp_path / "out")
    assert len(rows) == 2
    check_names(tmp_path / "out", CRITIC, EPISODES, OWN_SAMPLING)
    for row in rows:
        assert 1 <= row["episode/turns"] <= 3 and row["episode/environment_tokens"] > 0
        assert row["macro/count"] == pytest.approx(row["episode/turns"])  # a macro action for each turn
    samples = read_jsonl(tmp_path / "out" / "samples" / "update-000002.jsonl")
    for sample in samples:
        assert len(sample["turn_rewards"]) == sum(message["role"] == "assistant" for message in sample["messages"])
        assert sample["score"] == pytest.approx(sum(sample["turn_rewards"]))
        assert len(sample["response_mask"]) == len(sample["response_ids"]) == len(sample["tokens"])
        actions = [token["macro_action"] for token in sample["tokens"]]
        assert [action >= 0 for action in actions] == sample["response_mask"]
        assert max(actions) == len(sample["turn_rewards"]) - 1
    assert any(len(sample["turn_rewards"]) > 1 for sample in samples)


def test_a_simulated_user_gives_no_rewards(run, flags):
    result = run("ppo", flags | {"environment": "simulated_user", "user_model": "m", "max_turns": 2})
    message_of(result, "--environment simulated_user gives no rewards", "--critic_model_name_or_path is missing")
