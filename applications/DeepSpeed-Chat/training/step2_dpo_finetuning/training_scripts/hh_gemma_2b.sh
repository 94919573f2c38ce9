#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec python -m dschat dpo --config hh_gemma_2b "$@"
