# SPDX-License-Identifier: Apache-2.0
"""LoRA by peft: low-rank adapters inside a model, switched off for the reference, saved alone or merged."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import LoraConfig, TaskType, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dschat.errors import UserError

NAME = "default"  # peft's name of the adapter
ALPHA_PER_RANK = 2  # the update is scaled by alpha / rank


def add_lora(
    model: Any,
    rank: int,
    targets: str | Sequence[str] | None,
    base: str,
    alpha: int | None = None,
    dropout: float = 0.0,
) -> None:
    """Puts adapters into a model's linear layers and freezes everything else but a score head.

    Args:
        model: Hugging Face model, changed in place.
        rank: of the adapters.
        targets: parts of the names of the layers to adapt; every linear layer but the heads when None.
        base: path of the model, recorded in the adapter's config.
        alpha: the adapters' output is scaled by alpha / rank; twice the rank when None.
        dropout: part of the adapters' inputs that is dropped in training mode.

    Raises:
        UserError: a target matches no layer.
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
    """Writes adapter_config.json and adapter_model.safetensors, which peft opens with the base model.

    Its classes AutoPeftModelForCausalLM and AutoPeftModelForSequenceClassification (with num_labels=1) find that by
    the path in the config.

    Args:
        model: with adapters.
        adapter: their whole weights, names as in ``model``; see `is_adapter`.
        folder: to write into.
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
    """Whole weights of the plain model: W + scaling · B·A, each layer with its own scaling. Live weights stay.

    Args:
        model: with adapters.
        weights: its whole weights, names as in ``model``, one at a time. A layer's own comes before its adapter's, as
            peft keeps them, so that one waits at most.

    Yields:
        Name in the plain model and tensor.

    Raises:
        UserError: an adapter has more than A and B.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        layer, _, matrix = name.partition(".lora_")
        if matrix == f"A.{NAME}.weight":
            waiting["A"] = tensor.float().clone()
        elif matrix == f"B.{NAME}.weight":
            module, own = model.get_submodule(layer), waiting["own"]
            update = module.scaling[NAME] * (tensor.float() @ waiting["A"])
            yield f"{layer}.weight", (own.float() + (update.T if module.fan_in_fan_out else update)).to(own.dtype)
            waiting.clear()
        elif matrix:
            raise UserError(f"{name}: an adapter with such a weight cannot be merged. Save it with --no_merge_lora.")
        elif name.endswith(".base_layer.weight"):
            waiting["own"] = tensor.clone()
        else:
            yield name.replace(".base_layer.", "."), tensor
