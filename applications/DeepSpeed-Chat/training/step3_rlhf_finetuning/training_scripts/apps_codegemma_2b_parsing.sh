#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 3, CodeGemma-2B on APPS: PPO with macro actions that are parts of the program: statements, expressions. All else
# is apps_codegemma_2b.sh. Needs `pip install 'ma-rlhf[parsing]'`.
set -euo pipefail
export MA_RLHF_VARIANT=-parsing
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/apps_codegemma_2b.sh" \
    --termination_condition parsing \
    --parsing_cutoff 5 \
    --parser tree-sitter \
    "$@"
