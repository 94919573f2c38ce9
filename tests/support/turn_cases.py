# SPDX-License-Identifier: Apache-2.0
"""Episodes for tests: environments as files, a chat template for the small tokenizer, and scripted policies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from factories import (
    EOS,
    PAD,
    engine_of,
    frozen_engine_of,
    make_causal_lm,
    make_classifier,
    make_prompt,
    make_tokenizer,
    ppo_config,
    ppo_trainer_of,
)

# A user's message and a generation prompt are one ordinary word each; a turn ends with <eos>.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{{ m.content }} dog {% endif %}{% endfor %}"
)
ENVIRONMENTS = '''
import os
import subprocess
import time
from pathlib import Path


class Counts:
    """Three turns; a reply's reward is its number of letters, plus ten for the turn's number."""

    def reset(self, row, seed):
        self.turn = 0
        self.seed = seed
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages, reply):
        self.turn += 1
        answer = {"role": "user", "content": f"fox {self.turn}"}
        return [answer], 10.0 * self.turn + len(reply), self.turn == 3


class OneTurn(Counts):
    """Ends after the first reply, with the number of its letters as reward."""

    def step(self, messages, reply):
        return [], float(len(reply)), True


class Tools(OneTurn):
    """Has a tool, and begins with a system message."""

    tools = [{"type": "function", "function": {"name": "zebra", "description": "looks"}}]

    def reset(self, row, seed):
        return [{"role": "system", "content": "the cat"}, *super().reset(row, seed)]


class Seeds(Counts):
    """Says its seed."""

    def step(self, messages, reply):
        return [], float(self.seed % 1000), True


class Random(Counts):
    """As many turns as the seed says, with rewards that follow from seed and reply."""

    def reset(self, row, seed):
        self.turns = 1 + seed % 3
        return super().reset(row, seed)

    def step(self, messages, reply):
        self.turns -= 1
        reward = (len(reply) * 7 + self.seed % 11) % 5 / 5
        return [{"role": "user", "content": "the fox"}], reward, self.turns == 0


class Uneven(Random):
    """Breaks in some rows."""

    def step(self, messages, reply):
        if self.breaks:
            raise ValueError("broken")
        return super().step(messages, reply)

    def reset(self, row, seed):
        self.breaks = row["breaks"]
        return super().reset(row, seed)


class OnFirstRank(Random):
    """Breaks on other ranks than the first."""

    def reset(self, row, seed):
        if os.environ.get("RANK", "0") != "0":
            raise ValueError("broken")
        return super().reset(row, seed)


class Starts(Counts):
    """Starts a program, and says in a file that it was closed."""

    def reset(self, row, seed):
        self.folder = Path(row["folder"])
        program = subprocess.Popen(["sleep", "600"])
        (self.folder / "pid").write_text(str(program.pid))
        print("started")
        if row.get("hangs"):
            time.sleep(600)
        return super().reset(row, seed)

    def close(self):
        (self.folder / "closed").write_text("")


class Hangs(Counts):
    """Never begins."""

    def reset(self, row, seed):
        time.sleep(600)


class Five(Counts):
    """Returns what gymnasium's environments return."""

    def reset(self, row, seed):
        return super().reset(row, seed), {"info": 1}

    def step(self, messages, reply):
        new, reward, done = super().step(messages, reply)
        return new, reward, False, done, {}


