# SPDX-License-Identifier: Apache-2.0
"""Pad, bos and eos are decided once."""

import pytest

from dschat.errors import UserError
from dschat.models.tokenizer import end_token_id, load_tokenizer, require_same_tokenizer, same_ids
from factories import TEXTS, make_tokenizer


def saved(folder, **special):
    make_tokenizer(**special).save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_with_its_own_pad_is_left_alone(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path), "--m")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == 100


def test_no_tokenizer(tmp_path):
    with pytest.raises(UserError, match="--m .*holds no tokenizer"):
        load_tokenizer(str(tmp_path), "--m")


def test_no_eos_is_refused_in_every_step(tmp_path):
    folder = saved(tmp_path, eos_token=None)
    for may_add_pad in (False, True):
        with pytest.raises(UserError, match="--m .*no eos token"):
            load_tokenizer(folder, "--m", may_add_pad)


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_pad_equal_to_eos_is_refused_after_step_1_which_takes_a_reserved_token(pad, tmp_path):
    folder = saved(tmp_path, pad_token=pad)
    with pytest.raises(UserError, match="pad and eos are the same"):
        load_tokenizer(folder, "--m")
    tokenizer = load_tokenizer(folder, "--m", may_add_pad=True)
    assert tokenizer.pad_token == "<pad>" and tokenizer.pad_token_id == 0 and len(tokenizer) == 100


def test_step_1_adds_a_pad_where_nothing_is_reserved(tmp_path):
    folder = saved(tmp_path, pad_token=None)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<pad>", "<nul>"))
    tokenizer = load_tokenizer(folder, "--m", may_add_pad=True)
    assert tokenizer.pad_token_id == 100 and tokenizer.eos_token_id == 2
    tokenizer.save_pretrained(tmp_path / "out")
    assert load_tokenizer(str(tmp_path / "out"), "--m").pad_token_id == 100  # steps 2 and 3 take it


def test_end_token(tokenizer):
    assert end_token_id(tokenizer, None) == 2
    assert end_token_id(tokenizer, "<eos>") == 2
    assert end_token_id(tokenizer, ".") == tokenizer.convert_tokens_to_ids(".")
    with pytest.raises(UserError, match="--end_of_conversation_token 'quick fox' is . tokens"):
        end_token_id(tokenizer, "quick fox")


def test_different_tokenizers_are_refused():
    first = make_tokenizer()
    require_same_tokenizer(first, make_tokenizer(), "--a", "--b")
    upper = [text.upper() for text in TEXTS]
    for other in ({"texts": upper}, {"vocab_size": 90}, {"pad_token": "<bos>"}, {"eos_token": ";"}):
        with pytest.raises(UserError, match="--a and --b have different tokenizers"):
            require_same_tokenizer(first, make_tokenizer(**other), "--a", "--b")


def test_ids_mean_the_same_whatever_pads():
    """Whether a reward model can read the actor's ids."""
    plain = make_tokenizer()
    padded = make_tokenizer(pad_token="<bos>")
    assert same_ids(plain, plain) and same_ids(plain, padded)
    added = make_tokenizer()
    added.add_special_tokens({"pad_token": "<fill>"})
    assert same_ids(plain, added) and same_ids(added, plain)
    assert not same_ids(plain, make_tokenizer(eos_token="<bos>"))
    more = make_tokenizer()
    more.add_tokens(["<|more|>"])
    assert not same_ids(plain, more) and not same_ids(more, plain)
