# SPDX-License-Identifier: Apache-2.0
"""Models loaded in parts at ZeRO 3, beside the same models loaded whole; tests/distributed looks at the results.

tests/distributed/workers.py calls each of `CHECKS` on each of two processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from adapter_cases import HEADS, add_filled_lora, write_head_adapter
from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.engine import frozen_engine
from dschat.models.classifiers import load_critic, load_scalar, load_trained_scalar
from dschat.models.load import load_causal_lm
from dschat.models.lora import add_lora
from dschat.models.opening import DEFAULT_OPTIONS, LoadOptions
from dschat.models.policy import PolicyModel
from dschat.models.save import save_model
from dschat.models.scalar import ScalarModel
from dschat.models.tokenizer import load_tokenizer
from dschat.run.distributed import barrier, is_main, world_size
from dschat.settings.batches import BatchSizes, plan_batches
from dschat.training.steps.engines import placement_of
from factories import (
    TEXTS,
    engine_of,
    make_causal_lm,
    make_tokenizer,
    pad_rows,
    ragged_rows,
    save_folder,
    saved_weights,
)
from model_families import MODEL_FAMILIES, WITHOUT_CLASSIFIER
from real_size import as_large_as

FAMILIES = MODEL_FAMILIES | {"granite": WITHOUT_CLASSIFIER}
FAST_FAMILIES = ("gemma", "gpt2", "granite")
UNTIED = ("untied, both saved", "untied, adapter of the head")
ROWS = ragged_rows([2, 5], [7, 3], seed=5)
Load = Callable[[LoadOptions], Any]


def settings_of(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> EngineSettings:
    """ZeRO 3 as for a model of 7 billion weights, so that every parameter is in parts."""
    return EngineSettings(
        dtype,
        plan_batches(BatchSizes("", 1), world_size()),
        zero_stage=3,
        config_file=as_large_as(7e9, make_causal_lm()),
        **options,
    )


def state_of(model: Any) -> dict[str, Tensor]:
    """Copies of every whole parameter, also under the names that share one, and of every buffer."""
    state = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            state[name] = parameter.detach().clone()
    return state | {name: buffer.clone() for name, buffer in model.named_buffers()}


def shared_names(model: Any) -> list[list[str]]:
    """Groups of names that belong to one and the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(names.values())


def compare(load: Load, settings: EngineSettings) -> dict[str, Any]:
    """Loads a model whole and in parts.

    Returns:
        `differ`: names of weights that differ. `dtypes`: dtypes that only one of the models has. `shared`, `configs`:
        whether tied weights and configs are equal. `whole`: elements of parameters that are gathered after loading.
        `held`: share of the model's elements that this process holds.
    """
    whole, parts = load(DEFAULT_OPTIONS), load(LoadOptions(placement_of(settings)))
    held = sum(p.ds_tensor.numel() for p in parts.parameters())
    expected = state_of(whole)
    found = state_of(parts)
    differ = [name for name in expected if name not in found or not torch.equal(expected[name], found[name])]
    return {
        "differ": differ + sorted(found.keys() - expected.keys()),
        "dtypes": sorted({str(x.dtype) for x in found.values()} ^ {str(x.dtype) for x in expected.values()}),
        "shared": shared_names(whole) == shared_names(parts),
        "configs": whole.config.to_dict() == parts.config.to_dict(),
        "whole": sum(p.numel() for p in parts.parameters()),
        "held": held / sum(p.numel() for p in whole.parameters()),
    }


def compare_families(place: Path, kinds: Sequence[str], settings: EngineSettings) -> dict[str, Any]:
    """Each family as a policy and as a critic, from folders that the main process writes."""
    if is_main():
        for kind in kinds:
            FAMILIES[kind].save(place / kind, TEXTS * 20)
    barrier()
    found = {}
    for kind in kinds:
        path = str(place / kind)
        tokenizer = load_tokenizer(path, "--m")
        for role, load in (("policy", load_causal_lm), ("critic", load_critic)):
            found[f"{kind} {role}"] = compare(loader(load, path, tokenizer, torch.float32), settings)
    return found


def loading_families(folder: Path, keep: Callable[..., None]) -> None:
    """The families that `loading` leaves out."""
    kinds = [kind for kind in FAMILIES if kind not in FAST_FAMILIES]
    keep(folder, "loading", compare_families(folder / "families", kinds, settings_of(folder)))


