# SPDX-License-Identifier: Apache-2.0
"""Multi-turn rollouts: who speaks when, which seeds decide, and what simulated users are told and say."""

from collections.abc import Sequence

import pytest

from dialogue_cases import chat_tokenizer, dialogue
from dschat.base.chat_servers import Endpoint, EndpointFlags
from dschat.base.errors import UserError
from dschat.data.turn_end import turn_end
from dschat.rollouts.continuous import ContinuousEngine
from dschat.rollouts.sampling import Sampling
from dschat.turns.dialogues import SILENT, AssistantTurn, PolicyAssistant, UserFromData, roll_out
from dschat.turns.users import FunctionUser, ModelWriter, ServerWriter, SimulatedUser, question_of, simulator_prompt
from factories import make_causal_lm
from fake_judge import KEY, FakeJudge, judge_server


class Echo:
    """Says how many messages it has read."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, states: Sequence[list], seeds: Sequence[int]) -> list[AssistantTurn]:
        self.batches.append(len(states))
        return [AssistantTurn([len(said)], [7], f"after {len(said)}", True) for said in states]


def test_turns_alternate_until_each_dialogue_has_its_own() -> None:
    data = [dialogue("a", "-", "b", "-", "c"), dialogue("d"), dialogue("e", "-", "f")]
    echo = Echo()
    found = roll_out([d[:1] for d in data], [3, 1, 2], echo, UserFromData(data), [0, 0, 0])
    assert found[0].messages == dialogue("a", "after 1", "b", "after 3", "c", "after 5")
    assert found[1].messages == dialogue("d", "after 1")
    assert found[2].messages == dialogue("e", "after 1", "f", "after 3")
    assert echo.batches == [3, 2, 1]
    assert sorted(found[0].replies) == [0, 1, 2] and sorted(found[1].replies) == [0]


def policy(most: int | None = None, tokens: int = 6) -> PolicyAssistant:
    tokenizer = chat_tokenizer()
    model = make_causal_lm("gemma", vocab_size=len(tokenizer)).eval()
    end = turn_end(tokenizer).token_id
    sampling = Sampling(tokens, tuple(sorted({end, tokenizer.eos_token_id})), tokenizer.pad_token_id)
    return PolicyAssistant(ContinuousEngine(2).sampler_for(model), tokenizer, sampling, most)


def test_a_batch_equals_its_dialogues_alone() -> None:
    """The first dialogue ends before the others, which then have other places in their batch."""
    data = [dialogue("x"), dialogue("one", "-", "two"), dialogue("a longer first question", "-", "and then")]
    starts, turns, seeds = [d[:1] for d in data], [1, 2, 2], [11, 12, 13]
    together = roll_out(starts, turns, policy(), UserFromData(data), seeds)
    for n in range(3):
        (alone,) = roll_out([starts[n]], [turns[n]], policy(), UserFromData([data[n]]), [seeds[n]])
        assert alone == together[n]
    reply = together[1].replies[1]
    assert reply.state_ids[-2:] == together[1].replies[0].state_ids[-2:]  # both end with the generation prompt
    assert reply.text == together[1].messages[3]["content"]


def test_a_dialogue_that_outgrows_the_policy_is_named() -> None:
    with pytest.raises(UserError, match="use fewer turns or shorter replies"):
        policy(most=10)([dialogue("a long question")], [0])
    assert len(policy(most=100)([dialogue("a")], [0])[0].ids) <= 6


FLAGS = EndpointFlags("--user_server", "--user_model", "USER_API_KEY", "--max_new_tokens", "user")


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Question: a?\nQuestion:\n b?\n", "b?"),
        ("Why. **Next question:** b?", "b?"),
        ("It is open.</think>Question: b?", "b?"),
        ("I should ask. Question: maybe a?</think>b?\nQuestion: b?", "b?"),
        ("Question: What does </think> mean here?", "What does </think> mean here?"),
        ("I stop here. Question: ", None),
        ("**Question:** Is **b** so?", "Is **b** so?"),
        ("**Question**: b?", "b?"),
        ("**QUESTION: Is **b** so?**", "Is **b** so?"),
        ("Question:**b** is?", "**b** is?"),
        ("Question: Thanks! One more question: is 1 a prime?", "Thanks! One more question: is 1 a prime?"),
        ('<think>\nI write "Question:" and then\n</think>\n\nQuestion: b?', "b?"),
        ('<think>\nI write "Question:" and then', None),
    ],
)
def test_the_question_stands_behind_the_last_mark(text, question):
    assert question_of(text, is_complete=True) == question_of(text, is_complete=False) == question


def test_an_answer_without_a_mark_is_the_question_if_it_is_complete():
    assert question_of(" b?\n", is_complete=True) == question_of("<think>a</think>\nb?", is_complete=True) == "b?"
    assert question_of("It is open.</think>b?", is_complete=True) == "b?"
    assert question_of("The user would say this because", is_complete=False) is None


def test_the_prompt_shows_the_dialogue_and_asks_for_justification_and_question():
    prompt = simulator_prompt(dialogue("one {dialogue}", "two", "three", "four"))
    shown = "### user: one {dialogue}\n\n### assistant: two\n\n### user: three\n\n### assistant: four"
    assert prompt.count(shown) == 1
    behind = prompt.partition(shown)[2]
    assert behind.index("justification") < behind.index('"Question:"')


def test_no_question_ends_a_dialogue_and_leaves_the_others():
    def write(prompts, seeds):
        answers = {"first": "", "second": None, "third": "on"}
        return [answers[prompt.partition("### user: ")[2].split()[0]] for prompt in prompts]

    starts = [dialogue("first"), dialogue("second"), dialogue("third")]
    found = roll_out(starts, [2, 2, 2], Echo(), SimulatedUser(write), [0, 1, 2])
    assert [said.ended for said in found] == [SILENT, SILENT, ""]
    assert [said.messages for said in found] == [
        dialogue("first", "after 1"),
        dialogue("second", "after 1"),
        dialogue("third", "after 1", "on", "after 3"),
    ]


def test_a_model_plays_the_user():
    asked = []

    def assistant(states, seeds):
        asked.append((list(states), list(seeds)))
        cut = AssistantTurn([1], [2], "The user would say", False)
        return [None, AssistantTurn([1], [2], "because. Question: next?", True), cut]

    user = SimulatedUser(ModelWriter(assistant))
    dialogues = [dialogue("a", "b"), dialogue("c", "d"), dialogue("e", "f")]
    assert user(dialogues, [0, 1, 2], [7, 8, 9]) == [None, "next?", "The user would say"]
    (states, seeds) = asked[0]
    assert states[1] == [{"role": "user", "content": simulator_prompt(dialogues[1])}] and seeds == [7, 8, 9]


def test_a_function_plays_the_user(tmp_path):
    def ask(dialogues):
        dialogues[0].append("changed")
        return [f" about {said[0]['content']} " if said[0]["content"] != "c" else "" for said in dialogues]

    given = [dialogue("a", "b"), dialogue("c", "d")]
    assert FunctionUser(ask, "--user_function")(given, [0, 1], [0, 0]) == ["about a", None]
    assert given[0] == dialogue("a", "b")


@pytest.mark.parametrize(
    ("result", "shown"), [(["one"], "['one']"), (None, "None"), ([1, "b"], "[1, 'b']"), ("ab", "'ab'")]
)
def test_a_function_must_return_a_text_for_each_dialogue(result, shown):
    user = FunctionUser(lambda dialogues: result, "--user_function")
    with pytest.raises(
        UserError, match="--user_function: the function must return a list of texts, one for each"
    ) as caught:
        user([dialogue("a", "b"), dialogue("c", "d")], [0, 1], [0, 0])
    assert str(caught.value).endswith(f"it returned {shown}.")


def on(server: FakeJudge, folder, concurrency: int = 4) -> SimulatedUser:
    endpoint = Endpoint("big", server.url, 20, 5.0, 2, KEY, FLAGS, "USER_API_KEY")
    remedy = "Finished dialogues are saved: give the same command again to go on."
    return SimulatedUser(ServerWriter(endpoint, 0.8, concurrency, folder / "cache", remedy))


def says(messages):
    return f"why. Question: after {messages[-1]['content'].count('### assistant')} answers"


def test_a_server_plays_the_user_and_is_asked_once(tmp_path):
    dialogues = [dialogue("a", "b"), dialogue("c", "d", "e", "f")]
    with judge_server() as server:
        server.answer = says
        assert on(server, tmp_path)(dialogues, [0, 1], [2**62 + 5, 6]) == ["after 1 answers", "after 2 answers"]
        assert {body["seed"] for body in server.bodies} == {5, 6}
        assert server.bodies[0].keys() == {"model", "messages", "max_tokens", "temperature", "seed"}
        assert set(server.keys) == {f"Bearer {KEY}"}
        server.answer = lambda messages: "Question: otherwise"
        assert on(server, tmp_path)(dialogues, [0, 1], [2**62 + 5, 6]) == ["after 1 answers", "after 2 answers"]
        assert len(server.bodies) == 2  # the second time, from the disk
        assert on(server, tmp_path)(dialogues[:1], [0], [9]) == ["otherwise"]  # another seed asks anew
    assert KEY not in "".join(file.read_text() for file in (tmp_path / "cache").rglob("*.json"))


def test_a_rejected_dialogue_ends_alone_if_another_is_answered(tmp_path):
    """Although it comes first; and afterwards also without another one."""
    with judge_server() as server:
        server.answer = says
        server.fail_on("too long", (400, {"error": {"message": "too many tokens"}}, {}))
        user = on(server, tmp_path, concurrency=1)
        dialogues = [dialogue("too long", "b"), dialogue("c", "d")]
        with pytest.raises(UserError, match="it refuses the request: .*too many tokens"):
            user(dialogues[:1], [0], [1])
        assert user(dialogues, [0, 1], [1, 2]) == [None, "after 1 answers"]
        assert user(dialogues[:1], [0], [1]) == [None]
