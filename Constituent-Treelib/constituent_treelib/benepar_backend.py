# SPDX-License-Identifier: Apache-2.0
"""The Berkeley neural parser, the paper's: its checkpoints, read without running their code, and its trees."""

import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

from constituent_treelib.trees import Tree, TreelibError

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "benepar_en3"
MAX_WORDS = 200  # time and memory grow with the square of a sentence's words and more
MAX_CHARACTERS = 4000  # of a sentence; what takes spaCy's tokenizer longest, brackets, takes two seconds then
WORDS_PER_PASS = 500  # of the network, padding included
WEIGHTS = "benepar_model.bin"  # in a folder, beside the configuration and the tokenizer of the encoder
_VERSION_DIGITS = 12
_MESSAGE_LENGTH = 400


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


def find_model(model: str | os.PathLike[str]) -> Path:
    """The file or folder of a model: a checkpoint file, a folder like ``benepar_en3``, or the name of a download.

    A name is looked for in ``models`` of every folder where nltk keeps its data.

    Raises:
        TreelibError: there is none; says how to get it.
    """
    import nltk.data

    path = Path(model)
    if path.exists():
        return path
    if path.parent != Path(".") or path.suffix:
        raise TreelibError(f"benepar model {model}: there is no such file or folder.")
    places = [Path(folder) / "models" for folder in nltk.data.path if folder]
    for name in (path.name, f"{path.name}.zip"):
        for found in (place / name for place in places if (place / name).exists()):
            if name.endswith(".zip"):
                raise TreelibError(f"benepar model {model}: unpack {found} where it lies.")
            return found
    raise TreelibError(
        f"benepar model {model} is not on this machine. Download it: "
        f"python -c \"import benepar; benepar.download('{model}')\". Without a network, copy the folder "
        f"nltk_data/models/{model} from a machine that has it to {places[0] if places else 'nltk_data/models'}, or "
        "give the path of the folder as the model. Or use the backend chunker, which needs no model."
    )


def describe_model(path: Path) -> str:
    """benepar's version, the model's name and the beginning of the SHA-256 of its weights."""
    with open(path / WEIGHTS if path.is_dir() else path, "rb") as file:
        digits = hashlib.file_digest(file, "sha256").hexdigest()[:_VERSION_DIGITS]
    return f"{importlib.metadata.version('benepar')} {path.name} {digits}"


def load_model(path: Path, device: str) -> Any:
    """The ``ChartParser`` of a checkpoint, in float32, for parsing only. Loaded once per process.

    The state of the random generators stays as it is.

    Raises:
        TreelibError: it cannot be loaded, or not onto this device.
    """
    weights = path / WEIGHTS if path.is_dir() else path
    if not weights.is_file():
        raise TreelibError(f"benepar model {path}: the file {WEIGHTS} is missing.")
    return _loaded(path.resolve(), weights.stat().st_mtime_ns, device)


@functools.cache
def _loaded(path: Path, changed: int, device: str) -> Any:
    """The parser; `changed` tells versions of a file apart."""
    import torch

    config, state = _read_folder(path) if path.is_dir() else _read_file(path)
    try:
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
            parser = _build(config)
            _load_state(parser, state)
            if not all(bool(weight.isfinite().all()) for weight in parser.parameters()):
                raise ValueError("a weight is not finite")
            parser.requires_grad_(False).float().eval()
    except Exception as error:  # whatever a checkpoint of another making leads to
        raise TreelibError(f"benepar model {path}: cannot be loaded: {_in_one_line(error)}") from error
    try:
        return parser.to(device)
    except (RuntimeError, AssertionError) as error:
        raise TreelibError(f"benepar model on device {device}: {_in_one_line(error)}") from error


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What benepar saves during training: everything in one file."""
    content = _read_weights(path)
    if not isinstance(content, dict) or not {"config", "state_dict"} <= content.keys():
        raise TreelibError(f"benepar model {path}: is no checkpoint of benepar, with config and state_dict.")
    hparams = dict(content["config"].get("hparams", {}))
    encoder = hparams.get("pretrained_model")
    if hparams.get("use_pretrained") and not Path(str(encoder)).is_dir():
        raise TreelibError(
            f"benepar model {path}: wants the encoder {encoder!r}, which is no folder here. Give a folder with "
            "weights, config.json and tokenizer, as benepar publishes them."
        )
    return content["config"], content["state_dict"]


def _read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What benepar publishes: the weights, and configuration and tokenizer of the encoder."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False).benepar
    except (OSError, ValueError, AttributeError) as error:
        raise TreelibError(
            f"benepar model {path}: config.json is not a published model's: {_in_one_line(error)}"
        ) from error
    return {**config, "pretrained_model_path": str(path)}, _read_weights(path / WEIGHTS)


def _read_weights(path: Path) -> Any:
    """Tensors and plain values only: a file that would run code while it is read is refused."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise TreelibError(
            f"benepar model {path}: holds other things than tensors and plain values, which is not read because it "
            'could run code, or is damaged. Save it as torch.save({"config": plain values, "state_dict": tensors}).'
        ) from error
    except Exception as error:  # a damaged file can lead to any
        raise TreelibError(f"benepar model {path}: cannot be read: {_in_one_line(error)}") from error


def _build(config: dict[str, Any]) -> Any:
    """A ChartParser of this configuration, its encoder's sentence length limited to what the encoder can read."""
    from benepar.nkutil import HParams
    from benepar.parse_chart import ChartParser

    hparams = HParams(**{"force_root_constituent": True, **config["hparams"]})
    with _transformers_5():
        parser = ChartParser(**{**config, "hparams": hparams})
    if parser.pretrained_model is not None:
        tokenizer, encoder = parser.retokenizer.tokenizer, parser.pretrained_model.config
        tokenizer.model_max_length = min(tokenizer.model_max_length, _num_positions(encoder))
    return parser


def _num_positions(encoder: Any) -> int:
    """Tokens that an encoder has positions for; RoBERTa and its kin number theirs from the padding's id on."""
    positions = getattr(encoder, "max_position_embeddings", None)
    if not positions or positions < 0:
        return 1 << 30
    return positions - (encoder.pad_token_id + 1 if "roberta" in encoder.model_type else 0)


def _load_state(parser: Any, state: dict[str, Any]) -> None:
    """The weights, all of them; what old versions of transformers saved beside them does not count."""
    leftover = ("embeddings.position_ids", "EncDecAttention.relative_attention_bias.weight")
    unknown = state.keys() - parser.state_dict().keys()
    dropped = {name for name in unknown if name.startswith("pretrained_model.") and name.endswith(leftover)}
    parser.load_state_dict({name: value for name, value in state.items() if name not in dropped})


def _transformers_5() -> AbstractContextManager[Any]:
    """Lets benepar find the start and stop tokens of a tokenizer: transformers 5 dropped the method that it asks.

    Tokenizers that benepar loads meanwhile get it; transformers itself stays as it is.
    """
    from benepar import retokenization

    own = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=_load_tokenizer))
    return patch.object(retokenization, "transformers", own)


def _load_tokenizer(*args: Any, **kwargs: Any) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(*args, trust_remote_code=False, **kwargs)
    if not hasattr(tokenizer, "build_inputs_with_special_tokens"):
        tokenizer.build_inputs_with_special_tokens = functools.partial(_with_special_tokens, tokenizer)
    return tokenizer


def _with_special_tokens(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Ids between what the tokenizer puts before and after a text."""
    bare, full = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return [*full[:start], *ids, *full[start + len(bare) :]]
    raise ValueError("the tokenizer changes a text's tokens when it adds its special ones")


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MESSAGE_LENGTH]
