# SPDX-License-Identifier: Apache-2.0
"""What ids say and which characters they wrote, for every kind of tokenizer."""

import pytest

from macro_actions.token_text import TokenReader
from tokenizer_families import FAMILIES, TEXTS, byte_fallback, byte_level, unknown_decoder, word_piece

PAD, BOS, EOS = 0, 1, 2


def encode(family, text):
    return family.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_text_as_the_tokenizer_decodes_it(name, text):
    """The blank that some tokenizers put in front stays; their decoders drop it."""
    family = FAMILIES[name]()
    read = TokenReader(family.tokenizer)
    assert read._piece_to_bytes is not None
    assert read(encode(family, text)).text == family.prefix(text) + text


def test_words_decoded_step_by_step():
    """A piece writes the blank that stands before it."""
    family = word_piece()
    vocabulary = family.tokenizer.get_vocab()
    pieces = ["The", "x", "##d", "<eos>", ".", "y"]
    found = TokenReader(family.tokenizer)([vocabulary[piece] for piece in pieces])
    assert found.text == "The xd . y"
    assert found.spans == ((0, 3), (3, 5), (5, 6), (6, 6), (6, 8), (8, 10))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "byte-level"])
def test_unknown_token_says_nothing_and_ends_nothing(name):
    family = FAMILIES[name]()
    read = TokenReader(family.tokenizer)
    unknown = family.tokenizer.unk_token_id
    assert read([unknown]).spans == ((0, 0),)
    assert unknown not in read.end_ids and EOS in read.end_ids


def test_an_unknown_token_that_is_the_end_ends():
    """GPT-2 gives both the same id."""
    tokenizer = type(byte_level().tokenizer)(
        tokenizer_object=byte_level().tokenizer.backend_tokenizer, eos_token="<eos>", unk_token="<eos>"
    )
    assert EOS in TokenReader(tokenizer).end_ids


def torn(family, content):
    """Ids of single bytes."""
    names = {value: token for token, value in family.content.items() if len(value) == 1}
    return [names[bytes([byte])] for byte in content]


@pytest.mark.parametrize("family", [byte_level, byte_fallback])
@pytest.mark.parametrize(
    ("content", "text", "spans"),
    [
        ("日".encode(), "日", [(0, 1)] * 3),
        ("a🦊".encode(), "a🦊", [(0, 1)] + [(1, 2)] * 4),
        (b"\xe6\x97", "\ufffd", [(0, 1)] * 2),
        (b"\xe6\x97a", "\ufffda", [(0, 1), (0, 1), (1, 2)]),
        (b"\x97\xa5", "\ufffd\ufffd", [(0, 1), (1, 2)]),
    ],
)
def test_bytes_of_a_character(family, content, text, spans):
    family = family()
    found = TokenReader(family.tokenizer)(torn(family, content))
    assert (found.text, list(found.spans)) == (text, spans)


def test_bytes_decoded_step_by_step():
    """The ids of a torn character share it."""
    family = unknown_decoder()
    ids = encode(family, "x") + torn(family, "日".encode()) + [EOS] + encode(family, "y")
    found = TokenReader(family.tokenizer)(ids)
    assert (found.text, found.spans) == ("x日y", ((0, 1), (1, 2), (1, 2), (1, 2), (2, 2), (2, 3)))


@pytest.mark.parametrize("family", [byte_level, byte_fallback, unknown_decoder])
def test_a_special_token_between_the_bytes_of_a_character_belongs_to_it(family):
    """Or the character could be cut there."""
    family = family()
    first, *others = torn(family, "日".encode())
    found = TokenReader(family.tokenizer)([*encode(family, "x"), first, EOS, *others])
    assert found.text == family.prefix("x") + "x日"
    character = (len(found.text) - 1, len(found.text))
    assert found.spans[-4:] == (character,) * 4


@pytest.mark.parametrize("text", TEXTS)
def test_a_tokenizer_written_in_python(text):
    """ByT5's: a byte is an id. U+FFFD cannot be told from a character that is not complete: it waits for the next."""
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    found = TokenReader(tokenizer)(ids)
    assert found.text == text
    bounds = [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]
    if "\ufffd" in text:
        assert found.spans[:4] == ((0, 2),) * 4 and found.spans[4:8] == tuple(bounds[4:8])
    else:
        assert list(found.spans) == bounds
