# SPDX-License-Identifier: Apache-2.0
"""Episodes turn by turn: ids as they were sampled, seeds, limits, and environments that fail."""

import time
from typing import Any

import pytest
import torch

from chat_templates import TEMPLATES, byte_tokenizer
from dschat.base.errors import UserError
from dschat.data.encoding import encode_responses
from dschat.data.observations import ConversationEncoder, check_template
from dschat.rollouts.sampling import row_seed
from dschat.turns import sampler as rollouts
from dschat.turns.environments import EnvironmentPool, EpisodeProcess
from dschat.turns.episodes import EpisodeLimits, EpisodePlayer
from dschat.turns.sampler import agreed_source, assemble_episodes
from factories import EOS, PAD, make_tokenizer, sampling_of
from turn_cases import TEMPLATE, Scripted, chat_tokenizer, ended, make_row, write_environments

LIMITS = EpisodeLimits(turns=4, prompt_tokens=64, tokens=64)


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """Class → its pool of environments, made once."""
    file = write_environments(tmp_path_factory.mktemp("environments"))
    made: dict[str, EnvironmentPool] = {}

    def pool_of(name: str, timeout: float = 30.0) -> EnvironmentPool:
        if name not in made:
            made[name] = EnvironmentPool(f"{file}:{name}", timeout, 2)
        return made[name]

    yield pool_of
    for pool in made.values():
        pool.close()


def play(pool: EnvironmentPool, script: Any, rows: Any, limits: EpisodeLimits = LIMITS, skips: bool = False) -> Any:
    """The episodes of a scripted policy, and the script with what it was asked."""
    player = EpisodePlayer(chat_tokenizer(), sampling_of(), pool, limits, skips)
    sampler = Scripted(script)
    seeds = [100 + number for number in range(len(rows))]
    episodes, _ = player.play(sampler, rows, seeds, [7] * len(rows))
    return episodes, sampler


def ids_of(text: str) -> list[int]:
    (ids,) = encode_responses(chat_tokenizer(), [text])
    return ids


def three_replies() -> list[list[int]]:
    """Replies that end by themselves, of 7, 5 and 4 letters."""
    return [ended(*ids_of(text)) for text in ("the cat", "a mat", "jinx")]


def test_an_episode_is_the_ids_of_both_sides(pools) -> None:
    first, second, third = three_replies()
    episodes, sampler = play(pools("Counts"), [[first], [second], [third]], [make_row("we make")])
    (episode,) = episodes
    # The template puts " dog " behind a message of the environment; the reply's own <eos> is not written again.
    between = [ids_of("fox 1 dog "), ids_of("fox 2 dog ")]
    assert episode.ids == [*first, *between[0], *second, *between[1], *third]
    sampled = [True] * len(first) + [False] * len(between[0]) + [True] * len(second)
    assert episode.sampled == sampled + [False] * len(between[1]) + [True] * len(third)
    assert episode.rewards == [17.0, 25.0, 34.0]
    assert episode.done and episode.finished and episode.cut == [False, False, False]
    # Every turn read what was there before, and nothing else.
    prompt = sampler.prompts[0][0]
    assert sampler.prompts[1][0] == [*prompt, *first, *between[0]]
    assert sampler.prompts[2][0] == [*prompt, *first, *between[0], *second, *between[1]]
    # The first seed is that of a single response, later ones follow from it and the turn's number.
    assert sampler.seeds == [[100], [row_seed(100, 1)], [row_seed(100, 2)]]
    assert [message["content"] for message in episode.messages] == [
        *("we make", "the cat", "fox 1", "a mat", "fox 2", "jinx", "fox 3")
    ]


