#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec python -m dschat sft --config tldr_pythia_1b "$@"
