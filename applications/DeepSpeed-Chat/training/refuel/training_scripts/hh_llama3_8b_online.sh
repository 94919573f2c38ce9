#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec python -m dschat refuel-online --config hh_llama3_8b_online "$@"
