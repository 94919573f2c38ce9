#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 3, Gemma-2B on TL;DR: vanilla PPO, which is one token per macro action. All else is tldr_gemma_2b.sh.
set -euo pipefail
export MA_RLHF_VARIANT=-vanilla
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/tldr_gemma_2b.sh" \
    --ngram 1 \
    "$@"
