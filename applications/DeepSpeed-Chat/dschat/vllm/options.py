# SPDX-License-Identifier: Apache-2.0
"""Flags of `dschat serve-vllm`."""

from dataclasses import dataclass

from dschat.settings.commands import Dtype, require_token
from dschat.settings.flags import AT_LEAST_1, UP_TO_1, Range, check_values, flag

TOKEN = "VLLM_API_KEY"


SERVING_PORT: Range = (lambda port: 0 < port < 2**16, "1 to 65535")


@dataclass(kw_only=True)
class ServeVllmOptions:
    """Start a vLLM server that generates responses for training runs with --vllm_url.

    It begins with random weights; a run sends its own before every rollout. See docs/scaling.md.
    """

    model: str = flag("model that the run trains: a folder or hub id, of which only the config is read", path=True)
    host: str = flag(f"address to listen on; any other than this machine's own needs a token in {TOKEN}", "127.0.0.1")
    port: int = flag("port to listen on", 8000, SERVING_PORT)
    tensor_parallel: int = flag("number of GPUs that share the model (tensor parallelism)", 1, AT_LEAST_1)
    max_tokens: int = flag(
        "maximum tokens of a prompt with its response: max_prompt_seq_len + max_answer_seq_len of the run",
        1024,
        AT_LEAST_1,
    )
    dtype: Dtype | None = flag("dtype, the same as the run's; bf16 on a GPU and fp32 on a CPU if not given", None)
    gpu_memory: float = flag("fraction of each GPU's memory that vLLM may use", 0.9, UP_TO_1)

    def __post_init__(self) -> None:
        """Raise UserError, which names the flag and what to change."""
        check_values(self)
        require_token(self.host, TOKEN, "replace the weights")
