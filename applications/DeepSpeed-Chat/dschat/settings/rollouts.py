# SPDX-License-Identifier: Apache-2.0
"""Flags of sampling: how responses are drawn, by what, and how many for a rollout and its updates."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from dschat.base.errors import UserError
from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FREE, NOT_EMPTY, SHARE, UP_TO_1, flag

RolloutEngineName = Literal["continuous", "generate", "vllm"]
VLLM = "rollout_engine vllm"  # which the flags of vLLM need beside them
EVAL_PROMPTS = 512  # of an evaluation without --eval_prompts and --eval_iters
AHEAD_CLIP = 2.0  # of importance weights with --rollouts_ahead and without --rollout_is_clip


@dataclass(kw_only=True)
class SamplingFlags:
    """How responses are sampled, in PPO and in online REFUEL."""

    section = "rollouts and batches"

    temperature: float = flag("sampling temperature, also of all log-probs", 1.0, ABOVE_0)
    per_device_generation_batch_size: int = flag(
        "prompts answered at once on one process, each samples_per_prompt times", 16, AT_LEAST_1, SHARE
    )
    max_prompt_seq_len: int = flag("longest prompt in tokens; a longer one is dropped", 512, AT_LEAST_1)
    max_answer_seq_len: int = flag("longest response in tokens; sampling stops there", 512, AT_LEAST_1)
    decode_graphs: Literal["auto", "on", "off"] = flag(
        "continuous batching decodes in steps of fixed shapes, which a GPU replays as CUDA graphs; auto: on a GPU",
        "auto",
    )
    eval_prompts: int | None = flag(
        f"held-out prompts answered in an evaluation, on all processes together; 0 = all ({EVAL_PROMPTS}, unless"
        " eval_iters is given)",
        None,
        AT_LEAST_0,
        FREE,
    )


@dataclass(kw_only=True)
class RolloutFlags:
    """Sampling and the sizes of rollouts and updates."""

    section = "rollouts and batches"

    rollout_engine: RolloutEngineName = flag(
        "what draws responses: our own continuous batching, which drops rows that have ended and takes in waiting"
        " prompts (continuous); transformers' generate; or vLLM in the training process (vllm)",
        "continuous",
    )
    generation_batches: int = flag("generation batches of one rollout", 1, AT_LEAST_1, SHARE)
    samples_per_prompt: int = flag("responses to each prompt of a rollout", 1, AT_LEAST_1)
    per_device_training_batch_size: int = flag(
        "responses per forward pass and process in training", 16, AT_LEAST_1, SHARE
    )
    eval_iters: int | None = flag(
        "batches of an evaluation per process, instead of eval_prompts; 0 = all", None, AT_LEAST_0, FREE
    )
    ppo_epochs: int = flag("passes over one rollout", 1, AT_LEAST_1)
    top_k: int = flag("sample among the k likeliest tokens; 0 = all", 0, AT_LEAST_0)
    top_p: float = flag("sample among the likeliest tokens that make up this probability; 1 = all", 1.0, UP_TO_1)
    print_answers: bool = flag(
        "show some held-out prompts with their responses at each evaluation", False, on_resume=FREE
    )

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM samples responses."""
        return self.rollout_engine == "vllm"


@dataclass(kw_only=True)
class VllmFlags:
    """vLLM, in the training processes or on servers."""

    section = "rollouts and batches"

    vllm_gpu_memory: float = flag(
        "share of a GPU's memory that vLLM uses while it draws: weights and cache", 0.3, UP_TO_1, FREE, only_with=VLLM
    )
    vllm_tensor_parallel: int = flag(
        "neighbouring processes that share one engine of vLLM, each with its part of the weights",
        1,
        AT_LEAST_1,
        FREE,
        only_with=VLLM,
    )
    vllm_url: list[str] | None = flag(
        "one or more vLLM servers, which draw instead of the training processes: http://host:8000 of"
        " `dschat serve-vllm`; docs/scaling.md",
        None,
        NOT_EMPTY,
        FREE,
        only_with=VLLM,
    )
    vllm_timeout: float = flag(
        "seconds in which a server of vllm_url must finish one more response; else its engine counts as hung",
        1200.0,
        ABOVE_0,
        FREE,
        only_with="vllm_url",
    )
    rollouts_ahead: Literal[0, 1] = flag(
        "1: servers of vllm_url draw the next rollout while this one trains, with the weights of an iteration ago",
        0,
        only_with="vllm_url",
    )
    rollout_is_clip: float | None = flag(
        "with vllm, a token's policy loss weighs as much as it is likelier under the actor than under vLLM, at most"
        f" this; off if not given, {AHEAD_CLIP:g} with rollouts_ahead",
        None,
        ABOVE_0,
        only_with=VLLM,
    )

    def check_neighbours(self, world_size: int) -> None:
        """Raises UserError where processes cannot be dealt out to the engines of vLLM."""
        if world_size % self.vllm_tensor_parallel:
            sizes = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
            raise UserError(
                f"--vllm_tensor_parallel {self.vllm_tensor_parallel} does not divide the number of processes,"
                f" {world_size}: each engine of vLLM takes that many neighbours. Give one of {', '.join(sizes)}."
            )


def require_vllm() -> None:
    """Raises UserError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise UserError("--rollout_engine vllm needs vLLM: pip install 'ma-rlhf[vllm]'")
