# SPDX-License-Identifier: Apache-2.0
"""Every rule between flags: the message names the flag and the remedy."""

import json

import pytest

from dschat.settings.rules import check_function_path
from flag_cases import ACTOR, REQUIRED, RLOO, SCORED, config_of, refusal

# Steps, what the message says, and flags with values, each of which it says this of.
RANGES = [
    ("sft", "from 0 to 4294967295", "--seed -1 --seed 4294967296"),
    (
        "sft",
        "at least 1",
        "--num_train_epochs 0 --gradient_accumulation_steps 0 --global_batch_size 0 --lora_alpha 0 --max_seq_len 0"
        " --per_device_train_batch_size 0 --per_device_eval_batch_size 0 --max_tokens_per_micro_batch 0",
    ),
    (
        "sft",
        "at least 0",
        "--save_steps -1 --save_minutes -1 --save_minutes nan --eval_interval -1 --num_warmup_steps -1"
        " --gradient_clipping -1 --gradient_clipping nan"
        " --lora_dim -1 --warmup_ratio -0.1 --eval_iters -1 --learning_rate -1 --learning_rate inf --weight_decay -1",
    ),
    (
        "dpo ppo",
        "HH:MM:SS, or D-HH:MM:SS",
        "--max_time 10:00 --max_time 600 --max_time 00:00:00 --max_time 1-00 --max_time 00:60:00 --max_time soon",
    ),
    ("sft", "at least 0 and below 1", "--lora_dropout 1"),
    ("sft", "below 1", "--warmup_ratio 1"),
    (
        "dpo ppo",
        "flex_attention, or a kernel of the hub as kernels-community/NAME",
        "--attn_implementation flash --attn_implementation kernels-community/ --attn_implementation other/flash-attn3",
    ),
    ("sft", "give a value", "--prompt_key= --chosen_key= --rejected_key= --response_key= --messages_key="),
    ("sft", "drop the flag", "--end_of_conversation_token="),
    ("sft", "three numbers", "--data_split 2,4 --data_split 2,4,x --data_split 2,4,-4 --data_split 2,4,nan"),
    ("sft", "at least 0 and below 1", "--label_smoothing -0.1 --label_smoothing 1 --label_smoothing nan"),
    ("reward", "at least 0", "--center_rewards_coefficient -1"),
    ("reward", "give a value", "--margin_key="),
    ("dpo", "above 0", "--beta 0 --beta -0.1 --beta inf"),
    ("dpo", "at least 0 and below 0.5", "--label_smoothing -0.1 --label_smoothing 0.5 --label_smoothing nan"),
    ("refuel", "above 0", "--temperature 0"),
    ("refuel", "at least 0", "--eta -1 --total_episodes -1"),
    ("online", "at least 1", "--noptepochs 0 --max_turns 0"),
    ("online", "give a number", "--penalty_reward_value nan"),
    (
        "ppo",
        "at least 1",
        "--per_device_generation_batch_size 0 --generation_batches 0 --per_device_training_batch_size 0"
        " --per_device_eval_batch_size 0 --ppo_epochs 0 --max_prompt_seq_len 0 --max_answer_seq_len 0 --repeat_times 0"
        " --adaptive_kl_horizon 0 --samples_per_prompt 0 --ngram_lengths 0",
    ),
    (
        "ppo",
        "at least 0",
        "--actor_learning_rate -1 --critic_learning_rate -1 --actor_weight_decay -1 --critic_weight_decay -1"
        " --eval_prompts -1 --eval_iters -1 --top_k -1 --kl_coef -1 --missing_eos_penalty -1 --actor_lora_dim -1"
        " --critic_lora_dim -1",
    ),
    (
        "ppo",
        "above 0",
        "--temperature 0 --temperature -1 --temperature nan --cliprange 0 --cliprange_value 0 --clip_reward_value 0"
        " --adaptive_kl_target 0 --max_kl 0 --rollout_is_clip 0",
    ),
    ("ppo", "from 0 to 1", "--gamma 1.1 --lam -0.1"),
    ("ppo", "above 0 and at most 1", "--top_p 0 --top_p 1.5 --vllm_gpu_memory 1.1"),
    ("ppo", "at least 1 (1 = vanilla PPO), or inf", "--ngram 0 --ngram -5"),
]


