# SPDX-License-Identifier: Apache-2.0
"""How plain transformers reads a reward model: the tokenizer that is saved with it, and an example for its card."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.encoding import encode_prompt_texts, encode_responses, puts_bos
from dschat.data.turn_end import turn_end
from dschat.engine.engine import Engine
from dschat.models.scalar import ScalarModel
from dschat.models.score_template import score_template
from dschat.models.templates import apply_template
from dschat.run.distributed import device
from dschat.run.model_folders import SavedModel
from dschat.scoring.reward_reader import encode_dialogues

PROMPT = "Name a fruit."
REPLY = "An apple."
DIALOGUE = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": REPLY}]
CHAT_INPUTS = f"""\
tokenizer.apply_chat_template(
    [{{"role": "user", "content": "{PROMPT}"}}, {{"role": "assistant", "content": "{REPLY}"}}],
    return_dict=True,
    return_tensors="pt",
)"""


@dataclass(frozen=True)
class PlainReading:
    """What plain transformers reads.

    Attributes:
        tokenizer: the tokenizer to save with the model.
        inputs: Python code that makes the model's inputs of an example with it.
        ids: the ids of these inputs, which are those that training would make of the example.
    """

    tokenizer: PreTrainedTokenizerBase
    inputs: str
    ids: Sequence[int]


def saved_reward_model(
    engine: Engine[ScalarModel], base: str, tokenizer: PreTrainedTokenizerBase, end_id: int
) -> SavedModel:
    """How the reward model of step 2 is saved: so that plain transformers reads the number that was trained.

    Args:
        engine: of the reward model.
        base: the model it was trained from.
        tokenizer: the run's.
        end_id: the token that ends a response, at which the score is trained.
    """
    saved = SavedModel(engine, "reward model", base)
    reading = plain_reading(tokenizer, end_id)
    if reading is None:
        return saved
    return replace(saved, tokenizer=reading.tokenizer, example=partial(example_lines, engine, reading))


def plain_reading(tokenizer: PreTrainedTokenizerBase, end_id: int) -> PlainReading | None:
    """How plain transformers reads what training reads; None if it cannot, and the tokenizer is saved as it is.

    A chat template is replaced by one whose dialogues end with the token `end_id`, at which the score is trained.
    """
    end = str(tokenizer.decode([end_id]))
    if tokenizer.chat_template is None:
        text = f"{PROMPT} {REPLY}{end}"
        trained_ids = [
            *encode_prompt_texts(tokenizer, [PROMPT])[0],
            *encode_responses(tokenizer, [f" {REPLY}"])[0],
            end_id,
        ]
        reading = PlainReading(tokenizer, f'tokenizer({text!r}, return_tensors="pt")', tokenizer(text)["input_ids"])
        return reading if reading.ids == trained_ids else None
    if not isinstance(tokenizer.chat_template, str):
        return None
    try:
        turn = turn_end(tokenizer)
        trained, _ = encode_dialogues(tokenizer, [DIALOGUE], [True], end_id=end_id)
    except UserError:  # a template that refuses the dialogue
        return None
    is_begun = apply_template(tokenizer, DIALOGUE, False).startswith(tokenizer.bos_token or "")
    start = tokenizer.bos_token if puts_bos(tokenizer) and not is_begun else ""
    saved = copy.deepcopy(tokenizer)
    saved.chat_template = score_template(tokenizer.chat_template, start, turn.text, turn.tail + end)
    ids = saved(apply_template(saved, DIALOGUE, False), add_special_tokens=False)["input_ids"]
    return PlainReading(saved, CHAT_INPUTS, ids) if ids == trained.get(0) else None


@torch.no_grad()
def example_lines(engine: Engine[ScalarModel], reading: PlainReading) -> str:
    """Python lines that score the example, with the number that they print now. Every rank must call it."""
    engine.eval()
    score = float(engine(torch.tensor([reading.ids], device=device()), None)[0, -1])
    return (
        f"inputs = {reading.inputs}\nprint(model(**inputs).logits)  # {score:.4g}, the score when the model was saved"
    )
