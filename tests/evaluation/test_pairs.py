# SPDX-License-Identifier: Apache-2.0
"""Files of responses and of verdicts."""

from pathlib import Path

import pytest

from cli_runs import write_jsonl
from dschat.base.errors import UserError
from dschat.evaluation.responses import combined, comparison_of, model_names, pair_id, read_pairs, read_responses


def responses(*prompts, text="yes"):
    return [{"prompt": p, "response": f"{text} {p} {i}", "reward": i / 2} for i, p in enumerate(prompts)]


def pairs_of(tmp_path, first, second):
    a, b = write_jsonl(tmp_path / "a.jsonl", first), write_jsonl(tmp_path / "b.jsonl", second)
    return read_pairs(a, "--model_name_a", b, "--model_name_b")


def test_rows_are_paired_by_prompt_whatever_the_order(tmp_path):
    """A prompt that occurs twice is paired by occurrence."""
    first = responses("p", "q", "p")
    pairs = pairs_of(tmp_path, first, responses("p", "p", "q", text="no"))
    assert [(pair.prompt, pair.a.response, pair.b.response) for pair in pairs] == [
        ("p", "yes p 0", "no p 0"),
        ("q", "yes q 1", "no q 2"),
        ("p", "yes p 2", "no p 1"),
    ]
    assert pairs[1].a.reward == 0.5 and pairs[1].b.reward == 1.0
    assert len({pair.id for pair in pairs}) == 3 and all(len(pair.id) == 16 for pair in pairs)


def say(role, content):
    return {"role": role, "content": content}


ASKED = say("user", "Why is\nthe sky blue?")
TALKS = [
    ([ASKED], "Why is\nthe sky blue?"),
    ([say("system", "Be brief."), ASKED], "System: Be brief.\n\nUser: Why is\nthe sky blue?"),
]


@pytest.mark.parametrize(("messages", "read"), TALKS)
def test_a_prompt_that_a_template_wrote_is_read_as_its_messages(tmp_path, messages, read):
    """Two models with templates of their own have answered the same prompt."""
    first, second = (
        [{"prompt": template + str(messages), "prompt_messages": messages, "response": template}]
        for template in ("<|im_start|>user", "<start_of_turn>user")
    )
    (pair,) = pairs_of(tmp_path, first, second)
    assert pair.prompt == pair.a.prompt == pair.b.prompt == read
    assert pair.id == pair_id(read, "<|im_start|>user", "<start_of_turn>user")


def test_other_prompts_and_other_lengths_are_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.jsonl has 1 rows and --model_name_b .*b\.jsonl has 2"):
        pairs_of(tmp_path, responses("p"), responses("p", "q"))
    with pytest.raises(UserError, match=r"a\.jsonl:2: no row of --model_name_b .*b\.jsonl answers this prompt \('q'"):
        pairs_of(tmp_path, responses("p", "q"), responses("p", "r"))
    said = [row | {"prompt_messages": [{"role": "user", "content": "p"}]} for row in responses("<user>p")]
    with pytest.raises(UserError, match="only one of the files has the column prompt_messages"):
        pairs_of(tmp_path, said, responses("<user>p"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "p", "response": 3}\n', ":1: column 'response' holds int"),
        ('{"prompt": "p", "prompt_messages": "hello", "response": "r"}\n', ":1: column 'prompt_messages' must hold"),
        ('{"prompt": "p", "response": "r", "reward": NaN}\n', ":1: reward must be a finite number, not nan"),
    ],
)
def test_a_bad_file_of_responses_is_named_with_its_line(tmp_path, content, words):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=f"{file}.*{words}"):
        read_responses(file, "--model_name_a")


ROW = {"prompt": "p", "response_a": "x", "response_b": "y", "kind": "judge", "model_a": "m", "model_b": "n"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ROW | {"verdict": "C"}, "verdict must be one of A, B, tie, invalid, skip, not 'C'"),
        (
            {"verdict": "A"} | {name: ROW[name] for name in ROW if name != "model_b"},
            "add the columns model_a and model_b",
        ),
    ],
)
def test_a_row_that_is_no_comparison_is_named(row, words):
    with pytest.raises(UserError, match=f"f:3: .*{words}"):
        comparison_of(row, "f:3")


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["r/t=0.8/ppo-sampled.jsonl", "r/t=0.8/ma.jsonl"], ["ppo", "ma"]),
        (["ppo/t=0/m.jsonl", "ma/t=0/m.jsonl"], ["ppo/t=0/m", "ma/t=0/m"]),
        (["x/m.jsonl", "x/m.jsonl"], ["m", "m"]),
    ],
)
def test_models_are_called_as_their_files(files, names):
    assert model_names([Path(file) for file in files]) == names


@pytest.mark.parametrize(
    ("verdict", "of_orders"),
    [
        ("A", [("A", "A"), ("A",)]),
        ("B", [("B", "B")]),
        ("tie", [("A", "B"), ("B", "A"), ("A", "tie"), ("tie", "B"), ("tie",)]),
        ("invalid", [("invalid", "A"), ("B", "invalid"), ("invalid",)]),
        ("skip", [("A", "skip"), ("skip", "invalid")]),
    ],
)
def test_a_win_needs_both_orders(verdict, of_orders):
    assert {combined(orders) for orders in of_orders} == {verdict}