@pytest.mark.parametrize(
    ("step", "flag", "said"),
    [
        (step, f"--{flag}", said)
        for steps, said, flags in RANGES
        for flag in flags[2:].split(" --")
        for step in steps.split()
    ],
)
def test_values_out_of_range(step, flag, said):
    message = refusal(step, flag)
    assert flag.rstrip("=") in message and said in message, message


FUNCTIONS = ("reward_function", "metric_function", "termination_condition")
# Steps, flags that are refused, and what the message holds: the flag and the remedy.
REFUSALS = [
    ("sft", "--lora_dim 4 --lora_module_name=", "--lora_module_name is empty"),
    ("sft", "--finetune_mode last_layer --lora_dim 4", "--finetune_mode last_layer", "--lora_dim", "drop one"),
    ("sft reward dpo ppo", "--bf16 --dtype fp16", "--bf16", "--dtype fp16", "drop one"),
    ("sft", "--num_warmup_steps 5 --warmup_ratio 0.1", "--num_warmup_steps 5", "--warmup_ratio 0.1", "drop one"),
    ("sft", "--lr_scheduler_type constant --num_warmup_steps 5", "--lr_scheduler_type", "constant_with_warmup"),
    ("sft", "--lr_scheduler_type constant --warmup_ratio 0.1", "--lr_scheduler_type", "constant_with_warmup"),
    ("sft", "--deepspeed_config none.json", "--deepspeed_config none.json", "No such file"),
    ("sft", "--deepspeed_config broken.json", "--deepspeed_config broken.json", "not valid JSON"),
    ("sft", "--deepspeed_config stage.json", "zero_optimization.stage is decided by", "remove"),
    ("sft", "--deepspeed_config list.json", "--deepspeed_config list.json", "JSON object"),
    ("sft", "--output_dir file", "--output_dir file", "give a folder"),
    ("sft", "--push_to_hub model", "--push_to_hub model: give the repository as owner/name"),
    ("sft", "--offload", "--offload needs ZeRO", "--zero_stage 1, 2 or 3"),
    (
        "dpo ppo",
        "--checkpoint_every 2",
        "--gradient_checkpointing_every: of no effect without --gradient_checkpointing",
    ),
    ("sft", "--data_split 0,4,4", "--data_split 0,4,4", "no rows for step 1: make number 1 larger than 0"),
    (
        "sft",
        "--packing --attn_implementation flash_attention_2",
        "--packing works with --attn_implementation sdpa, eager and flex_attention",
    ),
    (
        "sft",
        "--sft_on_prompt --train_on all",
        "--train_on all: --sft_on_prompt trains on every token anyway; leave one of the two out",
    ),
    (
        "sft",
        "--max_tokens_per_micro_batch 1023",
        "--max_tokens_per_micro_batch 1023",
        "a text of --max_seq_len 1024: give 1024",
    ),
    ("reward dpo", "--max_tokens_per_micro_batch 2047", "a pair of --max_seq_len 1024: give 2048 or more"),
    ("refuel", "--max_tokens_per_micro_batch 4095", "a pair of --max_seq_len 2048: give 4096 or more"),
    ("online", "--max_tokens_per_micro_batch 8191", "a pair of --max_seq_len 4096: give 8192 or more"),
    ("ppo", "--max_tokens_per_micro_batch 1023", "--max_prompt_seq_len 512 with --max_answer_seq_len 512: give 1024"),
    ("sft", "--packing --max_tokens_per_micro_batch 2048", "--max_tokens_per_micro_batch: with --packing", "Drop one"),
    ("refuel", "--task.cluster=", "--cluster", "drop the flag"),
    ("refuel", "--task.cluster a/b", "--task.cluster a/b", "without a slash"),
    ("refuel", "--num_train_epochs 2", "--num_train_epochs 2", "--total_episodes 64000", "drop one"),
    ("online", "--reward_function score.py:f", "the score comes from --reward_model or from --reward_function"),
    ("online", "--trained_layers 4 --lora_dim 8", "--trained_layers 4 and --lora_dim 8 both"),
    (
        "online",
        "--trained_layers 2 --finetune_mode last_layer",
        "--trained_layers 2 and --finetune_mode last_layer both",
    ),
    ("online", "--total_episodes 10 --num_train_epochs 2", "--num_train_epochs 2 and --total_episodes 10 both"),
    ("online", "--print_sample_output_freq 2 --eval_interval 9", "--print_sample_output_freq 2 and --eval_interval 9"),
    ("online", "--task.total_length 512", "--max_seq_len 512 leaves no room"),
    ("online", "--global_batch_size 7 --per_device_train_batch_size 2", "--global_batch_size 7 is not a multiple"),
    ("ppo", "--rollout_engine vllm", "--rollout_engine vllm needs vLLM", "pip install 'ma-rlhf[vllm]'"),
    ("ppo", "--vllm_url http://a", "--vllm_url ['http://a']", "add --rollout_engine vllm"),
    ("ppo", "--vllm_timeout 3 --rollout_engine vllm", "--vllm_timeout 3", "add --vllm_url"),
    ("ppo", "--rollouts_ahead 1 --rollout_engine vllm", "--rollouts_ahead 1", "add --vllm_url"),
    *(
        ("ppo", f"--rollout_engine vllm --vllm_url {given}", told)
        for given, told in (
            ("localhost:8000", "localhost:8000 is not an address of a server"),
            ("http://a http://me:secret@host", "without a path, a user's name or a password"),
            ("http://node:80000", "http://node:80000 is not an address of a server"),
            ("http://a http://A/", "give each server once"),
            ("http://localhost:8000 http://127.0.0.1:8000/", "give each server once"),
            ("http://a --vllm_tensor_parallel 2", "give it to dschat serve-vllm"),
            ("http://a --vllm_gpu_memory 0.7", "give --gpu_memory to dschat serve-vllm"),
            ("http://a --vllm_timeout 1800", "--vllm_timeout 1800 is not below --ddp_timeout 1800"),
        )
    ),
    ("ppo", "--parsing_cutoff 2", "--parsing_cutoff 2", "at least 3", "each sentence becomes one macro action"),
    ("ppo", "--offload --zero_stage 2 --critic_zero_stage 0", "both actor and critic"),
    ("ppo", "--offload --zero_stage 2 --actor_zero_stage 0", "both actor and critic"),
    ("rloo", "--offload --actor_zero_stage 0", "--offload needs ZeRO"),
    ("ppo", "--finetune_mode all --critic_lora_dim 2", "--finetune_mode all and --lora_dim both"),
    (
        "ppo",
        "--finetune_mode lora --critic_lora_dim 0 --actor_lora_dim 0",
        "--finetune_mode lora: no model has adapters",
    ),
    # models and functions
    (
        "ppo",
        "--reward_function score.py:score --reward_model_name_or_path r --reward_url http://a"
        " --reward_source programs --reward_weights 1 2 3 4",
        "--reward_weights 1 2 3 4: give finite weights as NAME=NUMBER, each name once, such as",
        " --reward_weights score=0.5 reward_model=0.5 reward_url=0.5 programs=0.5",
    ),
    ("ppo", "--reward_weights judge=2", "--reward_weights judge=2: give", "--reward_weights reward_model=0.5"),
    ("ppo", "--reward_weights reward_model=nan", "--reward_weights reward_model=nan", "finite weights"),
    ("ppo", "--reward_weights reward_model=1 reward_model=2", "each name once"),
    ("ppo", "--reward_weights reward_model", "as NAME=NUMBER"),
    (
        "ppo",
        "--reward_function score.py:score metric.py:kl",
        "--reward_function",
        "would be called kl",
        "rename the function",
    ),
    (
        "ppo",
        "--reward_function score.py:other score.py:other",
        "--reward_function",
        "two numbers of a response would be called other",
    ),
    (
        "ppo",
        "--reward_function score.py:other score.py:first --metric_function score.py:first",
        "would be called first",
    ),
    # episodes
    *(
        ("ppo", f"--environment score.py:score {words}", *said)
        for words, *said in (
            (
                "--rollout_engine vllm --vllm_url http://h:1",
                "--environment with --vllm_url",
                "use --rollout_engine continuous",
            ),
            (
                "--rollout_engine vllm --vllm_tensor_parallel 2",
                "--environment with --vllm_tensor_parallel 2",
                "Use --vllm_tensor_parallel 1",
            ),
            (
                "--advantage_estimator tempo --samples_per_prompt 2",
                "--environment with --advantage_estimator tempo",
                "Use gae, rloo_turns",
            ),
            ("--advantage_estimator segment_mc", "--environment with --advantage_estimator segment_mc"),
            ("--segment_rewards each", "--environment with --segment_rewards", "Drop --segment_rewards"),
            ("--reward_model_name_or_path r --rm_template", "--environment with --rm_template", "Drop --rm_template"),
            ("--on_reward_error retry", "--environment with --on_reward_error retry", "Use stop or skip"),
            ("--max_answer_seq_len 8 --max_turn_seq_len 9", "--max_turn_seq_len 9 is longer than an episode"),
            ("--max_turns 29", "--environment_timeout 60", "--max_turns 29", "--ddp_timeout 1800"),
            # 12 prompts x 8 episodes are 3 calls after each other: 3 x 60 s in each of 9 turns and at the beginning.
            (
                "--max_turns 9 --per_device_generation_batch_size 12 --samples_per_prompt 8",
                "--environment_workers 32",
                "up to 1800 s",
                "raise --environment_workers or --ddp_timeout",
            ),
            ("--reward_url http://a/score", "--environment with --reward_url", "Use a --reward_function"),
            (
                "--samples_per_prompt 2 --advantage_estimator rloo_turns --drop_equal_groups",
                "--environment with --drop_equal_groups",
                "--advantage_estimator rloo_turns",
            ),
            (
                "--samples_per_prompt 2 --advantage_estimator reinforce_pp --drop_equal_groups",
                "--environment with --drop_equal_groups",
                "another estimator that compares whole responses",
            ),
            ("--clip_reward_value 2", "--environment with --clip_reward_value 2", "in the environment's step"),
        )
    ),
    *(
        (
            "ppo",
            f"--segment_rewards {kind} --samples_per_prompt 2 --advantage_estimator {estimator} --drop_equal_groups",
            "--segment_rewards with --drop_equal_groups",
            f"--advantage_estimator {estimator}",
            "drop --drop_equal_groups, or drop --segment_rewards",
        )
        for kind, estimator in (("each", "gae"), ("prefix", "sae"), ("each", "evpo"), ("prefix", "reinforce_pp"))
    ),
    (
        "ppo",
        "--segment_rewards prefix --clip_reward_value 1",
        "--segment_rewards with --clip_reward_value 1",
        "in the source of scores, and give --clip_reward_value none",
    ),
    ("ppo", "--environment score.py", "--environment score.py is not of the form"),
    # a simulated user
    *(
        ("ppo", f"--environment simulated_user {words}", *said)
        for words, *said in (
            ("", "--environment simulated_user: nobody plays the user", "--user_server", "--user_function"),
            ("--user_model m", "--user_model m without --user_server", "cannot hold a model", "Serve it"),
            (
                "--user_model m --user_function score.py:score",
                "--user_model m without --user_server",
                "drop --user_model",
            ),
            ("--user_server http://a/v1", "--user_server http://a/v1: add --user_model"),
            (
                "--user_server http://a/v1 --user_model m --user_function score.py:score",
                "--user_server and --user_function both play the user",
            ),
            ("--user_function score.py:absent", "--user_function score.py:absent", "does not define absent"),
            ("--user_function score.py:score --user_tries 2", "--user_tries 2", "add --user_server"),
            ("--user_function score.py:score --reward_weights environment=1", "--reward_weights reward_model=0.5"),
        )
    ),
    ("ppo", "--user_function score.py:score", "--user_function", "add --environment simulated_user"),
    ("ppo", "--user_server http://a/v1", "--user_server http://a/v1", "add --environment simulated_user"),
    ("ppo", "--user_model m", "--user_model m", "add --environment simulated_user"),
    ("ppo", "--max_turns 3", "--max_turns 3", "add --environment"),
    ("ppo", "--advantage_estimator rloo_turns", "--samples_per_prompt of at least 2"),
    (
        "ppo",
        "--reward_url 127.0.0.1:8500",
        "--reward_url 127.0.0.1:8500 is not an address",
        "http://127.0.0.1:8500/score",
    ),
    ("ppo", "--reward_url http://user:secret@host/", "--reward_url", "without a user's name, password or"),
    ("ppo", "--reward_url http://host/score?key=1", "--reward_url http://host/score?key=1 is not an address", "query"),
    (
        "ppo",
        "--reward_url http://a --reward_patience 1760",
        "--reward_timeout 60",
        "--reward_patience 1760",
        "--ddp_timeout 1800",
        "lower them",
    ),
    *(
        ("ppo", f"--reward_judge {file} {flags}", *words)
        for file, flags, *words in (
            ("rubric.toml", "", "--reward_judge rubric.toml", "add --judge_model"),
            ("none.toml", "--judge_model m", "--reward_judge none.toml: cannot be read"),
            ("rubric.toml", "--judge_model m --judge_url a:1", "--judge_url a:1 is not an address", "JUDGE_API_KEY"),
            ("rubric.toml", "--judge_model m --judge_price_in 1", "--judge_price_in and --judge_price_out", "both"),
            ("rubric.toml", "--judge_model m --judge_max_cost 1", "--judge_max_cost 1", "--judge_price_out"),
            # (217 + 8) x 8 = 1800
            (
                "rubric.toml",
                "--judge_model m --judge_timeout 217",
                "--judge_timeout 217",
                "--judge_tries 8",
                "up to 1800 s",
                "--ddp_timeout 1800",
            ),
            ("rubric.toml", "--judge_model m --segment_rewards each", "--segment_rewards", "Drop --segment_rewards"),
            ("ranking.toml", "--judge_model m", "ranks the responses", "--samples_per_prompt of at least 2"),
            (
                "ranking.toml",
                "--judge_model m --samples_per_prompt 2 --advantage_estimator segment_mc",
                "--advantage_estimator segment_mc",
                'judge = "points"',
            ),
        )
    ),
    *(
        ("ppo", f"--advantage_estimator distillation {flags}", *words)
        for flags, *words in (
            ("", "--advantage_estimator distillation", "add --teacher_model_name_or_path"),
            (
                "--teacher_model_name_or_path t --reward_function score.py:score",
                "reads no scores, but there are some (score)",
                "another estimator",
            ),
            (
                "--teacher_model_name_or_path t --drop_equal_groups --samples_per_prompt 2",
                "--drop_equal_groups",
                "drop it",
            ),
            (
                "--teacher_model_name_or_path t --normalize_scores --segment_rewards each --whiten_advantages",
                "--normalize_scores, --segment_rewards, --whiten_advantages: ",
                "drop it",
            ),
            ("--teacher_model_name_or_path t --gamma 0.5", "--gamma: ", "Drop the flag"),
        )
    ),
    ("ppo", "--teacher_coef 2", "--teacher_coef 2", "add --teacher_model_name_or_path"),
    ("ppo", "--judge_max_tokens 3", "--judge_max_tokens 3", "add --reward_judge"),
    ("ppo", "--reward_url http://a --rm_template", "--rm_template", "add --reward_model_name_or_path"),
    ("ppo", "--program_reward ratio", "--program_reward ratio", "add --reward_source programs"),
    ("ppo", "--reward_function score.py", "--reward_function score.py", "module.py:function"),
    ("ppo", "--reward_function score.txt:f", "--reward_function score.txt:f", "module.py:function"),
    ("ppo", "--reward_function score.py:not-a-name", "--reward_function", "module.py:function"),
    ("ppo", "--reward_function score.py:inner", "--reward_function", "does not define inner", "Scorer", "score"),
    ("ppo", "--reward_function broken.py:f", "--reward_function", "cannot read broken.py", "correct the file"),
    *(("ppo", f"--{flag} none.py:f", f"--{flag}", "no file none.py") for flag in (*FUNCTIONS, "parser")),
    ("ppo", "--metric_function null.py:x", "cannot read null.py"),
    ("ppo", "--metric_function metric.py:kl", "--metric_function", "rename the function"),
    (
        "ppo",
        "--termination_condition words",
        "--termination_condition words",
        "fixed, randomized, parsing, ppl, surprise, sentence",
    ),
    ("ppo", "--parser stanford", "--parser stanford is unknown", "chunker, tree-sitter or module.py:function"),
    ("ppo", "--parser_device gpu", "--parser_device gpu", "cpu, cuda or cuda:0"),
    # combinations
    ("ppo", "--eval_prompts 8 --eval_iters 2", "--eval_prompts", "--eval_iters", "drop one"),
    ("ppo", "--adaptive_kl_horizon 500", "--adaptive_kl_horizon 500", "add --adaptive_kl_target"),
    ("ppo online", "--adaptive_kl_target 6 --kl_coef 0", "--adaptive_kl_target", "--kl_coef above 0"),
    ("reward dpo", "--data_split 2,0,8", "no rows for step 2: make number 2 larger than 0"),
    ("ppo", "--data_split 2,8,0", "no rows for step 3: make number 3 larger than 0"),
    (
        "ppo refuel online",
        "--lora_dim 4 --lora_dropout 0.1",
        "--lora_dropout 0.1:",
        "differ before the first update. Drop the flag",
    ),
    # other command lines than the shortest one
    ("actor", "", "--critic_model_name_or_path is missing", "--reward_function module.py:function"),
    ("unscored", "", "--reward_model_name_or_path is missing", "--reward_function", "--reward_source programs"),
    ("rloo", "--samples_per_prompt 1", "--samples_per_prompt of at least 2", "published runs sample 4"),
    ("rloo", "--gamma 0.9 --macro_reward mean", "--gamma, --macro_reward: --advantage_estimator rloo adds up"),
    (
        "rloo",
        "--per_device_generation_batch_size 3 --per_device_training_batch_size 5",
        "--per_device_training_batch_size 5",
        "rollout of 12 ",
        "give --generation_batches 5",
    ),
    ("ppo", "--kl_in loss", "--kl_estimator k1", "gradient is 0 on average", "k3"),
    ("ppo", "--drop_equal_groups", "--samples_per_prompt of at least 2"),
    ("ppo", "--critic_trains mlp --lora_dim 4", "--critic_trains mlp", "give --critic_lora_dim 0"),
    (
        "ppo",
        "--critic_trains mlp --finetune_mode last_layer",
        "--critic_trains mlp",
        "without --finetune_mode last_layer",
    ),
    ("ppo", "--critic_group_weight_min 0.5", "add --critic_group_weight"),
    ("ppo", "--critic_group_weight 0.5", "--critic_group_weight", "--samples_per_prompt of at least 2"),
    (
        "rloo",
        "--cut_answers critic_only --critic_group_weight 0.5 --critic_warmup_updates 4 --value_head hl_gauss",
        "--critic_warmup_updates, --critic_group_weight, --cut_answers, --value_head: --advantage_estimator rloo has",
    ),
    ("ppo", "--value_head hl_gauss", "--value_head hl_gauss", "give --value_range LOW HIGH"),
    ("ppo", "--value_head hl_gauss --value_range 1 0", "the lower one first, such as -0.1 1.1"),
    ("ppo", "--value_head hl_gauss --value_range 0 inf", "give --value_range LOW HIGH"),
    ("ppo", "--value_head hl_gauss --value_range 1", "give --value_range LOW HIGH"),
    ("ppo", "--value_range 0 1", "add --value_head hl_gauss"),
    ("ppo", "--value_head hl_gauss --value_range -1 1 --lora_dim 4 --no_merge_lora", "give neither --share_base"),
    ("ppo", "--value_head hl_gauss --value_range -1 1 --lora_dim 4 --share_base", "give neither --share_base"),
    ("ppo", "--rollout_is_mask 2 4", "--rollout_is_mask 2 4: give two ratios with 1 between them, such as 0.2 4"),
    ("ppo", "--rollout_is_mask 0.2", "--rollout_is_mask 0.2: give two ratios"),
    ("ppo", "--rollout_is_mask 0.2 4 --rollout_engine vllm --rollout_is_clip 2", "either masked or truncated"),
    ("rloo", "--refill_rounds 2", "--refill_rounds 2 does nothing on its own", "add --drop_equal_groups"),
    (
        "rloo",
        "--refill_rounds 2 --drop_equal_groups --rollout_engine vllm --vllm_url http://h:1 --rollouts_ahead 1",
        "--refill_rounds with --rollouts_ahead",
        "Drop one of them",
    ),
    ("ppo", "--max_token_probability 0.9 --policy_ratio macro", "includes its likely tokens", "--policy_ratio token"),
    ("ppo", "--length_buffer 513", "--length_buffer 513", "--max_answer_seq_len 512"),
    ("ppo", "--length_penalty 2", "--length_penalty 2.0 does nothing", "--length_buffer"),
    ("ppo", "--lam 0.9 --lam_alpha 0.05", "--lam 0.9 and --lam_alpha 0.05", "drop one"),
    ("rloo", "--advantage_estimator reinforce_pp --normalize_advantages row", "normalises over the batch"),
    (
        "ppo",
        "--termination_condition turn --normalize_advantages row",
        "--normalize_advantages row with --termination_condition turn",
        "Use batch",
    ),
    (
        "ppo",
        "--reward_function score.py:score --samples_per_prompt 2 --advantage_estimator rloo --drop_equal_groups"
        " --teacher_model_name_or_path t",
        "--drop_equal_groups with --teacher_model_name_or_path",
        "Drop one of them",
    ),
    (
        "rloo",
        "--advantage_estimator grpo --samples_per_prompt 1",
        "grpo compares",
        "--samples_per_prompt of at least 2",
    ),
    ("rloo", "--advantage_estimator dr_grpo --gamma 0.9", "--advantage_estimator dr_grpo adds up"),
    ("unrewarded", "", "the score comes from --reward_model or from --reward_function"),
    ("unrewarded", "--reward_function score.py:g", "score.py does not define g"),
]
COMMAND_LINES = {"actor": ("ppo", ACTOR), "unscored": ("ppo", RLOO), "rloo": ("ppo", SCORED)}
COMMAND_LINES |= {"unrewarded": ("online", REQUIRED["refuel"])}


