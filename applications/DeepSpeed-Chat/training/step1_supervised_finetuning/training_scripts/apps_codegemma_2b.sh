#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 1, CodeGemma-2B on APPS: supervised fine-tuning.
# Settings of the published run. Environment variables: ../../launch.sh. Flags given to the script win.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../launch.sh"

choose_run apps-codegemma-2b google/codegemma-2b codeparrot/apps

batch_flags --global_batch_size 16 --per_device_train_batch_size 4 -- "$@"

launch \
    --data_path "$DATA" \
    --data_split 2,0,8 \
    --model_name_or_path "$MODEL" \
    --max_seq_len 1024 \
    "${BATCH[@]}" \
    --per_device_eval_batch_size 4 \
    --num_train_epochs 1 \
    --learning_rate 5e-6 \
    --weight_decay 0.01 \
    --lr_scheduler_type cosine \
    --warmup_ratio 0 \
    --gradient_clipping 1.0 \
    --zero_stage 2 \
    --eval_interval 20 \
    --save_steps 50 \
    --seed 1234 \
    --output_dir "$RUN/sft" \
    "$@"
