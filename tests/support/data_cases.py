# SPDX-License-Identifier: Apache-2.0
"""One-line makers of data rows, a tokenizer with one token per word, and loaders of every kind of example."""

from functools import partial
from typing import Any

import pytest

from dschat.base.errors import UserError
from dschat.data.examples import (
    PairExample,
    PreferenceExample,
    PromptExample,
    SFTExample,
    pair_examples,
    preference_examples,
    prompt_examples,
    sft_examples,
)
from dschat.data.loading import ExampleLoader
from dschat.data.rows import Row
from dschat.data.sources import load_source
from dschat.settings.common import ColumnFlags
from dschat.settings.supervised import SFTConfig
from factories import EOS, make_tokenizer, put_before_texts

WORDS = ["<pad>", "<s>", "</s>", "a", "b", "c", "d", "e", "<end>"]  # ids 0 to 8
KINDS = (SFTExample, PairExample, PreferenceExample, PromptExample)
TEXTS = ("the cat", "a dog ran", "it is old and grey", "no", "yes we can")


def word_tokenizer(bos: str | None = "<s>") -> Any:
    """One token per word of WORDS; anything else is e."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="e"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    put_before_texts(backend, bos)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="</s>", pad_token="<pad>")


def text_row(prompt: str, chosen: str | None = None, rejected: str | None = None, line: int = 1, **extra: Any) -> Row:
    """A row of texts."""
    return Row(prompt, None, chosen, rejected, extra, f"rows.jsonl:{line}")


def numbered_pairs(numbers: range) -> list[dict[str, Any]]:
    """Raw rows with two responses, one for each number, all different."""
    rows = []
    for number in numbers:
        prompt, chosen, rejected = (TEXTS[(number + place) % len(TEXTS)] for place in range(3))
        rows.append(
            {"prompt": f"{prompt} {number}", "chosen": f"{chosen} {number}", "rejected": rejected, "n": number}
        )
    return rows


def talk_row(messages: list[dict[str, str]], response: str | None = None, line: int = 1) -> Row:
    """A row of messages, and what answers them."""
    return Row(None, messages, response, None, {}, f"rows.jsonl:{line}")


def error_of(path: Any, keys: ColumnFlags | None = None) -> str:
    """What somebody reads whose data cannot be loaded: one line."""
    with pytest.raises(UserError) as caught:
        load_source(path, keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flags_of(*paths: Any, step: int = 1, **flags: Any) -> Any:
    """What decides which rows a step reads; the shares of the steps are 2, 4 and 4 tenths by default."""
    flags = {"data_split": "2,4,4"} | flags
    config = SFTConfig(data_path=list(map(str, paths)), output_dir="out", model_name_or_path="model", **flags)
    object.__setattr__(config, "step", step)  # of another command than SFT's
    return config


def make_of(kind: type, tokenizer: Any, limit: int, eos_id: int = EOS, **more: Any) -> partial[Any]:
    """What makes examples of one kind."""
    if kind is PromptExample:
        return partial(prompt_examples, tokenizer=tokenizer, max_prompt_seq_len=limit)
    makes: dict[type, Any] = {
        SFTExample: sft_examples,
        PairExample: pair_examples,
        PreferenceExample: preference_examples,
    }
    return partial(makes[kind], tokenizer=tokenizer, max_seq_len=limit, eos_id=eos_id, **more)


def loader_of(
    kind: type, flags: Any, limit: int, eos_id: int = EOS, tokenizer: Any = None, **more: Any
) -> ExampleLoader[Any]:
    """A loader of one kind of example; of demonstrations, for a step that learns from responses alone."""
    make = make_of(kind, tokenizer or make_tokenizer(), limit, eos_id, **more)
    return ExampleLoader(flags, kind, make, on_prompt=False if kind is SFTExample else None)


def look_at_data(words: list[str]) -> int:
    """`dschat data …`; its exit status."""
    from dschat.cli import main

    return main(["data", *words])