def test_sampled_ids_stay_though_their_text_has_others(pools) -> None:
    """The letters of a word one by one are other ids than the word: encoding the text again would lose them."""
    letters = [ids_of(letter)[0] for letter in "the"]
    assert ids_of("the") != letters
    # Blanks around a reply, which the template of Llama 3.1 trims from contents.
    reply = ended(*ids_of(" "), *letters, *ids_of(" "))
    episodes, _ = play(pools("Counts"), [[reply], [reply], [reply]], [make_row("we make")])
    ids = episodes[0].ids
    assert ids[: len(reply)] == reply and ids[-len(reply) :] == reply
    assert sampled_ids(episodes[0]) == reply * 3


def test_an_environment_is_closed_when_its_episode_is_over(pools, monkeypatch) -> None:
    """The first reply of one fills its episode, while the other goes on for three turns."""
    closed_after: list[int] = []
    first, second, third = three_replies()
    script = Scripted([[ids_of("a")[:1] * 64, first], [second], [third]])
    monkeypatch.setattr(EpisodeProcess, "close", lambda process: closed_after.append(len(script.prompts)))
    player = EpisodePlayer(chat_tokenizer(), sampling_of(), pools("Counts"), LIMITS, False)
    player.play(script, [make_row("we make")] * 2, [100, 101], [7, 7])
    assert closed_after[:2] == [1, 3]


def sampled_ids(episode: Any) -> list[int]:
    """The policy's tokens of an episode."""
    return [token for token, is_sampled in zip(episode.ids, episode.sampled, strict=True) if is_sampled]


def test_a_cut_reply_is_followed_by_the_end_of_its_turn(pools) -> None:
    limits = EpisodeLimits(turns=2, prompt_tokens=64, tokens=64, turn_tokens=2)
    cut, whole = ids_of("the cat")[:2], ended(*ids_of("a")[:1])
    episodes, sampler = play(pools("Counts"), [[cut], [whole]], [make_row("we make")], limits)
    (episode,) = episodes
    assert episode.ids == [*cut, EOS, *ids_of("fox 1 dog "), *whole]
    assert episode.sampled[:3] == [True, True, False] and episode.cut == [True, False]
    # Cut by --max_turns: the environment was not done.
    assert not episode.done and not episode.finished and episode.is_over
    assert sampler.limits == [[2], [2]]


def test_the_budget_of_an_episode_counts_the_environments_tokens(pools) -> None:
    first = ended(*ids_of("the cat"))
    between = ids_of("fox 1 dog ")
    tokens = len(first) + len(between) + 3
    limits = EpisodeLimits(turns=4, prompt_tokens=64, tokens=tokens)
    last = ids_of("quartz and")[:3]
    episodes, sampler = play(pools("Counts"), [[first], [last]], [make_row("we make")], limits)
    assert sampler.limits == [None, [3]]  # at first all of it, as for single responses
    assert len(episodes[0].ids) == tokens and episodes[0].cut == [False, True] and not episodes[0].done
    # Without room for a token behind the environment's message, the episode ends with the reply.
    limits = EpisodeLimits(turns=4, prompt_tokens=64, tokens=tokens - 3)
    episodes, _ = play(pools("Counts"), [[first]], [make_row("we make")], limits)
    assert episodes[0].ids == first and episodes[0].rewards == [17.0] and episodes[0].is_over


def test_an_episode_whose_last_reply_is_cut_is_not_finished(pools) -> None:
    """The environment ended it, but the policy did not end its reply."""
    limits = EpisodeLimits(turns=4, prompt_tokens=64, tokens=64, turn_tokens=2)
    episodes, _ = play(pools("OneTurn"), [[ids_of("the cat")[:2]]], [make_row("we make")], limits)
    assert episodes[0].done and not episodes[0].finished


