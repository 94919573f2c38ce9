#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec python -m dschat ppo --config webgpt_gemma_7b "$@"
