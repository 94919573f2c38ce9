#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 1, Gemma-2B on HH-RLHF: supervised fine-tuning.
# Settings of the published run. Environment variables: ../../launch.sh. Flags given to the script win.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../launch.sh"

choose_run hh-gemma-2b google/gemma-2b Dahoas/full-hh-rlhf

batch_flags --global_batch_size 512 --per_device_train_batch_size 4 -- "$@"

launch \
    --data_path "$DATA" \
    --data_split 2,4,4 \
    --model_name_or_path "$MODEL" \
    --max_seq_len 1024 \
    "${BATCH[@]}" \
    --per_device_eval_batch_size 4 \
    --num_train_epochs 3 \
    --learning_rate 5e-5 \
    --weight_decay 0.01 \
    --lr_scheduler_type cosine \
    --warmup_ratio 0.1 \
    --gradient_clipping 1.0 \
    --zero_stage 2 \
    --eval_interval 50 \
    --save_steps 50 \
    --seed 1234 \
    --output_dir "$RUN/sft" \
    "$@"
