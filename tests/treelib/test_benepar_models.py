# SPDX-License-Identifier: Apache-2.0
"""benepar's checkpoints: where they are looked for, what is refused, and published ones under transformers 5."""

import hashlib
import json
import pickle
import random
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("benepar")
pytest.importorskip("spacy")

import nltk.data
import transformers
from benepar import retokenization

from constituent_treelib import benepar_backend as loading
from constituent_treelib.benepar_backend import BeneparBackend
from constituent_treelib.parsing import make_backend, parse_texts
from constituent_treelib.trees import TreelibError
from toy_parser import publish_pretrained, save

pytestmark = pytest.mark.xdist_group("benepar")  # one process imports it

FOX = "The quick fox chased the lazy dog."


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folders of random parsers with a pretrained encoder, as old versions of transformers left them."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("bert", "t5")}
    return {kind: (folder, publish_pretrained(folder, kind)) for kind, folder in folders.items()}


def changed(file: Path, model: Path, change) -> Path:
    """A copy of a checkpoint file with other content."""
    content = torch.load(model, weights_only=True)
    change(content)
    torch.save(content, file)
    return file


def refusal(model, **settings) -> str:
    """What the user reads."""
    with pytest.raises(TreelibError) as caught:
        BeneparBackend(model, **settings)
    return str(caught.value)


def test_version_names_the_weights(benepar_model):
    digits = hashlib.sha256(benepar_model.read_bytes()).hexdigest()[:12]
    assert BeneparBackend(benepar_model).version == f"0.2.0 toy.pt {digits}"
    assert (BeneparBackend.name, BeneparBackend.unit) == ("benepar", "sentence")
    assert make_backend("benepar", str(benepar_model)).version == f"0.2.0 toy.pt {digits}"


def test_loaded_once_until_the_file_changes(benepar_model, tmp_path):
    file = Path(shutil.copy(benepar_model, tmp_path / "model.pt"))
    first, again = BeneparBackend(file), BeneparBackend(str(file))
    assert again._parser is first._parser
    other = changed(file, file, lambda content: content["state_dict"]["f_label.0.weight"].zero_())
    assert BeneparBackend(other).version != first.version
    assert not BeneparBackend(other)._parser.f_label[0].weight.any()


def test_loading_leaves_the_process_as_it_was(benepar_model, tmp_path, monkeypatch):
    """Random states; no gradients are kept; on the CPU where a GPU is visible; inside inference mode, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.random.get_rng_state(), random.getstate()
    with torch.inference_mode():
        backend = BeneparBackend(shutil.copy(benepar_model, tmp_path / "model.pt"))
    assert torch.equal(torch.random.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert not any(weight.requires_grad for weight in backend._parser.parameters())
    assert backend._parser.device == torch.device("cpu")
    assert backend.parse([FOX]) == BeneparBackend(benepar_model).parse([FOX]) != [None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(benepar_model):
    backend = BeneparBackend(benepar_model, device="cuda")
    assert backend._parser.device.type == "cuda"
    assert backend.parse([FOX]) == BeneparBackend(benepar_model).parse([FOX])


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")), "none"]
)
def test_a_device_that_is_not_there(device, benepar_model):
    assert f"device {device}" in refusal(benepar_model, device=device)


def test_a_downloaded_name_is_found_where_nltk_keeps_its_data(published, tmp_path, monkeypatch):
    folder, _ = published["bert"]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "benepar_toy").symlink_to(folder)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "elsewhere"), str(tmp_path)])
    assert BeneparBackend("benepar_toy").parse([FOX]) == BeneparBackend(folder).parse([FOX])


def test_a_name_that_was_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    message = refusal("benepar_en3")
    command = re.search(r"python -c \"(.*)\"", message)
    assert command and command[1] == "import benepar; benepar.download('benepar_en3')"
    assert f"to {tmp_path / 'models'}" in message and "chunker" in message
    assert "benepar_en3" in refusal(BeneparBackend.__init__.__defaults__[0])


def test_a_download_that_was_not_unpacked(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "benepar_en3.zip").write_bytes(b"PK")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    assert refusal("benepar_en3").endswith(f"unpack {tmp_path}/models/benepar_en3.zip into its folder.")


@pytest.mark.parametrize("model", ["missing/benepar_en3", "model.pt"])
def test_a_path_that_is_not_there(model):
    assert refusal(model) == f"benepar model {model}: there is no such file or folder."


class Attack:
    """A pickle that would write a file when it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["torch.save", "pickle"])
def test_a_checkpoint_that_would_run_code(form, benepar_model, tmp_path):
    file = tmp_path / "model.pt"
    content = torch.load(benepar_model, weights_only=True) | {"more": Attack(tmp_path / "ran")}
    if form == "torch.save":
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content))
    assert "could run code" in refusal(file)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"\x80\x02."])
def test_a_damaged_file(content, tmp_path):
    (tmp_path / "model.pt").write_bytes(content)
    assert str(tmp_path / "model.pt") in refusal(tmp_path / "model.pt")


