#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# REFUEL with users from data (setting two), Llama-3-8B-it on HH-RLHF dialogues, scored by FsfairX-LLaMA3-RM-v0.1.
# Settings of the published run: 32 dialogues a round, 4 updates on each, the top 4 layers trained.
# Environment variables: ../../launch.sh. Flags given to the script win.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../launch.sh"
MAIN=$(dirname -- "$MAIN")/online.py

choose_run hh-llama3-8b meta-llama/Meta-Llama-3-8B-Instruct Dahoas/full-hh-rlhf
REWARD_MODEL=${REWARD_MODEL:-sfairXC/FsfairX-LLaMA3-RM-v0.1}

batch_flags --global_batch_size 32 --per_device_train_batch_size 1 -- "$@"

launch \
    --data_path "$DATA" \
    --model_name_or_path "$MODEL" \
    --reward_model "$REWARD_MODEL" \
    --trained_layers 4 \
    --max_turns 5 \
    --max_prompt_seq_len 128 \
    --max_answer_seq_len 512 \
    --max_seq_len 4096 \
    --temperature 1.0 \
    "${BATCH[@]}" \
    --per_device_generation_batch_size 16 \
    --per_device_eval_batch_size 4 \
    --total_episodes 1000000 \
    --noptepochs 4 \
    --eta 1.0 \
    --kl_coef 0.05 \
    --penalty_reward_value -10 \
    --learning_rate 3e-7 \
    --weight_decay 1e-6 \
    --adam_epsilon 1e-8 \
    --lr_scheduler_type linear \
    --gradient_clipping 0 \
    --zero_stage 2 \
    --gradient_checkpointing \
    --print_sample_output_freq 200 \
    --eval_temperature 0.01 \
    --eval_prompts 500 \
    --save_steps 400 \
    --seed 555134 \
    --output_dir "$RUN/refuel-online" \
    "$@"
