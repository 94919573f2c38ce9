#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 3, Gemma-2B on TL;DR: RLOO, four responses to each prompt instead of a critic. Learning rate and number of
# responses are those of the published run, all else is tldr_gemma_2b.sh: an update takes 256 responses to 64 prompts.
# Macro actions of 5 tokens are logged; they change the training with --policy_ratio macro or macro_mean alone.
# Environment variables: ../../launch.sh. Flags given to the script win.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../launch.sh"

choose_run tldr-gemma-2b sft openai/summarize_from_feedback
REWARD_MODEL=${REWARD_MODEL:-$RUN/reward}

batch_flags --global_batch_size 256 --samples_per_prompt 4 --per_device_training_batch_size 4 \
    --per_device_generation_batch_size 32 -- "$@"

launch \
    --data_path "$DATA" \
    --data_split 2,4,4 \
    --actor_model_name_or_path "$MODEL" \
    --reward_model_name_or_path "$REWARD_MODEL" \
    --advantage_estimator rloo \
    --termination_condition fixed \
    --ngram 5 \
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
    --actor_weight_decay 0.1 \
    --lr_scheduler_type linear \
    --num_warmup_steps 6 \
    --gradient_clipping 1.0 \
    --cliprange 0.2 \
    --kl_ctl 0.05 \
    --zero_stage 2 \
    --eval_interval 20 \
    --save_steps 50 \
    --seed 1234 \
    --output_dir "$RUN/ppo-rloo" \
    "$@"
