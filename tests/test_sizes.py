# SPDX-License-Identifier: Apache-2.0
"""Every constant at which the code goes another way because something is large, crossed from both sides.

Small models and data stay below all of them, real ones above; what comes out must be the same on either side. The
limits of DeepSpeed are crossed by every test of ZeRO 3, see `real_size`.
"""

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from cli_runs import read_jsonl, write_jsonl
from closeness import near
from dialogue_cases import chat_tokenizer
from dschat.data import tokenised
from dschat.data.encoding import encode_prompts, encode_responses
from dschat.data.examples import PromptExample, prompt_examples
from dschat.data.rows import Row
from dschat.data.tokenised import encode_rows, num_workers, workers_for
from dschat.models.layout import PassSize, group_by_length
from dschat.refuel.data_options import RankOptions
from dschat.refuel.generate import first_messages
from dschat.refuel.rank import run_rank
from dschat.rollouts import scheduler, slots
from dschat.rollouts.continuous import sample
from dschat.rollouts.sampling import inverse_cdf
from dschat.training import nonfinite
from factories import make_causal_lm, make_tokenizer, random_ids, run_of, sampling_of
from macro_actions.logprobs import Head, chunk_positions, token_logprobs
from refuel_cases import row
from resume_runs import ppo_config

VOCABULARY, POSITIONS, ROWS = 100, 40, 9


def softmax_of_positions(folder: Path) -> list[Any]:
    """Log-probs, entropies and gradients of 40 positions."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).requires_grad_() for n in (POSITIONS, VOCABULARY))
    head = Head(lambda states: linear(states, weight), [weight], VOCABULARY)
    logprobs, entropy = token_logprobs(hidden, torch.tensor(random_ids(POSITIONS, 0)), head)
    (logprobs * torch.randn(POSITIONS, generator=generator)).sum().backward()
    return [x.detach().tolist() for x in (logprobs, entropy, hidden.grad, weight.grad)]


def drawn_ids(folder: Path) -> list[int]:
    logits = torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(1))
    return inverse_cdf(logits, torch.linspace(0, 0.999, 50, dtype=torch.float64))[0].tolist()


def responses(folder: Path) -> list[list[int]]:
    """Of nine prompts in six slots, over prompts and responses longer than a sliding window of 8."""
    prompts = [random_ids(2 + (5 * i) % 11, i) for i in range(ROWS)]
    return sample(make_causal_lm("gemma2"), prompts, sampling_of(24), range(ROWS), 6).rollout.response_rows()


def groups(folder: Path) -> list[Any]:
    """Every row once, in as few groups as can be, none of them above the longest rows' size."""
    lengths = np.random.RandomState(0).randint(1, 30, POSITIONS)
    found, by_tokens = group_by_length(lengths, PassSize(4)), group_by_length(lengths, PassSize(4, 100))
    largest, of_tokens = (max(len(rows) * lengths[rows].max() for rows in cut) for cut in (found, by_tokens))
    every = [sorted(np.concatenate(cut).tolist()) for cut in (found, by_tokens)]
    return [every, len(found), bool(largest <= 4 * lengths.max()), bool(of_tokens <= 100)]


def prompt_rows() -> list[Row]:
    return [Row("the cat sat " * (i % 4) + "mat", None, None, None, {}, f"rows:{i}") for i in range(ROWS)]


def encoded_texts(folder: Path) -> list[Any]:
    tokenizer = make_tokenizer()
    return [encode_prompts(tokenizer, prompt_rows()), encode_responses(tokenizer, [r.prompt for r in prompt_rows()])]


def batches_of_rows(folder: Path) -> list[Any]:
    make = partial(prompt_examples, tokenizer=make_tokenizer(), max_prompt_seq_len=5)
    examples, dropped = encode_rows(PromptExample, make, prompt_rows(), "tokenising", folder / "examples.arrow")
    return [*examples, dropped]


def messages_of_prompts(folder: Path) -> Any:
    file = write_jsonl(folder / "prompts.jsonl", [{"prompt": f"question {i % 7}"} for i in range(ROWS)])
    return first_messages(str(file), chat_tokenizer("llama-3"), 0)


def ranked_dialogues(folder: Path) -> Any:
    (folder / "own.py").write_text("def score(dialogues, rows):\n    return [float(len(str(d))) for d in dialogues]\n")
    unscored = {name: value for name, value in row(turn=1, last=2).items() if not name.endswith("_reward")}
    write_jsonl(folder / "dialogues" / "train.jsonl", [unscored] * ROWS)
    place = {"prompts": str(folder / "dialogues"), "output_repo": str(folder / "ranked")}
    run_rank(RankOptions(**place, reward_function=f"{folder / 'own.py'}:score"))
    return read_jsonl(folder / "ranked" / "train.jsonl")