def loading(folder: Path, keep: Callable[..., None]) -> None:
    """Some families as a policy and as a critic; grown embeddings, half precision, ties that do not hold."""
    place = folder / "families"
    settings = settings_of(folder)
    if is_main():
        save_special(place)
    found = compare_families(place, FAST_FAMILIES, settings)
    tokenizer = make_tokenizer()
    half = replace(settings, dtype=torch.bfloat16)
    found["bf16"] = compare(loader(load_causal_lm, str(place / "gemma"), tokenizer, half.dtype), half)
    for kind in ("odd", "several files"):
        found[kind] = compare(loader(load_causal_lm, str(place / kind), tokenizer, torch.float32), settings)
    found["adapter"] = compare(adapter_loader(load_trained_scalar, str(place / "adapter"), tokenizer), settings)
    for name in UNTIED:
        found[name] = compare(adapter_loader(load_causal_lm, str(place / name), tokenizer), settings)
    reward_model = partial(load_scalar, head_seed=5)
    found["grown"] = compare(loader(reward_model, str(place / "short"), tokenizer, torch.float32), settings)
    offloaded = replace(settings, offload=True)
    found["offloaded"] = compare(loader(load_causal_lm, str(place / "odd"), tokenizer, torch.float32), offloaded)
    keep(folder, "loading", found)
    keep(folder, "loaded", tensors=_engines(place, folder, tokenizer))


def save_special(place: Path) -> None:
    """Writes models that are hard to load.

    - `odd`: the config ties the head to the embeddings, but the weights differ.
    - `several files`: weights in several files.
    - `short`: fewer tokens than the tokenizer has.
    - `adapter`: an adapter and a score head alone, without the base's weights.
    - `untied, …`: adapters of a tied head, which untie it.
    """
    save_folder(place / "odd", make_causal_lm("gemma"), make_tokenizer())
    weights = load_file(place / "odd" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, place / "odd" / "model.safetensors", metadata={"format": "pt"})
    make_causal_lm("llama", tie_word_embeddings=False).save_pretrained(place / "several files", max_shard_size="10KB")
    make_causal_lm("gemma", vocab_size=60).save_pretrained(place / "short")
    base = save_folder(place / "base", make_causal_lm("gpt2"), make_tokenizer())
    model = load_scalar(base, "--m", torch.float32, make_tokenizer())
    add_filled_lora(model, 2, base)
    save_model(model, saved_weights(model), make_tokenizer(), place / "adapter", merge=False)
    tied = save_folder(place / "tied", make_causal_lm("gemma", tie_word_embeddings=True), make_tokenizer())
    for name in UNTIED:
        write_head_adapter(place / name, tied, *HEADS[name.removeprefix("untied, ")])


def adapter_loader(load: Any, path: str, tokenizer: Any) -> Load:
    """Loads a model from the folder of an adapter, which has no config of the model."""

    def loaded(load_options: LoadOptions) -> Any:
        return load(path, "--m", torch.float32, tokenizer, load_options=load_options)

    return loaded


def loader(load: Any, path: str, tokenizer: Any, dtype: torch.dtype) -> Load:
    """Loads a model. The rows of added tokens, which are random, are set to 1 so that they can be compared."""
    vocab_size = AutoConfig.from_pretrained(path).vocab_size

    def loaded(load_options: LoadOptions) -> Any:
        model = load(path, "--m", dtype, tokenizer, load_options=load_options)
        ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
        assert ends[0].num_embeddings == max(vocab_size, len(tokenizer))
        with load_options.placement.gathered(model, *ends):
            for end in ends:
                end.weight.data[vocab_size:] = 1
        return model

    return loaded


def _engines(place: Path, folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    """Weights after two updates, and outputs of frozen engines, by "model/whole or parts/name".

    `whole` and `parts` are how the model was loaded; the engines are all at ZeRO 3.
    """
    results: dict[str, Tensor] = {}
    ids, attention_mask, mask = pad_rows(ROWS)
    for name, file, lora in (
        ("plain", "several files", False),
        ("lora", "several files", True),
        ("untied", "untied, adapter of the head", False),
    ):
        for how in ("whole", "parts"):
            load_options = DEFAULT_OPTIONS if how == "whole" else LoadOptions(placement_of(settings_of(folder)))
            path = str(place / file)
            model = load_causal_lm(path, "--m", torch.float32, tokenizer, load_options=load_options)
            if lora:
                with torch.random.fork_rng():
                    torch.manual_seed(1)
                    add_lora(model, 2, None, path)
            engine = engine_of(model, zero_stage=3, weight_decay=0.5)
            for _ in range(2):
                engine.backward(-engine(ids, attention_mask, mask.shape[1])[0].sum() / 100)
                engine.step()
            results |= {f"{name}/{how}/{key}": x.clone() for key, x in engine.whole_weights()}
    for how in ("whole", "parts"):
        settings = settings_of(folder, offload=True)
        load_options = DEFAULT_OPTIONS if how == "whole" else LoadOptions(placement_of(settings))
        policy = load_causal_lm(str(place / "odd"), "--m", torch.float32, tokenizer, load_options=load_options)
        scalar = load_scalar(str(place / "gpt2"), "--m", torch.float32, tokenizer, load_options=load_options)
        with torch.no_grad():
            policy_engine = frozen_engine(PolicyModel(policy), settings)
            results[f"frozen/{how}/logprobs"] = policy_engine(ids, attention_mask, mask.shape[1])[0]
            results[f"frozen/{how}/scores"] = frozen_engine(ScalarModel(scalar), settings)(ids, attention_mask)
    return results


CHECKS = {"loading": loading, "loading_families": loading_families}
