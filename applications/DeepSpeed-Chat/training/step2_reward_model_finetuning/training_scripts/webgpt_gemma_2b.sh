#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec python -m dschat reward --config webgpt_gemma_2b "$@"
