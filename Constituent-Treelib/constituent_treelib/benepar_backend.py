# SPDX-License-Identifier: Apache-2.0
"""The Berkeley neural parser, the paper's. Words are spaCy's, with the characters they stand at."""

import functools
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from constituent_treelib.benepar_model import describe_model, find_model, load_model
from constituent_treelib.errors import TreelibError
from constituent_treelib.trees import Tree

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "benepar_en3"
MAX_WORDS = 200  # time and memory grow with the square of a sentence's words and more
MAX_CHARACTERS = 4000  # of a sentence; what takes spaCy's tokenizer longest, brackets, takes two seconds then
WORDS_PER_PASS = 500  # of the network, padding included


@dataclass(frozen=True)
class _Sentence:
    """What benepar asks of an example; and the (start, end) of each word in characters."""

    spans: list[tuple[int, int]]
    words: list[str]  # with quotation marks as in benepar's training data
    space_after: list[bool]
    tree: None = None  # there is no gold tree


class BeneparBackend:
    """Trees of a benepar model, for sentences. On the CPU unless another device is asked for."""

    name = "benepar"
    unit: Literal["sentence"] = "sentence"

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, device: str = "cpu") -> None:
        """Loads the model, once per process.

        Args:
            model: name of a downloaded model, or path of a checkpoint file or folder.
            device: of torch.

        Raises:
            TreelibError: benepar is not installed, or the model not there or not usable; says what to do.
        """
        _need_installed()
        path = find_model(model)
        self._parser = load_model(path, device)
        self._labels = {i: label.split("::") if label else [] for label, i in self._parser.label_vocab.items()}
        encoder = self._parser.add_timing
        self._max_words = MAX_WORDS if encoder is None else min(MAX_WORDS, len(encoder.timing_table) - 2)
        self.version = describe_model(path)
        self._has_failed = False

    def parse(self, units: Sequence[str]) -> list[Tree | None]:
        """The trees of sentences, from one call of the model.

        None for a sentence without words, with too many for the model, or that the model fails on; the others are not
        touched by that.
        """
        import torch

        sentences = _read(units)
        trees: list[Tree | None] = [None] * len(units)
        fitting = [i for i, sentence in enumerate(sentences) if 0 < len(sentence.words) <= self._max_words]
        # The best tree is found through gradients, which inference mode would forbid.
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not define `arg_constraints`")
            outputs = self._outputs([sentences[i] for i in fitting])
        for i, output in zip(fitting, outputs, strict=True):
            try:
                trees[i] = None if output is None else self._tree(sentences[i], output)
            except IndexError:  # constituents that are no tree
                continue
        return trees

    def _outputs(self, sentences: list[_Sentence]) -> list[Any]:
        """The model's output per sentence; None for those that it fails on, found by halving."""
        if not sentences:
            return []
        try:
            return list(self._parser.parse(sentences, return_compressed=True, subbatch_max_tokens=WORDS_PER_PASS))
        except Exception as error:  # a model may fail in any way
            if len(sentences) == 1:
                words = len(sentences[0].words)
                level = logging.INFO if self._has_failed else logging.WARNING
                name = type(error).__name__
                logger.log(level, "benepar failed on a sentence of %d words: %s: %s", words, name, error)
                self._has_failed = True
                return [None]
        middle = len(sentences) // 2
        return self._outputs(sentences[:middle]) + self._outputs(sentences[middle:])

    def _tree(self, sentence: _Sentence, output: Any) -> Tree | None:
        """The tree of a list of constituents, in which each stands before those inside it; every word is one of them.

        Built from the end: the finished constituents that lie inside the next one are the last ones put down.
        """
        tag_of = self._parser.tag_from_index
        tags = [""] * len(sentence.words) if output.tags is None else [tag_of[i] for i in output.tags.tolist()]
        constituents = list(zip(output.starts.tolist(), output.ends.tolist(), output.labels.tolist(), strict=True))
        if constituents[0][:2] != (0, len(sentence.words)) or len(tags) != len(sentence.words):
            return None
        finished: list[tuple[int, Tree]] = []
        for first, last, label in reversed(constituents):
            children = [] if last - first > 1 else [Tree(tags[first], *sentence.spans[first])]
            while not children or (finished and finished[-1][0] <= last and last - first > 1):
                children.append(finished.pop()[1])
            finished.append((last, _wrapped(self._labels[label], children)))
        return finished[0][1]


def _wrapped(labels: list[str], children: list[Tree]) -> Tree:
    """Children under a chain of constituents: S::VP is an S whose only child is a VP."""
    for label in reversed(labels or ([] if len(children) == 1 else ["TOP"])):
        children = [Tree(label, children[0].start, children[-1].end, tuple(children))]
    return children[0]


def _read(texts: Sequence[str]) -> list[_Sentence]:
    """The words of sentences; none of what is no Unicode (lone surrogates)."""
    from benepar.integrations.spacy_plugin import SentenceWrapper

    usual = SentenceWrapper.TEXT_NORMALIZATION_MAPPING
    english = _english()
    found = []
    with english.memory_zone():  # otherwise spaCy keeps every new word for good
        for text in texts:
            try:
                readable = text if len(text) <= MAX_CHARACTERS else ""
                tokens = [token for token in english.tokenizer(readable) if not token.is_space]
            except UnicodeEncodeError:
                tokens = []
            spans = [(token.idx, token.idx + len(token)) for token in tokens]
            words = [usual.get(text[start:end], text[start:end]) for start, end in spans]
            found.append(_Sentence(spans, words, [text[end : end + 1].isspace() for _, end in spans]))
    return found


@functools.cache
def _english() -> Any:
    """spaCy's English, of which only the tokenizer is used."""
    import spacy

    return spacy.blank("en")


def _need_installed() -> None:
    try:
        import benepar  # noqa: F401
        import spacy  # noqa: F401
    except ImportError as error:
        raise TreelibError(
            f"the backend benepar needs benepar and spaCy ({error}): pip install benepar spacy, or use the backend "
            "chunker."
        ) from error
