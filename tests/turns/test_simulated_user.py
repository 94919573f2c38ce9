# SPDX-License-Identifier: Apache-2.0
"""A simulated user as the environment of step 3: who says what, what is asked of a server, failures, resume."""

from contextlib import closing
from functools import partial

import pytest
import torch

from dschat.base.chat_servers import Endpoint
from dschat.base.errors import UserError
from dschat.base.reply_cache import Reply, ReplyCache
from dschat.data.rows import Row
from dschat.settings.rewards import SIMULATED_USER
from dschat.turns.environment import StepResult
from dschat.turns.environments import EnvironmentPool
from dschat.turns.simulated_user import SERVER, UserSettings, prompt_columns
from dschat.turns.step3 import build_user_settings
from dschat.turns.users import has_message, simulator_prompt
from factories import collected, ppo_config
from fake_judge import judge_server
from resume_runs import result_of
from turn_cases import episode_loop, write_environments

USERS = """
def ask(dialogues):
    (dialogue,) = dialogues
    return ["" if "enough" in dialogue[-1]["content"] else f"fox {len(dialogue)}"]
"""
OPENING = [{"role": "user", "content": "a cat"}]
SYSTEM = {"role": "system", "content": "Be kind."}
REPLY = {"role": "assistant", "content": "the mat"}


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("USER_API_KEY", raising=False)


@pytest.fixture
def function(tmp_path):
    (tmp_path / "users.py").write_text(USERS)
    return f"{tmp_path / 'users.py'}:ask"


@pytest.fixture
def server():
    with judge_server() as judge:
        judge.answer = lambda messages: f"so it is. Question: fox {messages[-1]['content'].count('### assistant')}"
        yield judge


def pool_of(settings):
    return closing(EnvironmentPool(SIMULATED_USER, 60.0, 8, settings))


def served(server, folder, tries=1):
    endpoint = Endpoint("m", server.url, 20, 60.0, tries, flags=SERVER)
    return UserSettings(3, "", endpoint, 0.5, str(folder / "cache"))


# -- who says what


def test_a_function_answers_until_the_last_turn(function):
    """The last reply of a dialogue is not answered, and an empty message ends it earlier. No reply has a reward."""
    with pool_of(UserSettings(3, function=function)) as pool, pool.episodes(1) as processes:
        assert pool.call(processes, [("reset", {"messages": OPENING}, 0)]) == [OPENING]
        messages = list(OPENING)
        for expected in ([{"role": "user", "content": "fox 2"}], [{"role": "user", "content": "fox 4"}], []):
            (result,) = pool.call(processes, [("step", messages, "the mat")])
            assert result == StepResult(expected, 0.0, not expected)
            messages += [REPLY, *expected]
    with pool_of(UserSettings(3, function=function)) as pool, pool.episodes(1) as processes:
        pool.call(processes, [("reset", {"messages": OPENING}, 0)])
        assert pool.call(processes, [("step", OPENING, "enough")]) == [StepResult([], 0.0, True)]


def test_a_servers_key_is_checked_and_warned_of_once(tmp_path, monkeypatch, caplog, capfd):
    """Before any model is loaded, by the environments' process, whose log is standard error."""
    flags = {"environment": SIMULATED_USER, "user_server": "http://users.example/v1", "user_model": "m"}
    settings = build_user_settings(ppo_config(tmp_path, **flags))
    with pytest.raises(UserError, match="--environment simulated_user: no key for http:.*: set .* USER_API_KEY"):
        pool_of(settings)
    monkeypatch.setenv("USER_API_KEY", "secret")
    with pool_of(build_user_settings(ppo_config(tmp_path, **flags))):
        assert f"{caplog.text}{capfd.readouterr().err}".count("http://users.example/v1 is not encrypted") == 1


def test_a_server_is_asked_with_the_seed_of_the_row(server, tmp_path):
    """Dialogues of one row have one seed; equal ones have the same answer, also in a later run."""
    settings = served(server, tmp_path)
    for _ in range(2):
        with pool_of(settings) as pool, pool.episodes(3) as processes:
            pool.call(processes, [("reset", {"messages": OPENING}, seed) for seed in (7, 7, 8)])
            results = pool.call(processes, [("step", OPENING, "the mat")] * 3)
            assert results == [StepResult([{"role": "user", "content": "fox 1"}], 0.0, False)] * 3
    assert sorted({body["seed"] for body in server.bodies}) == [7, 8]
    assert len(server.bodies) <= 3  # two at once may both be sent
    body = server.bodies[0]
    assert body["messages"] == [{"role": "user", "content": simulator_prompt([*OPENING, REPLY])}]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 20, 0.5)


