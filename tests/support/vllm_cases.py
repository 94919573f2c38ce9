# SPDX-License-Identifier: Apache-2.0
"""Models for vLLM and how far it is off, and servers of `dschat serve-vllm`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import torch

from factories import hf_logprobs, make_causal_lm, random_ids
from launches import free_port

# vLLM's attention on a CPU takes heads of 32 numbers at least. The first engine of a process decides whether there is
# a group for experts, so models with experts come first.
MODELS = {
    "mixtral": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32},
    "gemma": {"tie_word_embeddings": True, "head_dim": 32},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 32, "query_pre_attn_scalar": 32},
    "llama": {"tie_word_embeddings": False, "head_dim": 32},
    "llama tied": {"tie_word_embeddings": True, "head_dim": 32},
    "gpt2": {"n_embd": 64},
}
PROMPTS = [random_ids(length, seed=length) for length in (3, 7, 5, 8, 4)]
SEEDS = [11, 12, 13, 14, 15]
MAX_TOKENS = 32
# More than a block of vLLM's cache, which has 128 tokens on a CPU, and different ends.
LONG_PROMPTS = [[*random_ids(140, seed=1), *random_ids(length, seed=length)] for length in (3, 7, 5, 8, 4)]
LONG_TOKENS = 192


def causal_lm_of(name: str, **options: Any) -> Any:
    return make_causal_lm(name.split()[0], **{"initializer_range": 0.2} | MODELS[name] | options)


def largest_gap(actor: Any, prompts: Any, drawn: Any, temperature: float = 1.0) -> float:
    """Between the engine's log-probs and the model's own, row by row."""
    rollout, gaps = drawn.rollout, []
    for prompt, response, row in zip(prompts, rollout.response_rows(), rollout.drawn_logprobs, strict=True):
        own, _ = hf_logprobs(actor.module.inner, (list(prompt), response), temperature)
        gaps.append((own - row[: len(response)]).abs().max())
        assert not row[len(response) :].any()
    return float(max(gaps))


def one_update(actor: Any) -> None:
    """An optimiser step that makes drawn tokens likelier."""
    ids = torch.tensor([random_ids(10, seed=1)])
    actor.train()
    actor.backward(-actor(ids, torch.ones_like(ids).bool(), 6)[0].sum())
    actor.step()
    actor.eval()


START = 240  # seconds


class Server:
    """A process group of its own, so that all of it can be killed."""

    def __init__(self, model: str, log: Path, tensor_parallel: int = 1, token: str = "", max_tokens: int = 64) -> None:
        self.port, self._model, self._log, self._shares = int(free_port()), model, log, tensor_parallel
        self._max_tokens = str(max_tokens)
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"VLLM_API_KEY": token} if token else {})
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Returns at once."""
        words = [sys.executable, "-m", "dschat", "serve-vllm", "--model", self._model, "--port", str(self.port)]
        words += ["--tensor_parallel", str(self._shares), "--max_tokens", self._max_tokens, "--dtype", "fp32"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                words, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + START
        while time.monotonic() < end:
            with suppress(httpx2.HTTPError):
                if httpx2.get(f"{self.url}/health").status_code == 200:
                    return
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            time.sleep(0.2)
        raise AssertionError(self._log.read_text()[-3000:])

    def kill(self) -> None:
        """All of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def serving(model: str, folder: Path, tensor_parallel: int = 1, **options: Any) -> Iterator[Server]:
    """A server that answers, until the end."""
    server = Server(model, folder / "server.log", tensor_parallel, **options)
    try:
        server.wait()
        yield server
    finally:
        server.kill()
