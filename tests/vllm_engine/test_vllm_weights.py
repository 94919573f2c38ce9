# SPDX-License-Identifier: Apache-2.0
"""The actor's weights under the names of published folders, and vLLM's layers beside them."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from closeness import assert_near
from dschat.models.lora import add_lora
from dschat.vllm.weights import plain_weights, record_columns, transposed_matrices, wrong_layers
from factories import HIDDEN, engine_of, largest_difference, make_causal_lm, pad_rows, ragged_rows
from model_families import MODEL_FAMILIES


def test_they_are_copies(group):
    causal_lm = make_causal_lm("llama")
    _, weight = next(plain_weights(engine_of(causal_lm)))
    assert weight.data_ptr() not in {parameter.data_ptr() for parameter in causal_lm.parameters()}


def test_adapters_are_merged_layer_by_layer(group):
    """A plain model with the weights computes what the model with adapters does."""
    causal_lm = make_causal_lm("gemma")
    add_lora(causal_lm, 2, None, "base")
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    actor = engine_of(causal_lm)
    found = dict(plain_weights(actor))
    plain = make_causal_lm("gemma", seed=1)
    plain.load_state_dict(found, strict=False)
    assert found.keys() == dict(plain.named_parameters()).keys()
    ids, _, _ = pad_rows(ragged_rows([4, 4], [3, 3]))
    with torch.no_grad():  # entries of the adapters are some ten times the model's
        assert_near(plain(ids).logits, causal_lm(ids).logits, scale=10)


@pytest.mark.parametrize(
    ("family", "zero_stage", "lora"),
    [("mixtral", 0, False), ("mixtral", 3, False), ("gpt_neox", 0, False), ("mixtral", 0, True)],
)
def test_names_are_those_of_the_familys_folders(family, zero_stage, lora, group, tmp_path):
    """Those of the files that transformers writes: experts one by one, where its modules hold them as one.

    New adapters add nothing.
    """
    path = MODEL_FAMILIES[family].save(tmp_path, ["the quick brown fox jumps over the lazy dog"] * 20)
    causal_lm = AutoModelForCausalLM.from_pretrained(path)
    if lora:
        add_lora(causal_lm, 2, None, "base")
    actor = engine_of(causal_lm, zero_stage=zero_stage)
    assert largest_difference(dict(plain_weights(actor)), load_file(tmp_path / "model.safetensors")) == 0


@pytest.mark.parametrize("kind", ["gpt2", "gemma", "mixtral"])
def test_the_first_inputs_weights_are_noted(kind, group):
    """Of each matrix outside experts, adapters merged in; GPT-2 keeps most of its matrices transposed."""
    causal_lm = make_causal_lm(kind)
    expected = {}
    for name, layer in causal_lm.named_modules():
        if isinstance(layer, nn.Linear | Conv1D) and name != "lm_head":
            inputs = torch.eye(1, layer.nx if isinstance(layer, Conv1D) else layer.in_features)
            outputs = layer(inputs) - layer(torch.zeros_like(inputs))
            expected[f"{name}.weight"] = outputs[0].detach()
    add_lora(causal_lm, 2, None, "base")
    columns, actor = {}, engine_of(causal_lm)
    names = {name for name, _ in record_columns(plain_weights(actor), columns, transposed_matrices(actor), 1)}
    assert expected.keys() < columns.keys() < names
    assert all(torch.equal(columns[name][0], expected[name]) for name in expected)
    assert not any(".experts." in name for name in columns)
    halves = {}
    weights = dict(record_columns(plain_weights(engine_of(make_causal_lm("gemma"))), halves, frozenset(), 2))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(halves[name], weights[name].T[[0, weights[name].shape[1] // 2]])


class Layer(nn.Module):
    """Stands in for a layer of vLLM that computes with a packed copy of its weight, which it leaves empty."""

    def __init__(self, packed, weight=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0)) if weight is None else weight
        self.packed, self.input_size, self.quant_method = packed, packed.shape[1], self

    def apply(self, layer, x):
        return nn.functional.linear(x, layer.packed)


def test_a_layer_with_other_weights_is_found():
    """One weight that is off by a rounding error is enough; rows may be moved, and a vocabulary is filled up."""
    random = torch.Generator().manual_seed(0)
    q, v, embedding = (torch.randn(rows, HIDDEN, generator=random) for rows in (8, 4, 10))
    columns = {"q": q[:, :1].T, "v": v[:, :1].T, "embed": embedding[:, :1].T, "other": q[:, 1:2].T}
    columns = {f"{name}.weight": of_input for name, of_input in columns.items()}
    model = nn.Module()
    model.packed_modules_mapping = {"qv": ["q", "v"]}
    model.qv = Layer(torch.cat([v, q]).flip(0))
    model.embed = Layer(torch.cat([embedding, torch.zeros(6, HIDDEN)]), nn.Parameter(embedding))
    model.tied = Layer(model.embed.packed.clone(), model.embed.weight)
    model.unknown = Layer(q)
    assert wrong_layers(model, columns) == []
    for name in ("qv", "embed", "tied"):
        row = getattr(model, name).packed[3]
        kept = row.clone()
        row[0] = torch.nextafter(row[0], torch.tensor(9.0))
        assert wrong_layers(model, columns) == [name]
        row[1] = float("nan")  # what is not finite is noted where it is drawn from
        assert wrong_layers(model, columns) == []
        row.copy_(kept)
    assert wrong_layers(model, columns) == []


def test_a_part_of_a_layer_with_other_weights_is_found():
    """Of two ranks, the second has the second half of `down`'s inputs, of `up`'s outputs and of q's; both have k."""
    random = torch.Generator().manual_seed(0)
    down, up, q, k = (torch.randn(8, HIDDEN, generator=random) for _ in range(4))
    weights = {"down": down, "up": up, "q": q, "k": k}
    columns = {f"{name}.weight": weight.T[[0, HIDDEN // 2]] for name, weight in weights.items()}
    model = nn.Module()
    model.packed_modules_mapping = {"qk": ["q", "k"]}
    model.down, model.up, model.qk = Layer(down[:, HIDDEN // 2 :]), Layer(up[4:]), Layer(torch.cat([q[4:], k]))
    model.down.input_size, model.down.input_size_per_partition = HIDDEN, HIDDEN // 2
    model.qk.num_kv_head_replicas = 2
    for layer in (model.down, model.up, model.qk):
        layer.tp_size = 2
    others = {4: up[:4, 0], 12: torch.cat([q[:4, 0], k[:, 0]])}

    def wrong() -> list[str]:
        return wrong_layers(model, columns, 1, lambda part: torch.cat([others[len(part)], part]))

    assert wrong() == []
    for name in ("down", "up", "qk"):
        weight = getattr(model, name).packed
        kept, weight[1, 0] = weight[1, 0].clone(), 9
        assert wrong() == [name]
        weight[1, 0] = kept


# -- the worker, beside stand-ins for the parts of vLLM that it extends


class TransferEngine:
    """What vLLM's engine does with a model of no layers; without an NCCL group."""

    model_update_group = None

    def __init__(self, config, vllm_config, device, model) -> None:
        self.device, self.model = device, model
        self.parallel_config = SimpleNamespace(tensor_parallel_size=1, rank=0)

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass


class Model(nn.Module):
    """Keeps the weights that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.compute_logits = None
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights) -> None:
        self.loaded |= dict(weights)


VLLM_NAMES = {
    "config": ["VllmConfig"],
    "config.weight_transfer": ["WeightTransferConfig"],
    "distributed.weight_transfer": ["WeightTransferEngineFactory"],
    "distributed.weight_transfer.nccl_engine": ["NCCLWeightTransferInitInfo"],
    "model_executor.model_loader.reload.layerwise": ["get_layerwise_info"],
}


@pytest.fixture
def worker(monkeypatch):
    for module_name, names in VLLM_NAMES.items():
        module = ModuleType(f"vllm.{module_name}")
        vars(module).update({name: Mock() for name in names})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    engine_module = sys.modules["vllm.distributed.weight_transfer.nccl_engine"]
    monkeypatch.setattr(engine_module, "NCCLWeightTransferEngine", TransferEngine, raising=False)
    monkeypatch.setitem(sys.modules, "dschat.vllm.worker", None)  # so that it is taken out again
    del sys.modules["dschat.vllm.worker"]
    worker = importlib.import_module("dschat.vllm.worker")
    monkeypatch.setattr(worker, "repack_weights", lambda model: None)
    return worker


def test_a_weight_arrives_whole_or_is_refused(worker, monkeypatch) -> None:
    """[1, 2] in float32 is 00 00 80 3f, 00 00 00 40."""
    model = Model()
    weights = worker.TrainerWeights(None, None, torch.device("cpu"), model)
    weights.init_transfer_engine(worker.RunInfo("a", 1.0, [], []))
    pieces = bytes.fromhex("0000803f0000"), bytes.fromhex("0040")

    def receive(piece) -> None:
        weights.receive_weights(worker.WeightUpdate("w", "float32", [1, 2], "a.1", piece))

    weights.start_weight_update()
    receive(pieces[0])
    with pytest.raises(RuntimeError, match="the last weight is incomplete: only 6 bytes of it came"):
        weights.finish_weight_update()
    receive(pieces[1])
    weights.finish_weight_update()
    assert model.loaded["w"].tolist() == [[1.0, 2.0]]
    with pytest.raises(RuntimeError, match="w came without bytes, but there is no NCCL group"):
        receive(None)
    monkeypatch.setattr(worker, "wrong_layers", lambda *_: ["up", "down"])
    with pytest.raises(RuntimeError, match="up computes with other weights than the actor's .wrong layers: 2."):
        weights.finish_weight_update()
