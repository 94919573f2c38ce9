#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec python -m dschat ppo --config gsm8k_qwen25_05b "$@"
