# SPDX-License-Identifier: Apache-2.0
"""Starts a vLLM server that draws responses for --vllm_url: `dschat serve-vllm --model FOLDER`.

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
from dschat.models.lora import base_of
from dschat.rollouts.vllm import BATCHED_TOKENS
from dschat.settings.commands import ServeVllmOptions

logger = logging.getLogger("dschat.rollouts.serve")

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CPU_CACHE = 1  # GB of keys and values on a CPU
WORKER = "dschat.rollouts.vllm_worker"
GATE = "dschat.rollouts.vllm_gate"


def command(options: ServeVllmOptions) -> list[str]:
    """vLLM's own server with what a run needs of it."""
    on_gpu = torch.cuda.is_available()
    model, _ = base_of(options.model, "--model")  # an adapter's folder has no config
    dtype = options.dtype or ("bf16" if on_gpu else "fp32")
    words = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--host", options.host, "--port", str(options.port)),
        *("--tensor-parallel-size", str(options.tensor_parallel)),
        *("--max-model-len", str(options.max_tokens), "--dtype", DTYPES[dtype]),
        *("--max-num-batched-tokens", str(max(BATCHED_TOKENS, options.max_tokens))),
        # As in rollouts/vllm.py: a row depends on its seed and the weights alone.
        *("--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--generation-config", "vllm"),
        *("--logprobs-mode", "raw_logprobs", "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--weight-transfer-config", json.dumps({"backend": "dschat"})),
        *("--worker-extension-cls", f"{WORKER}.Extension", "--middleware", f"{GATE}.Gate"),
        *("--enable-scale-out", "--disable-uvicorn-access-log", "--no-enable-log-requests"),
    ]
    return words + (["--gpu-memory-utilization", str(options.gpu_memory)] if on_gpu else ["--enforce-eager"])


def environment(options: ServeVllmOptions) -> dict[str, str]:
    """Of vLLM's server; what the user has set stays."""
    needed = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that take weights
        "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return needed | os.environ


def serve(options: ServeVllmOptions) -> str:
    """Becomes vLLM's server. Raises UserError."""
    if find_spec("vllm") is None:
        raise UserError("a server needs vLLM: pip install 'ma-rlhf[vllm]'")
    words = command(options)
    logger.info("starting vLLM with %s: --vllm_url http://%s:%d", options.model, options.host, options.port)
    sys.stdout.flush()
    os.execve(words[0], words, environment(options))
