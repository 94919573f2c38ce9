#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec python -m dschat ppo --config apps_codegemma_2b_segments "$@"
