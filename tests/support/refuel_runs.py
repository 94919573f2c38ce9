# SPDX-License-Identifier: Apache-2.0
"""Small runs of `dschat refuel-online`: dialogues, a reward function, a trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dialogue_cases import chat_tokenizer, dialogue
from dschat.data.dialogues import DialogueExample
from dschat.data.rows import Row
from dschat.data.turn_end import turn_end
from dschat.engine.adapters_off import AdaptersOff
from dschat.models.lora import add_lora
from dschat.refuel.models import RefuelModels
from dschat.refuel.online import Refuel
from dschat.refuel.online_settings import RefuelOnlineConfig
from dschat.refuel.scores import FunctionDialogueScores
from dschat.rollouts.continuous import ContinuousEngine
from dschat.run.distributed import world_size
from factories import (
    HIDDEN,
    engine_of,
    frozen_engine_of,
    loop_of,
    make_causal_lm,
    make_rollout,
    ragged_rows,
    run_of,
    whole_state,
)
from macro_actions.refuel import PairBatch

GLOBAL = 8  # pairs of a round on all processes
WORDS = ("one", "a longer question", "x", "and then another", "which", "more words")


def examples_of(count: int) -> list[DialogueExample]:
    """Dialogues of one, two and three turns in turn."""
    found = []
    for index in range(count):
        texts = [WORDS[(index + turn) % len(WORDS)] for turn in range(2 * (index % 3) + 1)]
        row = Row(None, None, None, None, {"n": index}, f"talk.jsonl:{index + 1}")
        found.append(DialogueExample(dialogue(*texts), 20 + index % 5, row, index))
    return found


def length(dialogues: Sequence[Any], rows: Sequence[Any]) -> list[float]:
    """Characters that the assistant says, and a draw from the global random state, as users' functions may make."""
    said = [sum(len(m["content"]) for m in talk if m["role"] == "assistant") for talk in dialogues]
    return [number / 10 + float(torch.rand(1)) for number in said]


def share_of_early(dialogues: Sequence[Any], rows: Sequence[Any]) -> list[float]:
    """Share of the letters before n among the characters that the assistant says."""
    texts = ["".join(m["content"] for m in talk if m["role"] == "assistant") for talk in dialogues]
    return [sum(letter in "abcdefghijklm" for letter in text.lower()) / max(len(text), 1) for text in texts]


def talker(seed: int = 0) -> Any:
    """A causal LM for `chat_tokenizer` that often ends a reply: each of two end tokens is exp(3) times as likely."""
    tokenizer = chat_tokenizer()
    model = make_causal_lm(seed=seed, vocab_size=len(tokenizer), initializer_range=0.1, tie_word_embeddings=False)
    with torch.random.fork_rng():
        head = torch.nn.Linear(HIDDEN, len(tokenizer))
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[[turn_end(tokenizer).token_id, tokenizer.eos_token_id]] = 3.0
    model.lm_head = head
    return model.eval()


def config_of(folder: Path, **overrides: Any) -> RefuelOnlineConfig:
    """A configuration for trainers that get their engines handed in; paths in it lead nowhere."""
    flags: dict[str, Any] = {
        "data_path": ["unused"],
        "output_dir": str(folder),
        "model_name_or_path": "unused",
        "reward_function": "unused.py:f",
        "max_answer_seq_len": 6,
        "per_device_train_batch_size": GLOBAL // world_size(),
        "penalty_reward_value": -1.0,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
    }
    return RefuelOnlineConfig(**(flags | overrides))


def trainer_of(
    folder: Path,
    reward: Any = share_of_early,
    count: int = 16,
    lora_dim: int = 0,
    engine: dict[str, Any] | None = None,
    **flags: Any,
) -> Any:
    """A trainer on `examples_of` (count), whose folders only note when they would be written."""
    config, tokenizer = config_of(folder, lora_dim=lora_dim, **flags), chat_tokenizer()
    plan = config.plan_batches(world_size())

    trained = talker()
    if lora_dim:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            add_lora(trained, lora_dim, None, "base")
    options = {"learning_rate": config.model.learning_rate} | (engine or {})
    policy = engine_of(trained, plan.micro_batch, plan.accumulation, **options)
    reference: Any = AdaptersOff(policy) if lora_dim else frozen_engine_of(talker())
    scores = FunctionDialogueScores(reward, "--reward_function")
    models = RefuelModels(policy, reference if config.kl.kl_coef else None, scores, ContinuousEngine(4))
    run = run_of("refuel_online", config)
    examples = examples_of(count)
    algorithm = Refuel(models, examples, examples[:5], tokenizer, config, run)
    return loop_of(algorithm, config, run, {"policy": policy})


def pair_batch(rows: Sequence[Any]) -> PairBatch:
    """A batch of recorded replies: rows n and N + n are a pair; log-probs and rewards are drawn."""
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(len(rows), generator=generator) for _ in range(2)]
    logprobs = -10 + numbers[0]
    return PairBatch(make_rollout(rows), logprobs, logprobs, numbers[1], numbers[1])


def paired_rows(count: int) -> list[Any]:
    """`count` pairs of (state, reply) that share their states: first replies, then the others."""
    states = [state for state, _ in ragged_rows([3 + n % 4 for n in range(count)], [1] * count)]
    replies = [ragged_rows([1] * count, [1 + (n * k) % 5 for n in range(count)], k) for k in (1, 2)]
    return [(state, reply) for part in replies for state, (_, reply) in zip(states, part, strict=True)]


def two_rounds(
    folder: Path, zero_stage: int, tokens: int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """A run of two rounds of two updates on the processes of this group, in micro-batches of half a share.

    Args:
        tokens: that a micro-batch holds at most, too.

    Returns:
        Whole weights on the main process ({} elsewhere), and the metrics of the last evaluation.
    """
    engine = {"zero_stage": zero_stage}
    sizes: dict[str, Any] = {
        "per_device_train_batch_size": GLOBAL // world_size() // 2,
        "gradient_accumulation_steps": 2,
        "max_tokens_per_micro_batch": tokens,
    }
    trainer = trainer_of(folder, engine=engine, noptepochs=2, learning_rate=1e-4, **sizes)
    metrics = trainer.fit()
    return whole_state(trainer.algorithm.models.policy), metrics
