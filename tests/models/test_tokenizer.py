# SPDX-License-Identifier: Apache-2.0
"""Pad, bos and eos are decided once."""

import json

import pytest
from transformers import ByT5Tokenizer

from dschat.base.errors import UserError
from dschat.base.fingerprints import tokenizer_fingerprint
from dschat.models.tokenizer import end_token_id, load_tokenizer, open_tokenizer
from dschat.models.vocabulary import require_same_tokenizer, same_ids, vocabulary_difference
from factories import TEXTS, make_tokenizer


def saved(folder, **special):
    make_tokenizer(**special).save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_of_python_code_is_refused(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--m .*ByT5Tokenizer.* by Python code.*Use another model"):
        open_tokenizer(str(tmp_path), "--m")


def test_no_eos_is_refused_in_every_step(tmp_path):
    folder = saved(tmp_path, eos_token=None)
    for for_classifier in (False, True):
        with pytest.raises(UserError, match="--m .*no eos token"):
            load_tokenizer(folder, "--m", for_classifier)


def without_reserve(folder, *specials):
    """A saved tokenizer with `specials` in the places of <pad> and <bos>; BOS is <eos>."""
    path = saved(folder, pad_token=None, bos_token="<eos>")
    file = folder / "tokenizer.json"
    text = file.read_text()
    for old, new in zip(("<pad>", "<bos>"), specials, strict=True):
        text = text.replace(old, new)
    file.write_text(text)
    return path


@pytest.mark.parametrize(("pad", "for_classifier"), [(None, False), ("<eos>", True)])
def test_a_reserved_token_pads_in_every_step_where_none_of_the_tokenizer_s_own_does(pad, for_classifier, tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path, pad_token=pad), "--m", for_classifier)
    assert tokenizer.pad_token == "<pad>" and tokenizer.pad_token_id == 0 and len(tokenizer) == 100


def test_without_a_reserved_token_the_unknown_one_pads(tmp_path):
    folder = without_reserve(tmp_path, "<file>", "<turn>")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<turn>"}))
    assert load_tokenizer(folder, "--m").pad_token == "<turn>"
    assert load_tokenizer(folder, "--m", end_token="<turn>").pad_token == "<eos>"


def test_where_nothing_can_pad_eos_does_and_a_saved_classifier_gets_a_token(tmp_path):
    """As GPT-2, whose one special token is BOS, EOS and unknown at once."""
    folder = without_reserve(tmp_path, "wordy", "wordz")
    config = json.loads((tmp_path / "tokenizer.json").read_text())
    config["added_tokens"] = [token for token in config["added_tokens"] if token["id"] == 2]
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder, "--m")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    size = len(tokenizer)
    classifier = load_tokenizer(folder, "--m", for_classifier=True)
    assert (classifier.pad_token, classifier.pad_token_id, len(classifier)) == ("<pad>", 100, size + 1)
    classifier.save_pretrained(tmp_path / "out")
    again = load_tokenizer(str(tmp_path / "out"), "--m")
    assert again.pad_token_id == 100 and again.eos_token_id == 2
    require_same_tokenizer(tokenizer, again, "--a", "--b")  # a critic reads masks


def test_a_pad_that_was_chosen_leaves_the_tokenizer_the_same(tmp_path):
    """Data that were prepared with the tokenizer as it was are still those of the model that step 1 saves."""
    folder = without_reserve(tmp_path, "<|padding|>", "<turn>")
    before = tokenizer_fingerprint(open_tokenizer(folder, "--m"))
    tokenizer = load_tokenizer(folder, "--m", end_token="<turn>")
    assert tokenizer.pad_token == "<|padding|>" and tokenizer_fingerprint(tokenizer) == before
    tokenizer.save_pretrained(tmp_path / "out")
    assert tokenizer_fingerprint(open_tokenizer(str(tmp_path / "out"), "--m")) == before


TURNS = "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }}<pad>{% endfor %}"
REFUSING = "{{ raise_exception('no') }}<pad>"
DIVIDING = "{{ 1 // (messages | length - 2) }}<pad>"  # a Python error, where there are two messages


@pytest.mark.parametrize("how", [TURNS, REFUSING, DIVIDING, "flag"])
def test_a_pad_token_that_ends_turns_does_not_pad(how, tmp_path):
    """As in fine-tunes of Llama 3, where <|eot_id|> pads and ends turns; "<unused0>" is in reserve."""
    tokenizer = make_tokenizer(texts=[*TEXTS, "<unused0>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<unused0>"]})
    tokenizer.save_pretrained(tmp_path)
    end_token = "<pad>" if how == "flag" else None
    if how != "flag":
        (tmp_path / "chat_template.jinja").write_text(how)
    found = load_tokenizer(str(tmp_path), "--m", end_token=end_token)
    assert found.pad_token == "<unused0>" and len(found) == len(tokenizer)
    assert end_token_id(found, "<pad>") == 0


def test_a_pad_token_that_ends_texts_but_no_turns_still_pads(tmp_path):
    """As Qwen's <|endoftext|>: its template writes it first, and ends turns with another token."""
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (tmp_path / "chat_template.jinja").write_text("<pad>{% for m in messages %}{{ m.content }}<bos>{% endfor %}")
    assert load_tokenizer(str(tmp_path), "--m").pad_token == "<pad>"


def test_end_token(tokenizer):
    assert end_token_id(tokenizer, None) == 2
    assert end_token_id(tokenizer, ".") == tokenizer.convert_tokens_to_ids(".")
    with pytest.raises(UserError, match="--end_of_conversation_token 'quick fox' is . tokens"):
        end_token_id(tokenizer, "quick fox")


def test_an_end_that_is_the_unknown_token_too():
    """As in GPT-2's and OPT's vocabularies; other texts that are unknown are refused as such."""
    tokenizer = make_tokenizer(unk_token="<eos>")
    assert end_token_id(tokenizer, "<eos>") == tokenizer.eos_token_id
    tokenizer.encode = lambda text, add_special_tokens: [tokenizer.unk_token_id]
    with pytest.raises(UserError, match=r"'Zürich' is unknown to this tokenizer; it must be .*for instance '<eos>'"):
        end_token_id(tokenizer, "Zürich")


def test_different_tokenizers_are_refused():
    first = make_tokenizer()
    require_same_tokenizer(first, make_tokenizer(), "--a", "--b")
    upper = [text.upper() for text in TEXTS]
    for other in ({"texts": upper}, {"eos_token": ";"}):
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
    other_end = make_tokenizer(eos_token="<bos>")
    assert not same_ids(plain, other_end) and not same_ids(added, other_end)
    assert vocabulary_difference(added, other_end) == "their BOS or EOS differ"  # the pad token may be in one alone
    added.add_tokens(["<|more|>"])
    assert not same_ids(plain, added) and not same_ids(added, plain)
    number = added.convert_tokens_to_ids("<|more|>")
    assert vocabulary_difference(plain, added) == f"1 of their tokens differ, such as '<|more|>': missing and {number}"