def test_the_first_answer_to_a_question_stays(tmp_path):
    """Two processes that have asked the same go on with one answer."""
    first, second = Reply("Question: a", "", "m"), Reply("Question: b", "", "m")
    cache = ReplyCache(tmp_path)
    assert cache.put("ab" * 32, first, has_message) == first
    assert cache.put("ab" * 32, second, has_message) == cache.get("ab" * 32, has_message) == first
    empty = Reply("", "", "m")
    assert cache.put("cd" * 32, empty, has_message) == empty and cache.get("cd" * 32, has_message) is None
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.suffix == ".json"
    file.write_text("{")  # a damaged one is replaced, once
    assert cache.put("ab" * 32, second, has_message) == second
    assert cache.put("ab" * 32, first, has_message) == cache.get("ab" * 32, has_message) == second


@pytest.mark.parametrize(
    ("prompt", "messages", "expected"),
    [
        ("a cat", None, OPENING),
        (None, [SYSTEM, *OPENING], [SYSTEM, *OPENING]),
        (
            "\n\nHuman: a cat\n\nAssistant: the mat\n\nHuman: why\n\nAssistant:",
            None,
            [*OPENING, REPLY, {"role": "user", "content": "why"}],
        ),
    ],
)
def test_a_dialogue_begins_with_the_prompt_of_its_row(prompt, messages, expected):
    row = Row(prompt, messages, None, None, {"messages": "another column"}, "rows.jsonl:1")
    assert prompt_columns(row) == {"messages": expected}


# -- training


@pytest.fixture
def flags(server, tmp_path):
    """Episodes of three turns with the user on the server; a function scores them by their messages."""
    return {
        "environment": SIMULATED_USER,
        "user_server": server.url,
        "user_model": "m",
        "reward_function": [f"{write_environments(tmp_path)}:messages_of"],
        "max_turns": 3,
        "max_answer_seq_len": 64,
        "termination_condition": "turn",
    }


def test_a_user_that_fails_is_left_out_and_counted(flags, server, group, tmp_path):
    server.fail_on("zebra", (400, {"error": {"message": "no zebras"}}, {}))
    loop = episode_loop(tmp_path / "stops", **flags)
    with pytest.raises(UserError, match="it refuses the request: .*no zebras.*--on_reward_error skip"):
        collected(loop, [list(range(8))])
    loop = episode_loop(tmp_path / "skips", **(flags | {"on_reward_error": "skip"}))
    iteration = collected(loop, [list(range(8))])
    batch = iteration.batch
    is_trained = batch.scored.response_mask.any(1)
    assert is_trained.tolist() == [number != 4 for number in range(8)]  # the row of the zebra
    # The score of a dialogue is the reward function's: a message of both sides for each turn, none after the last.
    turns = torch.tensor([len(runs) for runs in batch.rollout.response_runs()])
    assert int(turns.max()) == 3
    assert torch.equal(batch.scored.scores[is_trained], 2.0 * turns[is_trained])
    assert not batch.scored.segment_rewards.any()
    assert iteration.metrics["objective/unscored"] == pytest.approx(1 / 8)


def test_a_resumed_run_gets_the_answers_of_the_first(flags, server, group, tmp_path):
    """From its first checkpoint on, byte for byte, although the server never answers a question alike."""
    numbers = iter(range(10**6))
    server.answer = lambda messages: f"Question: fox {next(numbers) % 7}"
    place = tmp_path / "out"
    make = partial(episode_loop, place, save_steps=1, save_total_limit=0, **flags)
    weights, metrics, _ = result_of(make(), place)
    asked = len(server.bodies)
    (first, *later) = sorted((place / "checkpoints").iterdir())
    assert later
    again, metrics_again, _ = result_of(make(resume_from_checkpoint=str(first)), place)
    assert metrics_again == metrics and len(server.bodies) == asked
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
