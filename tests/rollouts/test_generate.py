# SPDX-License-Identifier: Apache-2.0
"""Which engine a run draws with; transformers' generate draws what the flags say, whatever a checkpoint holds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from dschat.rollouts.continuous import ContinuousEngine
from dschat.rollouts.generate import GenerateEngine, generate
from dschat.training.steps import ppo as builders
from factories import BOS, EOS, PAD, favouring, make_causal_lm, ppo_config, random_ids, same_rollout, sampling_of

LEAKS = {"top_p": 0.3, "repetition_penalty": 5.0, "min_new_tokens": 7, "eos_token_id": list(range(3, 60))}


@pytest.mark.parametrize("leak", LEAKS)
def test_the_checkpoints_generation_config_does_not_leak(leak: str) -> None:
    causal_lm, prompts = favouring([EOS], bias=2.0), [random_ids(3 + row, row) for row in range(4)]
    sampling = sampling_of(8, temperature=0.8)
    clean = generate(causal_lm, prompts, sampling, range(4), 4).rollout
    causal_lm.generation_config = GenerationConfig(**{"do_sample": True, leak: LEAKS[leak]})
    saved = causal_lm.generation_config
    assert same_rollout(generate(causal_lm, prompts, sampling, range(4), 4).rollout, clean)
    assert causal_lm.generation_config is saved


def test_the_settings_reach_transformers() -> None:
    config = sampling_of(8, temperature=0.7, top_k=5, top_p=0.8).generation_config()
    assert (config.temperature, config.top_k, config.top_p, config.suppress_tokens) == (0.7, 5, 0.8, [PAD, BOS])


def test_logits_that_are_not_finite_are_noted_and_hurt_no_other_row() -> None:
    """Token 50, which ends a response, has an embedding that is not a number; one prompt holds it."""
    causal_lm, prompts = make_causal_lm("llama", initializer_range=0.1), [[5, 6, 7, 8], [5, 50, 7], [8, 9]]
    sampling = sampling_of(6, end_ids=(EOS, 50), temperature=0.0)
    clean = generate(causal_lm, prompts, sampling, range(3), 3)
    with torch.no_grad():
        causal_lm.get_input_embeddings().weight[50] = torch.nan
    drawn = generate(causal_lm, prompts, sampling, range(3), 3)
    assert not bool(clean.bad_rows.any()) and drawn.bad_rows.tolist() == [False, True, False]
    before, after = clean.rollout.response_rows(), drawn.rollout.response_rows()
    assert [before[0], before[2]] == [after[0], after[2]]


def engine_of(folder: Any, causal_lm: Any, **flags: Any) -> Any:
    """The engine of a run with rollouts of 3 x 2 prompts."""
    sizes = {"per_device_generation_batch_size": 3, "generation_batches": 2, "per_device_training_batch_size": 6}
    actor: Any = SimpleNamespace(module=SimpleNamespace(inner=causal_lm))
    return builders._rollout_engine(ppo_config(folder, **sizes, **flags), actor, None)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, ContinuousEngine),
        ({"decode_graphs": "on"}, ContinuousEngine),
        ({"rollout_engine": "generate"}, GenerateEngine),
    ],
)
def test_the_flag_chooses_the_engine_and_the_generation_batch_is_what_lives_at_once(
    flags: dict[str, str], kind: type, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    causal_lm, rows = make_causal_lm(), []
    engine = engine_of(tmp_path, causal_lm, **flags)
    assert isinstance(engine, kind) and not caplog.text
    causal_lm.register_forward_pre_hook(lambda *call: rows.append(len(call[2]["input_ids"])), with_kwargs=True)
    engine.sampler_for(causal_lm)([[5, 6]] * 6, sampling_of(4), range(6))
    assert ("decode_graphs" in flags) == (getattr(engine, "_decoder", None) is not None)
    assert max(rows) == 3


def test_a_model_that_the_loop_does_not_know_is_sampled_by_generate_and_said(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.MambaConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, pad_token_id=PAD)
    assert isinstance(engine_of(tmp_path, transformers.MambaForCausalLM(config)), GenerateEngine)
    assert "--rollout_engine continuous" in caplog.text and "models of type mamba" in caplog.text


@pytest.mark.parametrize(("flags", "count"), [({}, 512), ({"eval_prompts": 7}, 7), ({"eval_iters": 3}, 24)])
def test_prompts_of_an_evaluation(flags: dict[str, int], count: int, tmp_path: Any) -> None:
    config = ppo_config(tmp_path, per_device_eval_batch_size=8, **flags)
    assert config.num_eval_prompts == count
