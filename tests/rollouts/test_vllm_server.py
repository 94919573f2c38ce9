# SPDX-License-Identifier: Apache-2.0
"""Sampling by a vLLM server of two processes that share the model. `make test-vllm` runs these."""

from importlib.util import find_spec

import pytest

from closeness import EPS, FORWARD
from dschat.rollouts.vllm_server import ServerNeeds, VllmServers
from factories import engine_of, make_tokenizer, sampling_of, save_folder
from vllm_cases import PROMPTS, SEEDS, causal_lm_of, largest_gap, one_update, serving

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")]

NEEDS = ServerNeeds(vocabulary=100, max_tokens=32, temperature=0.7, patience=120)
TOKEN = "a secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    causal_lm = causal_lm_of("gemma")
    save_folder(folder / "model", causal_lm, make_tokenizer(100))
    with serving(str(folder / "model"), folder, tensor_parallel=2, token=TOKEN) as server:
        yield server


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)


@pytest.fixture
def actor(group):
    actor = engine_of(causal_lm_of("gemma"), learning_rate=0.01)
    actor.eval()
    return actor


def test_log_probs_are_the_models_own_after_every_update(server, actor, token):
    """And the same seeds draw the same tokens from the same weights, whoever else is drawn for."""
    engine = VllmServers([server.url], NEEDS)
    for _ in range(2):
        with engine.session(actor) as draw:
            drawn = draw(PROMPTS, sampling_of(12, temperature=0.7), SEEDS)
            alone = draw(PROMPTS[2:3], sampling_of(12, temperature=0.7), SEEDS[2:3])
        assert largest_gap(actor, PROMPTS, drawn, 0.7) < FORWARD * EPS
        assert alone.rollout.response_rows() == drawn.rollout.response_rows()[2:3]
        one_update(actor)