def test_five_values_of_gymnasium(pools) -> None:
    replies = [[ended(*ids_of("a"))]] * 3
    episodes, _ = play(pools("Five"), replies, [make_row("we make")])
    assert episodes[0].rewards == [11.0, 21.0, 31.0] and episodes[0].done


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "ValueError: no answer"),
        ("dies", "the environment's process has ended"),
        ("no tuple", "step must return"),
        ("no number", "must be a number, not text"),
        ("too large", "not finite in float32"),
        ("no flag", "done of a step must be true or false, not text"),
        ("no messages", "not an empty list"),
        ("no content", "must have a role and a content"),
        ("half a character", "surrogates not allowed"),
        ("no JSON", "a message of step is not a JSON value: Object of type set"),
        ("assistant", "message of the assistant"),
        ("reset", "ValueError: no beginning"),
    ],
)
def test_a_failure_costs_its_episode_only(pools, caplog, fault, said) -> None:
    rows = [make_row("we make", 0, fault="none"), make_row("we make", 1, fault=fault)]
    whole = ended(*ids_of("a"))
    turns = [[whole]] * 3 if fault == "reset" else [[whole, whole], [whole, whole], [whole]]
    episodes, _ = play(pools("Faulty"), turns, rows, skips=True)
    assert episodes[0].failure is None and episodes[0].done and len(episodes[0].rewards) == 3
    assert said in episodes[1].failure and episodes[1].failure.startswith("rows.jsonl:2: ")
    assert "rows.jsonl:2: " in caplog.text and "without a score: 1 of 2" in caplog.text
    with pytest.raises(UserError, match=r"rows.jsonl:2: .*--on_reward_error skip"):
        play(pools("Faulty"), turns, rows)


def test_an_environment_that_hangs(pools) -> None:
    pool = pools("Faulty")
    pool._timeout = 1.0
    rows = [make_row("we make", 0, fault="hangs"), make_row("we make", 1, fault="none")]
    whole = ended(*ids_of("a"))
    start = time.monotonic()
    episodes, _ = play(pool, [[whole, whole], [whole, whole], [whole]], rows, skips=True)
    assert time.monotonic() - start < 30
    assert "step did not return in 1 s (--environment_timeout)" in episodes[0].failure
    assert episodes[1].done and episodes[1].failure is None
    pool._timeout = 30.0


def test_more_episodes_than_workers(pools) -> None:
    rows = [make_row("we make", number) for number in range(5)]
    episodes, _ = play(pools("OneTurn"), [[ended(*ids_of("a"))] * 5], rows)
    assert [episode.rewards for episode in episodes] == [[1.0]] * 5


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() | {"qwen-3-thinking", "deepseek-v3.1", "phi-3"}))
def test_templates_of_families(name) -> None:
    check_template(byte_tokenizer(name), None, ["user"])


QWEN_USER = "<|im_start|>user\nfox {}<|im_end|>\n<|im_start|>assistant\n"
# Template → what ends a reply, and what is written between two replies.
DROP_THOUGHTS = {
    "qwen-3": ("<|im_end|>", "\n" + QWEN_USER),
    "qwen-3-thinking": ("<|im_end|>", "\n" + QWEN_USER + "<think>\n"),
    "r1": ("<eos>", "<|User|>fox {}<|Assistant|><think>\n"),
}


@pytest.mark.parametrize("name", DROP_THOUGHTS)
def test_thoughts_that_the_template_drops_from_earlier_turns_stay_as_they_were_sampled(pools, name) -> None:
    end, between = DROP_THOUGHTS[name]
    tokenizer = byte_tokenizer(name)
    thought = "" if between.endswith("<think>\n") else "<think>\n"
    texts = [f"{thought}hm {turn}\n</think>\n\nthe cat{end}" for turn in (1, 2, 3)]
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\n" + texts[0]}]
    assert "hm 1" not in tokenizer.apply_chat_template([*earlier, earlier[0]], tokenize=False)
    replies = encode_responses(tokenizer, texts)
    limits = EpisodeLimits(turns=4, prompt_tokens=256, tokens=1024)
    sampler = Scripted([[reply] for reply in replies])
    player = EpisodePlayer(tokenizer, sampling_of(), pools("Counts"), limits, False)
    (episode,), _ = player.play(sampler, [make_row("we make")], [100], [7])

    observations = encode_responses(tokenizer, [between.format(1), between.format(2)])
    assert episode.ids == [*replies[0], *observations[0], *replies[1], *observations[1], *replies[2]]
    assert sampler.prompts[2][0] == [*episode.prompt_ids, *episode.ids[: -len(replies[2])]]
    assert sampled_ids(episode) == [*replies[0], *replies[1], *replies[2]]