@pytest.mark.parametrize(
    ("step", "flags", "words"), [(step, flags, words) for steps, flags, *words in REFUSALS for step in steps.split()]
)
def test_refusals(step, flags, words):
    step, required = COMMAND_LINES.get(step, (step, None))
    message = refusal(step, flags, required)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "name", ["Scorer", "numbers", "join", "json", "fallback", "annotated", "other", "first", "second", "by_a_star"]
)
def test_names_bound_at_the_top_of_a_module_are_found_without_running_it(name):
    file = "star.py" if name == "by_a_star" else "score.py"
    assert config_of("ppo", f"--metric_function {file}:{name}").rewards.metric_name == name


def test_a_run_is_not_overwritten_unasked(tmp_path):
    """Finished, with metrics, or with a checkpoint; a run that ended before either left nothing to lose."""
    (tmp_path / "out").mkdir()
    record, metrics = tmp_path / "out" / "run.json", tmp_path / "out" / "metrics.jsonl"
    metrics.touch()
    for unfinished in ('{"finished": false}', "{}", "[]", '{"finished": tr'):
        record.write_text(unfinished)
        config_of("sft")
    checkpoint = tmp_path / "out" / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    assert "--output_dir out holds a run" in refusal("sft")
    checkpoint.rmdir()
    metrics.write_text('{"update": 0}\n')
    record.write_text(json.dumps({"finished": False}))
    assert "--output_dir out holds a run" in refusal("sft")
    metrics.unlink()
    record.write_text(json.dumps({"finished": True}))
    message = refusal("sft")
    assert "--output_dir out holds a run" in message
    assert "--overwrite_output_dir" in message
    assert config_of("sft", "--overwrite_output_dir").output.overwrite_output_dir


