# SPDX-License-Identifier: Apache-2.0
"""benepar checkpoints for the tests: one trained on the toy grammar, tiny random ones with a pretrained encoder."""

import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_runs import built_once
from constituent_treelib.benepar_backend import WEIGHTS
from toy_grammar import ToySentence, sample_sentences

TRAINING_SEED, NUM_SENTENCES = 1, 2000
BATCH_SIZE, STEPS, LEARNING_RATE, WARM_UP = 16, 400, 8e-3, 20
SIZES = {"d_model": 64, "num_layers": 1, "num_heads": 4, "d_kv": 16, "d_ff": 128}
SIZES |= {"d_label_hidden": 64, "d_tag_hidden": 64, "d_char_emb": 16, "encoder_max_len": 64}
DROPOUTS = ("attention", "relu", "residual", "morpho_emb", "char_lstm_input")


def training_sentences() -> list[ToySentence]:
    """What the toy parser has seen."""
    return sample_sentences(TRAINING_SEED, NUM_SENTENCES)


def unseen_sentences(count: int, seed: int = 2) -> list[ToySentence]:
    """What it has not."""
    return sample_sentences(seed, count, frozenset(sentence.text for sentence in training_sentences()))


def trained_parser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint file of the trained parser (about 15 s of CPU time), made once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return built_once(shared, "toy_parser", build_toy_parser) / "toy.pt"


def build_toy_parser(folder: Path) -> None:
    """Trains a parser and saves it as `folder/toy.pt`."""
    folder.mkdir(parents=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            save(_trained(training_sentences()), folder / "toy.pt")
    finally:
        torch.set_num_threads(threads)


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

    tags = sorted({tag for sentence in sentences for _, tag in sentence.pos()})
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


def publish_pretrained(folder: Path, kind: str, leftover: bool = False) -> Any:
    """A random parser with a tiny encoder, in the form of a published model: a folder; the parser.

    Args:
        folder: for configuration, tokenizer and weights.
        kind: bert or t5.
        leftover: also the entry that old versions of transformers saved.
    """
    from transformers import BertConfig, BertTokenizerFast, T5Config, T5TokenizerFast  # type: ignore[attr-defined]

    from constituent_treelib.benepar_backend import _transformers_5

    sentences = training_sentences()[:200]
    texts = [sentence.text for sentence in sentences]
    if kind == "bert":
        tokenizer = BertTokenizerFast(tokenizer_object=_word_pieces(texts))
        size: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
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
    torch.save(parser.state_dict() | ({f"pretrained_model.{name}": entry} if leftover else {}), folder / WEIGHTS)
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


def _trained(sentences: list[ToySentence]) -> Any:
    parser = new_parser(sentences)
    encoded = [parser.encode(sentence) for sentence in sentences]
    adam = torch.optim.Adam(parser.parameters())
    batches: list[list[int]] = []
    chance = random.Random(0)
    for step in range(STEPS):
        if not batches:
            batches = _batches([len(sentence.words) for sentence in sentences], chance)
        rows = batches.pop()
        batch = parser.pad_encoded([encoded[row] for row in rows])
        batch["batch_size"], batch["batch_num_tokens"] = len(rows), sum(len(sentences[row].words) for row in rows)
        for group in adam.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / WARM_UP) * (1 - 0.9 * step / STEPS)
        parser.compute_loss(batch).backward()
        adam.step()
        adam.zero_grad()
    return parser


def _batches(lengths: list[int], chance: random.Random) -> list[list[int]]:
    """Rows of similar length together, in random order."""
    rows = list(range(len(lengths)))
    chance.shuffle(rows)
    found = []
    for start in range(0, len(rows), 8 * BATCH_SIZE):
        near = sorted(rows[start : start + 8 * BATCH_SIZE], key=lambda row: lengths[row])
        found += [near[i : i + BATCH_SIZE] for i in range(0, len(near), BATCH_SIZE)]
    chance.shuffle(found)
    return found


if __name__ == "__main__":
    build_toy_parser(Path(sys.argv[1]))  # a new folder, for the file toy.pt
