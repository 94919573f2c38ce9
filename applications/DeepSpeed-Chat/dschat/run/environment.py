# SPDX-License-Identifier: Apache-2.0
"""What `dschat env` prints."""

import os
import platform
import re
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from dschat.run.output import CHECKOUT, commit_of, new_record
from dschat.settings.commands import EnvOptions

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "NCCL_",
    "DS_",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "MA_RLHF_",
    "OMP_NUM_THREADS",
    "VLLM_",
)
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
OTHERS = ("vllm", "flash-attn", "bitsandbytes", "spacy", "benepar", "gradio", "openai")


def describe(options: EnvOptions) -> str:
    """Versions, the machine, and variables that change what a run does; no values that could be secrets."""
    memory = psutil.virtual_memory()
    record = new_record("env", [], 0, 1)
    lines = {
        "code": " ".join(f"{name} {value}" for name, value in (record.code | commit_of(CHECKOUT)).items()),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "memory": f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free",
        "shared memory": _shared_memory(),
        **record.packages,
        **_installed(),
        "CUDA": str(torch.version.cuda or "no"),
        "NCCL": _nccl(),
        **_gpus(),
    }
    known = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    public = {name: value for name, value in known.items() if not SECRET.search(name)}
    return "\n".join(f"{name}: {value}" for name, value in (lines | public).items())


def _installed() -> dict[str, str]:
    found = {}
    for name in OTHERS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _shared_memory() -> str:
    """Of /dev/shm, which processes of one machine use."""
    if not os.path.isdir("/dev/shm"):
        return "none"
    room = shutil.disk_usage("/dev/shm")
    return f"{room.free / 1e9:.1f} of {room.total / 1e9:.1f} GB free"


def _nccl() -> str:
    if not torch.cuda.is_available():
        return "no"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _gpus() -> dict[str, str]:
    found = {}
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        found[f"GPU {number}"] = f"{torch.cuda.get_device_name(number)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    return found or {"GPUs": "none"}
