# SPDX-License-Identifier: Apache-2.0
"""Starts a vLLM server for --vllm_url: `dschat serve-vllm --model FOLDER`.

It begins with random weights; a run sends its own before every rollout. See docs/scaling.md.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib.util import find_spec

import torch

from dschat.base.errors import UserError
from dschat.models.adapters import base_of
from dschat.vllm.options import ServeVllmOptions
from dschat.vllm.requests import BATCHED_TOKENS

logger = logging.getLogger("dschat.vllm.serve")

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CPU_CACHE_GB = 1  # of keys and values on a CPU
WORKER_EXTENSION = "dschat.vllm.worker.Extension"
MIDDLEWARE = "dschat.vllm.gate.Gate"


def server_command(options: ServeVllmOptions) -> list[str]:
    """Command line of vLLM's own server, with the flags that a run needs."""
    on_gpu = torch.cuda.is_available()
    model, _ = base_of(options.model, "--model")  # an adapter's folder has no config
    dtype = options.dtype or ("bf16" if on_gpu else "fp32")
    flags = {
        "--model": model,
        "--host": options.host,
        "--port": options.port,
        "--tensor-parallel-size": options.tensor_parallel,
        "--max-model-len": options.max_tokens,
        "--dtype": DTYPES[dtype],
        "--max-num-batched-tokens": max(BATCHED_TOKENS, options.max_tokens),
        "--generation-config": "vllm",
        "--logprobs-mode": "raw_logprobs",
        "--load-format": "dummy",
        "--weight-transfer-config": json.dumps({"backend": "dschat"}),
        "--worker-extension-cls": WORKER_EXTENSION,
        "--middleware": MIDDLEWARE,
    }
    if on_gpu:
        flags["--gpu-memory-utilization"] = options.gpu_memory
    switches = [
        "--skip-tokenizer-init",
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
        "--no-enable-log-requests",
    ]
    if not on_gpu:
        # A prompt that is split over steps draws a random number per step. vLLM takes those back, but not on a CPU.
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]

    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in flags.items():
        words += [flag, str(value)]
    return words + switches


def server_environment() -> dict[str, str]:
    """Environment of vLLM's server; variables that the user has set stay."""
    defaults = {
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes that take weights
        "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return defaults | os.environ


def serve(options: ServeVllmOptions) -> str:
    """Replaces this process by vLLM's server. Raises UserError."""
    if find_spec("vllm") is None:
        raise UserError("a server needs vLLM: pip install 'ma-rlhf[vllm]'")
    command = server_command(options)
    logger.info("starting vLLM with %s: --vllm_url http://%s:%d", options.model, options.host, options.port)
    sys.stdout.flush()
    os.execve(command[0], command, server_environment())
