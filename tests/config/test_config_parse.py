# SPDX-License-Identifier: Apache-2.0
"""Flags: names, values, defaults, aliases, inert flags, malformed command lines."""

import dataclasses
import logging
import math
import sys
from pathlib import Path

import pytest

from dschat.config.parse import INERT_FLAGS, parse
from dschat.config.ppo import PPOConfig
from dschat.config.refuel import RefuelConfig, RefuelOnlineConfig
from dschat.config.supervised import DPOConfig, RewardConfig, SFTConfig

COMMON = ["--data_path", "rows.jsonl", "--output_dir", "out"]
REQUIRED = {
    SFTConfig: [*COMMON, "--model_name_or_path", "m"],
    RewardConfig: [*COMMON, "--model_name_or_path", "m"],
    DPOConfig: [*COMMON, "--model_name_or_path", "m"],
    PPOConfig: [*COMMON, "--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"],
    RefuelConfig: [*COMMON, "--model_name_or_path", "m"],
    RefuelOnlineConfig: [*COMMON, "--model_name_or_path", "m", "--reward_model", "r"],
}
CLASSES = list(REQUIRED)

# flag → (arguments, expected value); every flag of the three steps is here.
COMMON_VALUES = {
    "data_path": (["a.jsonl", "b"], ["a.jsonl", "b"]),
    "data_split": (["6,2,2"], "6,2,2"),
    "prompt_key": (["question"], "question"),
    "chosen_key": (["good"], "good"),
    "rejected_key": (["bad"], "bad"),
    "response_key": (["answer"], "answer"),
    "messages_key": (["turns"], "turns"),
    "end_of_conversation_token": (["<end>"], "<end>"),
    "output_dir": (["elsewhere"], "elsewhere"),
    "overwrite_output_dir": ([], True),
    "save_steps": (["7"], 7),
    "save_total_limit": (["5"], 5),
    "save_models": (["9"], 9),
    "resume_from_checkpoint": (["out/checkpoints/step-4"], "out/checkpoints/step-4"),
    "eval_interval": (["9"], 9),
    "enable_tensorboard": ([], True),
    "tensorboard_path": (["tb"], "tb"),
    "report_to": (["tensorboard"], ["tensorboard"]),
    "push_to_hub": (["me/model"], "me/model"),
    "seed": (["5"], 5),
    "num_train_epochs": (["3"], 3),
    "gradient_accumulation_steps": (["1"], 1),
    "global_batch_size": (["16"], 16),
    "lr_scheduler_type": (["constant_with_warmup"], "constant_with_warmup"),
    "num_warmup_steps": (["6"], 6),
    "warmup_ratio": (["0.1"], 0.1),
    "gradient_clipping": (["0.5"], 0.5),
    "on_nonfinite": (["skip"], "skip"),
    "dtype": (["fp32"], "fp32"),
    "bf16": ([], True),
    "attn_implementation": (["eager"], "eager"),
    "zero_stage": (["0"], 0),
    "offload": (["false"], False),
    "lora_dim": (["0"], 0),
    "lora_module_name": (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
    "finetune_mode": (["last_layer"], "last_layer"),
    "lora_alpha": (["16"], 16),
    "lora_dropout": (["0"], 0.0),
    "merge_lora": (["false"], False),
    "self_checks": (["false"], False),
    "deepspeed": ([], True),
    "deepspeed_config": (["{json}"], "{json}"),
    "ddp_timeout": (["60"], 60),
    "local_rank": (["0"], 0),
}
SUPERVISED_VALUES = {
    "eval_iters": (["0"], 0),
    "model_name_or_path": (["other"], "other"),
    "max_seq_len": (["64"], 64),
    "per_device_train_batch_size": (["4"], 4),
    "per_device_eval_batch_size": (["5"], 5),
    "gradient_checkpointing": ([], True),
    "learning_rate": (["3e-4"], 3e-4),
    "weight_decay": (["0"], 0.0),
}
SFT_VALUES = {
    "train_on": (["all"], "all"),
    "sft_on_prompt": ([], True),
    "label_smoothing": (["0.1"], 0.1),
    "packing": ([], True),
}
REWARD_VALUES = {
    "reward_loss": (["per_sample"], "per_sample"),
    "margin_key": (["gap"], "gap"),
    "center_rewards_coefficient": (["0.01"], 0.01),
    "reward_gain": ([], True),
}
DPO_VALUES = {
    "beta": (["0.01"], 0.01),
    "label_smoothing": (["0.1"], 0.1),
    "reference_free": (["--label_smoothing", "0.1"], True),
}
PPO_VALUES = {
    "eval_prompts": (["64"], 64),
    "eval_iters": (["0"], 0),
    "actor_model_name_or_path": (["other"], "other"),
    "critic_model_name_or_path": (["other"], "other"),
    "reward_model_name_or_path": (["other"], "other"),
    "reward_function": (["{module}:f"], ["{module}:f"]),
    "reward_url": (["http://127.0.0.1:8500/score"], "http://127.0.0.1:8500/score"),
    "reward_weights": (["0.5"], [0.5]),
    "on_reward_error": (["skip"], "skip"),
    "rm_template": (["--reward_model_name_or_path", "r"], True),
    "reward_batch": (["8", "--reward_url", "http://a/b"], 8),
    "reward_timeout": (["5.5", "--reward_url", "http://a/b"], 5.5),
    "reward_patience": (["7.5", "--reward_url", "http://a/b"], 7.5),
    "metric_function": (["{module}:f"], "{module}:f"),
    "reward_source": (["programs"], "programs"),
    "program_reward": (["ratio", "--reward_source", "programs"], "ratio"),
    "sandbox_level": (["rlimits", "--reward_source", "programs"], "rlimits"),
    "sandbox_workers": (["2", "--reward_source", "programs"], 2),
    "max_tests": (["5", "--reward_source", "programs"], 5),
    "drop_unsolvable": (["--reward_source", "programs"], True),
    "per_device_generation_batch_size": (["32"], 32),
    "generation_batches": (["2"], 2),
    "samples_per_prompt": (["4"], 4),
    "per_device_training_batch_size": (["8"], 8),
    "per_device_eval_batch_size": (["3"], 3),
    "ppo_epochs": (["2"], 2),
    "max_prompt_seq_len": (["100"], 100),
    "max_answer_seq_len": (["64"], 64),
    "temperature": (["0.8"], 0.8),
    "top_k": (["50"], 50),
    "top_p": (["0.9"], 0.9),
    "rollout_engine": (["generate"], "generate"),
    "vllm_gpu_memory": (["0.5", "--rollout_engine", "vllm"], 0.5),
    "rollout_is_clip": (["2", "--rollout_engine", "vllm"], 2.0),
    "print_answers": ([], True),
    "termination_condition": (["ppl"], "ppl"),
    "ngram": (["inf"], math.inf),
    "repeat_times": (["2"], 2),
    "ngram_lengths": (["1", "4"], [1, 4]),
    "parsing_cutoff": (["3"], 3),
    "parser": (["chunker"], "chunker"),
    "parser_model": (["benepar_en3_large"], "benepar_en3_large"),
    "parser_device": (["cuda"], "cuda"),
    "ppl_mode": (["prefix"], "prefix"),
    "value_function": (["first"], "first"),
    "macro_reward": (["mean"], "mean"),
    "isolate_last_token": ([], True),
    "policy_ratio": (["macro"], "macro"),
    "advantage_estimator": (["gae"], "gae"),
    "actor_learning_rate": (["1e-4"], 1e-4),
    "critic_learning_rate": (["1e-4"], 1e-4),
    "actor_weight_decay": (["0.2"], 0.2),
    "critic_weight_decay": (["0.2"], 0.2),
    "kl_coef": (["0.01"], 0.01),
    "kl_estimator": (["k3"], "k3"),
    "adaptive_kl_target": (["6"], 6.0),
    "adaptive_kl_horizon": (["500", "--adaptive_kl_target", "6"], 500),
    "max_kl": (["20"], 20.0),
    "kl_action": (["stop", "--max_kl", "20"], "stop"),
    "gamma": (["0.99"], 0.99),
    "lam": (["1"], 1.0),
    "cliprange": (["0.1"], 0.1),
    "cliprange_value": (["0.3"], 0.3),
    "clip_reward_value": (["2.5"], 2.5),
    "missing_eos_penalty": (["1"], 1.0),
    "whiten_advantages": ([], True),
    "normalize_advantages": (["row"], "row"),
    "normalize_scores": ([], True),
    "vf_coef": (["0.1"], 0.1),
    "gradient_checkpointing": ([], True),
    "actor_gradient_checkpointing": ([], True),
    "critic_gradient_checkpointing": (["no"], False),
    "actor_zero_stage": (["0"], 0),
    "critic_zero_stage": (["0"], 0),
    "offload_reference_model": (["no"], False),
    "actor_lora_dim": (["0"], 0),
    "critic_lora_dim": (["0"], 0),
    "share_base": (["--lora_dim", "4"], True),
    "enable_ema": (["0"], False),
}
REFUEL_ONLINE_VALUES = {
    "model_name_or_path": (["other"], "other"),
    "reward_model_name_or_path": (["other"], "other"),
    "reward_function": (["{module}:f"], "{module}:f"),
    "trained_layers": (["4"], 4),
    "gradient_checkpointing": ([], True),
    "max_turns": (["3"], 3),
    "max_prompt_seq_len": (["64"], 64),
    "max_answer_seq_len": (["100"], 100),
    "max_seq_len": (["1000"], 1000),
    "temperature": (["0.8"], 0.8),
    "rollout_engine": (["generate"], "generate"),
    "total_episodes": (["64000"], 64000),
    "per_device_train_batch_size": (["4"], 4),
    "per_device_generation_batch_size": (["32"], 32),
    "per_device_eval_batch_size": (["3"], 3),
    "eval_prompts": (["0"], 0),
    "eval_temperature": (["0.01"], 0.01),
    "print_sample_output_freq": (["200"], 200),
    "eta": (["2"], 2.0),
    "noptepochs": (["2"], 2),
    "kl_coef": (["0"], 0.0),
    "adaptive_kl_target": (["6"], 6.0),
    "adaptive_kl_horizon": (["500", "--adaptive_kl_target", "6"], 500),
    "penalty_reward_value": (["-4"], -4.0),
    "whiten_rewards": ([], True),
    "learning_rate": (["1e-6"], 1e-6),
    "weight_decay": (["0"], 0.0),
    "adam_epsilon": (["1e-5"], 1e-5),
}
REFUEL_VALUES = {
    "num_train_epochs": (["3", "--total_episodes", "0"], 3),
    "cluster": (["h100"], "h100"),
    "temperature": (["1"], 1.0),
    "eta": (["2"], 2.0),
    "total_episodes": (["640"], 640),
    "start_idx": (["5"], 5),
    "end_idx": (["9"], 9),
    "optimizer": (["adam"], "adam"),
}
VALUES = {
    SFTConfig: COMMON_VALUES | SUPERVISED_VALUES | SFT_VALUES,
    RewardConfig: COMMON_VALUES | SUPERVISED_VALUES | REWARD_VALUES,
    DPOConfig: COMMON_VALUES | SUPERVISED_VALUES | DPO_VALUES,
    PPOConfig: COMMON_VALUES | PPO_VALUES,
    RefuelConfig: COMMON_VALUES | SUPERVISED_VALUES | REFUEL_VALUES,
    RefuelOnlineConfig: COMMON_VALUES | REFUEL_ONLINE_VALUES,
}
CASES = [(config_class, name) for config_class in CLASSES for name in VALUES[config_class]]

# The interface that users know: which documented flag belongs to which step.
DOCUMENTED_EVERYWHERE = """--data_path --data_split --per_device_eval_batch_size --num_train_epochs
--gradient_accumulation_steps --lr_scheduler_type --num_warmup_steps --warmup_ratio --output_dir --seed --offload
--zero_stage --lora_dim --lora_module_name --enable_tensorboard --tensorboard_path --save_steps --eval_interval
--eval_iters --end_of_conversation_token --deepspeed --deepspeed_config --local_rank --global_batch_size --bf16 --dtype
--attn_implementation --data_output_path --num_padding_at_beginning --only_optimize_lora --dropout --actor_dropout
--critic_dropout --print_answers_interval --print_loss --add_eot_token --compute_fp32_loss --align_overflow
--enable_hybrid_engine --inference_tp_size --enable_zero3_generation_gather --enable_test_mode
--test_stop_step""".split()
DOCUMENTED_SUPERVISED = """--model_name_or_path --per_device_train_batch_size --max_seq_len --learning_rate
--weight_decay --gradient_checkpointing""".split()
DOCUMENTED_PPO = """--termination_condition --ngram --repeat_times --parsing_cutoff --parser_cutoff --value_function
--top_k --top_p --cliprange --cliprange_value --clip_reward_value --missing_eos_penalty --reward_model_name_or_path
--reward_function --actor_model_name_or_path --critic_model_name_or_path --per_device_generation_batch_size
--per_device_training_batch_size --generation_batches --ppo_epochs --max_prompt_seq_len --max_answer_seq_len
--actor_learning_rate --critic_learning_rate --actor_weight_decay --critic_weight_decay --actor_gradient_checkpointing
--critic_gradient_checkpointing --offload_reference_model --actor_zero_stage --critic_zero_stage --actor_lora_dim
--critic_lora_dim --enable_ema --print_answers --kl_ctl --gamma --lam --temperature""".split()
DOCUMENTED_REFUEL_ONLINE = """--base_model --reward_model --task.query_dataset --task.cluster --task.temperature
--task.total_length --task.response_length --task.prompt_length --task.penalty_reward_value --lr --eps --weight_decay
--refuel.eta --rebel.eta --reward.kl_coef --noptepochs --warmup_ratio --total_episodes --output_dir --offload
--per_device_train_batch_size --gradient_accumulation_steps --per_device_eval_batch_size --print_sample_output_freq
--wandb_project_name --max_turns --trained_layers""".split()
DOCUMENTED_REFUEL = """--task.query_dataset --task.cluster --task.total_length --task.temperature --lr --refuel.eta
--rebel.eta --total_episodes --print_sample_output_freq --base_model --start_idx --end_idx --optimizer --track
--wandb_project_name""".split()
DOCUMENTED = {
    SFTConfig: DOCUMENTED_EVERYWHERE + DOCUMENTED_SUPERVISED,
    RewardConfig: DOCUMENTED_EVERYWHERE + DOCUMENTED_SUPERVISED,
    DPOConfig: DOCUMENTED_EVERYWHERE + DOCUMENTED_SUPERVISED,
    PPOConfig: DOCUMENTED_EVERYWHERE + DOCUMENTED_PPO,
    RefuelConfig: DOCUMENTED_EVERYWHERE + DOCUMENTED_SUPERVISED + DOCUMENTED_REFUEL,
    RefuelOnlineConfig: DOCUMENTED_REFUEL_ONLINE,
}
REFUEL_ONLINE_ALIASES = {
    "--base_model": "model_name_or_path",
    "--reward_model": "reward_model_name_or_path",
    "--task.query_dataset": "data_path",
    "--task.temperature": "temperature",
    "--task.total_length": "max_seq_len",
    "--task.response_length": "max_answer_seq_len",
    "--task.prompt_length": "max_prompt_seq_len",
    "--task.penalty_reward_value": "penalty_reward_value",
    "--lr": "learning_rate",
    "--eps": "adam_epsilon",
    "--refuel.eta": "eta",
    "--rebel.eta": "eta",
    "--reward.kl_coef": "kl_coef",
}
ALIASES = {"--parser_cutoff": "parsing_cutoff", "--kl_ctl": "kl_coef"} | REFUEL_ONLINE_ALIASES
# Of REFUEL on pairs alone, since its online form has other meanings for them.
REFUEL_ALIASES = {"--task.cluster": "cluster", "--print_sample_output_freq": "eval_interval"}


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Real files for the flags that name files; the tests run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("dschat.config.ppo.find_spec", lambda name: object())  # as if vLLM were installed
    (tmp_path / "score.py").write_text("def f(prompts, responses, rows):\n    raise SystemExit('executed')\n")
    (tmp_path / "ds.json").write_text('{"steps_per_print": 1}')
    return {"{module}": "score.py", "{json}": "ds.json"}


def _fill(value, places):
    if isinstance(value, list):
        return [_fill(part, places) for part in value]
    if isinstance(value, str):
        for key, path in places.items():
            value = value.replace(key, path)
    return value


def _arguments(config_class, name, places):
    """The shortest command line with one more flag, and the value that must come out."""
    given, expected = VALUES[config_class][name]
    required = REQUIRED[config_class]
    if config_class is RefuelOnlineConfig and name == "reward_function":
        required = required[:-2]  # it stands in the place of the reward model
    arguments = [*required, f"--{name}", *(_fill(part, places) for part in given)]
    return arguments, _fill(expected, places)


@pytest.mark.parametrize(("config_class", "name"), CASES, ids=lambda part: getattr(part, "__name__", part))
def test_each_flag_sets_its_field(config_class, name, places):
    arguments, expected = _arguments(config_class, name, places)
    value = getattr(parse(config_class, arguments), name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("config_class", CLASSES)
def test_every_field_has_help_and_a_case_above(config_class):
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    assert set(fields) == set(VALUES[config_class])
    assert all(len(field.metadata["help"]) > 10 for field in fields.values())


@pytest.mark.parametrize("config_class", CLASSES)
def test_documented_flags_are_accepted(config_class, places):
    for documented in DOCUMENTED[config_class]:
        aliases = ALIASES | (REFUEL_ALIASES if config_class is RefuelConfig else {})
        name = aliases.get(documented, documented[2:])
        if name in {*INERT_FLAGS, *config_class.own_inert_flags}:
            parse(config_class, [*REQUIRED[config_class], documented])
            continue
        given, expected = VALUES[config_class][name]
        arguments = [*REQUIRED[config_class], documented, *(_fill(part, places) for part in given)]
        assert getattr(parse(config_class, arguments), name) == _fill(expected, places), documented


@pytest.mark.parametrize("config_class", [PPOConfig, RefuelOnlineConfig])
def test_the_former_name_of_continuous_batching_is_accepted(config_class, places):
    former = parse(config_class, [*REQUIRED[config_class], "--rollout_engine", "compacting"])
    assert former == parse(config_class, REQUIRED[config_class]) and former.rollout_engine == "continuous"


def test_other_spellings(places):
    config = parse(PPOConfig, REQUIRED[PPOConfig] + ["--kl-coef=0.3", "--no_self_checks", "--local_rank=0"])
    assert (config.kl_coef, config.self_checks, config.local_rank) == (0.3, False, 0)


@pytest.mark.parametrize("config_class", CLASSES)
@pytest.mark.parametrize("name", INERT_FLAGS)
@pytest.mark.parametrize("form", ["--{}", "--{} 0.5", "--{}=-1", "--{} 1 --{} 2"])
def test_inert_flags_warn_once_and_take_an_optional_value(config_class, name, form, places, caplog):
    arguments = [*form.replace("{}", name).split(), *REQUIRED[config_class]]
    config = parse(config_class, arguments)
    assert config == parse(config_class, REQUIRED[config_class])
    assert [record.getMessage() for record in caplog.records] == [f"--{name} does nothing here: {INERT_FLAGS[name]}."]
    assert caplog.records[0].levelno == logging.WARNING


def test_an_inert_flag_does_not_join_its_neighbours(places, capsys):
    with pytest.raises(SystemExit):
        parse(SFTConfig, ["--data_path", "a", "--dropout", "0.1", "b", *REQUIRED[SFTConfig][2:]])
    assert "unrecognized arguments: b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kl_cof", "1"], ["--kl_cof", "did you mean --kl_coef?"]),
        (["--learning_rate", "1"], ["unrecognized arguments: --learning_rate", "did you mean --actor_learning_rate?"]),
        (["--zzzzzzzz"], ["unrecognized arguments: --zzzzzzzz (--help"]),
        (["--ppo_epochs", "x"], ["--ppo_epochs", "invalid int value: 'x'"]),
        (["--dtype", "int8"], ["--dtype", "invalid choice: 'int8'"]),
        (["--zero_stage", "4"], ["--zero_stage", "invalid choice"]),
        (["--kl_estimator", "k4"], ["--kl_estimator", "invalid choice"]),
        (["--bf16", "perhaps"], ["--bf16", "perhaps"]),
        (["--cliprang", "0.1"], ["unrecognized arguments: --cliprang"]),
    ],
)
def test_malformed_command_lines_give_one_line_and_status_2(arguments, words, places, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(PPOConfig, REQUIRED[PPOConfig] + arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    assert all(word in error for word in words), error


def test_missing_flags_are_named(places, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(PPOConfig, [])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    assert all(flag in error for flag in ("--data_path", "--output_dir", "--actor_model_name_or_path"))


def test_arguments_come_from_the_process_by_default(places, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py", *REQUIRED[SFTConfig], "--seed", "7"])
    Path("main.args").write_text("--seed 8")  # HfArgumentParser would read it; only the command line counts
    assert parse(SFTConfig).seed == 7
