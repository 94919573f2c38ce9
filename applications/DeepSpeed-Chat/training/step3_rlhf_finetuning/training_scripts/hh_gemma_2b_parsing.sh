#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 3, Gemma-2B on HH: PPO with macro actions that are constituents of the response's sentences. All else is
# hh_gemma_2b.sh. Needs `pip install 'ma-rlhf[parsing]'` and the parser's model, once:
#   python -c "import benepar; benepar.download('benepar_en3')"
# PARSER and PARSER_MODEL choose another one: PARSER=chunker needs neither.
set -euo pipefail
export MA_RLHF_VARIANT=-parsing
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/hh_gemma_2b.sh" \
    --termination_condition parsing \
    --parsing_cutoff 5 \
    --parser "${PARSER:-benepar}" \
    ${PARSER_MODEL:+--parser_model "$PARSER_MODEL"} \
    "$@"
