# SPDX-License-Identifier: Apache-2.0
"""Every rule between flags: the message names the flag and the remedy."""

import json
import os

import pytest

from dschat.config.parse import parse
from dschat.config.ppo import PPOConfig
from dschat.config.refuel import RefuelConfig
from dschat.config.supervised import DPOConfig, RewardConfig, SFTConfig
from dschat.errors import UserError

COMMON = ["--data_path", "rows.jsonl", "--output_dir", "out"]
SFT = [*COMMON, "--model_name_or_path", "m"]
PPO = [*COMMON, "--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"]

MODULE = """
import math as numbers
from os.path import join
try:
    import json
except ImportError:
    json = None
    fallback = 1
if True:
    annotated: int = 1
else:
    other = 2
class Scorer: ...
first = second = 1
some.attribute = 3
def score(prompts, responses, rows):
    inner = 1
    raise SystemExit("a check must not run this")
raise SystemExit("a check must not run this")
"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test runs in a folder of its own that holds the files the flags name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("dschat.config.ppo.find_spec", lambda name: None)  # vLLM is not installed
    (tmp_path / "score.py").write_text(MODULE)
    (tmp_path / "star.py").write_text("from os.path import *\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "later.py").write_text("async def f(prompts, responses, rows): ...\n")
    (tmp_path / "metric.py").write_text("def kl(prompts, responses, rows): ...\n")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "file").write_text("")
    return tmp_path


def _refusal(config_class, arguments):
    with pytest.raises(UserError) as refusal:
        parse(config_class, arguments).plan_batches(int(os.environ.get("WORLD_SIZE", "1")))
    message = str(refusal.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        # numbers of every step
        ("--seed -1", ["--seed -1", "from 0 to 4294967295"]),
        ("--seed 4294967296", ["--seed", "from 0 to 4294967295"]),
        ("--num_train_epochs 0", ["--num_train_epochs 0", "at least 1"]),
        ("--gradient_accumulation_steps 0", ["--gradient_accumulation_steps 0", "at least 1"]),
        ("--global_batch_size 0", ["--global_batch_size 0", "at least 1"]),
        ("--save_steps -1", ["--save_steps -1", "at least 0"]),
        ("--eval_interval -1", ["--eval_interval -1", "at least 0"]),
        ("--num_warmup_steps -1", ["--num_warmup_steps -1", "at least 0"]),
        ("--gradient_clipping -1", ["--gradient_clipping -1", "at least 0"]),
        ("--gradient_clipping nan", ["--gradient_clipping nan", "at least 0"]),
        ("--lora_dim -1", ["--lora_dim -1", "at least 0"]),
        ("--lora_alpha 0", ["--lora_alpha 0", "at least 1"]),
        ("--lora_dropout 1", ["--lora_dropout 1", "at least 0 and below 1"]),
        ("--lora_dim 4 --lora_module_name=", ["--lora_module_name is empty"]),
        ("--finetune_mode all --lora_dim 4", ["--finetune_mode all", "--lora_dim", "drop one"]),
        ("--finetune_mode last_layer --lora_dim 4", ["--finetune_mode last_layer", "--lora_dim", "drop one"]),
        ("--warmup_ratio 1", ["--warmup_ratio 1", "below 1"]),
        ("--warmup_ratio -0.1", ["--warmup_ratio -0.1", "at least 0"]),
        # numbers of steps 1 and 2
        ("--eval_iters -1", ["--eval_iters -1", "at least 0"]),
        ("--max_seq_len 0", ["--max_seq_len 0", "at least 1"]),
        ("--per_device_train_batch_size 0", ["--per_device_train_batch_size 0", "at least 1"]),
        ("--per_device_eval_batch_size 0", ["--per_device_eval_batch_size 0", "at least 1"]),
        ("--learning_rate -1", ["--learning_rate -1", "at least 0"]),
        ("--learning_rate inf", ["--learning_rate inf", "at least 0"]),
        ("--weight_decay -1", ["--weight_decay -1", "at least 0"]),
        # combinations and names
        ("--bf16 --dtype fp32", ["--bf16", "--dtype fp32", "drop one"]),
        ("--bf16 --dtype fp16", ["--bf16", "--dtype fp16", "drop one"]),
        ("--num_warmup_steps 5 --warmup_ratio 0.1", ["--num_warmup_steps 5", "--warmup_ratio 0.1", "drop one"]),
        ("--lr_scheduler_type constant --num_warmup_steps 5", ["--lr_scheduler_type", "constant_with_warmup"]),
        ("--lr_scheduler_type constant --warmup_ratio 0.1", ["--lr_scheduler_type", "constant_with_warmup"]),
        ("--data_path=", ["--data_path", "give a value"]),
        ("--output_dir=", ["--output_dir", "give a value"]),
        ("--prompt_key=", ["--prompt_key", "give a value"]),
        ("--chosen_key=", ["--chosen_key", "give a value"]),
        ("--rejected_key=", ["--rejected_key", "give a value"]),
        ("--response_key=", ["--response_key", "give a value"]),
        ("--messages_key=", ["--messages_key", "give a value"]),
        ("--end_of_conversation_token=", ["--end_of_conversation_token", "drop the flag"]),
        ("--model_name_or_path=", ["--model_name_or_path", "give a value"]),
        ("--data_split 2,4", ["--data_split 2,4", "three numbers", "2,4,4"]),
        ("--data_split 2,4,x", ["--data_split 2,4,x", "three numbers"]),
        ("--data_split 2,4,-4", ["--data_split 2,4,-4", "three numbers"]),
        ("--data_split 2,4,nan", ["--data_split 2,4,nan", "three numbers"]),
        ("--data_split 0,4,4", ["--data_split 0,4,4", "step 1", "make number 1 larger than 0"]),
        ("--deepspeed_config none.json", ["--deepspeed_config none.json", "no such file"]),
        ("--deepspeed_config broken.json", ["--deepspeed_config broken.json", "not JSON", "correct the file"]),
        ("--deepspeed_config list.json", ["--deepspeed_config list.json", "JSON object"]),
        ("--output_dir file", ["--output_dir file", "give a folder"]),
        ("--global_batch_size 40", ["--global_batch_size 40", "make it 32 or 48"]),
    ],
)
def test_refusals_of_steps_1_and_2(flags, words):
    for config_class in (SFTConfig, RewardConfig, DPOConfig):
        if "step 1" in words and config_class is not SFTConfig:
            continue
        message = _refusal(config_class, SFT + flags.split(" "))
        assert all(word in message for word in words), message


def test_packing_needs_attention_that_keeps_examples_apart():
    message = _refusal(SFTConfig, [*SFT, "--packing", "--attn_implementation", "flash_attention_2"])
    assert "--packing works with --attn_implementation sdpa and eager" in message


@pytest.mark.parametrize("smoothing", ["-0.1", "1", "nan"])
def test_refusals_of_step_1(smoothing):
    message = _refusal(SFTConfig, [*SFT, "--label_smoothing", smoothing])
    assert f"--label_smoothing {smoothing}" in message.replace("1.0", "1") and "at least 0 and below 1" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--center_rewards_coefficient -1", ["--center_rewards_coefficient -1", "at least 0"]),
        ("--margin_key=", ["--margin_key", "give a value"]),
    ],
)
def test_refusals_of_the_reward_model(flags, words):
    message = _refusal(RewardConfig, SFT + flags.split(" "))
    assert all(word in message for word in words), message


def test_all_turns_and_the_prompt_too_are_refused():
    message = _refusal(SFTConfig, [*SFT, "--sft_on_prompt", "--train_on", "all"])
    assert "--train_on all: --sft_on_prompt trains on every token anyway; leave one of the two out" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--beta 0", ["--beta 0", "above 0"]),
        ("--beta -0.1", ["--beta -0.1", "above 0"]),
        ("--beta inf", ["--beta inf", "above 0"]),
        ("--label_smoothing -0.1", ["--label_smoothing -0.1", "at least 0 and below 0.5"]),
        ("--label_smoothing 0.5", ["--label_smoothing 0.5", "at least 0 and below 0.5"]),
        ("--label_smoothing nan --reference_free", ["--label_smoothing nan", "at least 0 and below 0.5"]),
    ],
)
def test_refusals_of_dpo(flags, words):
    message = _refusal(DPOConfig, SFT + flags.split(" "))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--task.temperature 0", ["--temperature 0", "above 0"]),
        ("--num_warmup_steps 3 --warmup_ratio 0.2", ["both set the warm-up"]),
        ("--lr_scheduler_type constant --warmup_ratio 0.2", ["constant has no warm-up"]),
        ("--optimizer adam --weight_decay 0.1", ["--weight_decay 0.1", "adam has none"]),
        ("--eta -1", ["--eta -1", "at least 0"]),
        ("--total_episodes -1", ["--total_episodes -1", "at least 0"]),
        ("--start_idx -1", ["--start_idx -1", "at least 0"]),
        ("--start_idx 5 --end_idx 5", ["--end_idx 5", "--start_idx 5"]),
        ("--task.cluster=", ["--cluster", "drop the flag"]),
        ("--task.cluster a/b", ["--task.cluster a/b", "without a slash"]),
        ("--num_train_epochs 2", ["--num_train_epochs 2", "--total_episodes 64000", "drop one"]),
    ],
)
def test_refusals_of_refuel(flags, words):
    message = _refusal(RefuelConfig, [*SFT, *flags.split(" ")])
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("config_class", "arguments", "step"),
    [(RewardConfig, SFT, 2), (DPOConfig, SFT, 2), (PPOConfig, PPO, 3)],
    ids=["reward", "dpo", "ppo"],
)
def test_a_split_must_leave_rows_for_the_step(config_class, arguments, step):
    split = {2: "2,0,8", 3: "2,8,0"}[step]
    message = _refusal(config_class, [*arguments, "--data_split", split])
    assert f"no rows for step {step}: make number {step} larger than 0" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        *[
            (f"--{name} 0", [f"--{name} 0", "at least 1"])
            for name in (
                "per_device_generation_batch_size",
                "generation_batches",
                "per_device_training_batch_size",
                "per_device_eval_batch_size",
                "ppo_epochs",
                "max_prompt_seq_len",
                "max_answer_seq_len",
                "repeat_times",
                "adaptive_kl_horizon",
            )
        ],
        *[
            (f"--{name} -1", [f"--{name} -1", "at least 0"])
            for name in (
                "actor_learning_rate",
                "critic_learning_rate",
                "actor_weight_decay",
                "critic_weight_decay",
                "eval_prompts",
                "eval_iters",
                "top_k",
                "kl_coef",
                "missing_eos_penalty",
                "actor_lora_dim",
                "critic_lora_dim",
            )
        ],
        *[
            (f"--{name} 0", [f"--{name} 0", "above 0"])
            for name in (
                "temperature",
                "cliprange",
                "cliprange_value",
                "clip_reward_value",
                "adaptive_kl_target",
                "max_kl",
            )
        ],
        ("--temperature -1", ["--temperature -1", "above 0"]),
        ("--kl_action stop", ["--kl_action stop", "add --max_kl"]),
        ("--temperature nan", ["--temperature nan", "above 0"]),
        ("--ngram_lengths 2 0", ["--ngram_lengths 0", "at least 1"]),
        ("--gamma 1.1", ["--gamma 1.1", "from 0 to 1"]),
        ("--lam -0.1", ["--lam -0.1", "from 0 to 1"]),
        ("--top_p 0", ["--top_p 0", "above 0 and at most 1"]),
        ("--top_p 1.5", ["--top_p 1.5", "above 0 and at most 1"]),
        ("--rollout_engine vllm", ["--rollout_engine vllm needs vLLM", "pip install 'ma-rlhf[vllm]'"]),
        ("--vllm_gpu_memory 0.5", ["--vllm_gpu_memory 0.5", "add --rollout_engine vllm"]),
        ("--vllm_gpu_memory 1.1", ["--vllm_gpu_memory 1.1", "above 0 and at most 1"]),
        ("--rollout_is_clip 2", ["--rollout_is_clip 2", "add --rollout_engine vllm"]),
        ("--rollout_is_clip 0", ["--rollout_is_clip 0", "above 0"]),
        ("--parsing_cutoff 2", ["--parsing_cutoff 2", "at least 3", "each sentence becomes one macro action"]),
        ("--parser_cutoff 2", ["--parsing_cutoff 2", "at least 3"]),
        ("--ngram 0", ["--ngram 0", "at least 1", "inf"]),
        ("--ngram -5", ["--ngram -5", "at least 1", "inf"]),
        ("--ngram 2.5", ["--ngram 2.5", "at least 1", "inf"]),
        ("--ngram many", ["--ngram many", "at least 1", "inf"]),
        # models and functions
        ("--actor_model_name_or_path=", ["--actor_model_name_or_path", "give a value"]),
        ("--critic_model_name_or_path=", ["--critic_model_name_or_path", "give a value"]),
        ("--reward_model_name_or_path=", ["--reward_model_name_or_path", "give a value"]),
        (
            "--reward_function score.py:score score.py:other --reward_weights 1",
            ["--reward_weights: 1 numbers for 2 sources of scores (score, other)", "one for each"],
        ),
        (
            "--reward_function score.py:score --reward_model_name_or_path r --reward_url http://a --reward_source"
            " programs --reward_weights 1 2 3",
            ["--reward_weights: 3 numbers for 4 sources", "(score, reward_model, reward_url, programs)"],
        ),
        ("--reward_weights 1 2", ["--reward_weights: 2 numbers for 1 sources", "(reward_model)"]),
        ("--reward_weights nan", ["--reward_weights nan", "finite numbers"]),
        (
            "--reward_function score.py:score metric.py:kl",
            ["--reward_function", "would be called score", "rename the function"],
        ),
        (
            "--reward_function score.py:other score.py:other",
            ["--reward_function", "two numbers of a response would be called other"],
        ),
        (
            "--reward_function score.py:other score.py:first --metric_function score.py:first",
            ["would be called first", "rename the function"],
        ),
        ("--reward_url 127.0.0.1:8500", ["--reward_url 127.0.0.1:8500 is no address", "http://127.0.0.1:8500/score"]),
        ("--reward_url http://user:secret@host/", ["--reward_url", "without a user's name, password or"]),
        ("--reward_url http://host/score?key=1", ["--reward_url http://host/score?key=1 is no address", "query"]),
        ("--reward_url http://a --reward_batch 0", ["--reward_batch 0", "at least 1"]),
        ("--reward_url http://a --reward_timeout 0", ["--reward_timeout 0", "above 0"]),
        ("--reward_url http://a --reward_patience -1", ["--reward_patience -1", "at least 0"]),
        (
            "--reward_url http://a --reward_patience 1760",
            ["--reward_timeout 60", "--reward_patience 1760", "--ddp_timeout 1800", "lower them"],
        ),
        ("--reward_batch 3", ["--reward_batch 3", "add --reward_url"]),
        ("--reward_timeout 3", ["--reward_timeout 3", "add --reward_url"]),
        ("--reward_patience 3", ["--reward_patience 3", "add --reward_url"]),
        ("--reward_url http://a --rm_template", ["--rm_template", "add --reward_model_name_or_path"]),
        ("--program_reward ratio", ["--program_reward ratio", "add --reward_source programs"]),
        ("--drop_unsolvable", ["--drop_unsolvable True", "add --reward_source programs"]),
        ("--reward_source programs --max_tests 0", ["--max_tests 0", "at least 1"]),
        ("--reward_function none.py:f", ["--reward_function", "no file none.py"]),
        ("--reward_function score.py", ["--reward_function score.py", "module.py:function"]),
        ("--reward_function score.txt:f", ["--reward_function score.txt:f", "module.py:function"]),
        ("--reward_function score.py:not-a-name", ["--reward_function", "module.py:function"]),
        ("--reward_function score.py:inner", ["--reward_function", "does not define inner", "Scorer", "score"]),
        ("--reward_function broken.py:f", ["--reward_function", "cannot read broken.py", "correct the file"]),
        ("--reward_function later.py:f", ["--reward_function later.py:f", "f is an async function", "plain one"]),
        ("--metric_function later.py:f", ["--metric_function later.py:f", "f is an async function"]),
        ("--termination_condition later.py:f", ["--termination_condition later.py:f", "f is an async function"]),
        ("--metric_function none.py:f", ["--metric_function", "no file none.py"]),
        ("--metric_function score.py:other_name", ["--metric_function", "does not define other_name"]),
        ("--metric_function metric.py:kl", ["--metric_function", "rename the function"]),
        ("--termination_condition none.py:f", ["--termination_condition", "no file none.py"]),
        ("--termination_condition score.py:inner", ["--termination_condition", "does not define inner"]),
        ("--termination_condition words", ["--termination_condition words", "fixed, randomized, parsing, ppl or"]),
        (
            "--parser stanford",
            ["--parser stanford is unknown", "chunker, tree-sitter or module.py:function"],
        ),
        ("--parser_device gpu", ["--parser_device gpu", "cpu, cuda or cuda:0"]),
        ("--parser none.py:f", ["--parser", "no file none.py"]),
        # combinations
        ("--eval_prompts 8 --eval_iters 2", ["--eval_prompts", "--eval_iters", "drop one"]),
        ("--macro_reward mean --value_function first", ["--macro_reward mean", "add --isolate_last_token"]),
        ("--adaptive_kl_horizon 500", ["--adaptive_kl_horizon 500", "add --adaptive_kl_target"]),
        ("--adaptive_kl_target 6 --kl_coef 0", ["--adaptive_kl_target", "--kl_coef above 0"]),
        ("--per_device_training_batch_size 5", ["--per_device_training_batch_size 5", "1, 2, 4, 8 or 16"]),
        ("--gradient_accumulation_steps 2", ["--gradient_accumulation_steps 2", "make --gradient_accumulation_steps"]),
        ("--global_batch_size 20", ["--global_batch_size 20", "make it 16"]),
    ],
)
def test_refusals_of_step_3(flags, words):
    message = _refusal(PPOConfig, PPO + flags.split(" "))
    assert all(word in message for word in words), message


def test_a_critic_or_a_reward_function_is_needed():
    message = _refusal(PPOConfig, [*COMMON, "--actor_model_name_or_path", "a"])
    assert "--critic_model_name_or_path is missing" in message
    assert "--reward_function module.py:function" in message


@pytest.mark.parametrize(
    "name", ["Scorer", "numbers", "join", "json", "fallback", "annotated", "other", "first", "second"]
)
def test_names_bound_at_the_top_of_a_module_are_found_without_running_it(name):
    assert parse(PPOConfig, [*PPO, "--metric_function", f"score.py:{name}"]).metric_name == name


def test_a_star_import_may_bring_any_name():
    assert parse(PPOConfig, [*PPO, "--termination_condition", "star.py:join"]).termination_condition == "star.py:join"


def test_an_unreadable_module_is_refused(tmp_path):
    (tmp_path / "null.py").write_bytes(b"x = 1\0")
    assert "cannot read null.py" in _refusal(PPOConfig, [*PPO, "--metric_function", "null.py:x"])


def test_a_run_is_not_overwritten_unasked(tmp_path):
    """Finished, or with metrics; a run that ended before its first metrics left nothing to lose."""
    (tmp_path / "out").mkdir()
    record, metrics = tmp_path / "out" / "run.json", tmp_path / "out" / "metrics.jsonl"
    metrics.touch()
    for unfinished in ('{"finished": false}', "{}", "[]", '{"finished": tr'):
        record.write_text(unfinished)
        parse(SFTConfig, SFT)
    metrics.write_text('{"update": 0}\n')
    record.write_text(json.dumps({"finished": False}))
    assert "--output_dir out holds a run" in _refusal(SFTConfig, SFT)
    metrics.unlink()
    record.write_text(json.dumps({"finished": True}))
    message = _refusal(SFTConfig, SFT)
    assert "--output_dir out holds a run" in message
    assert "--overwrite_output_dir" in message
    assert parse(SFTConfig, [*SFT, "--overwrite_output_dir"]).overwrite_output_dir


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--macro_reward mean", "--isolate_last_token"),
        ("--macro_reward mean --termination_condition ppl --ngram 1", "--isolate_last_token"),
        ("--top_k 50", "--top_k 50 and --top_p 1 truncate"),
        ("--top_p 0.9", "--top_k 0 and --top_p 0.9 truncate"),
        ("--top_k 5 --top_p 0.9", "--top_k 5 and --top_p 0.9 truncate"),
    ],
)
def test_unwise_combinations_warn_once(flags, words, caplog):
    parse(PPOConfig, PPO + flags.split(" "))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert words in messages[0]


@pytest.mark.parametrize(
    "flags",
    [
        "--dtype fp16",
        "--macro_reward mean --isolate_last_token",
        "--macro_reward mean --isolate_last_token --value_function first",
        "--macro_reward mean --ngram 1",
        "--num_warmup_steps 0 --warmup_ratio 0.1",
        "--lr_scheduler_type constant --warmup_ratio 0",
        "--kl_coef 0",
        "--ngram_lengths 1",
        "--top_k 0 --top_p 1",
    ],
)
def test_sound_combinations_are_silent(flags, caplog):
    parse(PPOConfig, PPO + flags.split(" "))
    assert not caplog.records


@pytest.mark.parametrize("used", ["out", "out/actor", "out/models/step-2/actor"])
def test_a_run_does_not_write_over_what_it_reads(tmp_path, used):
    (tmp_path / used).mkdir(parents=True)
    words = ["--model_name_or_path", used, "--data_path", "d.jsonl", "--output_dir", "./out", "--overwrite_output_dir"]
    assert f"--output_dir ./out: the run reads {used}, which its own models would" in _refusal(SFTConfig, words)


def test_data_may_lie_in_the_output_folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "d.jsonl").touch()
    parse(SFTConfig, ["--model_name_or_path", "gpt2", "--data_path", "out/d.jsonl", "--output_dir", "out"])


@pytest.mark.parametrize(("warmup", "warned"), [(10, False), (11, True)])
def test_a_warm_up_that_never_ends_is_warned_of(caplog, warmup, warned):
    parse(SFTConfig, [*SFT, "--num_warmup_steps", str(warmup)]).warn_of_warmup(11)
    assert ("--num_warmup_steps" in caplog.text) is warned