def test_a_system_prompt_in_the_last_question_only_is_refused() -> None:
    """As Mistral's v7 does: without a system message the template writes turn behind turn."""
    moving = (
        "{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% if m == last and messages[0].role == 'system' %}{{ messages[0].content }} "
        "{% endif %}{{ m.content }} dog {% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}"
        "{% endfor %}"
    )
    with pytest.raises(UserError, match="the system prompt into the last question"):
        check_template(chat_tokenizer(moving), None, ["user"])


def test_a_template_without_system_messages_is_tried_without_one() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    check_template(chat_tokenizer(refusing), None, ["user"])


# Writes users and the assistant, and nothing of anybody else or of tools, without a word.
TWO_ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} dog {% elif m.role == 'assistant' %}"
    "{{ m.content + eos_token }}{% endif %}{% endfor %}"
)


def test_a_template_that_leaves_out_what_the_environment_says_is_refused() -> None:
    """The policy would never read a tool's results."""
    with pytest.raises(UserError, match="the role 'tool'.*not in what the chat template writes"):
        check_template(chat_tokenizer(TWO_ROLES), None, ["user", "tool"])


def test_what_the_template_leaves_out_of_first_messages_is_said_once(pools, caplog) -> None:
    pool = pools("Tools")
    player = EpisodePlayer(chat_tokenizer(TWO_ROLES), sampling_of(), pool, LIMITS, False)
    for _ in range(2):
        player.play(Scripted([[ended(*ids_of("a"))]]), [make_row("we make")], [100], [7])
    said = "the chat template does not write: column 'tools': 1, the content of earlier system messages: 1"
    assert [said in message for message in caplog.messages].count(True) == 1


def test_a_model_without_a_template() -> None:
    with pytest.raises(UserError, match="needs a chat template"):
        ConversationEncoder(make_tokenizer(), None, ["user"])


def test_masks_of_assembled_episodes(pools) -> None:
    first, second, third = three_replies()
    script = [[first, second], [second, third], [third, first]]
    episodes, _ = play(pools("Counts"), script, [make_row("we make"), make_row("a", 1)])
    generation = assemble_episodes(episodes, PAD)
    rollout = generation.rollout
    for row, episode in enumerate(episodes):
        length = len(episode.ids)
        assert rollout.response_ids[row, :length].tolist() == episode.ids
        assert rollout.response_mask[row, :length].tolist() == episode.sampled
        assert not rollout.response_mask[row, length:].any()
    assert rollout.response_runs() == [[first, second, third], [second, third, first]]
    assert not rollout.cut_turns.any() and rollout.finished.all()
    # Log-probs of the sampling passes stand on the sampled tokens: −.5, −1, … in every turn of the script.
    expected = [-0.5 * (1 + number) for number in range(len(first))]
    assert generation.logprobs[0, : len(first)].tolist() == expected
    assert torch.equal(generation.logprobs != 0, rollout.response_mask)


def test_log_probs_are_those_that_the_engine_of_any_rank_reports(pools, monkeypatch) -> None:
    """A rank whose environments all fail samples nothing, and must go on as the others do."""
    rows = [make_row("we make", fault="reset")]
    episodes, _ = play(pools("Faulty"), [], rows, skips=True)
    assert agreed_source(episodes) == "none"
    for source in ("actor", "sampler", "none"):
        monkeypatch.setattr(rollouts, "gather_objects", lambda local, source=source: [local, source])
        assert agreed_source(episodes) == source
        generation = assemble_episodes(episodes, PAD, source)
        assert (generation.logprobs is not None) == (source == "actor")
        assert (generation.rollout.drawn_logprobs is not None) == (source == "sampler")
