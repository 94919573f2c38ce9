# SPDX-License-Identifier: Apache-2.0
"""Model text on a screen: every character is shown, none is obeyed."""

import pytest

from dschat.common.display import for_reading, visible, wrapped


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\r\nb\tc", "a\nb\tc"),
        ("over\rwritten\x08\x7f\x00", "over\\x0dwritten\\x08\\x7f\\x00"),
        ("\x9b2J", "\\x9b2J"),  # the one-byte form of escape [
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\ud800 \u2028", "\\ud800 \\u2028"),
        ("naïve 猫 👩‍👩‍👧", "naïve 猫 👩‍👩‍👧"),
    ],
)
def test_no_character_is_obeyed(text, expected):
    assert visible(text) == expected


def test_an_empty_response_is_seen():
    assert for_reading(" \n") == "(empty)" and for_reading("\n x \n") == "x"


def test_lines_are_broken_between_words_and_keep_their_ends():
    text = "one two three\n\n    four five\n" + "x" * 12
    assert wrapped(text, 9) == "one two\nthree\n\n    four\nfive\n" + "x" * 12
