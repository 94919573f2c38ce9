#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 3, CodeGemma-7B-it on APPS: PPO with macro actions of 10 tokens; with --ngram 1 vanilla PPO
# (give it an --output_dir of its own).
# The score of a response is what becomes of its program on the tests of its row, in a sandbox: docs/programs.md.
# --drop_unsolvable leaves out problems whose own solution fails their tests; running those takes minutes.
# Settings of the published run. Environment variables: ../../launch.sh. Flags given to the script win.
# The warm-up was published as 20 "steps" whose unit is not known; here they are updates.
# Alternative: --value_function first, faster than PPO on tokens with every critic of docs/results.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../launch.sh"

choose_run apps-codegemma-7b-it sft codeparrot/apps

batch_flags --global_batch_size 16 --per_device_training_batch_size 8 \
    --per_device_generation_batch_size 16 -- "$@"

launch \
    --data_path "$DATA" \
    --data_split 2,0,8 \
    --actor_model_name_or_path "$MODEL" \
    --reward_source programs \
    --termination_condition fixed \
    --ngram 10 \
    --value_function equal \
    --max_prompt_seq_len 600 \
    --max_answer_seq_len 512 \
    --temperature 1.0 \
    --top_p 1.0 \
    --top_k 5 \
    "${BATCH[@]}" \
    --per_device_eval_batch_size 16 \
    --num_train_epochs 1 \
    --ppo_epochs 1 \
    --actor_learning_rate 5e-7 \
    --critic_learning_rate 5e-5 \
    --actor_weight_decay 0.1 \
    --critic_weight_decay 0.1 \
    --lr_scheduler_type linear \
    --num_warmup_steps 20 \
    --gradient_clipping 1.0 \
    --cliprange 0.2 \
    --cliprange_value 0.2 \
    --gamma 1.0 \
    --lam 0.95 \
    --kl_ctl 0.05 \
    --zero_stage 3 \
    --actor_gradient_checkpointing \
    --critic_gradient_checkpointing \
    --eval_interval 20 \
    --save_steps 50 \
    --seed 1234 \
    --output_dir "$RUN/ppo${MA_RLHF_VARIANT:-}" \
    "$@"
