# SPDX-License-Identifier: Apache-2.0
"""Starts a vLLM server that draws responses for --vllm_url: `python -m dschat.rollouts.serve --model FOLDER`.

It begins with random weights; a run sends its own before every rollout. See docs/scaling.md.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import logging
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from dschat.common.script import add_flags, flag, run_script
from dschat.errors import UserError
from dschat.rollouts.vllm import BATCHED_TOKENS

logger = logging.getLogger("dschat.rollouts.serve")  # also where the module is __main__

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOKEN = "VLLM_API_KEY"
CPU_CACHE = 1  # GB of keys and values on a CPU
WORKER = "dschat.rollouts.vllm_worker"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The flags."""

    model: str = flag("the model that the run trains: a folder or hub id; only its config is read")
    host: str = flag(
        f"address to listen on (%(default)s); any other than this machine's own needs a token in {TOKEN}", "127.0.0.1"
    )
    port: int = flag("port to listen on (%(default)s)", 8000)
    tensor_parallel: int = flag("GPUs that share the model (%(default)s)", 1)
    max_tokens: int = flag("of a prompt with its response: --max_prompt_seq_len + --max_answer_seq_len", 1024)
    dtype: str | None = flag("that of the run: fp32, bf16 or fp16 (bf16 on a GPU, fp32 on a CPU)", None)
    gpu_memory: float = flag("share of each GPU's memory that it uses (%(default)s)", 0.9)

    def __post_init__(self) -> None:
        """Raises UserError, which names the flag and what to change."""
        for name in ("tensor_parallel", "max_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least 1.")
        if not 0 < self.port < 2**16:
            raise UserError(f"--port {self.port}: must be between 1 and 65535.")
        if not 0 < self.gpu_memory <= 1:
            raise UserError(f"--gpu_memory {self.gpu_memory}: must be above 0 and at most 1.")
        if self.dtype not in (None, *DTYPES):
            raise UserError(f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}.")
        if not _is_own(self.host) and not os.environ.get(TOKEN):
            raise UserError(
                f"--host {self.host}: whoever reaches it could replace the weights. Set {TOKEN} to a secret, here and "
                "where the run starts, or keep 127.0.0.1."
            )


def command(options: ServeOptions) -> list[str]:
    """vLLM's own server with what a run needs of it."""
    on_gpu = torch.cuda.is_available()
    dtype = options.dtype or ("bf16" if on_gpu else "fp32")
    words = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model),
        *("--host", options.host, "--port", str(options.port)),
        *("--tensor-parallel-size", str(options.tensor_parallel)),
        *("--max-model-len", str(options.max_tokens), "--dtype", DTYPES[dtype]),
        *("--max-num-batched-tokens", str(max(BATCHED_TOKENS, options.max_tokens))),
        # As in rollouts/vllm.py: a row depends on its seed and the weights alone.
        *("--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--generation-config", "vllm"),
        *("--logprobs-mode", "raw_logprobs", "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--weight-transfer-config", json.dumps({"backend": "dschat"})),
        *("--worker-extension-cls", f"{WORKER}.Extension", "--middleware", f"{WORKER}.Gate"),
        *("--enable-scale-out", "--disable-uvicorn-access-log", "--no-enable-log-requests"),
    ]
    return words + (["--gpu-memory-utilization", str(options.gpu_memory)] if on_gpu else ["--enforce-eager"])


def environment(options: ServeOptions) -> dict[str, str]:
    """Of vLLM's server; what the user has set stays."""
    needed = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that take weights
        "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return needed | os.environ


def _is_own(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def serve(options: ServeOptions) -> str:
    """Becomes vLLM's server. Raises UserError."""
    if find_spec("vllm") is None:
        raise UserError("a server needs vLLM: pip install 'ma-rlhf[vllm]'")
    words = command(options)
    logger.info("starting vLLM with %s: --vllm_url http://%s:%d", options.model, options.host, options.port)
    sys.stdout.flush()
    os.execve(words[0], words, environment(options))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m dschat.rollouts.serve", description=__doc__)
    add_flags(parser, ServeOptions)
    return run_script(lambda: serve(ServeOptions(**vars(parser.parse_args()))), print)


if __name__ == "__main__":
    sys.exit(main())
