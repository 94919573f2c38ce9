# SPDX-License-Identifier: Apache-2.0
"""Each form of data through all steps: forked, a few updates each."""

import gzip
import json

from transformers import AutoTokenizer

from cli_runs import copy_model, read_jsonl, training_rows, write_jsonl

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<pad>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_messages_in_all_steps(run, sft_flags, reward_flags, ppo_flags, sft, reward, texts, tmp_path):
    """A conversation's column, and preferences as lists that repeat the prompt, packed.

    The template ends turns otherwise than training ends responses: that is said, once.
    """
    half = len(texts) // 2
    talks = [{"messages": talk(t, "chosen"), "rejected": t["rejected"]} for t in texts[:half]]
    pairs = [{column: talk(t, column) for column in ("chosen", "rejected")} for t in texts[half:]]
    packed = tmp_path / "pairs.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(pair) + "\n" for pair in pairs).encode()))
    actor = copy_model(sft, tmp_path / "actor", chat_template=TEMPLATE)
    critic = copy_model(reward, tmp_path / "critic", chat_template=TEMPLATE)
    common = {"data_path": [write_jsonl(tmp_path / "talks.jsonl", talks), packed], "data_split": "20,20,20"}
    for step, flags in (
        ("sft", sft_flags | {"model_name_or_path": actor, "train_on": "all"}),
        ("reward", reward_flags | {"model_name_or_path": actor}),
        ("ppo", ppo_flags | {"actor_model_name_or_path": actor, "critic_model_name_or_path": critic}),
    ):
        said = run(step, flags | common | {"output_dir": tmp_path / step}).expect(0).stderr
        assert training_rows(tmp_path / step), step
        # 32 rows of each: 30 to train (95 to 5), of which a third is each step's
        sources = json.loads((tmp_path / step / "run.json").read_text())["data"]["sources"]
        assert [source["train"] for source in sources] == [10, 10]
        assert said.count("the chat template ends the assistant's turns with <pad>") == 1
    sample = read_jsonl(tmp_path / "ppo" / "samples" / "update-000000.jsonl")[0]
    assert sample["prompt"].startswith("<user>Hi.<pad>\n<assistant>Yes?<pad>\n<user>")
    assert sample["prompt"].endswith("<pad>\n<assistant>")
    assert [message["content"] for message in sample["prompt_messages"]][:2] == ["Hi.", "Yes?"]
    assert AutoTokenizer.from_pretrained(tmp_path / "ppo" / "actor").chat_template == TEMPLATE


def talk(text, column):
    """Two turns; the second is a row of the corpus."""
    said = (("user", "Hi."), ("assistant", "Yes?"), ("user", text["prompt"]), ("assistant", text[column]))
    return [{"role": role, "content": content} for role, content in said]
