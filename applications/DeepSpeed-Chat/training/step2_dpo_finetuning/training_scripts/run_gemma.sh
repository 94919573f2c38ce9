#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Step 2, direct preference optimisation: Gemma-2B on TL;DR. Other presets lie beside this one.
# Environment variables: ../../launch.sh. Flags given to the script win.
set -euo pipefail
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/tldr_gemma_2b.sh" "$@"
