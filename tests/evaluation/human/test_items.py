# SPDX-License-Identifier: Apache-2.0
"""What a rater sees: sides, text, guidelines, names."""

import subprocess
import sys
from collections import Counter

import pytest

from cli_runs import read_jsonl, write_jsonl
from dschat.errors import UserError
from dschat.evaluation.human import guidelines, items_for, rater_name
from dschat.evaluation.human_page import escaped
from dschat.evaluation.pairs import read_pairs
from human_runs import write_responses


def sides(folder, count, rater, seed=42):
    first, second = write_responses(folder, count)
    return "".join(item.first for item in items_for(read_pairs(first, "-a", second, "-b"), rater, seed))


@pytest.mark.parametrize(
    ("seed", "rater", "expected"),
    [(42, "anna", "ABBAAABB"), (42, "Anna", "ABBAAABB"), (42, "ben", "BBBAAAAB"), (43, "anna", "BAAABABB")],
)
def test_sides_follow_from_seed_rater_and_texts(tmp_path, seed, rater, expected):
    """Worked out with sha256sum; they must not change, or a study begun before would change its sides."""
    assert sides(tmp_path, 8, rater, seed) == expected


def test_sides_are_balanced_for_every_rater(tmp_path):
    for rater in ("anna", "ben", "eva"):
        assert Counter(sides(tmp_path, 50, rater)) == {"A": 25, "B": 25}
        assert sorted(Counter(sides(tmp_path, 7, rater)).values()) == [3, 4]
    assert sides(tmp_path, 50, "anna") != sides(tmp_path, 50, "ben")


def test_with_an_odd_number_the_odd_one_is_not_always_the_same_models(tmp_path):
    ahead = Counter(sides(tmp_path, 1, f"rater {i}") for i in range(40))
    assert set(ahead) == {"A", "B"}


def test_sides_do_not_hang_on_the_order_of_the_files(tmp_path):
    first, second = write_responses(tmp_path, 20)
    turned = write_jsonl(tmp_path / "turned.jsonl", read_jsonl(first)[::-1])
    before = {item.pair.prompt: item.first for item in items_for(read_pairs(first, "-a", second, "-b"), "anna", 42)}
    after = {item.pair.prompt: item.first for item in items_for(read_pairs(turned, "-a", second, "-b"), "anna", 42)}
    assert before == after and list(before) == list(reversed(after))


def test_a_choice_is_turned_into_a_verdict_on_the_models(tmp_path):
    first, second = write_responses(tmp_path, 8)
    for item in items_for(read_pairs(first, "-a", second, "-b"), "anna", 42):
        shown = item.responses
        assert sorted(shown) == [f"bad {item.pair.prompt[-1]}", f"good {item.pair.prompt[-1]}"]
        assert item.verdict("1") == ("A" if shown[0].startswith("good") else "B")
        assert item.verdict("2") == ("A" if shown[1].startswith("good") else "B")
        assert (item.verdict("3"), item.verdict("4")) == ("tie", "skip")


def test_a_pair_of_the_same_texts_is_asked_once(tmp_path):
    rows = [{"prompt": "p", "response": "r"}, {"prompt": "q", "response": "r"}, {"prompt": "p", "response": "r"}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    assert [item.pair.prompt for item in items_for(read_pairs(file, "-a", file, "-b"), "anna", 42)] == ["p", "q"]


def test_html_holds_no_character_that_a_template_or_a_browser_could_obey():
    text = "<b>&\"'`${x}{{y}}@children\\"
    assert escaped(text) == (
        "&#60;b&#62;&#38;&#34;&#39;&#96;&#36;&#123;x&#125;&#123;&#123;y&#125;&#125;&#64;children&#92;"
    )


@pytest.mark.parametrize("name", ["", "  ", "x" * 61, "a\x1b[2J", "a\u202eb"])
def test_a_rater_needs_a_name(name):
    with pytest.raises(UserError, match="--rater"):
        rater_name(name)
    assert rater_name("  Anna   Ö. ") == "Anna Ö."


def test_guidelines_are_of_the_data_set():
    def words(dataset):
        return " ".join(text for point in guidelines(dataset) for text in point)

    for dataset, criteria in {
        "summarize": ("relevance", "coherence", "consistency", "fluency"),
        "hh-rlhf": ("helpful",),
        "webgpt": ("accuracy", "coherence", "usefulness"),
    }.items():
        assert all(word in words(dataset) for word in criteria)
        assert len(words(dataset)) > len(words(""))
    assert words("a-name-of-ones-own") == words("")


def test_the_terminal_needs_no_gradio_and_no_torch():
    program = (
        "import sys, dschat.evaluation.human\n"
        "assert not {'gradio', 'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
