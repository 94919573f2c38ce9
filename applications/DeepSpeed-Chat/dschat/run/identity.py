# SPDX-License-Identifier: Apache-2.0
"""The identity of a run, which a resumed run must share: flags, batches, data, models, tokenizer."""

import json
import math
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dschat.base.changes import changed_names
from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash, model_hash, template_fingerprint, tokenizer_fingerprint
from dschat.base.package_functions import function_path
from dschat.models.template_date import date_read_by
from dschat.run.distributed import device, gather_objects
from dschat.run.state import Json
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.flags import FREE, flags_on_resume

DATA = "the data"  # a hash of everything
FILES = "the files of the data"  # a hash per file, to name those that have changed
FILE_FLAGS = ("deepspeed_config", "reward_judge")  # flags of files whose content counts, wherever they are
MOST_NAMED = 8  # files named in a message
DATE = "the date in the chat template"  # "none" if the template writes no date
GLOBAL_SIZES = ("examples of an update", "prompts of a rollout")  # over all processes
TOKENIZER = "the tokenizer"  # its hash and its chat template

Identity = dict[str, str]  # name of a part → its value, or the hash of its content


def identity_of(config: CommonConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, data: Json) -> Identity:
    """Everything that determines the numbers of a run, by name.

    Args:
        config: flags of the run.
        plan: its batch sizes.
        tokenizer: tokenizer of the run.
        data: sources (with revisions of those from the hub) and file hashes, as in `RunRecord.data`.
    """
    free = flags_on_resume(type(config), FREE)
    flags = {name: value for name, value in config.flat().items() if name not in free}
    if flags.get("reward_url"):
        flags["reward_url"] = "given"  # the server's address may change
    files = _python_files(flags)
    for name in FILE_FLAGS:
        if flags.get(name):
            files[name] = [Path(flags.pop(name))]

    identity = {"the kind of device": device().type}
    for name, value in flags.items():
        identity[f"--{name}"] = _text(value)
    for name, size in zip(GLOBAL_SIZES, (plan.global_batch, plan.global_rollout), strict=True):
        identity[name] = _text(size)

    sources = []
    revisions = {}
    for source in data["sources"]:
        sources.append([source["train"], source["eval"], source.get("hub")])
        if source.get("hub"):
            revisions[source["name"]] = source["hub"]
    identity[DATA] = content_hash(json.dumps([list(data["sha256"].values()), sources]))
    identity[FILES] = json.dumps(data["sha256"] | revisions)

    fingerprints = [tokenizer_fingerprint(tokenizer), template_fingerprint(tokenizer)]
    identity[TOKENIZER] = content_hash(json.dumps(fingerprints))
    identity[DATE] = date_read_by(tokenizer) or "none"
    for name, value in config.flat().items():
        if name.endswith("model_name_or_path") and value:
            identity[f"the model of {name}"] = model_hash(value)
    for name, paths in files.items():
        identity[f"the file of --{name}"] = content_hash(b"".join(path.read_bytes() for path in paths))
    return identity


def _python_files(flags: Mapping[str, object]) -> dict[str, list[Path]]:
    """The Python files of flags that name functions, as in file.py:function; by flag."""
    files: dict[str, list[Path]] = {}
    for name, value in flags.items():
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values:
            continue
        functions = [function_path(str(function)) for function in values]
        if all(".py:" in function for function in functions):
            files[name] = [Path(function.rpartition(":")[0]) for function in functions]
    return files


def check_same_everywhere(identity: Identity) -> None:
    """Checks that all processes have equal flags and files; nodes may have their own disks. Every rank must call it.

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


def differences(before: Mapping[str, str], now: Mapping[str, str], may_differ: Collection[str] = ()) -> list[str]:
    """What differs between the identities of a checkpoint and of this run, in words, flags that may differ aside."""
    passed_over = {FILES, *(f"--{name}" for name in may_differ)}
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
    """Files and hub sets whose content only one of two runs has, in parentheses; none if their order has changed."""
    hashes_before = json.loads(before[FILES])
    hashes_now = json.loads(now[FILES])
    names = []
    for name, file_hash in hashes_now.items():
        if file_hash not in hashes_before.values():
            names.append(name)
    for name, file_hash in hashes_before.items():
        if file_hash not in hashes_now.values():
            names.append(name)
    names = list(dict.fromkeys(names))
    if not names:
        return ""
    shown = names[:MOST_NAMED]
    if len(names) > MOST_NAMED:
        shown.append("…")
    return f" ({', '.join(shown)})"


def _text(value: object) -> str:
    return "inf" if value == math.inf else json.dumps(value)
