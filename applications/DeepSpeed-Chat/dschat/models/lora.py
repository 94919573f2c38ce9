# SPDX-License-Identifier: Apache-2.0
"""LoRA by peft: low-rank adapters inside a model, switched off for the reference, saved, merged, read again."""

import copy
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dschat.base.errors import UserError
from dschat.models.opening import Placement

logger = logging.getLogger(__name__)

NAME = "default"  # peft's name of the adapter
ALPHA_PER_RANK = 2  # the update is scaled by alpha / rank
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in peft's files
# What an adapter's config may set; peft knows variants of LoRA beside, which are merged in other ways.
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
    """Puts adapters into a model's linear layers and freezes everything else but a score head.

    `targets` are parts of the names of the layers to adapt, every linear layer but the heads when None; the config
    records `base`, the model's path. The output is scaled by alpha / rank, alpha twice the rank when None. Raises
    UserError where a target matches no layer.
    """
    wanted = [targets] if isinstance(targets, str) else targets
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    linear = [name for name in linear if name.split(".")[-1] not in ("lm_head", "embed_out", "score")]
    for target in wanted or ():
        if not any(target in name for name in linear):
            raise UserError(
                f"--lora_module_name {target}: no linear layer of {base} has that in its name. Layers are called, "
                f"for instance, {', '.join(linear[:3])}."
            )
    config = LoraConfig(
        r=rank,
        lora_alpha=ALPHA_PER_RANK * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=[name for name in linear if wanted is None or any(target in name for target in wanted)],
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        base_model_name_or_path=base,
    )
    inject_adapter_in_model(config, model, NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith("score."))


def lora_config(model: Any) -> LoraConfig | None:
    """The configuration of a model's adapters, None where it has none."""
    return (getattr(model, "peft_config", None) or {}).get(NAME)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base model, for forward passes without gradient."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters() would also flip requires_grad
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_adapter(name: str) -> bool:
    """Whether a weight of that name belongs to an adapter, or is a score head trained beside one."""
    return ".lora_" in name or name.startswith("score.")