# The constant; a value that the work crosses; how much the work is, in the constant's unit; the work.
CROSSED: dict[str, tuple[int, int, Callable[[Path], Any]]] = {
    "macro_actions.logprobs.CPU_LOGITS": (7 * VOCABULARY, POSITIONS * VOCABULARY, softmax_of_positions),
    "macro_actions.logprobs.BLOCK": (3 * VOCABULARY, POSITIONS * VOCABULARY, softmax_of_positions),
    "rollouts.sampling.BLOCK": (7, VOCABULARY, drawn_ids),
    "rollouts.scheduler.DROP_SHARE": (2, 6, responses),
    "rollouts.scheduler.SPARE_COLUMNS": (1, 24, responses),
    "models.layout.SEARCHED": (8, POSITIONS, groups),
    "data.encoding.CHUNK": (2, ROWS, encoded_texts),
    "data.tokenised.BATCH": (2, ROWS, batches_of_rows),
    "refuel.generate.CHUNK": (2, ROWS, messages_of_prompts),
    "refuel.rank.AT_ONCE": (2, ROWS, ranked_dialogues),
}
# Others, and the tests that cross them:
# refuel.rank.CHUNK: refuel/test_masks.py::test_the_same_command_again_writes_the_same_and_another_is_refused
# macro_actions.logprobs.GPU_LOGITS: test_sizes.py::test_chunks_of_a_gpu
# macro_actions.logprobs.GPU_POSITIONS: test_sizes.py::test_chunks_of_a_gpu
# rollouts.scheduler.SYNC_INTERVAL: test_sizes.py::test_what_only_cuda_does_runs_on_a_cpu
# models.layout.PREFILL_TOKENS: rollouts/test_static.py::test_prompts_are_read_in_groups_of_so_many_tokens
# models.layout.COLUMN_STEP: rollouts/test_compacting.py::test_every_family_is_drawn_as_by_hand
# rollouts.static.ROW_STEP: rollouts/test_static.py::test_buckets
# rollouts.slots.ALIGNED_DEVICES: test_sizes.py::test_what_only_cuda_does_runs_on_a_cpu
# models.save.FILE_SIZE: models/test_save.py::test_a_large_model_lies_in_several_files
# data.tokenised.FEW: test_sizes.py::test_many_characters_are_encoded_by_several_processes
# scoring.serve.MAX_REQUEST_BYTES: scoring/test_serve.py::test_what_is_no_request_is_refused
# training.nonfinite.MAX_WRITTEN: test_sizes.py::test_batches_that_are_kept
# plan.states.REDUCE_BUCKET: plan/test_arithmetic.py::test_what_zero_holds_for_a_while
# plan.states.LIVE_PARAMETERS: plan/test_arithmetic.py::test_what_zero_holds_for_a_while
# plan.states.SUB_GROUP: plan/test_arithmetic.py::test_the_optimisers_own_memory


def module_of(name: str) -> tuple[Any, str]:
    module, _, constant = name.rpartition(".")
    return import_module(module if module.startswith("macro_actions.") else f"dschat.{module}"), constant


def nearly(found: Any, expected: Any) -> bool:
    """Whether nested lists are equal, numbers up to the rounding of float32 sums in another order."""
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(nearly, found, expected))
    return found == (near(expected, scale=0.1) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("name", CROSSED)
def test_the_result_is_the_same_on_both_sides(name, tmp_path, monkeypatch):
    below, size, work = CROSSED[name]
    module, constant = module_of(name)
    assert below < size <= getattr(module, constant), "the work crosses the constant, or it does not"
    (tmp_path / "above").mkdir()
    (tmp_path / "below").mkdir()
    expected = work(tmp_path / "above")
    monkeypatch.setattr(module, constant, below)
    assert nearly(work(tmp_path / "below"), expected) and expected


def test_chunks_of_a_gpu():
    """1 GiB of float32 logits: 1,048 positions of Gemma's 256,000 ids; never fewer than 512 positions."""
    gpu = torch.device("cuda")
    assert chunk_positions(256_000, gpu) == 2**28 // 256_000 == 1048
    assert chunk_positions(600_000, gpu) == 512


@pytest.mark.parametrize("steps", [3, 8])
def test_what_only_cuda_does_runs_on_a_cpu(steps, monkeypatch):
    """The host asks only now and then which rows have ended; masks are copied to where kernels can read them."""
    expected = responses(Path())
    assert scheduler.SYNC_INTERVAL == {"cuda": 8} and slots.ALIGNED_DEVICES == {"cuda"}
    monkeypatch.setattr(scheduler, "SYNC_INTERVAL", {"cpu": steps})
    monkeypatch.setattr(slots, "ALIGNED_DEVICES", {"cpu"})
    assert responses(Path()) == expected


@pytest.mark.parametrize("characters", [99, 100])
def test_many_characters_are_encoded_by_several_processes(characters, monkeypatch):
    monkeypatch.setattr(tokenised, "FEW", 100)
    monkeypatch.setattr(tokenised, "num_workers", lambda: 5)
    rows = [Row("a" * 50, None, "b" * (characters - 50), None, {}, "rows:1")]
    assert num_workers() >= 1 and workers_for(rows) == (5 if characters == 100 else None)


def test_batches_that_are_kept(group, tmp_path, monkeypatch):
    """Of updates that are left out, the first are written down."""
    kept = nonfinite.NonFinite("skip", run_of("ppo", ppo_config(tmp_path)))
    spoilt = [nonfinite.BadRows("values", torch.tensor([False, True]))]
    monkeypatch.setattr(nonfinite, "MAX_WRITTEN", 2)
    for update in range(4):
        assert kept.check_rows(spoilt, update, lambda: {"values": torch.tensor([0.0, math.nan])})
        assert len(list((tmp_path / nonfinite.FOLDER).glob("*.json"))) == min(update + 1, 2)
