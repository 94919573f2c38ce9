#!/usr/bin/env bash
# Step 3 on two nodes that share PROJ_PATH. Start it on both, with NODE_RANK=0 on the first and NODE_RANK=1 on the other:
#   MASTER_ADDR=<first node> NODE_RANK=0 NUM_GPUS=8 bash training_scripts/run_gemma_two_nodes.sh
# Further flags are passed on; PROJ_PATH, SFT_MODEL, REWARD_MODEL and DATA_PATH are those of run_gemma.sh.
# With password-less ssh between the nodes, one launcher does: deepspeed --hostfile=<file with "host slots=8" lines> main.py …
#   MASTER_ADDR  address of the first node, reachable from both
#   MASTER_PORT  a free port on it (default: 29500)
#   NODE_RANK    0 or 1
#   NUM_NODES    default: 2
#   NUM_GPUS     processes on each node (default: 1)
set -euo pipefail
cd "$(dirname "$0")/.."

: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node}"
: "${NODE_RANK:?set NODE_RANK to 0 on the first node and to 1 on the second}"
NUM_NODES=${NUM_NODES:-2}
NUM_GPUS=${NUM_GPUS:-1}
PROJ_PATH=${PROJ_PATH:-$PWD}
SFT_MODEL=${SFT_MODEL:-$PROJ_PATH/models/sft}
REWARD_MODEL=${REWARD_MODEL:-$PROJ_PATH/models/reward}
DATA_PATH=${DATA_PATH:-$PROJ_PATH/data/tldr}

# The launcher wants a list of the nodes' names and sizes; with --no_ssh it starts only this node's processes.
HOSTFILE=$(mktemp)
# What ended a run is repeated last, below the launcher's own lines.
MA_RLHF_ERROR_FILE=$(mktemp)
export MA_RLHF_ERROR_FILE
trap 'cat "$MA_RLHF_ERROR_FILE" >&2; rm -f "$HOSTFILE" "$MA_RLHF_ERROR_FILE"' EXIT
for ((node = 0; node < NUM_NODES; node++)); do
    echo "node-$node slots=$NUM_GPUS" >>"$HOSTFILE"
done

deepspeed --hostfile "$HOSTFILE" --no_ssh --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}" main.py \
    --deepspeed \
    --data_path "$DATA_PATH" \
    --data_split 2,4,4 \
    --actor_model_name_or_path "$SFT_MODEL" \
    --critic_model_name_or_path "$REWARD_MODEL" \
    --termination_condition fixed \
    --ngram 5 \
    --zero_stage 3 \
    --max_prompt_seq_len 512 \
    --max_answer_seq_len 512 \
    --per_device_generation_batch_size $((256 / (NUM_GPUS * NUM_NODES))) \
    --per_device_training_batch_size 4 \
    --global_batch_size 256 \
    --actor_learning_rate 1.5e-5 \
    --critic_learning_rate 1.5e-5 \
    --num_warmup_steps 6 \
    --kl_ctl 0.05 \
    --temperature 0.8 \
    --top_k 50 \
    --actor_gradient_checkpointing \
    --critic_gradient_checkpointing \
    --eval_interval 20 \
    --seed 1234 \
    --output_dir "$PROJ_PATH/models/ppo" \
    "$@"
