# SPDX-License-Identifier: Apache-2.0
"""Prompt and response ids for each kind of tokenizer, built here; every sequence decodes to the exact text."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data_cases import talk_row, text_row
from dialogue_cases import dialogue
from dschat.base.errors import UserError
from dschat.data.continuations import AddedTokens, encode_continuations
from dschat.data.encoding import decode_response, encode_prompts, encode_responses
from dschat.data.rows import Row
from factories import put_before_texts

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CORPUS = [
    "POST\nSubreddit: r/tifu\nThe cat sat on the mat. It was slow.\nTL;DR: ",
    " The cat was slow.",
    "def f(x):\n",
]
TEXTS = [
    ("The cat sat\nTL;DR: ", "was slow. "),
    ("\n\nHuman: cat?\n\nAssistant:", " The mat. "),
    ("The ca", "t sat"),
    ("The cat", "  two spaces"),
    ("The cat", "\n"),
    ("The cat", " "),
    ("The cat", ""),
]


def wrap(backend: Tokenizer, **tokens) -> PreTrainedTokenizerFast:
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"} | tokens
    if backend.post_processor is None:
        put_before_texts(backend, names["bos_token"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def byte_level(**tokens) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=tokens.pop("add_prefix_space", False))
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    return wrap(backend, **tokens)


def unigram(scheme: str, nested: bool = False) -> Tokenizer:
    """Character pieces and a few words, with fixed scores."""
    characters = sorted(set("".join(a + b for a, b in TEXTS)) - {" "}) + ["▁"]
    words = ["▁The", "▁cat", "▁sat", "sat", "was", "▁was", "▁slow", "slow", "▁on", "▁the", "▁mat"]
    scores = [(token, 0.0) for token in SPECIAL] + [(c, -8.0) for c in characters] + [(word, -5.0) for word in words]
    backend = Tokenizer(models.Unigram(scores, unk_id=SPECIAL.index("<unk>")))
    space = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.pre_tokenizer = pre_tokenizers.Sequence([space]) if nested else space
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return backend


def llama() -> Tokenizer:
    """Byte-fallback BPE with normalizers Prepend and Replace, as in the first Llama tokenizers."""
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("ca", "t"), ("▁", "cat"), ("▁", "▁")]
    tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + list("▁acehnostwTS.") + [a + b for a, b in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


TOKENIZERS = {
    "byte-level": byte_level,
    "byte-level with prefix space": lambda: byte_level(add_prefix_space=True),
    "metaspace always": lambda: wrap(unigram("always")),
    "metaspace first": lambda: wrap(unigram("first")),
    "metaspace in a sequence": lambda: wrap(unigram("always", nested=True)),
    "llama": lambda: wrap(llama()),
}


def encode_prompt(tokenizer, row: Row) -> list[int]:
    [ids] = encode_prompts(tokenizer, [row])
    return ids


def encode_response(tokenizer, text: str) -> list[int]:
    [ids] = encode_responses(tokenizer, [text])
    return ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_sequences_decode_to_the_exact_text(name):
    tokenizer = TOKENIZERS[name]()
    for prompt, response in TEXTS:
        prompt_ids, response_ids = encode_prompt(tokenizer, text_row(prompt)), encode_response(tokenizer, response)
        assert prompt_ids == [tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]
        ids = [*prompt_ids, *response_ids, tokenizer.eos_token_id]
        decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # this decoder keeps the prefix: the prompt shows one, the response does not
        prefix = " " if name == "byte-level with prefix space" else ""
        assert decoded == prefix + prompt + response
        assert decode_response(tokenizer, [*response_ids, tokenizer.eos_token_id, tokenizer.pad_token_id]) == response


def test_llama_tokens_by_hand():
    tokenizer = wrap(llama())

    def tokens(ids):
        return tokenizer.convert_ids_to_tokens(ids)

    assert tokens(encode_prompt(tokenizer, text_row("the cat"))) == ["<s>", "▁the", "▁cat"]
    assert tokens(encode_response(tokenizer, "the cat")) == ["the", "▁cat"]
    assert tokens(encode_response(tokenizer, " the")) == ["▁the"]
    prompt = encode_prompt(tokenizer, text_row("cat "))
    assert tokens(prompt + encode_response(tokenizer, " the")) == ["<s>", "▁cat", "▁", "▁the"], "not merged"
    assert tokens(encode_response(tokenizer, "é\n")) == ["<0xC3>", "<0xA9>", "<0x0A>"]


def test_continuations_by_hand():
    """Only a text at the beginning or after a token begins with the dummy prefix."""
    tokenizer = wrap(llama())
    tokenizer.add_tokens([AddedToken("sat", single_word=True, normalized=False)])
    texts = ["cat", "cat", "cat</s>cat", "cat"]
    texts_before = ["the</s>", "the", "the", "sat"]  # in "satcat" nothing is a token
    rows = encode_continuations(tokenizer, texts, texts_before, AddedTokens(tokenizer))
    assert [tokenizer.convert_ids_to_tokens(ids) for ids in rows] == [
        ["▁cat"],
        ["cat"],
        ["cat", "</s>", "▁cat"],
        ["cat"],
    ]


def test_bos_stands_where_the_tokenizer_puts_one():
    as_gpt2 = byte_level(bos_token="<s>")
    as_gpt2.backend_tokenizer.post_processor = processors.ByteLevel()
    for tokenizer, bos in ((as_gpt2, []), (byte_level(), [1])):
        cat = tokenizer.encode("cat", add_special_tokens=False)
        assert encode_prompt(tokenizer, text_row("cat")) == [*bos, *cat]
        assert encode_prompt(tokenizer, text_row("<s>cat")) == [1, *cat], "once"


def test_added_tokens_are_seen_after_the_first_use():
    tokenizer = wrap(llama())
    encode_response(tokenizer, "cat")
    tokenizer.add_tokens(["<end>"], special_tokens=True)
    end = tokenizer.convert_tokens_to_ids("<end>")
    cat = tokenizer.convert_tokens_to_ids("cat")
    assert encode_response(tokenizer, "cat<end>cat") == [cat, end, cat]


# conversations

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.mark.parametrize("head", ["", "{{ bos_token }}"])
def test_chat_template_gets_one_bos(head):
    tokenizer = byte_level()
    tokenizer.chat_template = head + TEMPLATE
    ids = encode_prompt(tokenizer, talk_row(dialogue("cat?", "mat.", "why?")))
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == "user: cat?\nassistant: mat.\nuser: why?\nassistant:"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template. Use rows with a prompt and a response"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages .roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses the messages .can only concatenate str"),  # an error of Python
    ],
)
def test_conversation_without_template_and_those_that_refuse(template, words):
    tokenizer = byte_level()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=f"rows.jsonl:1: .*{words}"):
        encode_prompt(tokenizer, talk_row(dialogue("cat")))
