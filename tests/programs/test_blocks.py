# SPDX-License-Identifier: Apache-2.0
"""Which fenced block of a response is its program, by CommonMark and by hand."""

import time
from textwrap import dedent

import pytest

from dschat.programs.blocks import find_program, names_python, program_of
from dschat.programs.segment_rewards import function_ends, rewards_by_segment

RIGHT = "print(int(input()) * 2)\n"
FENCED = f"```python\n{RIGHT}```\n"


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(f"Sample:\n```\n21\n```\nSolution:\n{FENCED}", id="untagged sample first"),
        pytest.param(f"{FENCED}It prints\n```\n42\n```\n", id="untagged output behind"),
        pytest.param(f"<think>\n```python\nprint(0)\n```\n</think>\n{FENCED}", id="draft while thinking"),
        pytest.param(f"<think>a</think>\n<think>```python\nprint(0)\n```</think>\n{FENCED}", id="thinking twice"),
        pytest.param(f"  ```python\n  {RIGHT}  ```", id="indented fence"),
        pytest.param(f"1. Read.\n2. Double:\n\n   ```python\n   {RIGHT}   ```\n3. Done.", id="in a list item"),
        pytest.param(f"- So:\n    ```python\n    {RIGHT}    ```", id="four columns in, within an item"),
        pytest.param(f"> ```python\n> {RIGHT}> ```\nDone.", id="in a quote"),
        pytest.param(f"~~~python\n{RIGHT}~~~", id="tildes"),
        pytest.param(f"```python\n{RIGHT}", id="never closed"),
        pytest.param(f"<answer>\n{FENCED}</answer>", id="below a tag"),
        pytest.param(f"{FENCED}```python\n\n```\n", id="an empty block last"),
        pytest.param(f"```python\n    {RIGHT}```", id="indented code"),
        pytest.param(f" {RIGHT}", id="a space that the tokenizer puts first"),
        pytest.param(RIGHT, id="nothing but the program"),
    ],
)
def test_the_right_program_is_taken(response) -> None:
    program = program_of(response)
    assert program is not None and program.strip("\n") == RIGHT.strip()


def test_a_program_that_holds_fences_is_whole() -> None:
    docstring = 'def f():\n    """\n    ```\n    f()\n    ```\n    """\n    return "<think>"\n'
    assert program_of(f"```python\n{docstring}```") == docstring
    longer = 's = """\n```\n"""\nprint(s)\n'
    assert program_of(f"````python\n{longer}````") == longer
    assert program_of(f"~~~python\n{longer}~~~") == longer
    assert program_of("```python\r\nif 1:\r\n\tprint(1)\r\n```") == "if 1:\r\n\tprint(1)\r\n"
    assert program_of("  ```python\n\tif 1:\n\t\tprint(1)\n  ```") == "if 1:\n\tprint(1)\n"


@pytest.mark.parametrize("first", ["```python", "```"])
def test_the_first_or_the_last_of_equal_blocks(first) -> None:
    response = f"{first}\nprint(1)\n```\nBetter:\n{first}\nprint(2)\n```\nor\n{first}\nprint(3)"
    assert program_of(response) == program_of(response, "last") == "print(3)"
    assert program_of(response, "first") == "print(1)\n"
    lines = ["```python\n", "def f(): pass\n", "```\n"] * 2
    assert rewards_by_segment([(0, 1.0)], ["f"], lines) == [0, 0, 0, 0, 1, 0]
    assert rewards_by_segment([(0, 1.0)], ["f"], lines, "first") == [0, 1, 0, 0, 0, 0]


