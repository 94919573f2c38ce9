#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 3, Gemma-2-27B on TL;DR: PPO with macro actions of 5 tokens; with --ngram 1 vanilla PPO
# (give it an --output_dir of its own).
# Settings of the published run. Environment variables: ../../launch.sh. Flags given to the script win.
# Four models of 27 billion weights: about 1.35 TB of main memory in all, and 69 GB of each of 8 GPUs, since each draws
# with the whole actor. Where vLLM is installed, two GPUs may share it, with 45 GB of each:
#   --rollout_engine vllm --vllm_tensor_parallel 2 --vllm_gpu_memory 0.45
# Alternative: --value_function first, faster than PPO on tokens with every critic of docs/results.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../launch.sh"

choose_run tldr-gemma2-27b sft openai/summarize_from_feedback
REWARD_MODEL=${REWARD_MODEL:-$RUN/reward}

batch_flags --global_batch_size 256 --per_device_training_batch_size 8 \
    --per_device_generation_batch_size 16 -- "$@"

launch \
    --data_path "$DATA" \
    --data_split 2,4,4 \
    --actor_model_name_or_path "$MODEL" \
    --critic_model_name_or_path "$REWARD_MODEL" \
    --termination_condition fixed \
    --ngram 5 \
    --value_function equal \
    --max_prompt_seq_len 512 \
    --max_answer_seq_len 512 \
    --temperature 0.8 \
    --top_p 1.0 \
    --top_k 50 \
    "${BATCH[@]}" \
    --per_device_eval_batch_size 8 \
    --num_train_epochs 1 \
    --ppo_epochs 1 \
    --actor_learning_rate 7e-7 \
    --critic_learning_rate 1e-6 \
    --actor_weight_decay 0.1 \
    --critic_weight_decay 0.1 \
    --lr_scheduler_type linear \
    --num_warmup_steps 0 \
    --gradient_clipping 1.0 \
    --cliprange 0.2 \
    --cliprange_value 0.2 \
    --gamma 1.0 \
    --lam 0.95 \
    --kl_ctl 0.1 \
    --zero_stage 3 \
    --offload \
    --offload_reference_model \
    --dtype bf16 \
    --actor_gradient_checkpointing \
    --critic_gradient_checkpointing \
    --eval_interval 20 \
    --save_steps 50 \
    --seed 1234 \
    --output_dir "$RUN/ppo${MA_RLHF_VARIANT:-}" \
    "$@"
