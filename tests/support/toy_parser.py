# SPDX-License-Identifier: Apache-2.0
"""benepar checkpoints for the tests, all of random weights: a parser of a toy grammar, and parsers with an encoder."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nltk import Tree

from constituent_treelib.benepar_backend import WEIGHTS

SIZES = {"d_model": 64, "num_layers": 1, "num_heads": 4, "d_kv": 16, "d_ff": 128}
SIZES |= {"d_label_hidden": 64, "d_tag_hidden": 64, "d_char_emb": 16, "encoder_max_len": 64}
DROPOUTS = ("attention", "relu", "residual", "morpho_emb", "char_lstm_input")
# category: children | …; what has no line here is a part of speech of WORDS.
RULES = """
S: NP VP . | NP VP . | PP , NP VP . | NP ADVP VP . | `` S0 , '' NP VP .
S0: NP VP
STO: VPTO
NP: DT NN | DT NN | DT JJ NN | NNP | NPB PP | NPB PRN | NPP NN
NPB: DT NN | NNP
NPP: NNP POS
PRN: -LRB- NP -RRB-
VP: VBD NP | VBD PP | VBD NP PP | VBD STO | VBD
VPTO: TO VPI
VPI: VB NP | VB
PP: IN NP
ADVP: RB | RB RB
"""
# Categories that differ only in what they hold, by the name that the tree shows.
SHOWN = {"S0": "S", "STO": "S", "NPB": "NP", "NPP": "NP", "VPTO": "VP", "VPI": "VP"}
WORDS = """
DT the a every
NN fox dog cat house garden
NNP Anna Tom Paris
JJ quick lazy old
VBD saw liked read slept asked
VB see like read
TO to
RB often very
IN on near with
POS 's
`` "
'' "
-LRB- (
-RRB- )
, ,
. . ? !
"""
NO_BLANK_BEFORE, NO_BLANK_AFTER = {",", ".", "''", "-RRB-", "POS"}, {"``", "-LRB-"}
MAX_WORDS = 24
_RULES = {name: content.split(" | ") for name, content in (line.split(": ", 1) for line in RULES.split("\n")[1:-1])}
_WORDS = {name: words for name, *words in map(str.split, WORDS.split("\n")[1:-1])}


@dataclass(frozen=True)
class ToySentence:
    """What benepar asks of an example, and the text.

    Attributes:
        tree: with TOP above S, as in a treebank.
        words: as they stand in the text.
        space_after: per word whether a blank follows.
    """

    tree: Tree
    words: list[str]
    space_after: list[bool]

    @property
    def text(self) -> str:
        """The sentence."""
        return "".join(word + " " * space for word, space in zip(self.words, self.space_after, strict=True))


def sample_sentences(seed: int, count: int) -> list[ToySentence]:
    """Different sentences of the grammar, of at most MAX_WORDS words."""
    chance, found = random.Random(seed), dict[str, ToySentence]()
    while len(found) < count:
        sentence = _sentence(chance)
        if len(sentence.words) <= MAX_WORDS:
            found.setdefault(sentence.text, sentence)
    return list(found.values())


def _sentence(chance: random.Random) -> ToySentence:
    tree = Tree("TOP", [_expand("S", chance)])
    first = tree.leaf_treeposition(0)
    tree[first] = tree[first][0].upper() + tree[first][1:]
    tags = [tag for _, tag in tree.pos()]
    pairs = zip(tags, tags[1:], strict=False)
    spaces = [left not in NO_BLANK_AFTER and right not in NO_BLANK_BEFORE for left, right in pairs]
    return ToySentence(tree, tree.leaves(), [*spaces, False])


def _expand(category: str, chance: random.Random) -> Tree:
    if category in _WORDS:
        return Tree(category, [chance.choice(_WORDS[category])])
    children = chance.choice(_RULES[category]).split()
    return Tree(SHOWN.get(category, category), [_expand(child, chance) for child in children])


def build_toy_parser(folder: Path) -> Path:
    """A parser of the grammar, `folder/toy.pt`, a new folder."""
    folder.mkdir(parents=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save(new_parser(sample_sentences(1, 300)), folder / "toy.pt")
    return folder / "toy.pt"


def save(parser: Any, file: Path) -> None:
    """A checkpoint as benepar's own training writes it."""
    torch.save({"config": parser.config, "state_dict": parser.state_dict()}, file)


def new_parser(sentences: list[ToySentence], pretrained_model_path: str | None = None, **hparams: Any) -> Any:
    """An untrained ChartParser with the vocabularies of the sentences.

    Args:
        sentences: with all labels, parts of speech and letters.
        pretrained_model_path: folder of an encoder's configuration and tokenizer.
        hparams: changed settings; by default words are read by an LSTM over their letters.
    """
    from benepar import char_lstm, decode_chart, nkutil, parse_chart

    tags = sorted({tag for sentence in sentences for _, tag in sentence.tree.pos()})
    settings = {
        **{"use_chars_lstm": True, "use_pretrained": False, "use_encoder": True, "pretrained_model": ""},
        **{"force_root_constituent": True, "predict_tags": True, "tag_loss_scale": 5.0},
        **{f"{name}_dropout": 0.0 for name in DROPOUTS},
        **SIZES,
        **hparams,
    }
    return parse_chart.ChartParser(
        {tag: number for number, tag in enumerate(["UNK", *tags])},
        decode_chart.ChartDecoder.build_vocab([sentence.tree for sentence in sentences]),
        char_lstm.RetokenizerForCharLSTM.build_vocab([sentence.words for sentence in sentences]),
        nkutil.HParams(**settings),
        pretrained_model_path,
    )


def publish_pretrained(folder: Path, kind: str) -> Any:
    """A random parser with a tiny encoder, in the form of a published model: a folder; the parser.

    Args:
        folder: for configuration, tokenizer and weights, with the entry that old versions of transformers saved.
        kind: bert or t5.
    """
    from transformers import BertConfig, BertTokenizerFast, T5Config, T5TokenizerFast  # type: ignore[attr-defined]

    from constituent_treelib.benepar_backend import _transformers_5

    sentences = sample_sentences(1, 200)
    texts = [sentence.text for sentence in sentences]
    size: dict[str, Any]
    if kind == "bert":
        tokenizer = BertTokenizerFast(tokenizer_object=_word_pieces(texts))
        size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config: Any = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=40, **size)
        name, entry = "embeddings.position_ids", torch.arange(40)[None]
    else:
        tokenizer = T5TokenizerFast(tokenizer_object=_unigrams(texts), model_max_length=40)
        size = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        config = T5Config(vocab_size=len(tokenizer), **size)
        name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        entry = torch.zeros(32, 2)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    with torch.random.fork_rng(), _transformers_5():
        torch.manual_seed(0)
        parser = new_parser(sentences, str(folder), use_chars_lstm=False, use_pretrained=True)
    config.benepar = parser.config
    config.save_pretrained(folder)
    torch.save(parser.state_dict() | {f"pretrained_model.{name}": entry}, folder / WEIGHTS)
    return parser


def _word_pieces(texts: list[str]) -> Any:
    """BERT's kind of tokenizer; [CLS] is 2, [SEP] 3."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    return backend


def _unigrams(texts: list[str]) -> Any:
    """T5's kind of tokenizer; </s> is 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special: dict[str, Any] = {"special_tokens": ["<pad>", "</s>", "<unk>"], "unk_token": "<unk>"}
    backend.train_from_iterator(texts, trainers.UnigramTrainer(vocab_size=200, show_progress=False, **special))
    backend.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    return backend