@pytest.mark.parametrize("name", ["models", "samples", "adapter", "checkpoints"])
def test_folders_of_other_origin_are_not_replaced_unasked(tmp_path, name):
    """--overwrite_output_dir of a later run would remove them with that run's."""
    folder = tmp_path / "out" / name / "epoch1"
    folder.mkdir(parents=True)
    assert f"--output_dir out holds {name} but no run" in refusal("sft")
    config_of("sft", "--overwrite_output_dir")
    folder.rmdir()
    config_of("sft")  # an empty one is nobody's


def test_the_base_of_an_adapter_is_an_input_too(tmp_path, monkeypatch):
    """And the base of that, if it is an adapter as well."""
    monkeypatch.chdir(tmp_path)
    for name, base in (("first", "out"), ("second", "first"), ("other", "elsewhere/model")):
        settings = {"base_model_name_or_path": base}
        (tmp_path / name / "adapter").mkdir(parents=True)
        (tmp_path / name / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "out").mkdir()
    message = refusal("sft", "--model_name_or_path second --overwrite_output_dir")
    assert "--output_dir out: the run reads out, which its own models would replace" in message
    config_of("sft", "--model_name_or_path other --overwrite_output_dir")
    (tmp_path / "first" / "config.json").write_text("{}")  # merged: its base is not read
    config_of("sft", "--model_name_or_path first --overwrite_output_dir")