def save_adapter(model: Any, adapter: Mapping[str, Tensor], folder: Path) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which peft opens with the base model: its classes
    AutoPeftModelForCausalLM and AutoPeftModelForSequenceClassification (with num_labels=1) find that by the path in
    the config. `adapter` holds whole weights, names as in ``model``; see `is_adapter`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(
        model, state_dict=dict(adapter), adapter_name=NAME, save_embedding_layers=False
    )
    weights |= {name: tensor for name, tensor in adapter.items() if name.startswith("score.")}
    prefixed = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in weights.items()}
    save_file(prefixed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(lora_config(model))
    assert config is not None  # the caller asked
    scores = hasattr(model, "score")
    config.task_type = TaskType.SEQ_CLS if scores else TaskType.CAUSAL_LM
    config.modules_to_save = ["score"] if scores else None
    config.inference_mode = True
    config.save_pretrained(str(folder))


def merged(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Whole weights of the plain model by their names there: W + scaling · B·A, each layer with its own scaling. Live
    weights stay.

    `weights` are those of the model with adapters, names as in ``model``, one at a time. A layer's own comes before
    its adapter's, as peft keeps them, so that one waits at most. Raises UserError where an adapter has more than A and
    B.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        layer, _, matrix = name.partition(".lora_")
        if matrix == f"A.{NAME}.weight":
            waiting["A"] = tensor.float().clone()
        elif matrix == f"B.{NAME}.weight":
            module = model.get_submodule(layer)
            pair = (waiting["A"], tensor)
            yield f"{layer}.weight", _merged_weight(waiting["own"], pair, module.scaling[NAME], module.fan_in_fan_out)
            waiting.clear()
        elif matrix:
            raise UserError(f"{name}: an adapter with such a weight cannot be merged. Save it with --no_merge_lora.")
        elif name.endswith(".base_layer.weight"):
            waiting["own"] = tensor.clone()
        else:
            yield name.replace(".base_layer.", "."), tensor


def _merged_weight(own: Tensor, pair: tuple[Tensor, Tensor], scaling: float, inputs_first: bool) -> Tensor:
    """W + scaling · B·A in W's own dtype, computed in float32: W (out, in), the pair A (r, in) and B (out, r).

    `inputs_first`: W is (in, out), as GPT-2's are.
    """
    a, b = (matrix.to(own.device, torch.float32) for matrix in pair)
    update = scaling * (b @ a)
    return (own.float() + (update.T if inputs_first else update)).to(own.dtype)


def find_adapter(path: str | None) -> Path | None:
    """The folder of a LoRA adapter, which is ``path`` or ``path/adapter``; None where neither holds one."""
    folders = [] if path is None else [Path(path), Path(path) / "adapter"]
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def adapter_settings(folder: Path) -> dict[str, Any]:
    """What an adapter's config says: r, base_model_name_or_path and so on. UserError where it cannot be read."""
    try:
        settings: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} cannot be read: {error}") from error
    return settings


def adapter_alone(path: str) -> Path | None:
    """The folder of the LoRA adapter of a path that holds one and no whole model (--no_merge_lora); None otherwise.

    Some programs write their base's config.json beside an adapter's files.
    """
    place, folder = Path(path), find_adapter(path)
    if folder is None or not (place / "config.json").is_file():
        return folder
    has_weights = any(file.name != WEIGHTS for file in place.glob("*.safetensors"))
    return None if has_weights or folder != place else folder


def base_of(path: str, flag: str) -> tuple[str, list[Path]]:
    """The path of a model's whole weights, and the folders of the LoRA adapters to put on them, in that order.

    A path that holds an adapter alone goes on its base, which may be such a path itself. Of any other path there are
    no adapters. Raises UserError, which names the flag, where an adapter does not say what its base is.
    """
    adapters: list[Path] = []
    base = path
    while (folder := adapter_alone(base)) is not None:
        if folder in adapters:
            raise UserError(f"{flag} {path}: {folder / CONFIG} names its own folder as the model that it is for.")
        adapters.insert(0, folder)
        named = adapter_settings(folder).get("base_model_name_or_path")
        if not isinstance(named, str) or not named:
            raise UserError(f"{flag} {path}: {folder / CONFIG} does not say which model it is for.")
        base = named
    return base, adapters


def named_base(path: str, flag: str) -> str:
    """What stands before the base's path in messages about a path that cannot be opened."""
    return flag if adapter_alone(path) is None else f"{flag} {path}: its LoRA adapter is for"


def file_place(path: str, name: str, flag: str) -> str:
    """Where a file that goes with a model is, such as its tokenizer's: `path`, or, of an adapter alone, the first of
    its folder, the folder above it and its base that has one called `name`.
    """
    base, adapters = base_of(path, flag)
    for adapter in reversed(adapters):
        for place in (adapter, adapter.parent):
            if (place / name).is_file():
                return str(place)
    return base


def has_score_head(adapter: Path) -> bool:
    """Whether a score head was saved with an adapter: a reward model's or a critic's."""
    try:
        with safe_open(adapter / WEIGHTS, framework="pt") as file:
            return any(".score." in name for name in file.keys())
    except (OSError, SafetensorError):
        return False


@torch.no_grad()
def merge_adapter(model: Any, folder: Path, where: str, base: str, placement: Placement) -> None:
    """Adds the update of a saved LoRA adapter to a model's own weights, as `merged` does; whole weights that were
    saved beside it, such as a score head, take the places of the model's. Every rank must call it.

    A weight that the model shares, such as a head tied to the embeddings, is given to one of its places alone where
    the adapter changes only that one; the config then says that they are not tied.

    `where` is the flag and path for messages, `base` the path of the model below. Raises UserError where the adapter
    is not plain LoRA, or does not fit.
    """
    config, saved = _read_adapter(folder, where, "")
    layers: dict[str, dict[str, Tensor]] = {}  # by name: A and B
    whole: dict[str, Tensor] = {}
    for name, tensor in saved.items():
        layer, _, matrix = name.removeprefix(PREFIX).partition(".lora_")
        if matrix:
            layers.setdefault(layer, {})[matrix] = tensor
        else:  # peft also saves the own weight of a head or of embeddings that have an adapter
            whole[layer.replace(".base_layer.", ".")] = tensor
    modules = dict(model.named_modules())
    for name, tensor in whole.items():
        parent, _, attribute = name.rpartition(".")
        module = modules.get(parent)
        own = getattr(module, attribute, None)
        if module is None or not isinstance(own, nn.Parameter) or _shape(own) != tensor.shape:
            raise _misfit(folder, where, base, name)
        others = [other for other in _names_of(model, own) if other != name]
        with placement.whole(model, module):
            present = getattr(module, attribute)
            values = [whole.get(other, present).to(tensor) for other in others]
            if all(torch.equal(value, tensor) for value in values):
                present.copy_(tensor)
            else:
                _untie(model, module, attribute, tensor, where)
    for layer, matrices in layers.items():
        module = modules.get(layer)
        _require_fit(module, matrices, folder, where, base, layer)
        assert module is not None
        pair = (matrices["A.weight"], matrices["B.weight"])
        scaling = _scaling(config, layer, len(pair[0]))
        is_shared = len(_names_of(model, module.weight)) > 1
        with placement.whole(model, module):
            weight = module.weight
            updated = _merged_weight(weight, pair, scaling, isinstance(module, Conv1D))
            if is_shared:
                _untie(model, module, "weight", updated, where)
            else:
                weight.copy_(updated)


def _names_of(model: nn.Module, wanted: nn.Parameter) -> list[str]:
    """All names of one parameter, more than one where modules share it."""
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if parameter is wanted]