class Faulty(Counts):
    """Does what its row says in the second turn."""

    def reset(self, row, seed):
        self.fault = row["fault"]
        if self.fault == "reset":
            raise ValueError("no beginning")
        return super().reset(row, seed)

    def step(self, messages, reply):
        result = super().step(messages, reply)
        if self.turn != 2:
            return result
        if self.fault == "raises":
            raise ValueError("no answer")
        if self.fault == "dies":
            os._exit(3)
        if self.fault == "hangs":
            time.sleep(60)
        if self.fault == "no tuple":
            return "text"
        if self.fault == "no number":
            return result[0], "much", False
        if self.fault == "too large":
            return result[0], 1e300, False
        if self.fault == "no flag":
            return result[0], 1.0, "no"
        if self.fault == "no messages":
            return [], 1.0, False
        if self.fault == "no content":
            return [{"role": "user"}], 1.0, False
        if self.fault == "half a character":
            return [{"role": "user", "content": "a" + chr(0xDC80)}], 1.0, False
        if self.fault == "no JSON":
            return [{"role": "user", "content": "a", "set": {1}}], 1.0, False
        if self.fault == "assistant":
            return [{"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}], 1.0, False
        return result


def messages_of(prompts, responses, rows):
    return [float(len(row["episode_messages"])) for row in rows]
'''


def write_environments(folder: Path) -> Path:
    """The file with the environments above."""
    file = folder / "environments.py"
    file.write_text(ENVIRONMENTS)
    return file


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    """The small tokenizer with a chat template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def make_row(prompt: str, number: int = 0, **columns: Any) -> Any:
    """A row of the data whose environment reads these columns."""
    from dschat.data.rows import Row

    messages = [{"role": "user", "content": prompt}]
    return Row(None, messages, None, None, {"prompt": prompt, **columns}, f"rows.jsonl:{number + 1}")


class Scripted:
    """Samples the replies of a script, turn by turn, and remembers what it was asked."""

    def __init__(self, turns: Sequence[Sequence[Sequence[int]]]) -> None:
        self._turns = list(turns)
        self.prompts: list[list[list[int]]] = []
        self.seeds: list[list[int]] = []
        self.limits: list[Any] = []

    def __call__(self, prompts: Any, sampling: Any, seeds: Any, *, limits: Any = None) -> Any:
        from dschat.rollouts.engine import Generation, assemble, pad_prompts

        self.prompts.append([list(prompt) for prompt in prompts])
        self.seeds.append(list(seeds))
        self.limits.append(limits)
        replies = self._turns[len(self.prompts) - 1]
        width = max(len(reply) for reply in replies)
        tokens = torch.tensor([[*reply, *[PAD] * (width - len(reply))] for reply in replies])
        longest = [len(reply) for reply in replies]
        rollout = assemble(pad_prompts(prompts, PAD, torch.device("cpu")), tokens, sampling, longest)
        logprobs = torch.where(rollout.response_mask, -0.5 * (1 + torch.arange(width)), 0.0)
        return Generation(rollout, logprobs, torch.zeros(len(prompts), dtype=torch.bool))


def ended(*ids: int) -> list[int]:
    """A reply that ends by itself."""
    return [*ids, EOS]


PROMPTS = ("we make", "the cat", "jinx", "a mat and a dog", "zebra")


def episode_loop(
    folder: Path,
    environment: str,
    processes: int = 1,
    rows: Any = None,
    rate: float = 1e-2,
    engine: Any = None,
    **flags: Any,
) -> Any:
    """The loop of step 3 on small models, whose rollouts are 8 episodes of an environment.

    Args:
        folder: of the run.
        environment: ``module.py:Class``.
        processes: that the 8 episodes are shared among.
        rows: further columns of each row.
        rate: learning rate of actor and critic.
        engine: samples; continuous batching if not given.
        flags: others than those of an update of 4 episodes in micro-batches of 2.
    """
    from dschat.rollouts.continuous import ContinuousEngine
    from dschat.run.distributed import world_size
    from dschat.training.ppo.models import PPOModels
    from dschat.training.steps.scores import SourceParts, reward_source
    from dschat.turns.step3 import build_episode_sampler, open_environments

    sizes = {
        "per_device_generation_batch_size": 8 // processes,
        "per_device_training_batch_size": 2 // processes,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2,
        "max_prompt_seq_len": 32,
        "max_answer_seq_len": 24,
        "max_turn_seq_len": 5,
        "reward_function": None,
        "environment": environment,
        "num_train_epochs": 1,
        "self_checks": False,
    }
    config = ppo_config(folder, **(sizes | flags))
    plan = config.plan_batches(world_size())
    tokenizer = chat_tokenizer()
    prompts = []
    for number in range(16):
        text = PROMPTS[number % len(PROMPTS)]
        columns = {"prompt": text} | ({} if rows is None else rows[number])
        prompts.append(make_prompt(tokenizer(text)["input_ids"], text, number, columns))

    def trained(model: Any) -> Any:
        options = {"learning_rate": rate, "zero_stage": config.engine.zero_stage}
        return engine_of(model, plan.micro_batch, plan.accumulation, **options)

    critic = trained(make_classifier()) if config.advantages.needs.critic else None
    models = PPOModels(
        actor=trained(make_causal_lm()),
        reference=frozen_engine_of(make_causal_lm()),
        critic=critic,
        reward=reward_source(SourceParts(config, None, tokenizer, None)),  # type: ignore[arg-type]
        rollouts=engine or ContinuousEngine(8),
    )
    sampler = build_episode_sampler(config, models, tokenizer, open_environments(config, tokenizer))
    return ppo_trainer_of(models, prompts, prompts[:3], tokenizer, config, sampler=sampler)


def two_updates_on_episodes(folder: Path, zero_stage: int = 0, name: str = "Uneven", engine: Any = None) -> Any:
    """Two rollouts with one update each, and evaluations of three episodes, on the processes of this group.

    Environments of some rows break. Returns weights, metrics and sample files, on the main process.

    Args:
        folder: of the run.
        zero_stage: of actor and critic.
        name: of the environment.
        engine: samples; continuous batching if not given.
    """
    from dschat.run.distributed import barrier, is_main, world_size
    from resume_runs import result_of

    if is_main():
        write_environments(folder)
    barrier()
    rows = [{"breaks": number in (1, 6, 13)} for number in range(16)]
    flags = {
        "per_device_training_batch_size": 8 // world_size(),
        "gradient_accumulation_steps": 1,
        "termination_condition": "turn",
        "on_reward_error": "skip",
        "missing_eos_penalty": 0.5,
        "eval_interval": 1,
        "zero_stage": zero_stage,
    }
    environment = f"{folder / 'environments.py'}:{name}"
    loop = episode_loop(folder / "out", environment, world_size(), rows, 1e-4, engine, **flags)
    return result_of(loop, folder / "out")
