#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 3, Gemma-2B on TL;DR: PPO with macro actions of 5 tokens. Vanilla PPO is tldr_gemma_2b_vanilla.sh.
# Settings of the published run. Environment variables: ../../launch.sh. Flags given to the script win.
# The warm-up was published as 200 "steps" of one prompt on each of 8 GPUs: about 6 updates of 256 prompts.
# Alternative: --value_function first, faster than PPO on tokens with every critic of docs/results.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../launch.sh"

choose_run tldr-gemma-2b sft openai/summarize_from_feedback
REWARD_MODEL=${REWARD_MODEL:-$RUN/reward}

batch_flags --global_batch_size 256 --per_device_training_batch_size 4 \
    --per_device_generation_batch_size 32 -- "$@"

launch \
    --data_path "$DATA" \
    --data_split 2,4,4 \
    --actor_model_name_or_path "$MODEL" \
    --critic_model_name_or_path "$REWARD_MODEL" \
    --termination_condition fixed \
    --ngram 5 \
    --value_function equal \
    --max_prompt_seq_len 512 \
    --max_answer_seq_len 512 \
    --temperature 0.8 \
    --top_p 1.0 \
    --top_k 50 \
    "${BATCH[@]}" \
    --per_device_eval_batch_size 16 \
    --num_train_epochs 1 \
    --ppo_epochs 1 \
    --actor_learning_rate 1.5e-5 \
    --critic_learning_rate 1.5e-5 \
    --actor_weight_decay 0.1 \
    --critic_weight_decay 0.1 \
    --lr_scheduler_type linear \
    --num_warmup_steps 6 \
    --gradient_clipping 1.0 \
    --cliprange 0.2 \
    --cliprange_value 0.2 \
    --gamma 1.0 \
    --lam 0.95 \
    --kl_ctl 0.05 \
    --zero_stage 2 \
    --eval_interval 20 \
    --save_steps 50 \
    --seed 1234 \
    --output_dir "$RUN/ppo${MA_RLHF_VARIANT:-}" \
    "$@"
