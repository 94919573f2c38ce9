# SPDX-License-Identifier: Apache-2.0
"""Where the policy is found, and what it answers."""

import json
import shutil

import pytest
import torch

from dschat.base.errors import UserError
from dschat.evaluation.policy import Compute, load_policy, locate_policy
from dschat.models.tokenizer import load_tokenizer
from factories import BOS, EOS, PAD, make_causal_lm, make_prompt, random_ids, save_folder


def policy_of(path, options):
    tokenizer = load_tokenizer(path, "--model")
    where = Compute(torch.device("cpu"), torch.float32)
    temperature = options.responses.temperature_value
    return load_policy(path, "--model", tokenizer, options.generation, options.sampler, temperature, where)


def examples_of(lengths):
    return [make_prompt([BOS, *random_ids(length, i)], f"p{i}", i) for i, length in enumerate(lengths)]


def test_the_actor_below_an_output_folder(tmp_path, project):
    (tmp_path / "train_config.json").write_text("{}")
    shutil.copytree(project / "run" / "actor", tmp_path / "actor")
    for path in (tmp_path, f"{tmp_path}/", tmp_path / "actor"):
        assert locate_policy(str(path)) == str(tmp_path / "actor")
    (tmp_path / "actor" / "actor").mkdir()
    assert locate_policy(str(tmp_path / "actor")) == str(tmp_path / "actor"), "a model with such a folder is itself"


def greedy_by_hand(causal_lm, prompt, count):
    """Argmax over the unpadded row, token after token; neither pad nor BOS is ever drawn."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = causal_lm(input_ids=torch.tensor([ids])).logits[0, -1]
        logits[[PAD, BOS]] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def test_a_model_whose_logits_are_not_finite_answers_nothing(project, options):
    policy = policy_of(str(project / "run" / "actor"), options(max_new_tokens=4))
    next(policy.causal_lm.parameters()).data.fill_(torch.nan)
    with pytest.raises(UserError, match="its logits are not finite for 2 of 2 responses. Give --dtype fp32 or bf16"):
        policy.respond(examples_of([4, 2]))


def test_the_checkpoints_own_end_tokens_end_a_response_and_are_not_in_its_text(
    project, options, bytes_tokenizer, tmp_path
):
    """A chat model ends with another token than EOS, an ordinary one for its tokenizer."""
    shutil.copytree(project / "run" / "actor", tmp_path / "chat")
    plain = policy_of(str(tmp_path / "chat"), options(temperature="0", max_new_tokens=8))

    prompt = examples_of([9])
    drawn = greedy_by_hand(plain.causal_lm, prompt[0].prompt_ids, 8)
    place = drawn.index(drawn[2])
    assert EOS not in drawn[:3]
    file = tmp_path / "chat" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [EOS, drawn[place]]}))
    chat = policy_of(str(tmp_path / "chat"), options(temperature="0", max_new_tokens=8))
    response = chat.respond(prompt)[0][0]
    assert (response.tokens, response.finished) == (place + 1, True)
    assert response.text == bytes_tokenizer.decode(drawn[:place])
    file.unlink()
    without = policy_of(str(tmp_path / "chat"), options(temperature="0", max_new_tokens=8))
    assert without.respond(prompt)[0][0].text == bytes_tokenizer.decode(drawn, skip_special_tokens=True)


@pytest.mark.parametrize("engine", ["continuous", "generate"])
def test_draws_depend_on_seed_and_number(engine, project, options):
    path, examples = str(project / "run" / "actor"), examples_of([6, 5, 3])
    policy = policy_of(path, options(seed=1, rollout_engine=engine))
    first, second = policy.respond(examples, 2)
    torch.manual_seed(99)
    again = policy_of(path, options(seed=1, rollout_engine=engine)).respond(examples, 2)
    assert policy.respond(examples, 2) == again == [first, second]
    (other,) = policy_of(path, options(seed=2, rollout_engine=engine)).respond(examples)
    assert first != second and first != other


def test_draws_depend_on_no_other_prompt(project, options):
    path, examples = str(project / "run" / "actor"), examples_of([6, 5, 3])
    first, second = policy_of(path, options(batch_size=4)).respond(examples, 2)
    assert policy_of(path, options(batch_size=1)).respond(examples[1:2], 2) == [first[1:2], second[1:2]]


def test_top_k_and_top_p_narrow_the_draws(project, options):
    path, examples = str(project / "run" / "actor"), examples_of([6, 5, 3])
    greedy = policy_of(path, options(temperature="0")).respond(examples)
    assert policy_of(path, options(top_k=1)).respond(examples) == greedy
    assert policy_of(path, options(top_k=0, top_p=1e-6)).respond(examples) == greedy


def test_prompts_that_leave_no_room_in_a_table_of_positions(options, bytes_tokenizer, tmp_path):
    path = save_folder(tmp_path, make_causal_lm("gpt2", vocab_size=300), bytes_tokenizer)
    policy = policy_of(path, options(max_new_tokens=28))
    policy.check_lengths(100)
    with pytest.raises(UserError, match=r"at most 128 tokens.*prompt has 101 and --max_new_tokens is 28.*len 100"):
        policy.check_lengths(101)
    with pytest.raises(UserError, match=r"--max_new_tokens is 200. Lower --max_new_tokens\.$"):
        policy_of(path, options(max_new_tokens=200)).check_lengths(3)
