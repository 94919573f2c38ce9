# SPDX-License-Identifier: Apache-2.0
"""What two runs must share for one to go on where the other stopped: flags, batches, data, models, tokenizer."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from transformers import AutoConfig, PreTrainedTokenizerBase

from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.config.rules import FREE, SHARE, flags_on_resume
from dschat.config.supervised import OneModelConfig
from dschat.run.distributed import device
from dschat.run.progress import Json

# What may differ between runs of different numbers of processes; the global sizes may not.
SHARES = flags_on_resume(PPOConfig, SHARE) | flags_on_resume(OneModelConfig, SHARE)
DATA, FILES = "the data", "the files of the data"  # a hash of all; each with its own, to name what has changed
MOST_NAMED = 8  # of these
SAMPLE = 1 << 20  # bytes at either end of a weight file that go into its fingerprint
INNER_SAMPLE = 1 << 12  # bytes at the beginning of every weight of a file that is larger than both ends

Identity = dict[str, str]  # what → its value, or the hash of its content


def identity_of(config: CommonConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, data: Json) -> Identity:
    """Everything that decides the numbers of a run, by name.

    Args:
        config: the flags.
        plan: the batch sizes.
        tokenizer: of the run.
        data: sources (with the revision of those from the hub) and file hashes, as `RunRecord.data` holds them.
    """
    free = flags_on_resume(config, FREE)
    flags = {name: value for name, value in dataclasses.asdict(config).items() if name not in free}
    if flags.get("reward_url"):
        flags["reward_url"] = "given"  # where a server runs may change
    functions = flags.get("reward_function")
    if isinstance(functions, list) and len(functions) == 1:
        flags["reward_function"] = functions[0]  # as in checkpoints from when there was one function
    sources = [[source["train"], source["eval"], source.get("hub")] for source in data["sources"]]
    specs = {name: [value] if isinstance(value, str) else value for name, value in flags.items()}
    files = {
        name: [Path(part.rpartition(":")[0]) for part in parts]
        for name, parts in specs.items()
        if isinstance(parts, list) and all(isinstance(part, str) and ".py:" in part for part in parts) and parts
    }
    if flags.get("deepspeed_config"):
        files["deepspeed_config"] = [Path(flags.pop("deepspeed_config"))]
    return {
        "the kind of device": device().type,
        **{f"--{name}": _text(value) for name, value in flags.items()},
        "examples of an update": _text(plan.global_batch),
        "prompts of a rollout": _text(plan.global_rollout),
        DATA: _hash(json.dumps([sorted(data["sha256"].values()), sources])),
        FILES: json.dumps(data["sha256"] | {one["name"]: one["hub"] for one in data["sources"] if one.get("hub")}),
        "the tokenizer": _tokenizer_hash(tokenizer),
        **{f"the model of {name}": model_hash(getattr(config, name)) for name in _model_flags(config)},
        **{
            f"the file of --{name}": _hash(b"".join(file.read_bytes() for file in found))
            for name, found in files.items()
        },
    }


def with_later_flags(before: Identity, now: Identity, config: CommonConfig) -> Identity:
    """A checkpoint's identity with the flags that did not exist when it was written, at their defaults."""
    defaults = {
        f"--{field.name}": _text(field.default)
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING
    }
    once_one_name = before.get("--lora_module_name", "").startswith('"')
    targets = {"--lora_module_name": f"[{before['--lora_module_name']}]"} if once_one_name else {}
    return {name: defaults[name] for name in now if name in defaults} | before | targets


def differences(before: Mapping[str, str], now: Mapping[str, str], other_size: bool) -> list[str]:
    """What differs between two identities, in words.

    Args:
        before: of the checkpoint.
        now: of this run.
        other_size: the number of processes differs, so that a process's share of a batch may.
    """
    passed_over = {FILES, *(f"--{name}" for name in SHARES if other_size)}
    found = []
    for name in sorted({*before, *now} - passed_over):
        old, new = before.get(name), now.get(name)
        if not is_same(old, new):
            is_content = name.startswith("the ")
            which = _changed_files(before, now) if name == DATA else ""
            found.append(f"{name} has changed{which}" if is_content else f"{name} was {old}, is {new}")
    return found


def is_same(before: str | None, now: str | None) -> bool:
    """Whether two values are equal; hashes of large models by earlier versions end at the dash."""
    return before == now or (before is not None and now is not None and now.startswith(f"{before}-"))


def _changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The files and sets of the hub whose content only one of two runs has; early checkpoints name none."""
    old, new = (json.loads(identity.get(FILES, "{}")) for identity in (before, now))
    found = [name for one, other in ((new, old), (old, new)) for name in one if one[name] not in other.values()]
    names = list(dict.fromkeys(found))
    return f" ({', '.join([*names[:MOST_NAMED], *['…'] * (len(names) > MOST_NAMED)])})" if old and names else ""


def _model_flags(config: CommonConfig) -> Iterable[str]:
    names = (field.name for field in dataclasses.fields(config) if field.name.endswith("model_name_or_path"))
    return [name for name in names if getattr(config, name)]


def _text(value: object) -> str:
    return "inf" if value == math.inf else json.dumps(value)


def _hash(content: str | bytes) -> str:
    return hashlib.sha256(content.encode("utf-8") if isinstance(content, str) else content).hexdigest()


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    whole = {
        "vocabulary": tokenizer.get_vocab(),
        "special": tokenizer.special_tokens_map,
        "template": tokenizer.chat_template,
        "backend": tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else "",
    }
    return _hash(json.dumps(whole, sort_keys=True, default=str))


def model_hash(path: str) -> str:
    """Of a folder: its config and, of each weight file, the length and both ends. From the hub: the commit.

    Where files are larger than that, the beginning of every weight follows, after a dash. A folder without a model of
    its own may hold an adapter, in itself or in ``adapter``.
    """
    folder = Path(path)
    if not folder.is_dir():
        return str(getattr(AutoConfig.from_pretrained(path, trust_remote_code=False), "_commit_hash", None))
    places = [folder / "config.json", folder / "adapter_config.json", folder / "adapter" / "adapter_config.json"]
    config = next((place for place in places if place.is_file()), places[0])
    folder, whole, inner = config.parent, hashlib.sha256(config.read_bytes()), None
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as stream:
            size = file.stat().st_size
            whole.update(f"{file.name} {size}".encode() + stream.read(SAMPLE))
            stream.seek(max(0, size - SAMPLE))
            whole.update(stream.read(SAMPLE))
            if size > 2 * SAMPLE:
                inner = inner or hashlib.sha256()
                for start, end in _places(stream):
                    stream.seek(start)
                    inner.update(stream.read(min(INNER_SAMPLE, end - start)))
    return whole.hexdigest() if inner is None else f"{whole.hexdigest()}-{inner.hexdigest()}"


def _places(stream: BinaryIO) -> list[tuple[int, int]]:
    """Where the weights of a safetensors file begin and end, from its header."""
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    weights = (entry for name, entry in json.loads(stream.read(length)).items() if name != "__metadata__")
    return sorted((8 + length + start, 8 + length + end) for start, end in (w["data_offsets"] for w in weights))
