#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# REFUEL, a round of Llama-3-8B-Instruct on dialogues of UltraInteract that ArmoRM scored.
# Settings of the published run. Environment variables: ../../launch.sh; DATA is what tokenize_masks.py wrote, MODEL
# the policy that drew the dialogues, CLUSTER a name of the machines (see --task.cluster). Flags given to the script win.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../launch.sh"
MAIN=${MAIN%main.py}refuel.py

choose_run -llama-3-8b-it meta-llama/Meta-Llama-3-8B-Instruct "$PROJ_PATH/data/refuel/llama-3-8b-it/pairs"

batch_flags --global_batch_size 128 --per_device_train_batch_size 1 -- "$@"

launch \
    --task.query_dataset "$DATA" \
    ${CLUSTER:+--task.cluster "$CLUSTER"} \
    --base_model "$MODEL" \
    --task.total_length 2048 \
    --task.temperature 0.8 \
    --refuel.eta 1e3 \
    --total_episodes 64000 \
    "${BATCH[@]}" \
    --per_device_eval_batch_size 1 \
    --optimizer adamw \
    --lr 3e-7 \
    --weight_decay 1e-6 \
    --lr_scheduler_type cosine \
    --warmup_ratio 0.1 \
    --gradient_clipping 0 \
    --dtype bf16 \
    --zero_stage 3 \
    --gradient_checkpointing \
    --print_sample_output_freq 100 \
    --save_steps 100 \
    --seed 555134 \
    --output_dir "$RUN/refuel" \
    "$@"
