# SPDX-License-Identifier: Apache-2.0
"""link-grammar itself; skipped, by name, where it is not installed."""

import os
import signal
import sys

import pytest

from constituent_treelib import link_grammar
from constituent_treelib.link_grammar import LinkGrammarBackend
from constituent_treelib.parsing import parse_texts
from constituent_treelib.trees import TreelibError
from treelib_cases import SALAD, check_partition, check_trees


@pytest.fixture(scope="module")
def backend():
    try:
        made = LinkGrammarBackend(timeout=20.0)
    except TreelibError as error:
        pytest.skip(f"link-grammar: {error}")
    yield made
    made.close()


def test_a_sentence(backend):
    text = "The quick fox jumped over the lazy dog."
    (tree,) = backend.parse([text])
    assert [text[leaf.start : leaf.end] for leaf in tree.leaves()] == text.replace(".", " .").split()
    phrases = {(node.label, text[node.start : node.end]) for node in tree.nodes() if node.children}
    assert {("NP", "The quick fox"), ("PP", "over the lazy dog"), ("VP", "jumped over the lazy dog")} <= phrases


def test_brackets_and_quotes(backend):
    text = "He said \"don't (ever) do that [please]\", didn't he?"
    (tree,) = backend.parse([text])
    words = [
        "He",
        "said",
        '"',
        "don't",
        "(",
        "ever",
        ")",
        "do",
        "that",
        "[",
        "please",
        "]",
        '"',
        ",",
        "didn't",
        "he",
        "?",
    ]
    assert [text[leaf.start : leaf.end] for leaf in tree.leaves()] == words


def test_positions_are_characters(backend):
    text = "The café is nice, and the 😀 naïve 日本語 too."
    (tree,) = backend.parse([text])
    words = [text[leaf.start : leaf.end] for leaf in tree.leaves()]
    assert words == ["The", "café", "is", "nice", ",", "and", "the", "😀", "naïve", "日本語", "too", "."]


def test_what_it_aborts_on_is_not_sent(backend):
    before = backend._worker.pid
    assert backend.parse(["", " ", "\0", "\0a", "a\0", SALAD]) == [None] * 6
    assert backend._worker.pid == before


def test_salad_and_one_second(backend):
    """A grammar takes its time for words without one; the run goes on."""
    quick = LinkGrammarBackend(timeout=1.0)
    texts = [SALAD, "The dog ran. " + SALAD[:130] + ". The dog ran.", "", "\0"]
    trees, counts = parse_texts(texts, quick)
    quick.close()
    assert counts.sentences == counts.parsed + counts.fell_back == 5
    for found, text in zip(trees, texts, strict=True):
        check_trees(found, text)
        check_partition(found, text)


def test_a_process_that_does_not_answer(backend):
    stopped = LinkGrammarBackend(timeout=0.3)
    before = stopped._worker.pid
    os.kill(before, signal.SIGSTOP)
    assert stopped.parse(["The dog ran."]) == [None]
    assert stopped._worker.pid is None
    stopped.close()


def test_a_call_has_a_limited_time(monkeypatch, caplog):
    """Of ten sentences that each take a tenth of a second, those within 0.35 s are asked."""
    program = (
        "import json, sys, time\nprint(json.dumps({'version': '1'}), flush=True)\n"
        "for line in sys.stdin:\n    time.sleep(0.1); print('null', flush=True)\n"
    )
    monkeypatch.setattr(link_grammar, "CALL_SECONDS", 0.35)
    monkeypatch.setattr(link_grammar, "SENTENCE_SECONDS", 0.0)
    slow = LinkGrammarBackend(command=[sys.executable, "-c", program])
    assert slow.parse(["The dog ran."] * 10) == [None] * 10
    slow.close()
    assert "link-grammar is out of time" in caplog.text and "of 10 sentences are left" in caplog.text


def test_killed_from_outside(backend):
    os.kill(backend._worker.pid, signal.SIGKILL)
    assert backend.parse(["The dog ran.", "The dog ran."])[1] is not None


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_for_the_whole_run_leaves_it_to_its_work(sent, backend):
    """A launcher sends it to every process, and the one that asks still wants its answer."""
    backend.parse(["The dog ran."])
    before = backend._worker.pid
    os.kill(before, sent)
    assert backend.parse(["The dog ran."])[0] is not None and backend._worker.pid == before


def test_a_language_without_a_dictionary(backend):
    with pytest.raises(TreelibError, match="no dictionary of the language 'xx'.*apt-get install"):
        LinkGrammarBackend("xx")
