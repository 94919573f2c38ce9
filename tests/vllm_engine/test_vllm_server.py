# SPDX-License-Identifier: Apache-2.0
"""Sampling by a vLLM server of two processes that share the model. `make test-vllm` runs these."""

import threading
import time
from importlib.util import find_spec

import httpx2
import pytest
import torch

from cli_runs import read_jsonl
from closeness import EPS, FORWARD
from dschat.base.errors import UserError
from dschat.vllm.servers import ServerNeeds, VllmServers
from factories import engine_of, make_prompts, make_tokenizer, ppo_config, ppo_loop, sampling_of, save_folder
from launches import WORKERS, launch
from vllm_cases import LONG_TOKENS, PROMPTS, SEEDS, causal_lm_of, largest_gap, one_update, serving

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")]

NEEDS = ServerNeeds(vocabulary=100, max_tokens=32, temperature=0.7)
TOKEN = "a secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    causal_lm = causal_lm_of("gemma", max_position_embeddings=LONG_TOKENS)
    save_folder(folder / "model", causal_lm, make_tokenizer(100))
    with serving(str(folder / "model"), folder, tensor_parallel=2, token=TOKEN, max_tokens=LONG_TOKENS) as server:
        yield server


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)


@pytest.fixture
def actor(group):
    actor = engine_of(causal_lm_of("gemma", max_position_embeddings=LONG_TOKENS), learning_rate=0.01)
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


def test_nobody_gets_in_without_the_token(server):
    """Neither to draw, nor to the weights; vLLM itself would leave these open."""
    for path in ("/run", "/update_weights", "/collective_rpc", "/pause", "/v1/models", "/inference/v1/generate"):
        assert httpx2.post(server.url + path, json={}).status_code == 401
    assert httpx2.get(server.url + "/health").status_code == 200


def test_weights_that_do_not_fit_are_refused(server, group, token):
    """What the server's log says reaches the run; the next run is not in its way."""
    other = engine_of(causal_lm_of("gemma", intermediate_size=48))
    with pytest.raises(UserError, match="it refuses, 500: .*collective_rpc"):
        VllmServers([server.url], NEEDS).session(other).__enter__()
    actor = engine_of(causal_lm_of("gemma"))
    with VllmServers([server.url], NEEDS).session(actor) as draw:
        assert largest_gap(actor, PROMPTS, draw(PROMPTS, sampling_of(4, temperature=0.7), SEEDS), 0.7) < FORWARD * EPS


def test_a_run_that_died_goes_on_exactly(server, group, token, tmp_path):
    """From its last checkpoint; the weights that drew ahead what it holds are nowhere any more."""

    def loop(place, dies_at=None, **flags):
        def reward(prompts, responses, rows):
            calls.append(len(responses))
            assert len(calls) != dies_at, "it dies"
            return torch.tensor([response.count("a") / max(len(response), 1) for response in responses])

        calls = []
        config = ppo_config(
            tmp_path / place,
            rollout_engine="vllm",
            vllm_url=[server.url],
            rollouts_ahead=1,
            temperature=0.7,
            num_train_epochs=2,
            save_steps=1,
            actor_learning_rate=1e-2,
            **flags,
        )
        torch.manual_seed(0)
        models = {name: causal_lm_of("gemma") for name in ("actor", "reference")}
        return ppo_loop(config, reward, make_prompts(16), (), rollouts=VllmServers([server.url], NEEDS), **models)

    loop("whole").fit()
    with pytest.raises(Exception, match="it dies"):
        loop("died", dies_at=3).fit()
    loop("died", resume_from_checkpoint="latest").fit()
    whole, died = (metrics_of(tmp_path, run) for run in ("whole", "died"))
    assert [row["update"] for row in whole] == [1, 2, 3, 4] and died == whole
    assert [row["rollout/staleness"] for row in whole] == [0, 1, 1, 1]


def metrics_of(folder, run):
    rows = read_jsonl(folder / run / "metrics.jsonl")
    drop = ("seconds", "time/")
    return [{name: x for name, x in row.items() if not name.startswith(drop)} for row in rows]


@pytest.mark.slow
def test_two_processes_train_beside_a_server(tmp_path):
    """Ten updates at ZeRO 3 are those with an engine in each process; also where the server is killed in the middle:
    the run ends with a checkpoint, and goes on from it once the server is there again."""
    save_folder(tmp_path / "model", causal_lm_of("llama", initializer_range=0.05), make_tokenizer(100))
    with serving(str(tmp_path / "model"), tmp_path, tensor_parallel=2) as server:
        (tmp_path / "url").write_text(server.url)
        launch(WORKERS, [tmp_path, "vllm_served"], timeout=900).expect(0)

        def kill():
            while not all((tmp_path / f"fifth-{rank}").exists() for rank in (0, 1)):
                time.sleep(0.1)
            server.kill()
            (tmp_path / "killed").touch()

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        launch(WORKERS, [tmp_path, "vllm_lost"], timeout=900).expect(0)
        server.start()
        server.wait()
        launch(WORKERS, [tmp_path, "vllm_lost"], timeout=900).expect(0)
    inside, served, lost = (metrics_of(tmp_path, run) for run in ("inside", "served", "lost"))
    assert len(inside) == 10 and lost == served
    for one, other in zip(inside, served, strict=True):
        assert one.keys() == other.keys()
        for name, number in one.items():
            assert other[name] == pytest.approx(number, rel=1e-4, abs=1e-4), name
