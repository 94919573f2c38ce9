# SPDX-License-Identifier: Apache-2.0
"""A metric, the steps that write it, and the conditions on which it is written; glossary.py collects them."""

import re
from dataclasses import dataclass

RUNS = {  # name of a step in run.json → its name in texts
    "sft": "SFT",
    "reward": "reward model",
    "dpo": "DPO",
    "refuel": "REFUEL on pairs",
    "ppo": "step 3",
    "refuel_online": "REFUEL online",
}


@dataclass(frozen=True)
class Metric:
    """A number in metrics.jsonl."""

    name: str  # its key; <…> is a name that depends on the run
    runs: str  # steps that write it, separated by spaces
    unit: str
    meaning: str
    worry: str = ""  # values that point to a problem; empty if any value may be right
    when: str = ""  # condition on which it is written; empty if every run of these steps writes it

    def fits(self, name: str) -> bool:
        """Whether a key of metrics.jsonl is this metric, or one of its family."""
        return re.fullmatch(re.sub("<[a-z]+>", r"\\w+", self.name), name) is not None


ALL = " ".join(RUNS)
SUPERVISED = "sft reward dpo refuel"
ONLINE = "ppo refuel_online"

# Conditions on which metrics are written.
OWN_SAMPLING = "own sampling, not ahead of training"
SEVERAL = "several sources, `--reward_weights` or `--metric_function`"
SKIP = "`--on_reward_error skip`"
NONFINITE = "`--on_nonfinite skip`"
NORMALISED = "`--normalize_scores`"
PARSING = "`--termination_condition parsing`"
PROGRAMS = "`--reward_source programs`"
EPISODES = "`--environment`"
TEACHER = "`--teacher_model_name_or_path`"
JUDGE = "`--reward_judge`"
JUDGE_PRICES = "`--reward_judge` and prices"
VLLM = "`--rollout_engine vllm`"
COMPLETIONS = "`--advantage_estimator segment_mc`"
GATE = "`--advantage_estimator evpo`"
AHEAD = "`--rollouts_ahead`"
REFILL = "`--refill_rounds`"
CRITIC = "a critic"
WARMUP = "`--critic_warmup_updates`, in these updates"
FP16 = "fp16"
KL = "a KL penalty"
GPU = "a GPU, whose peaks are measured at the start (run.json)"
AVERAGE = "`--reward_loss average`"
OTHER_TOKENS = "a loss that does not compare that number"
