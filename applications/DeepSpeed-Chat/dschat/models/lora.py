# SPDX-License-Identifier: Apache-2.0
"""LoRA with peft: adding adapters to a model, switching them off, saving, merging and loading them."""

import copy
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dschat.base.errors import UserError
from dschat.base.fingerprints import hub_commit, model_hash
from dschat.models.adapters import CONFIG, NAME, WEIGHTS, is_adapter, lora_config
from dschat.models.opening import Placement
from dschat.models.parameters import whole_shape
from dschat.models.reward_notes import save_adapter_notes
from dschat.models.tensor_files import save_tensors

logger = logging.getLogger(__name__)

ALPHA_PER_RANK = 2  # the update is scaled by alpha / rank
PREFIX = "base_model.model."  # of every name in peft's files
HEAD_NAMES = ("lm_head", "embed_out", "score")  # layers that never get an adapter
# Settings of an adapter's config that plain LoRA may have. Others select variants of LoRA that are merged differently.
PLAIN_LORA = """r lora_alpha lora_dropout use_rslora rank_pattern alpha_pattern fan_in_fan_out target_modules
exclude_modules layers_to_transform layers_pattern modules_to_save base_model_name_or_path revision task_type peft_type
peft_version inference_mode auto_mapping""".split()


def add_lora(
    model: Any,
    rank: int,
    targets: str | Sequence[str] | None,
    base: str,
    alpha: int | None = None,
    dropout: float = 0.0,
) -> None:
    """Adds adapters to a model's linear layers and freezes everything else but a score head.

    Args:
        model: a Hugging Face model.
        rank: rank of the adapters.
        targets: parts of the names of the layers to adapt; None adapts every linear layer but the heads.
        base: path of the model, see `record_base`.
        alpha: the output is scaled by alpha / rank; None means twice the rank.
        dropout: dropout of the adapters' inputs.

    Raises:
        UserError: a target matches no layer.
    """
    target_parts = [targets] if isinstance(targets, str) else targets
    layer_names: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and name.split(".")[-1] not in HEAD_NAMES:
            layer_names.append(name)
    for target in target_parts or ():
        if not any(target in name for name in layer_names):
            raise UserError(
                f"--lora_module_name {target}: no linear layer of {base} that can have an adapter has that in its "
                f"name; the head never has one. Layers are called, for instance, {', '.join(layer_names[:3])}."
            )
    adapted_names = layer_names
    if target_parts is not None:
        adapted_names = [name for name in layer_names if any(target in name for target in target_parts)]
    config = LoraConfig(
        r=rank,
        lora_alpha=ALPHA_PER_RANK * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=adapted_names,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    record_base(model, config, base)
    inject_adapter_in_model(config, model, NAME)
    if config.target_parameters:  # peft adapts experts of some families whatever it was asked for
        raise UserError(
            f"--lora_dim: adapters of the experts of {base} could not be saved. Give --lora_module_name the names of"
            " other layers, such as q_proj v_proj."
        )
    config.target_parameters = None  # an empty set would count as another kind of adapter
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith("score."))


