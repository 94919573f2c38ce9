# SPDX-License-Identifier: Apache-2.0
"""Flags of sampling: how responses are generated, and how many per rollout and update; rules of vLLM's servers."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal
from urllib.parse import urlsplit

from dschat.base.errors import UserError
from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FREE, NOT_EMPTY, SHARE, UP_TO_1, default_of, flag
from dschat.settings.rules import Check, Rule

RolloutEngineName = Literal["continuous", "generate", "vllm"]
VLLM = "rollout_engine vllm"  # which the flags of vLLM need beside them
EVAL_PROMPTS = 512  # of an evaluation without --eval_prompts and --eval_iters
AHEAD_CLIP = 2.0  # of importance weights with --rollouts_ahead and without --rollout_is_clip
SERVER = re.compile(r"https?://[^/\s@?]+/?")  # an address without a path, a user's name or a password


@dataclass(kw_only=True, frozen=True)
class SamplingFlags:
    """How responses are sampled, in PPO and in online REFUEL."""

    section = "rollouts and batches"

    temperature: float = flag("sampling temperature; log-probabilities use it, too", 1.0, ABOVE_0)
    per_device_generation_batch_size: int = flag(
        "prompts per process that are generated at the same time, each with samples_per_prompt responses",
        16,
        AT_LEAST_1,
        SHARE,
    )
    max_prompt_seq_len: int = flag("maximum prompt length in tokens; longer prompts are dropped", 512, AT_LEAST_1)
    max_answer_seq_len: int = flag(
        "maximum response length in tokens; of a whole episode, with the environment's messages after the prompt",
        512,
        AT_LEAST_1,
    )
    decode_graphs: Literal["auto", "on", "off"] = flag(
        "continuous batching decodes with static shapes, replayed as CUDA graphs on a GPU; auto: on a GPU", "auto"
    )
    eval_prompts: int | None = flag(
        f"held-out prompts per evaluation, on all processes together; 0 = all ({EVAL_PROMPTS}, unless eval_iters is"
        " given)",
        None,
        AT_LEAST_0,
        FREE,
    )


@dataclass(kw_only=True, frozen=True)
class RolloutFlags:
    """Sampling and the sizes of rollouts and updates."""

    section = "rollouts and batches"

    rollout_engine: RolloutEngineName = flag(
        "how responses are generated: built-in continuous batching (continuous), transformers' generate, or vLLM in"
        " the training processes or on servers (vllm)",
        "continuous",
    )
    generation_batches: int = flag("generation batches per rollout", 1, AT_LEAST_1, SHARE)
    samples_per_prompt: int = flag("responses per prompt in a rollout", 1, AT_LEAST_1)
    per_device_training_batch_size: int = flag(
        "responses per forward pass and process in training (micro-batch)", 16, AT_LEAST_1, SHARE
    )
    eval_iters: int | None = flag(
        "evaluation batches, of all processes together, instead of eval_prompts; 0 = all", None, AT_LEAST_0, FREE
    )
    ppo_epochs: int = flag("passes over each rollout", 1, AT_LEAST_1)
    top_k: int = flag("sample from the k most likely tokens; 0 = all", 0, AT_LEAST_0)
    top_p: float = flag("sample from the most likely tokens whose probabilities add up to this; 1 = all", 1.0, UP_TO_1)
    print_answers: bool = flag(
        "print some held-out prompts with their responses at each evaluation", False, on_resume=FREE
    )

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM samples responses."""
        return self.rollout_engine == "vllm"


