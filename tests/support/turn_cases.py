# SPDX-License-Identifier: Apache-2.0
"""Episodes for tests: environments as files, a chat template for the small tokenizer, and scripted policies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from factories import EOS, PAD, make_tokenizer

# A user's message and a generation prompt are one ordinary word each; a turn ends with <eos>.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{{ m.content }} dog {% endif %}{% endfor %}"
)
ENVIRONMENTS = '''
import os
import sys
import time


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
    """Ends after the first reply, with the reward of `length_of`."""

    def step(self, messages, reply):
        return [], float(len(reply)), True


class Seeds(Counts):
    """Says its seed."""

    def step(self, messages, reply):
        return [], float(self.seed % 1000), True


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
        if self.fault == "exits":
            sys.exit(3)
        if self.fault == "dies":
            os._exit(3)
        if self.fault == "hangs":
            time.sleep(60)
        if self.fault == "no tuple":
            return "text"
        if self.fault == "no number":
            return result[0], "much", False
        if self.fault == "not finite":
            return result[0], float("nan"), False
        if self.fault == "no messages":
            return [], 1.0, False
        if self.fault == "no content":
            return [{"role": "user"}], 1.0, False
        return result


def length_of(prompts, responses, rows):
    return [float(len(response)) for response in responses]
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
