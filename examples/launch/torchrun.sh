#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Step 3 by torchrun. Run it on each machine: NNODES=2 NODE_RANK=0 MASTER_ADDR=… bash torchrun.sh
exec torchrun --nnodes "${NNODES:-1}" --node_rank "${NODE_RANK:-0}" --nproc_per_node "${GPUS:-8}" \
    --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${MASTER_PORT:-29500}" \
    -m dschat ppo --config tldr_gemma_2b --save_steps 50 --resume_from_checkpoint
