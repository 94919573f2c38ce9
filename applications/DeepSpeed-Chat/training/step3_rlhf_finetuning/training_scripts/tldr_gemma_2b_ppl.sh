#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 3, Gemma-2B on TL;DR: PPO with macro actions that end where the perplexity rises. All else is tldr_gemma_2b.sh.
set -euo pipefail
export MA_RLHF_VARIANT=-ppl
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/tldr_gemma_2b.sh" \
    --termination_condition ppl \
    "$@"
