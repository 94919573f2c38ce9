#!/usr/bin/env bash
# Step 2 for Gemma-2B on TL;DR: the reward model. Further flags are passed on; the last of a kind wins.
#   PROJ_PATH   folder for data and models (default: the current folder)
#   SFT_MODEL   what step 1 wrote (default: $PROJ_PATH/models/sft)
#   DATA_PATH   data with TL;DR's columns, or prompt, chosen and rejected (default: $PROJ_PATH/data/tldr)
#   NUM_GPUS    processes on this machine (default: 1)
#   MASTER_PORT  port of the launcher, for several runs on one machine (default: 29500)
set -euo pipefail
cd "$(dirname "$0")/.."

PROJ_PATH=${PROJ_PATH:-$PWD}
SFT_MODEL=${SFT_MODEL:-$PROJ_PATH/models/sft}
DATA_PATH=${DATA_PATH:-$PROJ_PATH/data/tldr}
NUM_GPUS=${NUM_GPUS:-1}

# What ended a run is repeated last, below the launcher's own lines.
MA_RLHF_ERROR_FILE=$(mktemp)
export MA_RLHF_ERROR_FILE
trap 'cat "$MA_RLHF_ERROR_FILE" >&2; rm -f "$MA_RLHF_ERROR_FILE"' EXIT

deepspeed --num_gpus "$NUM_GPUS" --master_port "${MASTER_PORT:-29500}" main.py \
    --deepspeed \
    --data_path "$DATA_PATH" \
    --data_split 2,4,4 \
    --model_name_or_path "$SFT_MODEL" \
    --max_seq_len 1024 \
    --per_device_train_batch_size 4 \
    --per_device_eval_batch_size 4 \
    --global_batch_size 64 \
    --learning_rate 1e-5 \
    --weight_decay 0.1 \
    --num_train_epochs 1 \
    --lr_scheduler_type cosine \
    --warmup_ratio 0.1 \
    --gradient_checkpointing \
    --eval_interval 200 \
    --seed 1234 \
    --output_dir "$PROJ_PATH/models/reward" \
    "$@"