@dataclass(kw_only=True, frozen=True)
class VllmFlags:
    """vLLM, in the training processes or on servers."""

    section = "rollouts and batches"

    vllm_gpu_memory: float = flag(
        "fraction of a GPU's memory that vLLM may use while it generates: weights and KV cache",
        0.3,
        UP_TO_1,
        FREE,
        only_with=VLLM,
    )
    vllm_tensor_parallel: int = flag(
        "tensor parallelism of vLLM: number of neighbouring processes that share one engine",
        1,
        AT_LEAST_1,
        FREE,
        only_with=VLLM,
    )
    vllm_url: list[str] | None = flag(
        "one or more vLLM servers that generate instead of the training processes, such as http://host:8000 of"
        " `dschat serve-vllm`; docs/scaling.md",
        None,
        NOT_EMPTY,
        FREE,
        only_with=VLLM,
    )
    vllm_timeout: float = flag(
        "a server of vllm_url counts as hung if it finishes no response in this many seconds",
        1200.0,
        ABOVE_0,
        FREE,
        only_with="vllm_url",
    )
    rollouts_ahead: Literal[0, 1] = flag(
        "1: servers of vllm_url generate the next rollout while this one trains, so its weights are one iteration old",
        0,
        only_with="vllm_url",
    )
    rollout_is_clip: float | None = flag(
        "with vllm: weight each token's policy loss by the importance ratio of the actor to vLLM, truncated at this;"
        f" off if not given, {AHEAD_CLIP:g} with rollouts_ahead",
        None,
        ABOVE_0,
        only_with=VLLM,
    )

    def check_neighbours(self, world_size: int) -> None:
        """Raises UserError if processes cannot be dealt out to the engines of vLLM."""
        if world_size % self.vllm_tensor_parallel:
            sizes = []
            for size in range(1, world_size + 1):
                if world_size % size == 0:
                    sizes.append(str(size))
            raise UserError(
                f"--vllm_tensor_parallel {self.vllm_tensor_parallel} does not divide the number of processes,"
                f" {world_size}: each engine of vLLM takes that many neighbours. Give one of {', '.join(sizes)}."
            )


def require_vllm() -> None:
    """Raises UserError if vLLM is not installed."""
    if find_spec("vllm") is None:
        raise UserError("--rollout_engine vllm needs vLLM: pip install 'ma-rlhf[vllm]'")


def _check_server_urls(config: Any) -> None:
    """Raises UserError unless the servers of vLLM have valid and different addresses."""
    urls = config.vllm.vllm_url
    if urls is None:
        return
    from dschat.base.servers import is_loopback

    servers = set()
    for url in urls:
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
            server = ("localhost" if is_loopback(host) else host, parts.port)
        except ValueError:  # a port or an IPv6 address that cannot be
            server = None
        if server is None or not SERVER.fullmatch(url):
            raise UserError(
                f"--vllm_url {url} is not an address of a server: give one such as http://127.0.0.1:8000, without a"
                " path, a user's name or a password."
            )
        servers.add(server)
    if len(servers) < len(urls):
        raise UserError("--vllm_url: give each server once.")


SERVER_RULES: tuple[Rule[Any] | Check[Any], ...] = (  # of a configuration with the groups vllm and engine
    Check(_check_server_urls),
    Rule(
        lambda config: config.vllm.vllm_url is not None and config.vllm.vllm_tensor_parallel > 1,
        "--vllm_tensor_parallel {vllm_tensor_parallel} with --vllm_url: a server divides the model among its own GPUs."
        " Drop the flag here, and give it to dschat serve-vllm.",
    ),
    Rule(
        lambda config: (
            config.vllm.vllm_url is not None
            and config.vllm.vllm_gpu_memory != default_of(VllmFlags, "vllm_gpu_memory")
        ),
        "--vllm_gpu_memory {vllm_gpu_memory:g} with --vllm_url: a server uses the memory of its own GPUs. Drop the"
        " flag here, and give --gpu_memory to dschat serve-vllm.",
    ),
    Rule(
        lambda config: config.vllm.vllm_url is not None and config.vllm.vllm_timeout >= config.engine.ddp_timeout,
        "--vllm_timeout {vllm_timeout:g} is not below --ddp_timeout {ddp_timeout}, after which the other processes"
        " stop waiting: lower it, or raise that.",
    ),
)


def sampling_lengths(config: Any, prompt: int, response: int) -> tuple[int, int]:
    """The most tokens that step 3 reads before it samples, and the most that it samples at once.

    A completion of segment_mc, or a later turn of an episode, may begin one token before the end of the longest
    sequence. It shares columns of the cache of keys and values with a short one, whose reply may be as long as any, so
    that the cache needs both lengths together.

    Args:
        config: config of step 3.
        prompt: tokens of the longest prompt.
        response: maximum tokens after it.
    """
    longest_reply = response
    if config.has_episodes:
        longest_reply = config.episodes.max_turn_seq_len or response
    if config.has_episodes or config.advantages.needs.segment_values:
        return prompt + response - 1, longest_reply
    return prompt, longest_reply