@pytest.mark.parametrize(
    ("name", "flags"),
    [("config.yaml", ""), ("README.md", ""), ("config.json", ""), ("model.safetensors", "--resume_from_checkpoint")],
)
def test_files_of_other_origin_are_not_replaced_unasked(tmp_path, name, flags):
    """A user's settings in the folder that the run writes to, say, or a model from elsewhere."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rows.jsonl").touch()
    config_of("sft", flags)
    (tmp_path / "out" / name).write_text("{}")
    message = refusal("sft", flags)
    assert f"--output_dir out holds {name} but no run" in message and "--overwrite_output_dir" in message
    config_of("sft", "--overwrite_output_dir")


def test_what_is_left_of_a_run_is_of_no_other_origin(tmp_path):
    """Copied without run.json."""
    (tmp_path / "out" / "checkpoints" / "step-2").mkdir(parents=True)
    (tmp_path / "out" / "config.yaml").write_text("{}")
    config_of("sft", "--resume_from_checkpoint")


@pytest.mark.parametrize("used", ["out", "out/actor", "out/models/step-2/actor"])
def test_a_run_does_not_write_over_what_it_reads(tmp_path, used):
    (tmp_path / used).mkdir(parents=True)
    words = ["--model_name_or_path", used, "--data_path", "d.jsonl", "--output_dir", "./out", "--overwrite_output_dir"]
    assert f"--output_dir ./out: the run reads {used}, which its own models would" in refusal("sft", [], words)


@pytest.mark.parametrize(("warmup", "warned"), [(10, False), (11, True)])
def test_a_warm_up_that_never_ends_is_warned_of(caplog, warmup, warned):
    config_of("sft", f"--num_warmup_steps {warmup}").warn_of_warmup(11)
    assert ("--num_warmup_steps" in caplog.text) is warned


def test_an_output_folder_is_no_address():
    """As a path it would be a folder called "s3:"."""
    message = refusal("sft", "--output_dir s3://bucket/run")
    assert "--output_dir s3://bucket/run is an address: give a folder of this machine" in message


@pytest.mark.parametrize("given", ["true", "out/checkpoints/step-9"])
def test_a_checkpoint_that_is_not_there_is_refused_before_models_are_loaded(given):
    """`resume_from_checkpoint: true` in a file of transformers means the newest checkpoint."""
    message = refusal("sft", f"--resume_from_checkpoint {given}")
    assert f"--resume_from_checkpoint {given}: there is no such folder" in message and "latest" in message


@pytest.mark.parametrize(
    "source",
    [
        b"\xef\xbb\xbfdef score(): ...",
        b"# -*- coding: latin-1 -*-\nname = '\xe9'\ndef score(): ...",
        b"from elsewhere import  *",
        b"try:\n    from fast import score\nexcept ImportError:\n    score = None",
    ],
    ids=["byte order mark", "latin-1", "star import", "in a block"],
)
def test_a_file_is_read_as_python_reads_it(source, tmp_path):
    (tmp_path / "own.py").write_bytes(source)
    check_function_path("reward_function", f"{tmp_path}/own.py:score")