def test_a_response_that_is_still_thinking_has_no_program() -> None:
    assert program_of(f"<think>Perhaps\n{FENCED}") is None
    assert program_of(f"<think>a</think>\n<think>{FENCED}") is None
    assert program_of(FENCED, prompt="<|assistant|><think>\n") is None
    assert program_of(f"So.</think>{FENCED}", prompt="<|assistant|><think>\n") == RIGHT
    assert program_of("<think>so</think>\n\n") is None and program_of("\n") is None
    assert program_of(f"<think>so</think>\n\n{RIGHT}") == f"\n\n{RIGHT}"
    assert program_of(FENCED, prompt="<think>\n</think>\n") == RIGHT
    assert function_ends(f"<think>Perhaps\n{FENCED}", [None])[None] == len(f"<think>Perhaps\n{FENCED}")


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        ("Solve.\n```python\n", f"{RIGHT}```\nThis prints 1.\n"),
        ("Solve.\n```python", f"\n{RIGHT}```\nThis prints 1.\n"),
        ("Solve.\n```", f"python\n{RIGHT}```\nThis prints 1.\n"),
        ("Solve.\n~~~~py\n", f"{RIGHT}~~~~\nOutput:\n~~~~\n1\n~~~~\n"),
        ("Like this:\n```\n1\n```\n", f"So:\n{FENCED}"),
        ("- Like this:\n  ```\n  1\n", FENCED),
        ("Solve.\n```python\n", f"```\nNo. Better:\n{FENCED}"),
    ],
)
def test_a_block_that_the_prompts_last_line_opens_goes_on_in_the_response(prompt, response) -> None:
    program = find_program(response, prompt=prompt)
    assert program is not None and program.text.strip() == RIGHT.strip()
    for position, character in enumerate(program.text):
        assert response[program.position_in_response(position)] == character


def test_an_answer_may_name_the_marks_of_thoughts() -> None:
    code = "text = input()\nprint(text.split('</think>')[-1])\n"
    answer = f"```python\n{code}```\nWithout `<think>` or `</think>` it would fail.\n"
    assert program_of(answer) == program_of(f"<think>so</think>\n{answer}") == code
    assert program_of(f"So.</think>{answer}", prompt="<think>\n") == code


def seconds_of(response: str) -> float:
    """CPU seconds that it takes to find the program, the least of three times."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        assert program_of(response) == RIGHT
        seconds.append(time.process_time() - start)
    return min(seconds)


@pytest.mark.parametrize(("text", "count"), [("> ```\na\n", 125), ("> - a\n", 125), ("- ```\n- > a\n", 125)])
def test_time_grows_linearly_with_the_number_of_fences_and_quotes(text, count) -> None:
    """Eight times as many; sixty-four times as long if each were searched up to the end of the text."""
    fewer = seconds_of(text * count + "\n" + FENCED)
    assert seconds_of(text * 8 * count + "\n" + FENCED) < 24 * fewer


@pytest.mark.parametrize(
    ("info", "is_python"),
    [
        *[(info, True) for info in ("PY", "python3.11", "{.python .numberLines}", 'python title="a.py"')],
        *[(info, False) for info in ("pycon", "python-repl", "{.pythonic}")],
    ],
)
def test_names_of_python(info, is_python) -> None:
    assert names_python(info) is is_python


def test_places_in_the_response() -> None:
    """An indented block's function ends where it does in the response, by counting."""
    response = dedent(
        """\
        1. So:

             ```python
             def f(x):
                 return 2 * x

             def g(x):
                 return x
             ```
        Done.
        """
    )
    assert response[: function_ends(response, ["f"])["f"]].endswith("return 2 * x")
    assert response[: function_ends(response, ["g"])["g"]].endswith("return x")
    assert function_ends(response, [None])[None] == response.index("\n     ```\nDone")
    program = find_program(response)
    assert program is not None
    for position, character in enumerate(program.text):
        assert response[program.position_in_response(position)] == character
    lines = response.splitlines(True)
    rewards = rewards_by_segment([(0, 1.0), (1, 2.0)], ["f", "g"], lines)
    assert rewards == [0, 0, 0, 0, 1, 0, 0, 2, 0, 0]


def test_deep_nesting_takes_little_time() -> None:
    nested = "> - " * 5000 + "\n" + "\n" * 20_000
    assert program_of(nested) == nested
