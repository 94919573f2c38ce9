# SPDX-License-Identifier: Apache-2.0
"""A judge beside a teacher, on a real server of vLLM. `make test-vllm` runs this."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec

import pytest
import torch

from closeness import assert_near
from dschat.base.chat_servers import Endpoint
from dschat.base.reply_cache import ReplyCache
from dschat.judge.client import JudgeClient
from dschat.judge.costs import Prices, Spending
from dschat.judge.rubrics import Rubric
from dschat.judge.scores import JudgeScores, JudgeSettings
from factories import batch_of_iteration, make_causal_lm, make_prompts, ppo_config, ppo_loop
from launches import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")]

READY_WITHIN = 300  # seconds
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
POINTS = Rubric("Grade it.", criteria={"brevity": "Short?", "truth": "True?"}, weights={"brevity": 1, "truth": 3})


def save_judge(folder):
    """A GPT-2 whose next-token logits are the same everywhere: a quotation mark first, then 7, then 2, then 1.

    The schema of the answer forces the rest, so that the answer is {"reason":"","brevity":7,"truth":7}. Without a
    schema, about one sampled token in eight is EOS.
    """
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from dschat.models.tiny import make_model

    make_model(folder, ["a judge grades the first text and the second one."])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "n_positions": 4096, "n_embd": 64, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends))
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.zero_()
        model.transformer.ln_f.bias[0] = 1.0
        model.transformer.wte.weight[:, 0] = 0.0
        for preference, text in enumerate('127"'):
            (token,) = tokenizer.encode(text, add_special_tokens=False)
            model.transformer.wte.weight[token, 0] = 5.0 + preference
        model.transformer.wte.weight[tokenizer.eos_token_id, 0] = 6.5
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Address of a server of `vllm serve` with the judge."""
    folder = tmp_path_factory.mktemp("judge")
    save_judge(folder / "model")
    port = free_port()
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", folder / "model", "--served-model-name", "judge"]
    words += ["--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--max-model-len", "4096"]
    words += ["--enforce-eager", "--max-num-seqs", "4"]
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("w") as log:
        command = [sys.executable, *map(str, words)]
        server = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, folder / "log.txt")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_for(address, server, log):
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + READY_WITHIN
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with direct.open(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def judge_of(url, folder, rubric, spending=None):
    endpoint = Endpoint("judge", url, 60, 120.0, 2, "none")
    cache = ReplyCache(folder / "cache")
    client = JudgeClient(endpoint, cache, spending or Spending(None))
    return JudgeScores(client, JudgeSettings(rubric, 4, 60.0, False))


def loop_of(folder, judge, **flags):
    options = {"teacher_model_name_or_path": "unused", "kl_coef": 0.0, "max_answer_seq_len": 4} | flags
    config = ppo_config(folder, **options)
    return ppo_loop(config, judge, make_prompts(8), teacher=make_causal_lm(seed=3))


def test_points_of_a_real_server_beside_a_teacher(url, group, tmp_path):
    """7 points on each criterion are .7; the server counts its tokens; a second rollout asks nothing."""
    spending = Spending(Prices(1.0, 1.0))
    loop = loop_of(tmp_path / "out", judge_of(url, tmp_path, POINTS, spending))
    batch = batch_of_iteration(loop, [list(range(8))])
    assert_near(batch.trajectory.scores, [0.7] * 8)
    assert 1 <= spending.requests <= 8 and spending.lost == 0 and spending.cost > 0
    again = judge_of(url, tmp_path, POINTS, asked := Spending(None))
    repeated = batch_of_iteration(loop_of(tmp_path / "again", again), [list(range(8))])
    assert torch.equal(repeated.trajectory.scores, batch.trajectory.scores) and asked.requests == 0
    plain = batch.advantages - batch.trajectory.teacher_log_ratios
    assert batch.trajectory.teacher_log_ratios.any() and plain.isfinite().all()
