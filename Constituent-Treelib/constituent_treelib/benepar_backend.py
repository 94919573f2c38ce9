# SPDX-License-Identifier: Apache-2.0
"""The Berkeley neural parser, which the paper uses. Its checkpoints are read without running code from them."""

import functools
import hashlib
import importlib.metadata
import os
import pickle
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

from constituent_treelib.trees import Tree, TreelibError

DEFAULT_MODEL = "benepar_en3"
MAX_WORDS = 200  # of a sentence; time and memory grow at least with the square of the number of words
MAX_CHARACTERS = 4000  # of a sentence; the worst case for spaCy's tokenizer, brackets, then takes two seconds
WORDS_PER_PASS = 500  # in one forward pass, padding included
WEIGHTS = "benepar_model.bin"  # in a model's folder, beside the encoder's configuration and tokenizer
_VERSION_DIGITS = 12
_MESSAGE_LENGTH = 400


@dataclass(frozen=True)
class _Sentence:
    """A sentence with the fields that benepar reads, and the (start, end) of each word in characters."""

    spans: list[tuple[int, int]]
    words: list[str]  # with quotation marks as in benepar's training data
    space_after: list[bool]
    tree: None = None  # there is no gold tree


class BeneparBackend:
    """Parses sentences with a benepar model, on the CPU unless another device is given."""

    name = "benepar"
    unit: Literal["sentence"] = "sentence"

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, device: str = "cpu") -> None:
        """Loads the model, once per process.

        Args:
            model: name of a downloaded model, or path of a checkpoint file or folder.
            device: torch device.

        Raises:
            TreelibError: benepar is not installed, or the model is missing or unusable; the message says what to do.
        """
        _require_packages()
        path = find_model(model)
        self._parser = load_model(path, device)
        self._labels: dict[int, list[str]] = {}  # chains of categories by label id
        for label, label_id in self._parser.label_vocab.items():
            self._labels[label_id] = label.split("::") if label else []
        self.version = describe_model(path)

    def parse(self, units: Sequence[str]) -> list[Tree | None]:
        """Parses sentences in one call of the model.

        A tree is None if its sentence has no words, or too many.
        """
        import torch

        sentences = _split_words(units)
        trees: list[Tree | None] = [None] * len(units)
        fitting = [i for i, sentence in enumerate(sentences) if 0 < len(sentence.words) <= MAX_WORDS]
        # The best tree is found through gradients, which inference mode would forbid.
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not define `arg_constraints`")
            fitting_sentences = [sentences[i] for i in fitting]
            outputs = list(
                self._parser.parse(fitting_sentences, return_compressed=True, subbatch_max_tokens=WORDS_PER_PASS)
            )
        for i, output in zip(fitting, outputs, strict=True):
            with suppress(IndexError):  # the constituents do not form a tree
                trees[i] = self._build_tree(sentences[i], output)
        return trees

    def _build_tree(self, sentence: _Sentence, output: Any) -> Tree | None:
        """Builds the tree from a list of constituents, each before those inside it, one for every word included."""
        word_count = len(sentence.words)
        tags = [""] * word_count
        if output.tags is not None:
            tags = [self._parser.tag_from_index[i] for i in output.tags.tolist()]
        starts = output.starts.tolist()
        ends = output.ends.tolist()
        constituents = list(zip(starts, ends, output.labels.tolist(), strict=True))
        if constituents[0][:2] != (0, word_count) or len(tags) != word_count:
            return None

        # From the end: the finished constituents inside the next one are on top of the stack.
        finished: list[tuple[int, Tree]] = []  # last word and tree
        for first, last, label in reversed(constituents):
            children: list[Tree] = []
            if last - first <= 1:
                start, end = sentence.spans[first]
                children.append(Tree(tags[first], start, end))
            else:
                children.append(finished.pop()[1])
                while finished and finished[-1][0] <= last:
                    children.append(finished.pop()[1])
            finished.append((last, _under_labels(self._labels[label], children)))
        return finished[0][1]


def _under_labels(labels: list[str], children: list[Tree]) -> Tree:
    """Puts children under a chain of constituents: S::VP is an S whose only child is a VP."""
    if not labels and len(children) > 1:
        labels = ["TOP"]
    for label in reversed(labels):
        children = [Tree(label, children[0].start, children[-1].end, tuple(children))]
    return children[0]


