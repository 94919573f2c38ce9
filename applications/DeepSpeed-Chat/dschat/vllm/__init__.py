# SPDX-License-Identifier: Apache-2.0
"""Rollouts by vLLM: inside the training processes (engine.py) or on servers (servers.py, `dschat serve-vllm`)."""
