#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 3, an example of 70 billion weights, and no published run: Llama-3.1-70B on TL;DR, with the settings of Gemma-2-27B.
# Nobody has run it at its full size. No GPU of 80 GB holds the actor whole: 4 share it while vLLM draws
# (pip install 'ma-rlhf[vllm]'). For 16 GPUs of 80 GB on two machines of 1.8 TB of main memory each, started on both:
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=<first machine> NUM_GPUS=8 bash training_scripts/tldr_llama31_70b.sh
# with NODE_RANK=1 on the second. `python -m dschat.plan tldr_llama31_70b --gpus 16 --recommend` says what else fits.
# MODEL and REWARD_MODEL are those of steps 1 and 2. Environment variables: ../../launch.sh. Flags given to the script win.
set -euo pipefail
export MODEL=${MODEL:-${PROJ_PATH:-$PWD}/models/tldr-llama31-70b/sft}
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/tldr_gemma2_27b.sh" --rollout_engine vllm --vllm_tensor_parallel 4 \
    --vllm_gpu_memory 0.55 "$@"