def _split_words(texts: Sequence[str]) -> list[_Sentence]:
    """Splits sentences into words; one that is too long or no valid Unicode (lone surrogates) has none."""
    from benepar.integrations.spacy_plugin import SentenceWrapper

    normalized = SentenceWrapper.TEXT_NORMALIZATION_MAPPING
    english = _spacy_english()
    sentences = []
    with english.memory_zone():  # otherwise spaCy never frees new words
        for text in texts:
            try:
                tokens = english.tokenizer(text if len(text) <= MAX_CHARACTERS else "")
            except UnicodeEncodeError:
                tokens = []
            spans: list[tuple[int, int]] = []
            words: list[str] = []
            space_after: list[bool] = []
            for token in tokens:
                if token.is_space:
                    continue
                start = token.idx
                end = start + len(token)
                word = text[start:end]
                spans.append((start, end))
                words.append(normalized.get(word, word))
                space_after.append(text[end : end + 1].isspace())
            sentences.append(_Sentence(spans, words, space_after))
    return sentences


@functools.cache
def _spacy_english() -> Any:
    """spaCy's English pipeline, of which only the tokenizer is used."""
    import spacy

    return spacy.blank("en")


def _require_packages() -> None:
    try:
        import benepar  # noqa: F401
        import spacy  # noqa: F401
    except ImportError as error:
        raise TreelibError(
            f"the backend benepar needs benepar and spaCy ({error}): pip install benepar spacy, or use the backend "
            "chunker."
        ) from error


def find_model(model: str | os.PathLike[str]) -> Path:
    """Path of a model: a checkpoint file, a folder like ``benepar_en3``, or the name of a downloaded model.

    A name is searched in ``models`` of every data folder of nltk.

    Raises:
        TreelibError: there is no such model; the message says how to get it.
    """
    import nltk.data

    path = Path(model)
    if path.exists():
        return path
    if path.parent != Path(".") or path.suffix:
        raise TreelibError(f"benepar model {model}: there is no such file or folder.")
    folders = [Path(folder) / "models" for folder in nltk.data.path if folder]
    for folder in folders:
        if (folder / path.name).exists():
            return folder / path.name
    for folder in folders:
        archive = folder / f"{path.name}.zip"
        if archive.exists():
            raise TreelibError(f"benepar model {model}: unpack {archive} into its folder.")
    raise TreelibError(
        f"benepar model {model} is not on this machine. Download it: "
        f"python -c \"import benepar; benepar.download('{model}')\". Without a network, copy the folder "
        f"nltk_data/models/{model} from a machine that has it to {folders[0] if folders else 'nltk_data/models'}, or "
        "give the path of the folder as the model. Or use the backend chunker, which needs no model."
    )


def describe_model(path: Path) -> str:
    """benepar's version, the model's name and the first digits of the SHA-256 of its weights."""
    weights = path / WEIGHTS if path.is_dir() else path
    with weights.open("rb") as file:
        digits = hashlib.file_digest(file, "sha256").hexdigest()[:_VERSION_DIGITS]
    return f"{importlib.metadata.version('benepar')} {path.name} {digits}"


def load_model(path: Path, device: str) -> Any:
    """Loads the ``ChartParser`` of a checkpoint, in float32, for inference only; once per process.

    The random generators keep their state.

    Raises:
        TreelibError: it cannot be loaded, or not onto this device.
    """
    weights = path / WEIGHTS if path.is_dir() else path
    if not weights.is_file():
        raise TreelibError(f"benepar model {path}: the file {WEIGHTS} is missing.")
    return _load_cached(path.resolve(), weights.stat().st_mtime_ns, device)


