# SPDX-License-Identifier: Apache-2.0
"""Families of models through all steps, and what the steps save and measure read by plain transformers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cli_runs import Result, message_of, training_rows, write_jsonl
from closeness import assert_near
from model_families import MODEL_FAMILIES, WITHOUT_CLASSIFIER

TRAIN, HELD_OUT = 16, 4
QUICK = "qwen2"  # the others are slow in the sum
LENGTH = 256
SUPERVISED = {"max_seq_len": LENGTH, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
PPO = {
    "max_prompt_seq_len": LENGTH,
    "max_answer_seq_len": 12,
    "per_device_generation_batch_size": 8,
    "per_device_training_batch_size": 8,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-2,
}

Text = dict[str, str]


@dataclass(frozen=True)
class Chain:
    """Folders of a family's chain of steps, and its held-out rows."""

    base: Path
    sft: Path
    reward: Path
    ppo: Path
    held_out: list[Text]


def rows_for(tokenizer: Any, texts: Sequence[Text]) -> list[Text]:
    """Rows whose responses begin with a blank; the first prompt begins with BOS, if the tokenizer has one."""
    rows = [
        {"prompt": text["prompt"] + " TL;DR:", "chosen": " " + text["chosen"], "rejected": " " + text["rejected"]}
        for text in texts
    ]
    rows[0]["prompt"] = (tokenizer.bos_token or "") + rows[0]["prompt"]
    return rows


def run_chain(family: str, texts: Sequence[Text], run: Callable[..., Result], folder: Path) -> Chain:
    """Steps 1, 2 and 3 of two updates each; fails if a step does, or if it leaves weights of a model out."""
    chain = Chain(folder / "base", folder / "sft", folder / "reward", folder / "ppo", [])
    MODEL_FAMILIES[family].save(chain.base, [text["prompt"] + " " + text["chosen"] for text in texts])
    tokenizer = AutoTokenizer.from_pretrained(chain.base)
    write_jsonl(folder / "data" / "train.jsonl", rows_for(tokenizer, texts[:TRAIN]))
    chain.held_out.extend(rows_for(tokenizer, texts[TRAIN : TRAIN + HELD_OUT]))
    write_jsonl(folder / "data" / "eval.jsonl", chain.held_out)
    models = {"actor_model_name_or_path": chain.sft, "critic_model_name_or_path": chain.reward}
    for step, output, split, flags in (
        ("sft", chain.sft, "1,0,0", SUPERVISED | {"model_name_or_path": chain.base}),
        ("reward", chain.reward, "0,1,0", SUPERVISED | {"model_name_or_path": chain.sft}),
        ("ppo", chain.ppo, "0,0,1", PPO | models),
    ):
        common = {"data_path": folder / "data", "data_split": split, "output_dir": output}
        screen = run(step, common | flags).expect(0).stderr
        assert "are not used" not in screen and "rows dropped" not in screen
        assert len(training_rows(output)) == 2
    return chain


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text as the tokenizer gives them, with one BOS at most."""
    ids = tokenizer(text).input_ids
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def plain_row(tokenizer: Any, row: Text, name: str) -> tuple[list[int], int]:
    """Ids of prompt, response and EOS, tokenized as one text, and how many of them are the prompt's."""
    ids = plain_ids(tokenizer, row["prompt"] + row[name] + tokenizer.eos_token)
    prompt = plain_ids(tokenizer, row["prompt"])
    assert ids[: len(prompt)] == prompt
    return ids, len(prompt)


@torch.no_grad()
def plain_logprobs(model: Any, ids: Sequence[int], prompt: int, tokenizer: Any) -> Tensor:
    """Log-probs of the response by the model's own logits, over the ids of the tokenizer."""
    logits = model(torch.tensor([ids])).logits[0, :-1]
    missing = sorted({*range(logits.shape[-1])} - {*tokenizer.get_vocab().values()})
    logits[:, missing] = -torch.inf
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[prompt - 1 :, 0]


@torch.no_grad()
def plain_score(model: Any, ids: Sequence[int]) -> float:
    """The classifier's own number for a text."""
    return float(model(torch.tensor([ids])).logits[0, 0])


def examples_of(folder: Path, rows: Sequence[Text]) -> tuple[Any, list[Any], list[Any]]:
    """The tokenizer of a saved folder, and step 1's and step 2's examples of rows."""
    from dschat.data.examples import pair_examples, sft_examples
    from dschat.data.rows import Row
    from dschat.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder), "--m")
    data = [Row(row["prompt"], None, row["chosen"], row["rejected"], {}, "rows") for row in rows]
    eos = tokenizer.eos_token_id
    return tokenizer, sft_examples(data, tokenizer, LENGTH, eos)[0], pair_examples(data, tokenizer, LENGTH, eos)[0]