def test_another_kind_of_file(tmp_path):
    torch.save({"weights": torch.zeros(2)}, tmp_path / "model.pt")
    assert "is not a checkpoint of benepar" in refusal(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content["state_dict"].pop("f_label.0.weight"), 'Missing key(s) in state_dict: "f_label'),
        (lambda content: content["state_dict"].update(extra=torch.zeros(1)), 'Unexpected key(s) in state_dict: "ex'),
        (lambda content: content["config"]["hparams"].pop("d_model"), "d_model"),
        (lambda content: content["state_dict"]["f_label.0.weight"].fill_(float("nan")), "a weight is not finite"),
    ],
)
def test_a_checkpoint_with_wrong_content(change, words, benepar_model, tmp_path):
    file = changed(tmp_path / "model.pt", benepar_model, change)
    message = refusal(file)
    assert message.startswith(f"benepar model {file}: cannot be loaded") and words in message
    assert "\n" not in message


def test_a_folder_of_something_else(published, tmp_path):
    assert "benepar_model.bin is missing" in refusal(tmp_path)
    folder, _ = published["bert"]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    del config["benepar"]
    (copy / "config.json").write_text(json.dumps(config))
    assert f"benepar model {copy}: config.json is not a published model's" in refusal(copy)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_published_models(kind, published):
    """The weights are the parser's that was published. benepar reads transformers itself again."""
    folder, original = published[kind]
    backend = BeneparBackend(folder)
    assert retokenization.transformers is transformers
    assert None not in backend.parse([FOX, 'She said, "(it)  slept".', "x", "日本 fox"])
    weights = backend._parser.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in original.state_dict().items())
    assert weights.keys() == original.state_dict().keys()


def test_start_and_stop_of_a_sentence(published):
    """[CLS] The fox [SEP]: the network sees a sentence between the encoder's own start and stop.

    A word is where its last piece is. T5's are read in the decoder, which starts with the padding: <pad> the fox </s>.
    """
    bert = loading.load_model(published["bert"][0], "cpu").retokenizer
    assert bert.tokenizer.build_inputs_with_special_tokens([-100]) == [2, -100, 3]
    encoded = bert(["The", "foxes"], [True, False])
    pieces = bert.tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert [pieces[i] for i in encoded["words_from_tokens"]] == ["[CLS]", "the", "##s", "[SEP]"]
    t5 = loading.load_model(published["t5"][0], "cpu").retokenizer
    assert t5.tokenizer.build_inputs_with_special_tokens([-100]) == [-100, 1]
    encoded = t5(["the", "fox"], [True, False])
    pieces = ["<pad>", *t5.tokenizer.convert_ids_to_tokens(encoded["input_ids"])]
    assert [pieces[i] for i in encoded["words_from_tokens"]] == ["<pad>", "e", "▁fox", "</s>"]


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_sentences_too_long_for_the_encoder(kind, published):
    """40 positions, two (T5: one, and the decoder's start) of which are no words."""
    backend = BeneparBackend(published[kind][0])
    _, counts = parse_texts([FOX, "fox " * 38, "fox " * 39, FOX, "fox " * 50], backend)
    assert (counts.parsed, counts.fell_back) == (3, 2)


def test_roberta_counts_its_positions_from_the_padding():
    config = SimpleNamespace(model_type="xlm-roberta", pad_token_id=1, max_position_embeddings=514)
    assert loading._num_positions(config) == 512
    assert loading._num_positions(SimpleNamespace(model_type="t5")) > 1_000_000


def test_one_file_that_names_its_encoder(published, tmp_path):
    """What benepar saves while it trains: configuration and tokenizer of the encoder are elsewhere."""
    folder, parser = published["bert"]
    encoder = tmp_path / "encoder"
    shutil.copytree(folder, encoder)
    parser.pretrained_model.save_pretrained(encoder)
    config = {**parser.config, "hparams": {**parser.config["hparams"], "pretrained_model": str(encoder)}}
    save(SimpleNamespace(config=config, state_dict=parser.state_dict), tmp_path / "model.pt")
    assert BeneparBackend(tmp_path / "model.pt").parse([FOX]) == BeneparBackend(folder).parse([FOX]) != [None]
    shutil.rmtree(encoder)
    loading._load_cached.cache_clear()
    assert str(encoder) in refusal(tmp_path / "model.pt")


def test_no_encoder_is_fetched(benepar_model, tmp_path):
    """A file may not choose what is loaded from elsewhere."""

    def names_one(content):
        content["config"]["hparams"].update(use_pretrained=True, pretrained_model="someone/encoder")

    message = refusal(changed(tmp_path / "model.pt", benepar_model, names_one))
    assert "wants the encoder 'someone/encoder', which is no folder here" in message


def test_not_installed(monkeypatch, benepar_model):
    monkeypatch.setitem(sys.modules, "spacy", None)
    message = refusal(benepar_model)
    assert "pip install benepar spacy" in message and "chunker" in message
