#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec python -m dschat refuel --config llama_3_8b_it "$@"
