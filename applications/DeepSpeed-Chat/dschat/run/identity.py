# SPDX-License-Identifier: Apache-2.0
"""What two runs must share for one to go on where the other stopped: flags, batches, data, models, tokenizer."""

import json
import math
import socket
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash, model_hash, template_fingerprint, tokenizer_fingerprint
from dschat.base.kept import changed_names
from dschat.models.template_date import date_read_by
from dschat.run.distributed import device, gather_objects
from dschat.run.state import Json
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.flags import FREE, SHARE, flags_on_resume
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import OneModelConfig

# What may differ between runs of different numbers of processes; the global sizes may not.
SHARES = flags_on_resume(PPOConfig, SHARE) | flags_on_resume(OneModelConfig, SHARE)
DATA, FILES = "the data", "the files of the data"  # a hash of all; each with its own, to name what has changed
MOST_NAMED = 8  # of these
DATE = "the date in the chat template"  # "none" where it does not read the clock
TOKENIZER = "the tokenizer"  # its hash and its chat template

Identity = dict[str, str]  # what → its value, or the hash of its content


def identity_of(config: CommonConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, data: Json) -> Identity:
    """Everything that decides the numbers of a run, by name.

    `data` are sources (with the revision of those from the hub) and file hashes, as `RunRecord.data` holds them.
    """
    free = flags_on_resume(type(config), FREE)
    flags = {name: value for name, value in config.flat().items() if name not in free}
    if flags.get("reward_url"):
        flags["reward_url"] = "given"  # where a server runs may change
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
        DATA: content_hash(json.dumps([sorted(data["sha256"].values()), sources])),
        FILES: json.dumps(data["sha256"] | {one["name"]: one["hub"] for one in data["sources"] if one.get("hub")}),
        TOKENIZER: content_hash(json.dumps([tokenizer_fingerprint(tokenizer), template_fingerprint(tokenizer)])),
        DATE: date_read_by(tokenizer) or "none",
        **{f"the model of {name}": model_hash(path) for name, path in _model_paths(config).items()},
        **{
            f"the file of --{name}": content_hash(b"".join(file.read_bytes() for file in found))
            for name, found in files.items()
        },
    }


def check_same_everywhere(identity: Identity) -> None:
    """Compares what processes were given: nodes may have files of their own. Every rank must call it.

    Raises UserError, on every rank: names the first rank that has something else than rank 0, its host, and what.
    """
    (host, first), *others = gather_objects((socket.gethostname(), identity))
    for number, (other_host, own) in enumerate(others, 1):
        changed = []
        for name in sorted(changed_names(first, own)):
            if name == DATA:
                changed.append(f"{name}{_changed_files(first, own)}")
            elif name != FILES:
                changed.append(name)
        if changed:
            error = UserError(
                f"rank {number} ({other_host}) and rank 0 ({host}) were given different things: {', '.join(changed)}. "
                "Start every node with the same flags and the same files, or read them from a disk that all share."
            )
            error.on_every_rank = True
            raise error


def differences(before: Mapping[str, str], now: Mapping[str, str], other_size: bool) -> list[str]:
    """What differs between the identities of a checkpoint and of this run, in words. `other_size`: the number of
    processes differs, so that a process's share of a batch may.
    """
    passed_over = {FILES, *(f"--{name}" for name in SHARES if other_size)}
    texts = []
    for name in sorted(changed_names(before, now)):
        if name in passed_over:
            continue
        if name == DATA:
            texts.append(f"{name} has changed{_changed_files(before, now)}")
        elif name.startswith("the "):
            texts.append(f"{name} has changed")
        else:
            texts.append(f"{name} was {before.get(name)}, is {now.get(name)}")
    return texts


def _changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The files and sets of the hub whose content only one of two runs has."""
    old, new = (json.loads(identity[FILES]) for identity in (before, now))
    found = [name for one, other in ((new, old), (old, new)) for name in one if one[name] not in other.values()]
    names = list(dict.fromkeys(found))
    return f" ({', '.join([*names[:MOST_NAMED], *['…'] * (len(names) > MOST_NAMED)])})" if names else ""


def _model_paths(config: CommonConfig) -> dict[str, str]:
    """Flag → the model that it names."""
    return {name: path for name, path in config.flat().items() if name.endswith("model_name_or_path") and path}


def _text(value: object) -> str:
    return "inf" if value == math.inf else json.dumps(value)
