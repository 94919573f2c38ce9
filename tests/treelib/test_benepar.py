# SPDX-License-Identifier: Apache-2.0
"""Parsing with benepar, on sentences of a toy grammar: the trees of spaCy's component."""

import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("benepar")
pytest.importorskip("spacy")

from constituent_treelib import benepar_backend as loading
from constituent_treelib.benepar_backend import BeneparBackend
from constituent_treelib.parsing import parse_texts
from constituent_treelib.trees import is_sound
from toy_parser import SIZES, ToySentence, sample_sentences

pytestmark = pytest.mark.xdist_group("benepar")  # one process imports it

FOX = "The quick fox chased the lazy dog."
LONGEST = int(SIZES["encoder_max_len"]) - 2  # words; start and stop of the sentence take two places


@pytest.fixture(scope="module")
def backend(benepar_model: Path) -> BeneparBackend:
    return BeneparBackend(benepar_model)


@pytest.fixture(scope="module")
def sentences() -> list[ToySentence]:
    return sample_sentences(2, 100)


def test_as_the_spacy_component_parses(backend, benepar_model, sentences):
    import spacy
    from spacy.tokens import Doc

    english = spacy.blank("en")
    component = english.add_pipe("benepar", config={"model": str(benepar_model)})
    texts = [sentence.text for sentence in sentences[:30]]
    printed = []
    for text, tree in zip(texts, backend.parse(texts), strict=True):
        tokens = english.tokenizer(text)
        words, spaces = [token.text for token in tokens], [bool(token.whitespace_) for token in tokens]
        starts = [True] + [False] * (len(words) - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            doc = component(Doc(english.vocab, words, spaces, sent_starts=starts))
        [sentence] = doc.sents
        printed.append(tree.bracket_string(text))
        assert printed[-1] == sentence._.parse_string
    assert sum("(S (VP (" in tree for tree in printed) > 3, "chains of phrases"
    assert sum("-LRB-" in tree for tree in printed) > 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"I saw it," she said.', ['"', "I", "saw", "it", ",", '"', "she", "said", "."]),
        ("A dog (the cat's) slept [there].", "A dog ( the cat 's ) slept [ there ] .".split()),
        ("The\tdog\u00a0slept\r\nthere", ["The", "dog", "slept", "there"]),
        ("She didn’t — or couldn't — read.", "She did n’t — or could n't — read .".split()),
        ("-LRB- `` '' -RRB-", None),
        ("Le cafe\u0301 d'A\u0301lvaro", None),
        ("the 👨‍👩‍👧 saw 🦊!", None),
        ("a\u200bb \u200b \ufffd \0 \x01 c", None),
    ],
)
def test_offsets(backend, text, words):
    [tree] = backend.parse([text])
    assert is_sound(tree, len(text))
    pieces = [text[leaf.start : leaf.end] for leaf in tree.leaves()]
    assert "".join(pieces) == "".join(text.split())
    if words is not None:
        assert pieces == words


def test_what_cannot_be_parsed_leaves_the_others_alone(backend):
    [alone] = backend.parse([FOX])
    too_long = "fox " * (LONGEST + 1)
    assert backend.parse([]) == [] and backend.parse(["", " "]) == [None, None]
    trees, counts = parse_texts(["", FOX, " \t\u3000", too_long, "a \ud800 b", FOX, "fox " * LONGEST], backend)
    assert dict(counts.reasons) == {"failed: ValueError": 1, "not parsed": 1}
    assert trees[1] == trees[5] == [alone]
    assert len(trees[6][0].leaves()) == LONGEST


def test_a_long_sentence_is_not_given_to_the_model(backend, monkeypatch):
    """Of sentences of 3, 4 and 5 words with a limit of 4, the network sees the first two."""
    lengths = []
    parse = backend._parser.parse

    def spy(sentences, **options):
        lengths.extend(len(sentence.words) for sentence in sentences)
        return parse(sentences, **options)

    monkeypatch.setattr(loading, "MAX_WORDS", 4)
    monkeypatch.setattr(backend._parser, "parse", spy)
    trees = backend.parse(["the fox slept", "the lazy fox slept", "the old lazy fox slept"])
    assert [tree is None for tree in trees] == [False, False, True]
    assert lengths == [3, 4]


def test_sentences_of_one_forward_pass(backend, monkeypatch):
    """A sentence of 3 words takes 5 places, with its start and its stop: four do not fit into 12."""
    passes = []
    forward = backend._parser.forward

    def spy(batch):
        passes.append(len(batch["valid_token_mask"]))
        return forward(batch)

    monkeypatch.setattr(loading, "WORDS_PER_PASS", 12)
    monkeypatch.setattr(backend._parser, "forward", spy)
    backend.parse(["the fox slept"] * 4)
    assert sum(passes) == 4 and len(passes) > 1


def test_an_output_that_does_not_cover_the_sentence(backend, monkeypatch):
    """A word that the encoder's tokenizer drops makes benepar's chart shorter than the sentence."""
    from benepar.parse_base import CompressedParserOutput

    short = CompressedParserOutput(*(torch.tensor(values).numpy() for values in ([0, 0, 1], [2, 1, 2], [1, 0, 0])))
    monkeypatch.setattr(backend._parser, "parse", lambda *args, **kwargs: [short])
    assert backend.parse(["The fox slept"]) == [None]
    [tree] = backend.parse(["The fox"])
    assert [(leaf.label, leaf.start, leaf.end) for leaf in tree.leaves()] == [("", 0, 3), ("", 4, 7)]


def test_one_by_one_as_all_at_once(backend, sentences):
    texts = [sentence.text for sentence in sentences[:40]]
    together = backend.parse(texts)
    assert backend.parse(texts) == together
    assert [tree for text in texts for tree in backend.parse([text])] == together


def test_no_warnings_and_no_random_numbers(backend):
    before = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.parse([FOX])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_new_words_are_not_kept(backend):
    backend.parse(["a fox"])
    before = len(loading._spacy_english().vocab.strings)
    backend.parse([f"fox{i} saw dog{i}" for i in range(50)])
    assert len(loading._spacy_english().vocab.strings) == before


def test_brackets_without_end_are_not_read(backend, monkeypatch):
    """spaCy's tokenizer takes time with the square of their number."""
    seen = []
    english = loading._spacy_english()
    monkeypatch.setattr(english, "tokenizer", lambda text, read=english.tokenizer: (seen.append(text), read(text))[1])
    assert backend.parse(["(" * 100_000, FOX]) == [None, *backend.parse([FOX])]
    assert max(map(len, seen)) <= loading.MAX_CHARACTERS