@torch.no_grad()
def check_policy(folder: Path, rows: Sequence[Text]) -> None:
    """A saved policy as PolicyModel reads it, in a padded batch, against plain transformers, row by row."""
    from dschat.data.collate import collate_sft
    from dschat.models.load import load_causal_lm
    from dschat.models.policy import PolicyModel

    tokenizer, examples, _ = examples_of(folder, rows)
    policy = PolicyModel(load_causal_lm(str(folder), "--m", torch.float32, tokenizer)).eval()
    batch = collate_sft(examples, tokenizer.pad_token_id)
    found, _ = policy(batch["input_ids"], batch["attention_mask"], batch["response_mask"].shape[1])
    model, plain = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for row, example, own in zip(rows, examples, found, strict=True):
        ids, prompt = plain_row(plain, row, "chosen")
        assert [*example.prompt_ids, *example.response_ids] == ids
        expected = plain_logprobs(model, ids, prompt, plain)
        assert float(expected.std()) > 0.1
        assert_near(own[: len(expected)], expected)


@torch.no_grad()
def check_scalar(folder: Path, rows: Sequence[Text]) -> None:
    """A saved reward model or critic as ScalarModel reads it, against plain transformers.

    The score of a pair's texts is the number at their ends; values: models/test_outputs.py.
    """
    from dschat.data.collate import collate_pairs
    from dschat.models.classifiers import load_trained_scalar
    from dschat.models.scalar import ScalarModel, last_scores

    tokenizer, _, pairs = examples_of(folder, rows)
    loaded = load_trained_scalar(str(folder), "--m", torch.float32, tokenizer)
    scalar = ScalarModel(loaded).eval()
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    plain = AutoTokenizer.from_pretrained(folder)
    batch = collate_pairs(pairs, tokenizer.pad_token_id)
    scores = last_scores(scalar(batch["input_ids"], batch["attention_mask"]), batch["attention_mask"])
    texts = [plain_row(plain, row, name) for name in ("chosen", "rejected") for row in rows]
    expected = torch.tensor([plain_score(model, ids) for ids, _ in texts])
    assert float(expected.std()) > 1e-3
    assert_near(scores, expected)


def check_bos(family: str, chain: Chain) -> None:
    """The tokenizer that is saved puts BOS before a text as the family's own does; no prompt gets two."""
    for folder in (chain.base, chain.sft, chain.reward, chain.ppo / "actor", chain.ppo / "critic"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        bos, ids = tokenizer.bos_token_id, tokenizer("a book").input_ids
        assert (bos is not None and ids[0] == bos) == MODEL_FAMILIES[family].puts_bos, folder
    tokenizer, examples, _ = examples_of(chain.sft, chain.held_out)
    counts = [example.prompt_ids.count(tokenizer.bos_token_id) for example in examples]
    first, others = tokenizer.bos_token is not None, MODEL_FAMILIES[family].puts_bos
    assert counts == [int(first), *[int(others)] * (HELD_OUT - 1)]


@pytest.mark.parametrize(
    "family", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODEL_FAMILIES]
)
def test_a_family_in_all_steps(family, run, texts, tmp_path):
    chain = run_chain(family, texts, run, tmp_path)
    check_bos(family, chain)
    for folder in (chain.sft, chain.ppo / "actor"):
        assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == family
        check_policy(folder, chain.held_out)
    for folder in (chain.reward, chain.ppo / "critic"):
        check_scalar(folder, chain.held_out)


@pytest.mark.slow
def test_a_family_without_classifiers_trains_on_a_reward_function(run, functions, texts, tmp_path):
    """Step 1 says so, step 2 refuses it, step 3 makes a critic of it."""
    base = WITHOUT_CLASSIFIER.save(tmp_path / "base", [text["prompt"] for text in texts])
    rows = rows_for(AutoTokenizer.from_pretrained(base), texts[: TRAIN + HELD_OUT])
    write_jsonl(tmp_path / "data" / "train.jsonl", rows[:TRAIN])
    write_jsonl(tmp_path / "data" / "eval.jsonl", rows[TRAIN:])
    sft, common = tmp_path / "sft", {"data_path": tmp_path / "data"}
    one = run("sft", common | SUPERVISED | {"data_split": "1,0,0", "model_name_or_path": base, "output_dir": sft})
    assert "no sequence classifier of the family granite" in one.expect(0).stderr
    two = run("reward", common | SUPERVISED | {"data_split": "0,1,0", "model_name_or_path": sft})
    message_of(two, f"--model_name_or_path {sft}", "granite", "--reward_function")
    models = {"actor_model_name_or_path": sft, "reward_function": f"{functions}:length"}
    run("ppo", common | PPO | models | {"data_split": "0,0,1", "output_dir": tmp_path / "ppo"}).expect(0)
    assert len(training_rows(tmp_path / "ppo")) == 2
    for folder in (sft, tmp_path / "ppo" / "actor"):
        check_policy(folder, rows[TRAIN:])
