#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec python -m dschat ppo --config tldr_gemma_2b_as_released "$@"