@functools.cache
def _load_cached(path: Path, modified: int, device: str) -> Any:
    """Loads the parser; the time of modification is a part of the cache's key."""
    import torch

    config, state = _read_folder(path) if path.is_dir() else _read_file(path)
    try:
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
            parser = _build(config)
            _load_state(parser, state)
            if not all(bool(weight.isfinite().all()) for weight in parser.parameters()):
                raise ValueError("a weight is not finite")
            parser.requires_grad_(False).float().eval()
    except Exception as error:  # an incompatible checkpoint may raise anything
        raise TreelibError(f"benepar model {path}: cannot be loaded: {_in_one_line(error)}") from error
    try:
        return parser.to(device)
    except (RuntimeError, AssertionError) as error:
        raise TreelibError(f"benepar model on device {device}: {_in_one_line(error)}") from error


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and weights from one file, as benepar saves during training."""
    content = _read_weights(path)
    if not isinstance(content, dict) or not {"config", "state_dict"} <= content.keys():
        raise TreelibError(f"benepar model {path}: is not a checkpoint of benepar, with config and state_dict.")
    hparams = dict(content["config"].get("hparams", {}))
    encoder = hparams.get("pretrained_model")
    if hparams.get("use_pretrained") and not Path(str(encoder)).is_dir():
        raise TreelibError(
            f"benepar model {path}: wants the encoder {encoder!r}, which is no folder here. Give a folder with "
            "weights, config.json and tokenizer, as benepar publishes them."
        )
    return content["config"], content["state_dict"]


def _read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and weights from a folder, as benepar publishes them with the encoder's tokenizer."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False).benepar
    except (OSError, ValueError, AttributeError) as error:
        raise TreelibError(
            f"benepar model {path}: config.json is not a published model's: {_in_one_line(error)}"
        ) from error
    return {**config, "pretrained_model_path": str(path)}, _read_weights(path / WEIGHTS)


def _read_weights(path: Path) -> Any:
    """Reads tensors and plain values; refuses a file that would run code while it is read."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise TreelibError(
            f"benepar model {path}: holds other things than tensors and plain values, which are not read because they "
            'could run code, or it is damaged. Save it as torch.save({"config": plain values, "state_dict": tensors}).'
        ) from error
    except Exception as error:  # a damaged file may raise anything
        raise TreelibError(f"benepar model {path}: cannot be read: {_in_one_line(error)}") from error


def _build(config: dict[str, Any]) -> Any:
    """Makes a ChartParser; its sentence length is limited to the positions of its encoder."""
    from benepar.nkutil import HParams
    from benepar.parse_chart import ChartParser

    hparams = HParams(**{"force_root_constituent": True, **config["hparams"]})
    with _transformers_5():
        parser = ChartParser(**{**config, "hparams": hparams})
    if parser.pretrained_model is not None:
        tokenizer = parser.retokenizer.tokenizer
        position_count = _num_positions(parser.pretrained_model.config)
        tokenizer.model_max_length = min(tokenizer.model_max_length, position_count)
    return parser


def _num_positions(encoder: Any) -> int:
    """Positions of an encoder for tokens; models like RoBERTa count theirs from the padding's id on."""
    positions = getattr(encoder, "max_position_embeddings", None)
    if not positions or positions < 0:
        return 1 << 30
    return positions - (encoder.pad_token_id + 1 if "roberta" in encoder.model_type else 0)


def _load_state(parser: Any, state: dict[str, Any]) -> None:
    """Loads all weights, without buffers that old versions of transformers saved beside them."""
    obsolete = ("embeddings.position_ids", "EncDecAttention.relative_attention_bias.weight")
    expected = parser.state_dict().keys()
    weights = {}
    for name, value in state.items():
        is_obsolete = name.startswith("pretrained_model.") and name.endswith(obsolete)
        if name in expected or not is_obsolete:
            weights[name] = value
    parser.load_state_dict(weights)


def _transformers_5() -> AbstractContextManager[Any]:
    """Lets benepar find the start and stop tokens of a tokenizer: transformers 5 dropped the method that it asks.

    Tokenizers that benepar loads meanwhile get it; transformers itself stays as it is.
    """
    from benepar import retokenization

    substitute = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=_load_tokenizer))
    return patch.object(retokenization, "transformers", substitute)


def _load_tokenizer(*args: Any, **kwargs: Any) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(*args, trust_remote_code=False, **kwargs)
    if not hasattr(tokenizer, "build_inputs_with_special_tokens"):
        tokenizer.build_inputs_with_special_tokens = functools.partial(_with_special_tokens, tokenizer)
    return tokenizer


def _with_special_tokens(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Ids between those that the tokenizer puts before and after a text."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for start in range(len(full) - len(plain) + 1):
        end = start + len(plain)
        if full[start:end] == plain:
            return [*full[:start], *ids, *full[end:]]
    raise ValueError("the tokenizer changes a text's tokens when it adds its special ones")


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MESSAGE_LENGTH]
