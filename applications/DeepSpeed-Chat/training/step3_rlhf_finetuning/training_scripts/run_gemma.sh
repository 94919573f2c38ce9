#!/usr/bin/env bash
# Step 3 for Gemma-2B on TL;DR: PPO with macro actions of 5 tokens. Further flags are passed on; the last of a kind
# wins: `run_gemma.sh --ngram 1` is vanilla PPO, `run_gemma.sh --termination_condition ppl` cuts by perplexity.
#   PROJ_PATH     folder for data and models (default: the current folder)
#   SFT_MODEL     what step 1 wrote (default: $PROJ_PATH/models/sft)
#   REWARD_MODEL  what step 2 wrote (default: $PROJ_PATH/models/reward)
#   DATA_PATH     data with TL;DR's columns, or a prompt column (default: $PROJ_PATH/data/tldr)
#   NUM_GPUS      processes on this machine (default: 1)
#   MASTER_PORT  port of the launcher, for several runs on one machine (default: 29500)
set -euo pipefail
cd "$(dirname "$0")/.."

PROJ_PATH=${PROJ_PATH:-$PWD}
SFT_MODEL=${SFT_MODEL:-$PROJ_PATH/models/sft}
REWARD_MODEL=${REWARD_MODEL:-$PROJ_PATH/models/reward}
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
    --actor_model_name_or_path "$SFT_MODEL" \
    --critic_model_name_or_path "$REWARD_MODEL" \
    --termination_condition fixed \
    --ngram 5 \
    --value_function equal \
    --max_prompt_seq_len 512 \
    --max_answer_seq_len 512 \
    --per_device_generation_batch_size $((256 / NUM_GPUS)) \
    --generation_batches 1 \
    --per_device_training_batch_size 4 \
    --global_batch_size 256 \
    --ppo_epochs 1 \
    --num_train_epochs 1 \
    --actor_learning_rate 1.5e-5 \
    --critic_learning_rate 1.5e-5 \
    --actor_weight_decay 0.1 \
    --critic_weight_decay 0.1 \
    --lr_scheduler_type linear \
    --num_warmup_steps 6 \
    --kl_ctl 0.05 \
    --gamma 1.0 \
    --lam 0.95 \
    --temperature 0.8 \
    --top_k 50 \
    --actor_gradient_checkpointing \
    --critic_gradient_checkpointing \
    --eval_interval 20 \
    --seed 1234 \
    --output_dir "$PROJ_PATH/models/ppo" \
    "$@"