def _untie(model: Any, module: nn.Module, attribute: str, values: Tensor, where: str) -> None:
    """Gives a module a parameter of its own in the place of one that it shares."""
    shared = getattr(module, attribute)
    own = nn.Parameter(values.to(shared.device, shared.dtype, copy=True), requires_grad=shared.requires_grad)
    setattr(module, attribute, own)
    for config in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    logger.info("%s: the adapter changes one of the places of a tied weight, which is no longer shared", where)


def _require_fit(
    module: nn.Module | None, matrices: Mapping[str, Tensor], folder: Path, where: str, base: str, layer: str
) -> None:
    """Raises UserError unless a layer is linear and A (r, in) and B (out, r) have its size."""
    if not isinstance(module, nn.Linear | Conv1D) or matrices.keys() != {"A.weight", "B.weight"}:
        raise _misfit(folder, where, base, layer)
    a, b = matrices["A.weight"], matrices["B.weight"]
    size = (b.shape[0], a.shape[1])
    own = _shape(module.weight)
    if a.shape[0] != b.shape[1] or tuple(own[::-1] if isinstance(module, Conv1D) else own) != size:
        raise _misfit(folder, where, base, layer)


def _shape(parameter: Any) -> Any:
    """That of the whole weight, which may be in parts."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _misfit(folder: Path, where: str, base: str, name: str) -> UserError:
    return UserError(
        f"{where}: the adapter {folder} does not fit the base {base}, which has no {name} of that size. "
        "Give the model that it was trained on, at the path that adapter_config.json names."
    )


def _scaling(config: LoraConfig, layer: str, rank: int) -> float:
    """What an adapter's update of a layer is multiplied by, as peft computes it."""
    patterns = config.alpha_pattern or {}
    alpha = patterns.get(get_pattern_key(list(patterns), layer), config.lora_alpha)
    return float(alpha / math.sqrt(rank) if config.use_rslora else alpha / rank)


def _read_adapter(folder: Path, where: str, more: str) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The config and the weights of a saved adapter. Raises UserError where it cannot be read, or is not plain LoRA;
    `more` is added to the remedy.
    """
    try:
        config = LoraConfig.from_pretrained(str(folder))
        saved = load_file(folder / WEIGHTS)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise UserError(f"{where}: the adapter {folder} cannot be read: {error}") from error
    if config.init_lora_weights in (False, "gaussian", "orthogonal"):  # others would change the base
        config.init_lora_weights = True
    names, plain = [field.name for field in fields(config) if field.name not in PLAIN_LORA], LoraConfig()
    if odd := ", ".join(name for name in names if getattr(config, name) != getattr(plain, name)):
        raise UserError(
            f"{where}: the adapter {folder} is no plain LoRA, its {CONFIG} sets {odd}. Merge it into its base by "
            f"peft's merge_and_unload and give that as a whole model{more}."
        )
    return config, saved


def load_adapter(model: Any, folder: Path, flag: str, base: str) -> None:
    """Puts a saved adapter of `find_adapter` and its score head into a classifier, and freezes everything else.

    `base`, the path of the model below it, is recorded when the adapter is saved again. Raises UserError where the
    adapter is not plain LoRA, or not of a reward model over such a base.
    """
    config, saved = _read_adapter(folder, f"{flag} {folder}", ", without --share_base")
    config.base_model_name_or_path, config.inference_mode, config.modules_to_save = base, False, None
    config.lora_dropout = 0.0  # log-probs and values of an update are compared with earlier ones
    try:
        inject_adapter_in_model(config, model, NAME)
    except ValueError as error:
        raise UserError(f"{flag} {folder}: the adapter does not fit the base {base}: {error}") from error
    weights = {_own_name(name): tensor for name, tensor in saved.items()}
    own = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    fits = weights.keys() == own.keys() and all(weights[name].shape == own[name].shape for name in own)
    if not fits:
        odd = sorted(weights.keys() ^ own.keys())[:3] or "the shapes of its weights"
        raise UserError(
            f"{flag} {folder}: not the adapter and score head of a reward model over {base}, which differ in {odd}."
        )
    for name, parameter in model.named_parameters():
        if name in own:
            parameter.data.copy_(weights[name])
        parameter.requires_grad_(name in own)


def _own_name(name: str) -> str:
    """The name in the model of a weight in peft's file."""
    name = name.removeprefix(PREFIX)
    for matrix in (".lora_A", ".lora_B"):
        name = name.replace(f"{matrix}.weight", f"{matrix}.{NAME}.weight")
    return name
