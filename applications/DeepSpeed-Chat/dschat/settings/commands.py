# SPDX-License-Identifier: Apache-2.0
"""Flags of the servers, and of commands that have few."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dschat.base.errors import UserError
from dschat.base.secrets import secret_of
from dschat.base.servers import is_loopback
from dschat.settings.flags import AT_LEAST_1, Range, check_values, flag
from dschat.settings.rewards import REWARD_TOKEN

Dtype = Literal["fp32", "bf16", "fp16"]
PORT: Range = (lambda port: 0 <= port < 2**16, "a port, from 0 to 65535; 0 takes a free one")


@dataclass(kw_only=True)
class ServeOptions:
    """Serve a reward model to --reward_url; docs/rewards.md has its request."""

    model: str = flag("reward model: folder or hub id of a sequence classifier with one label", path=True)
    host: str = flag(
        f"address to listen on; any other than this machine's own needs a token in {REWARD_TOKEN}", "127.0.0.1"
    )
    port: int = flag("port to listen on; 0 = any free one, which is printed", 8500, PORT)
    dtype: Dtype | None = flag("dtype of weights and activations; if not given, bf16 on CUDA and fp32 on a CPU", None)
    batch_size: int = flag("responses per forward pass", 16, AT_LEAST_1)
    max_tokens: int = flag(
        "maximum length of prompt and response together, in tokens; longer ones get no score", 8192, AT_LEAST_1
    )
    device: str | None = flag("device: cpu, cuda or cuda:N; if not given, the first GPU, or the CPU without one", None)
    rm_template: bool = flag(
        "format prompt and response with the reward model's own chat template, as a user and an assistant message",
        False,
    )

    def __post_init__(self) -> None:
        """Raise UserError, which names the flag and what to change."""
        check_values(self)
        require_token(self.host, REWARD_TOKEN, "ask the model, or keep it busy")


@dataclass(kw_only=True)
class OverwriteFlags:
    """Whether a result that is there is replaced."""

    overwrite: bool = flag(
        "replace a finished result, or an incomplete one that was begun without this flag or with other settings",
        False,
    )


@dataclass(kw_only=True)
class PushOptions:
    """Upload a model with its card, run.json and metrics to the Hugging Face hub."""

    folder: Path = flag("folder of a model, or output folder of step 3, whose policy is uploaded", positional=True)
    repository: str = flag(
        "repository on the hub, owner/name; created as a private one if it does not exist", positional=True
    )
    public: bool = flag("create a public repository, or allow pushing to one that is public", False)
    dry_run: bool = flag("list the files that would be uploaded, search them for secrets, and upload nothing", False)


@dataclass(kw_only=True)
class ExportOptions:
    """Write the models of a checkpoint: resume its run into a new folder, with no update left to make, and evaluate.

    To be run where the run was started, with the files that its flags name.
    """

    checkpoint: Path = flag("folder of the checkpoint, OUTPUT_DIR/checkpoints/step-N", positional=True)
    folder: Path = flag("new folder for the models", positional=True)


@dataclass(kw_only=True)
class EnvOptions:
    """Print versions, GPUs, memory and what else a bug report needs."""


@dataclass(kw_only=True)
class CompletionOptions:
    """Print a script that completes commands, flags and presets in the shell: `source <(dschat completion bash)`."""

    shell: Literal["bash", "zsh"] = flag("shell: bash or zsh", positional=True)


def require_token(host: str, variable: str, danger: str, where_given: str = ", here and where the run starts") -> None:
    """Raises UserError if a server would be reachable from other machines without a token.

    Args:
        host: address that the server would listen on.
        variable: environment variable for the token.
        danger: what anyone who reaches the server could do, for the message.
        where_given: clause of the message that says where users give the token.
    """
    if not is_loopback(host) and not secret_of(variable):
        raise UserError(
            f"--host {host}: anyone who can reach it could {danger}. Set {variable} to a secret{where_given}, or keep"
            " 127.0.0.1."
        )
