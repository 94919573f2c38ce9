# SPDX-License-Identifier: Apache-2.0
"""Describes the installation and the machine, for `dschat env`."""

import os
import platform
import shutil
import socket
import sys

import psutil
import torch

from dschat.base.network import address_of_hostname, describe_interfaces, is_reachable
from dschat.base.secrets import SECRET_NAME
from dschat.run.distributed import device
from dschat.run.record import code_version, package_versions
from dschat.settings.commands import EnvOptions

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "DS_",
    "FI_",
    "GLOO_",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "MA_RLHF_",
    "NCCL_",
    "OMP_NUM_THREADS",
    "TORCH_",
    "TRITON_",
    "VLLM_",
)


def describe(options: EnvOptions) -> str:
    """Lists versions, hardware and variables that affect runs, without values that could be secrets."""
    memory = psutil.virtual_memory()
    packages = package_versions()
    lines = {
        "code": " ".join(f"{name} {value}" for name, value in code_version(packages).items() if value),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "memory": f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free",
        "shared memory": _shared_memory(),
        "hostname": _hostname(),
        "network": describe_interfaces(),
        **packages,
        "CUDA": str(torch.version.cuda or "no"),
        "NCCL": _nccl(),
        **_gpus(),
    }
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES) and not SECRET_NAME.search(name):
            lines[name] = value
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def _shared_memory() -> str:
    """Free space in /dev/shm, through which processes of one machine communicate."""
    if not os.path.isdir("/dev/shm"):
        return "none"
    usage = shutil.disk_usage("/dev/shm")
    return f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"


def _hostname() -> str:
    """The hostname and its address, which gloo gives to other ranks."""
    address = address_of_hostname()
    remark = "" if is_reachable(address) else ", which other machines cannot reach"
    return f"{socket.gethostname()}, {address}{remark}"


def _nccl() -> str:
    if device().type != "cuda":
        return "no"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _gpus() -> dict[str, str]:
    gpus: dict[str, str] = {}
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        gpus[f"GPU {number}"] = f"{torch.cuda.get_device_name(number)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    return gpus or {"GPUs": "none"}
