# SPDX-License-Identifier: Apache-2.0
"""The flags of step 3's rollouts and batches, and of what draws responses."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal, get_args

from dschat.config import rules
from dschat.config.rules import default_of, flag
from dschat.errors import UserError

RolloutEngineName = Literal["continuous", "generate", "vllm"]
EVAL_PROMPTS = 512  # of an evaluation without --eval_prompts and --eval_iters


def engine_name(value: str) -> str:
    """A value of --rollout_engine; continuous was called compacting, which is still accepted."""
    return "continuous" if value == "compacting" else value


@dataclass(kw_only=True)
class RolloutFlags:
    """Sampling and the sizes of rollouts and updates."""

    _argument_group_name = "rollouts and batches"

    rollout_engine: Annotated[RolloutEngineName, engine_name] = flag(
        "what draws responses: our own continuous batching, which drops rows that have ended and takes in waiting"
        " prompts (continuous); transformers' generate; or vLLM in the training process (vllm)",
        "continuous",
        choices=get_args(RolloutEngineName),
    )
    per_device_generation_batch_size: int = flag(
        "prompts answered at once on one process, each samples_per_prompt times", 16
    )
    generation_batches: int = flag("generation batches of one rollout", 1)
    samples_per_prompt: int = flag("responses to each prompt of a rollout", 1)
    per_device_training_batch_size: int = flag("responses per forward pass and process in training", 16)
    eval_prompts: int | None = flag(
        f"held-out prompts answered in an evaluation, on all processes together; 0 = all ({EVAL_PROMPTS}, unless"
        " eval_iters is given)",
        None,
    )
    eval_iters: int | None = flag(
        "batches of per_device_eval_batch_size per process in an evaluation, instead of eval_prompts; 0 = all", None
    )
    per_device_eval_batch_size: int = flag("prompts per process that one of eval_iters stands for", 16)
    ppo_epochs: int = flag("passes over one rollout", 1)
    max_prompt_seq_len: int = flag("longest prompt in tokens; a longer one is dropped", 512)
    max_answer_seq_len: int = flag("longest response in tokens; sampling stops there", 512)
    temperature: float = flag("sampling temperature, also of all log-probs", 1.0)
    top_k: int = flag("sample among the k likeliest tokens; 0 = all", 0)
    top_p: float = flag("sample among the likeliest tokens that make up this probability; 1 = all", 1.0)
    vllm_gpu_memory: float = flag("share of a GPU's memory that vLLM uses while it draws: weights and cache", 0.3)
    rollout_is_clip: float | None = flag(
        "with vllm, a token's policy loss weighs as much as it is likelier under the actor than under vLLM, at most"
        " this; off if not given",
        None,
    )
    print_answers: bool = flag("show some held-out prompts with their responses at each evaluation", False)

    def check_rollouts(self) -> None:
        """Check these flags, alone and against each other. Raises UserError."""
        sizes = ["per_device_generation_batch_size", "generation_batches", "per_device_training_batch_size"]
        sizes += ["samples_per_prompt"]
        sizes += ["per_device_eval_batch_size", "ppo_epochs", "max_prompt_seq_len", "max_answer_seq_len"]
        rules.check_numbers(self, sizes, rules.AT_LEAST_1)
        rules.check_numbers(self, ["eval_prompts", "eval_iters", "top_k"], rules.AT_LEAST_0)
        rules.check_numbers(self, ["temperature", "rollout_is_clip"], rules.ABOVE_0)
        share_rule = (lambda share: 0 < share <= 1, "a number above 0 and at most 1")
        rules.check_numbers(self, ["top_p", "vllm_gpu_memory"], share_rule)
        if self.eval_prompts is not None and self.eval_iters is not None:
            raise UserError("--eval_prompts and --eval_iters both say how many prompts to evaluate: drop one of them.")
        self._check_rollout_engine()

    def _check_rollout_engine(self) -> None:
        if self.rollout_engine == "vllm":
            return
        for name in ("vllm_gpu_memory", "rollout_is_clip"):
            value = getattr(self, name)
            if value != default_of(RolloutFlags, name):
                raise UserError(f"--{name} {value} does nothing on its own: add --rollout_engine vllm, or drop it.")

    def check_engine_installed(self) -> None:
        """Check that the engine's package is there. Raises UserError."""
        if self.rollout_engine == "vllm" and find_spec("vllm") is None:
            raise UserError("--rollout_engine vllm needs vLLM: pip install 'ma-rlhf[vllm]'")

    def num_eval_prompts(self, world_size: int) -> int:
        """How many held-out prompts an evaluation answers on all processes together; 0 = all."""
        if self.eval_iters is None:
            return self.eval_prompts or 0
        return self.eval_iters * self.per_device_eval_batch_size * world_size
