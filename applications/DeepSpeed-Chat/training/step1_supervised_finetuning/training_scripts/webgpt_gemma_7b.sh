#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec python -m dschat sft --config webgpt_gemma_7b "$@"