def record_base(model: Any, config: LoraConfig, base: str) -> None:
    """Records which model adapters are trained on: a hub id and its commit, or a folder's absolute path and hash."""
    config.base_model_name_or_path = base
    config.revision = None
    model.adapter_base_hash = None
    if Path(base).is_dir():
        config.base_model_name_or_path = os.path.abspath(base)
        model.adapter_base_hash = model_hash(base)
        return
    with suppress(OSError):  # a model that no run has loaded, such as that of a plan
        config.revision = hub_commit(base, local_files_only=True)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Computes the base model inside, in forward passes without gradient."""
    layers = []
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            layers.append(module)
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters() would also flip requires_grad
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapter(model: Any, adapter: Mapping[str, Tensor], folder: Path) -> None:
    """Writes adapter_config.json, adapter_model.safetensors and the notes of `dschat.models.reward_notes`.

    AutoPeftModelForCausalLM and AutoPeftModelForSequenceClassification (with num_labels=1) open them; they read the
    base model's path from the config.

    Args:
        model: with adapters; its weights are not read.
        adapter: whole weights by their names in the model, see `is_adapter`.
        folder: created if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(
        model, state_dict=dict(adapter), adapter_name=NAME, save_embedding_layers=False
    )
    weights |= {name: tensor for name, tensor in adapter.items() if name.startswith("score.")}
    prefixed = {}
    for name, tensor in weights.items():
        prefixed[f"{PREFIX}{name}"] = tensor.contiguous()
    save_tensors(prefixed, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(lora_config(model))
    assert config is not None  # the caller checked
    has_score = hasattr(model, "score")
    config.task_type = TaskType.SEQ_CLS if has_score else TaskType.CAUSAL_LM
    config.modules_to_save = ["score"] if has_score else None
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_adapter_notes(model.config, model.adapter_base_hash, folder)


def merged(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Merges adapters into a stream of weights: W + scaling · B·A, with each layer's own scaling.

    The model's own weights are not changed.

    Args:
        model: with adapters.
        weights: whole weights by their names in the model, one at a time. A layer's weight comes before its adapter's
            two matrices, as peft orders them, so at most one layer is held at a time.

    Yields:
        Name in the plain model, and weight.

    Raises:
        UserError: an adapter has other weights than A and B.
    """
    pending: dict[str, Tensor] = {}  # the weight W and the matrix A of the current layer
    for name, tensor in weights:
        layer, _, matrix = name.partition(".lora_")
        if matrix == f"A.{NAME}.weight":
            pending["A"] = tensor.float().clone()
        elif matrix == f"B.{NAME}.weight":
            module = model.get_submodule(layer)
            update = LoraUpdate(pending["A"], tensor, module.scaling[NAME])
            yield f"{layer}.weight", update.added_to(pending["W"], module.fan_in_fan_out)
            pending.clear()
        elif matrix:
            raise UserError(f"{name}: an adapter with such a weight cannot be merged. Save it with --no_merge_lora.")
        elif name.endswith(".base_layer.weight"):
            pending["W"] = tensor.clone()
        else:
            yield name.replace(".base_layer.", "."), tensor


@dataclass(frozen=True)
class LoraUpdate:
    """The update scaling · B·A of one layer's weight."""

    a: Tensor  # (rank, in)
    b: Tensor  # (out, rank)
    scaling: float

    def added_to(self, weight: Tensor, inputs_first: bool) -> Tensor:
        """W + scaling · B·A in W's dtype, computed in float32.

        Args:
            weight: W, (out, in).
            inputs_first: W is (in, out), as in GPT-2.
        """
        a = self.a.to(weight.device, torch.float32)
        b = self.b.to(weight.device, torch.float32)
        update = self.scaling * (b @ a)
        return (weight.float() + (update.T if inputs_first else update)).to(weight.dtype)


@torch.no_grad()
def merge_adapter(model: Any, folder: Path, where: str, base: str, placement: Placement) -> None:
    """Merges a saved LoRA adapter into a model, as `merged` does. Every rank must call it.

    Whole weights that were saved with the adapter, such as a score head, replace the model's. If the adapter changes
    only one of the modules that share a weight, such as a head tied to the embeddings, that module gets its own weight
    and the config then says that the weights are not tied.

    Args:
        model: the base.
        folder: folder of the adapter.
        where: flag and path, for messages.
        base: path of the base, for messages.
        placement: where the model's weights are.

    Raises:
        UserError: the adapter is not plain LoRA, or does not fit.
    """
    config, weights = _read_adapter(folder, where, "")
    matrices_by_layer: dict[str, dict[str, Tensor]] = {}  # layer → matrix name → A and B
    whole_weights: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        layer, _, matrix = name.removeprefix(PREFIX).partition(".lora_")
        if matrix:
            matrices_by_layer.setdefault(layer, {})[matrix] = tensor
        else:  # peft also saves the original weight of an adapted head or embedding
            whole_weights[layer.replace(".base_layer.", ".")] = tensor
    modules = dict(model.named_modules())
    misfit = f"{where}: the adapter {folder} does not fit the base {base}, which has no"
    remedy = "Give the model that it was trained on, at the path that adapter_config.json names."

    for name, tensor in whole_weights.items():
        parent, _, attribute = name.rpartition(".")
        module = modules.get(parent)
        parameter = getattr(module, attribute, None)
        if module is None or not isinstance(parameter, nn.Parameter) or whole_shape(parameter) != tensor.shape:
            raise UserError(f"{misfit} {name} of that size. {remedy}")
        shared_names = []
        for other in _names_of(model, parameter):
            if other != name:
                shared_names.append(other)
        with placement.gathered(model, module):
            present = getattr(module, attribute)
            shared_values = [whole_weights.get(other, present).to(tensor) for other in shared_names]
            if all(torch.equal(value, tensor) for value in shared_values):
                present.copy_(tensor)
            else:
                _untie(model, module, attribute, tensor, where)

    for layer, matrices in matrices_by_layer.items():
        module = modules.get(layer)
        if module is None or not _fits(module, matrices):
            raise UserError(f"{misfit} {layer} of that size. {remedy}")
        a = matrices["A.weight"]
        update = LoraUpdate(a, matrices["B.weight"], _scaling(config, layer, len(a)))
        is_shared = len(_names_of(model, module.weight)) > 1
        with placement.gathered(model, module):
            weight = module.weight
            new_weight = update.added_to(weight, isinstance(module, Conv1D))
            if is_shared:
                _untie(model, module, "weight", new_weight, where)
            else:
                weight.copy_(new_weight)


def _names_of(model: nn.Module, parameter: nn.Parameter) -> list[str]:
    """All names of a parameter, several if modules share it."""
    named = model.named_parameters(remove_duplicate=False)
    names: list[str] = []
    for name, candidate in named:
        if candidate is parameter:
            names.append(name)
    return names


def _untie(model: Any, module: nn.Module, attribute: str, values: Tensor, where: str) -> None:
    """Replaces a parameter that a module shares by a new one of its own."""
    shared = getattr(module, attribute)
    values = values.to(shared.device, shared.dtype, copy=True)
    setattr(module, attribute, nn.Parameter(values, requires_grad=shared.requires_grad))
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    logger.info("%s: the adapter changes one of several tied weights, which is no longer tied", where)


def _fits(module: nn.Module, matrices: Mapping[str, Tensor]) -> bool:
    """Whether a layer is linear and A (rank, in) and B (out, rank) match its size."""
    if not isinstance(module, nn.Linear | Conv1D) or matrices.keys() != {"A.weight", "B.weight"}:
        return False
    a = matrices["A.weight"]
    b = matrices["B.weight"]
    shape = whole_shape(module.weight)
    if isinstance(module, Conv1D):
        shape = shape[::-1]
    return a.shape[0] == b.shape[1] and tuple(shape) == (b.shape[0], a.shape[1])


def _scaling(config: LoraConfig, layer: str, rank: int) -> float:
    """The factor of an adapter's update of a layer, as peft computes it."""
    patterns = config.alpha_pattern or {}
    alpha = patterns.get(get_pattern_key(list(patterns), layer), config.lora_alpha)
    return float(alpha / math.sqrt(rank) if config.use_rslora else alpha / rank)


def _read_adapter(folder: Path, where: str, remedy_end: str) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Reads the config and weights of a saved adapter.

    Raises:
        UserError: it cannot be read, or is not plain LoRA; `remedy_end` is appended to the latter's remedy.
    """
    try:
        config = LoraConfig.from_pretrained(str(folder))
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise UserError(f"{where}: the adapter {folder} cannot be read: {error}") from error
    if config.init_lora_weights in (False, "gaussian", "orthogonal"):  # other initialisations change the base
        config.init_lora_weights = True
    defaults = LoraConfig()
    variant_names: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name) or None  # what is empty is not set
        default = getattr(defaults, field.name) or None
        if field.name not in PLAIN_LORA and value != default:
            variant_names.append(field.name)
    if variant_names:
        raise UserError(
            f"{where}: the adapter {folder} is not a plain LoRA, its {CONFIG} sets {', '.join(variant_names)}. Merge "
            f"it into its base by peft's merge_and_unload and give that as a whole model{remedy_end}."
        )
    return config, weights


def load_adapter(model: Any, folder: Path, flag: str, base: str) -> None:
    """Loads a saved adapter and its score head into a classifier, in which peft freezes everything else.

    Args:
        model: a classifier over the base.
        folder: from `find_adapter`.
        flag: for messages.
        base: path of the base, recorded when the adapter is saved again.

    Raises:
        UserError: the adapter is not plain LoRA, or not that of a reward model over such a base.
    """
    config, saved_weights = _read_adapter(folder, f"{flag} {folder}", ", without --share_base")
    record_base(model, config, base)
    config.inference_mode = False
    config.modules_to_save = None
    config.lora_dropout = 0.0  # log-probs and values of an update are compared with earlier ones
    try:
        inject_adapter_in_model(config, model, NAME)
    except ValueError as error:
        raise UserError(f"{flag} {folder}: the adapter does not fit the base {base}: {error}") from error
    weights = {_model_name(name): tensor for name, tensor in saved_weights.items()}
    parameters = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameters[name] = parameter
    differing = sorted(weights.keys() ^ parameters.keys())[:3]
    shapes_fit = all(weights[name].shape == parameters[name].shape for name in weights.keys() & parameters.keys())
    if differing or not shapes_fit:
        raise UserError(
            f"{flag} {folder}: not the adapter and score head of a reward model over {base}, which differ in "
            f"{differing or 'the shapes of its weights'}."
        )
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])
        parameter.requires_grad_(True)


def _model_name(name: str) -> str:
    """The name in the model of a weight in peft's file."""
    name = name.removeprefix(PREFIX)
    for matrix in (".lora_A", ".lora_B"):
        name = name.replace(f"{matrix}.weight", f"{matrix}.{NAME}.weight")
    return name
