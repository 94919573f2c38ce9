#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 3, Gemma-7B on TL;DR: vanilla PPO, which is one token per macro action, with the KL coefficient
# published for it. All else is tldr_gemma_7b.sh.
set -euo pipefail
export MA_RLHF_VARIANT=-vanilla
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/tldr_gemma_7b.sh" \
    --ngram 1 \
    --kl_ctl 0.05 \
    "$@"
