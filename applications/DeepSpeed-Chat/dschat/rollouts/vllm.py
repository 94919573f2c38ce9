# SPDX-License-Identifier: Apache-2.0
"""Sampling by vLLM inside the training process: each rank has an engine of its own, asleep while the models train."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dschat.errors import UserError
from dschat.models.engines import TrainedPolicy
from dschat.rollouts.assembly import assemble, pad_prompts
from dschat.rollouts.engine import Draw, Drawn
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.vllm_weights import check_layers, plain_weights
from dschat.run.distributed import device
from dschat.run.state import random_states, set_random_states

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import CompletionOutput

CPU_CACHE = 1 << 28  # bytes of keys and values on a CPU
BATCHED_TOKENS = 8192  # the most prompt tokens of a step
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, so that weights need no way to it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads are the trainer's, too
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VllmEngine:
    """A rollout engine that lives beside the trainer.

    vLLM gives log-probs of what its sampler draws from ("processed": masked, truncated), or of the logits without the
    temperature ("raw"). The trainer's are those of the whole softmax(logits / temperature). So the temperature is put
    into the model, as a last division of its logits, and vLLM's sampler keeps a temperature of 1: then the raw ones
    are the trainer's.
    """

    def __init__(self, model: str, max_tokens: int, gpu_memory: float) -> None:
        """Starts nothing yet; the first session does.

        Args:
            model: folder or hub name of the actor's config; the weights come from the actor.
            max_tokens: of the longest prompt and response together.
            gpu_memory: share of a GPU's memory for weights and cache.
        """
        self._model, self._max_tokens, self._gpu_memory = model, max_tokens, gpu_memory
        self._llm: LLM | None = None
        self._packed: list[nn.Module] = []  # layers to be packed anew on a CPU: the head and experts
        self._on_gpu = device().type == "cuda"
        self._temperature = 1.0

    @contextmanager
    def session(self, actor: TrainedPolicy) -> Iterator[Draw]:
        """The engine awake with the actor's weights; see `dschat.rollouts.engine.RolloutEngine`."""
        states = random_states()
        try:
            llm = self._awake(actor)
            try:
                yield self._draw
            finally:
                if self._on_gpu:
                    llm.sleep(level=2)  # frees the weights as well
        finally:
            set_random_states(states)  # vLLM seeds and uses the global ones

    def _awake(self, actor: TrainedPolicy) -> LLM:
        is_new = self._llm is None
        if self._llm is None:
            self._llm = self._start(actor)
        llm = self._llm
        sleeps = self._on_gpu and not is_new
        if sleeps:
            llm.wake_up(tags=["weights"])
        self._push(llm, actor)
        if sleeps:
            llm.wake_up(tags=["kv_cache"])
        return llm

    def _start(self, actor: TrainedPolicy) -> LLM:
        """An engine with random weights. Every rank must call it. Raises UserError."""
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        from vllm import LLM
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        try:
            llm = LLM(
                self._model,
                skip_tokenizer_init=True,
                trust_remote_code=False,
                generation_config="vllm",  # not the checkpoint's, whose defaults would leak in
                dtype=next(actor.module.parameters()).dtype,
                load_format="dummy",
                max_model_len=self._max_tokens,
                # A prompt that is split over steps would use up numbers of its row's seed, and rows depend on others.
                enable_chunked_prefill=False,
                max_num_batched_tokens=max(BATCHED_TOKENS, self._max_tokens),
                enable_prefix_caching=False,  # old keys and values would outlive the weights
                distributed_executor_backend="external_launcher",
                enforce_eager=not self._on_gpu,
                enable_sleep_mode=self._on_gpu,
                gpu_memory_utilization=self._gpu_memory,
                kv_cache_memory_bytes=None if self._on_gpu else CPU_CACHE,
                logprobs_mode="raw_logprobs",
                disable_log_stats=True,
            )
        except ValueError as error:  # too little memory, or a model that vLLM does not know
            raise UserError(
                f"--rollout_engine vllm: vLLM does not start with {self._model}: {error}. Change "
                "--vllm_gpu_memory, or use --rollout_engine compacting."
            ) from error
        # When the engine is collected, it would end the whole process group, which is the trainer's.
        llm.llm_engine.engine_core._finalizer.detach()
        (model,) = llm.apply_model(lambda model: model)
        self._packed = [m for m in model.modules() if isinstance(m, ParallelLMHead) or hasattr(m, "w13_weight")]
        self._divide_logits(model)
        return llm

    def _divide_logits(self, model: nn.Module) -> None:
        """Puts the temperature of the draws into the model."""
        compute_logits: Callable[[Tensor], Tensor] = model.compute_logits  # type: ignore[assignment]

        def divided(hidden: Tensor) -> Tensor:
            return compute_logits(hidden).float().div_(self._temperature)

        model.compute_logits = divided  # type: ignore[assignment]

    def _push(self, llm: LLM, actor: TrainedPolicy) -> None:
        """Gives the engine the actor's weights. Every rank must call it. Raises UserError where they do not arrive."""
        columns: dict[str, Tensor] = {}
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": plain_weights(actor, columns)})
        if not self._on_gpu:
            # On a CPU, layers compute with a packed copy of their weight. That of a head tied to the embedding is not
            # made anew, since no weight of the head's own name comes; and new weights of experts are not packed.
            for layer in self._packed:
                kernel = getattr(layer.quant_method, "moe_kernel", None)
                method = layer.quant_method if kernel is None else kernel.fused_experts
                method.process_weights_after_loading(layer)  # type: ignore[union-attr,operator]
        llm.apply_model(lambda model: check_layers(model, columns))

    def _draw(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> Drawn:
        """See `dschat.rollouts.engine.Draw`."""
        from vllm import SamplingParams

        assert self._llm is not None  # a session is open
        self._temperature = sampling.temperature or 1.0
        parameters = [
            SamplingParams(
                temperature=1.0 if sampling.temperature else 0.0,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=seed,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(sampling.end_ids),
                ignore_eos=True,  # only those ids end a response
                logit_bias=dict.fromkeys(sampling.forbidden, -torch.inf),
                logprobs=0,  # of the drawn token alone
                flat_logprobs=True,
                detokenize=False,
            )
            for seed in seeds
        ]
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self._llm.generate(inputs, parameters, use_tqdm=False)
        return _drawn(prompts, [output.outputs[0] for output in outputs], sampling)


def _drawn(prompts: Sequence[Sequence[int]], responses: Sequence[CompletionOutput], sampling: Sampling) -> Drawn:
    """The responses of the prompts, in their order, as tensors on the device."""
    tokens = pad_sequence([torch.tensor(list(r.token_ids)) for r in responses], True, sampling.end_ids[0])
    rollout = assemble(pad_prompts(prompts, sampling.pad_id, device()), tokens.to(device()), sampling)
    logprobs = pad_sequence([torch.tensor(r.logprobs.logprobs) for r in responses], True).to(device())
    bad_rows = ~logprobs.isfinite().all(1)
    return Drawn(replace(rollout, drawn_logprobs=logprobs), None, bad_rows)
