# SPDX-License-Identifier: Apache-2.0
"""What reads responses behind messages gives the chat template its tools, and its own blanks once."""

import json

import pytest
import torch

from chat_templates import byte_tokenizer
from data_cases import talk_row
from dialogue_cases import bot, dialogue, user
from dschat.base.errors import UserError
from dschat.data.examples import PromptExample, pair_examples
from dschat.data.rows import Row
from dschat.data.turn_end import response_texts
from dschat.evaluation.generate import _references
from dschat.refuel.scores import RewardModelDialogueScores
from dschat.scoring.reward_reader import RewardReader
from dschat.scoring.serve import BadRequest, ScoreRequest
from dschat.scoring.source import ResponseTexts

TOOLS = [{"type": "function", "function": {"name": "sun", "parameters": {"type": "object"}}}]
WITH_TOOLS = Row(None, [user("a")], "b", "c", {}, "rows.jsonl:1", template_arguments={"tools": TOOLS})


class Recorder:
    """A classifier that keeps the ids that it is given."""

    is_decoder, limit = True, None

    def __init__(self, end_token=None):
        self.end_token = end_token

    def numbers(self, sequences):
        self.sequences = [list(ids) for ids in sequences]
        return torch.zeros(len(sequences))


def read(template, row, response, rm_template, finished=True):
    """The text that a reward model reads."""
    classifier, tokenizer = Recorder(), byte_tokenizer(template)
    texts = ResponseTexts(["unused"], [response], [row], [finished])
    RewardReader(classifier, tokenizer, "model", rm_template).read(texts)
    return tokenizer.decode(classifier.sequences[0], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(("template", "response"), [("llama-2", " b "), ("mistral", " b"), ("zephyr", "\nb")])
@pytest.mark.parametrize("rm_template", [True, False])
def test_a_sampled_response_is_read_as_the_template_writes_it(template, response, rm_template):
    whole = byte_tokenizer(template).apply_chat_template(dialogue("a", "b"), tokenize=False)
    text = read(template, talk_row([user("a")]), response, rm_template)
    assert text.removesuffix("\n") == whole.removesuffix("\n")


@pytest.mark.parametrize(
    ("template", "response", "text"),
    [
        ("llama-2", "b ", "<bos>[INST] a [/INST] b"),  # without the blank before its end token, too
        ("chatml", "b\n", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb\n"),
        ("chatml", "", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", "QZXJ b", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nQZXJ b"),
    ],
)
def test_a_cut_response_ends_where_its_content_ends(template, response, text):
    assert read(template, talk_row([user("a")]), response, True, finished=False) == text


@pytest.mark.parametrize("end_token", ["<eos>", "<|im_end|>"])
@pytest.mark.parametrize("rm_template", [True, False])
@pytest.mark.parametrize("template", ["qwen-2.5", "llama-2", "chatml"])
def test_a_reward_model_of_step_2_reads_the_ids_that_it_was_trained_on(template, rm_template, end_token):
    """Without what the template writes after a turn, such as ChatML's line break, and with the end token of step 2."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens([end_token])
    rows = [talk_row([user("a")], "b"), talk_row(dialogue("a", "b", "c"), "d")]
    pairs = [Row(**vars(row) | {"rejected": "no"}) for row in rows]
    examples, _ = pair_examples(pairs, tokenizer, 999, tokenizer.convert_tokens_to_ids(end_token))
    expected = [example.chosen_ids for example in examples]
    classifier = Recorder(end_token)
    reader = RewardReader(classifier, tokenizer, "model", rm_template)
    reader.read(ResponseTexts(["unused"] * 2, response_texts(tokenizer, rows, "chosen"), rows, [True] * 2))
    assert classifier.sequences == expected
    dialogues = [[*row.messages, bot(row.chosen)] for row in rows]
    RewardModelDialogueScores(classifier, tokenizer, "--reward_model model")(dialogues, rows, [True] * 2)
    assert classifier.sequences == expected


def test_dialogues_that_the_template_refuses_have_no_score():
    tokenizer = byte_tokenizer("gemma")
    classifier = Recorder("<eos>")
    reader = RewardReader(classifier, tokenizer, "model", True)
    bad = [user("a"), user("b"), bot("c")]
    rows = [Row(None, None, None, None, {}, f"y:{number}") for number in (1, 2)]
    read_all = RewardModelDialogueScores(classifier, tokenizer, "--reward_model model")
    with pytest.raises(UserError, match="--reward_model model: its chat template refuses y:2"):
        read_all([dialogue("a", "b"), bad], rows, [True] * 2)
    skips = RewardModelDialogueScores(classifier, tokenizer, "--reward_model model", skips=True)
    assert skips([dialogue("a", "b"), bad], rows, [True] * 2).nan_to_num(-1).tolist() == [0, -1]
    with pytest.raises(UserError, match="--rm_template: the chat template of --reward_model model refuses x:1"):
        reader(ResponseTexts(["p"], ["c"], [Row(None, bad[:2], None, None, {}, "x:1")], [True]))


def test_a_tokenizer_without_the_end_of_training_is_refused():
    words = "--reward_model model: its responses ended with <end> in training .* which its tokenizer lacks"
    with pytest.raises(UserError, match=words):
        RewardReader(Recorder("<end>"), byte_tokenizer("chatml"), "model", False)


@pytest.mark.parametrize("rm_template", [True, False])
def test_tools_reach_the_reward_models_template(rm_template):
    tokenizer = byte_tokenizer("qwen-2.5")
    prompt = tokenizer.apply_chat_template([user("a")], tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert read("qwen-2.5", WITH_TOOLS, "b", rm_template).startswith(f"{prompt}b<")


def test_responses_of_the_data_are_scored_as_they_are_trained_on():
    example = PromptExample([1], "unused", WITH_TOOLS, 0)
    assert _references([example], byte_tokenizer("llama-2")) == ([" b "], [" c "])


@pytest.mark.parametrize("name", ["chat_template", "messages"])
def test_a_reward_server_refuses_what_it_gives_to_the_template_itself(name):
    """A client's template would be a program that the server runs."""
    body = {"prompts": ["p"] * 2, "responses": ["b"] * 2, "template_arguments": [{"tools": TOOLS}, {name: "x"}]}
    with pytest.raises(BadRequest, match=f"template_arguments of response 1 hold {name}, which the server") as refusal:
        ScoreRequest.read(json.dumps(body).encode())
    assert refusal.value.status == 422
