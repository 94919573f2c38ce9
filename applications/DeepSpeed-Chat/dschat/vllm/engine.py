# SPDX-License-Identifier: Apache-2.0
"""vLLM inside the training processes, asleep while the models train.

Each rank has its own engine or, with --vllm_tensor_parallel k, shares one with its k - 1 neighbours: vLLM's external
launcher divides the process group in the same way. Ranks that share an engine pass it the same requests in the same
order, those of all k ranks, and each takes its own responses from the result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from dschat.base.errors import UserError
from dschat.models.adapters import base_of
from dschat.models.engines import TrainedPolicy
from dschat.models.vocabulary import missing_ids_of
from dschat.rollouts.engine import Generation, ResponseSampler
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import device, gather_objects, neighbours, rank
from dschat.run.state import random_states, set_random_states
from dschat.vllm.requests import BATCHED_TOKENS, ResponseRequest, VllmResponse, make_requests, to_generation
from dschat.vllm.weights import (
    Temperature,
    plain_weights,
    record_columns,
    repack_weights,
    transposed_matrices,
    wrong_layers,
)

if TYPE_CHECKING:
    from vllm import LLM

T = TypeVar("T")

CPU_CACHE = 1 << 28  # bytes of keys and values on a CPU
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run in this process, where the weights are
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer uses the same threads
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VllmEngine:
    """A rollout engine in the same process as the trainer.

    vLLM reports log-probs either of the distribution it samples from (masked and truncated) or of the logits without
    the temperature. The trainer needs those of softmax(logits / temperature) over the whole vocabulary. So the model
    itself divides its logits by the temperature, and vLLM's sampler keeps a temperature of 1: vLLM's raw log-probs
    are then the trainer's.
    """

    def __init__(self, model: str, max_tokens: int, gpu_memory: float, tensor_parallel: int = 1) -> None:
        """Stores the settings; the first session starts vLLM.

        Args:
            model: folder or hub name of the actor's config. The weights come from the actor.
            max_tokens: longest prompt and response together.
            gpu_memory: share of a GPU's memory for weights and cache.
            tensor_parallel: neighbouring ranks that share an engine; it divides the number of ranks.
        """
        self._tensor_parallel = tensor_parallel
        self._group = neighbours(tensor_parallel)
        self._model, _ = base_of(model, "--actor_model_name_or_path")  # an adapter's folder has no config
        self._max_tokens = max_tokens
        self._gpu_memory = gpu_memory
        self._on_gpu = device().type == "cuda"
        self._llm: LLM | None = None
        self._temperature: Temperature | None = None

    @contextmanager
    def session(self, actor: TrainedPolicy, same_weights: bool = False) -> Iterator[ResponseSampler]:
        """Wakes the engine with the actor's weights; see `dschat.rollouts.engine.RolloutEngine`."""
        states = random_states()  # vLLM seeds and uses the global generators
        try:
            llm = self._wake(actor)
            try:
                yield self._sample
            finally:
                if self._on_gpu:
                    llm.sleep(level=2)  # frees the weights as well
        finally:
            set_random_states(states)

    def _wake(self, actor: TrainedPolicy) -> LLM:
        """Starts or wakes vLLM and loads the actor's weights. Every rank must call it."""
        is_new = self._llm is None
        if self._llm is None:
            self._llm = self._start(actor)
        llm = self._llm
        assert self._temperature is not None  # `_start` sets it
        self._temperature.missing = missing_ids_of(actor.module.inner)

        is_asleep = self._on_gpu and not is_new
        if is_asleep:
            llm.wake_up(tags=["weights"])
        self._load_weights(llm, actor)
        if is_asleep:
            llm.wake_up(tags=["kv_cache"])
        llm.reset_prefix_cache()  # its keys and values were computed with the weights before
        return llm

    def _start(self, actor: TrainedPolicy) -> LLM:
        """Starts vLLM with random weights. Every rank must call it. Raises UserError."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        try:
            llm = LLM(
                self._model,
                skip_tokenizer_init=True,
                trust_remote_code=False,
                generation_config="vllm",  # the checkpoint's would change the sampling
                dtype=next(actor.module.parameters()).dtype,
                load_format="dummy",
                max_model_len=self._max_tokens,
                enable_chunked_prefill=None if self._on_gpu else False,  # see serve.py
                max_num_batched_tokens=max(BATCHED_TOKENS, self._max_tokens),
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=self._tensor_parallel,
                enforce_eager=not self._on_gpu,
                enable_sleep_mode=self._on_gpu,
                gpu_memory_utilization=self._gpu_memory,
                kv_cache_memory_bytes=None if self._on_gpu else CPU_CACHE,
                logprobs_mode="raw_logprobs",
                disable_log_stats=True,
            )
        except ValueError as error:  # too little memory, or a model that vLLM does not support
            raise UserError(
                f"--rollout_engine vllm: vLLM does not start with {self._model}: {error}. Change "
                "--vllm_gpu_memory or --vllm_tensor_parallel, or use --rollout_engine continuous."
            ) from error
        # vLLM's finalizer would destroy the process group, which is the trainer's.
        llm.llm_engine.engine_core._finalizer.detach()
        (self._temperature,) = llm.apply_model(Temperature)
        return llm

    def _load_weights(self, llm: LLM, actor: TrainedPolicy) -> None:
        """Loads the actor's weights and compares them. Every rank must call it. Raises UserError if they differ."""
        columns: dict[str, Tensor] = {}
        transposed = transposed_matrices(actor)
        weights = record_columns(plain_weights(actor), columns, transposed, self._tensor_parallel)
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self._on_gpu:
            llm.apply_model(repack_weights)

        shard = rank() % self._tensor_parallel
        (wrong,) = llm.apply_model(partial(wrong_layers, columns=columns, shard=shard))
        for name in sorted(set().union(*self._gather(wrong))):
            raise UserError(
                f"--rollout_engine vllm: {name} computes with other weights than the actor's, which vLLM was given. "
                "Use --rollout_engine continuous, and please report the model."
            )

    def _gather(self, item: T) -> list[T]:
        """The items of all ranks that share the engine, in rank order."""
        return [item] if self._tensor_parallel == 1 else gather_objects(item, self._group)

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        limits: Sequence[int] | None = None,
    ) -> Generation:
        assert self._llm is not None and self._temperature is not None  # a session is open
        self._temperature.value = sampling.temperature or 1.0

        # All ranks of the engine pass it the same requests; this rank's start behind those of the ranks before it.
        requests_by_rank = self._gather(make_requests(prompts, sampling, seeds, limits))
        shard = rank() % self._tensor_parallel
        first = sum(len(requests) for requests in requests_by_rank[:shard])
        shared_requests = [request for requests in requests_by_rank for request in requests]
        shared_responses = self._generate(shared_requests)
        responses = shared_responses[first : first + len(prompts)]
        return to_generation(prompts, responses, sampling, limits)

    def _generate(self, requests: Sequence[ResponseRequest]) -> list[VllmResponse]:
        from vllm import SamplingParams

        assert self._llm is not None
        inputs = [{"prompt_token_ids": request.prompt} for request in requests]
        parameters = [SamplingParams(**request.parameters) for request in requests]
        responses = []
        for output in self._llm.generate(inputs, parameters, use_tqdm=False):
            completion = output.outputs[0]
            responses.append(VllmResponse(list(completion.token_ids), completion.logprobs.logprobs))
        return responses
