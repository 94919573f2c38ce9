# SPDX-License-Identifier: Apache-2.0
"""The distribution ma-rlhf. applications/DeepSpeed-Chat/setup.py installs the same one."""

import os
from pathlib import Path

from setuptools import find_packages, setup

VERSION = "0.1.0"  # of all three distributions
EDITABLE = "MA_RLHF_EDITABLE"  # set by the build backend
ROOT = Path(__file__).resolve().parent
PACKAGES = ROOT / "applications" / "DeepSpeed-Chat"
CORE = ROOT / "applications" / "macro-actions"
TREES = ROOT / "Constituent-Treelib"


# What steps 1 to 3 and DPO need, with a reward model, a function or a server. What other folders of dschat need beside
# it are extras; those named in dschat/base/extras.py are checked before a command does anything else.
REQUIREMENTS = [
    "torch>=2.8",
    "transformers>=5.21,<6",
    "deepspeed>=0.19.8,<1",
    "accelerate>=1.10",
    "datasets>=4.3",
    "peft>=0.21",
    "tensorboard>=2.21",
    "jinja2>=3.1",
    "markupsafe>=3",
    "psutil>=6",
    "pyyaml>=6",
    "pyarrow>=25",
    "safetensors>=0.8",
    "huggingface-hub>=1.31",
    "tqdm>=4.66.3",
    "numpy>=1.26",
    "tokenizers>=0.23.1",
    "multiprocess>=0.70.16",
    "httpx2>=2.7",
    "filelock>=3.30",  # earlier ones remove the file of the next holder, so that two hold the lock
    "pydantic>=2.11,<3",
]
STARLETTE = "starlette>=0.37.2"
EXTRAS = {
    "bench": ["lm-eval>=0.4.13,<0.5"],
    "evaluation": ["matplotlib>=3.9", "pandas>=2.2", "rouge-score>=0.1.2", "scipy>=1.15", "statsmodels>=0.14.4"],
    "math": ["math-verify[antlr4-13-2]>=0.9,<1"],
    "programs": ["markdown-it-py>=4,<5"],
    "serve": ["fastapi>=0.115,<1", "uvicorn>=0.35,<1", STARLETTE],
    "wandb": ["wandb>=0.21"],
    "real": ["gguf>=0.17", "vaderSentiment>=3.3.2"],
    "trackio": ["trackio>=0.43,<1"],
    "ui": ["gradio>=6.24,<7", STARLETTE],
    "vllm": ["vllm>=0.32,<0.34", STARLETTE],
    "dev": ["pytest>=9", "pytest-xdist>=3.8", "hypothesis>=6.100", "ruff>=0.17,<0.18", "mypy>=2.4,<3"],
}
PARSING = [
    "spacy>=3.8",
    "benepar>=0.2",
    "nltk>=3.9",
    "sentencepiece>=0.2",
    "protobuf>=4",
    "tree-sitter>=0.25",
    "tree-sitter-python>=0.25",
]


def distribution(package_dir: str, core_dir: str, trees_dir: str) -> dict:
    """Arguments of ``setup`` for the packages as seen from a folder.

    An editable install finds macro_actions and constituent_treelib in the checkout; a wheel requires their
    distributions, which own their files alone. See applications/DeepSpeed-Chat/build_backend.py.

    Args:
        package_dir: where the folder ``dschat`` lies, relative to the folder that holds the running setup.py.
        core_dir: the folder that holds ``macro_actions``, likewise; that package has a setup of its own, too.
        trees_dir: the folder that holds ``constituent_treelib``, as core_dir.
    """
    return {
        "name": "ma-rlhf",
        "version": VERSION,
        "description": "RLHF with macro actions: SFT, reward model and PPO on DeepSpeed",
        "long_description": (ROOT / "README.md").read_text(encoding="utf-8"),
        "long_description_content_type": "text/markdown",
        "license": "Apache-2.0",
        "python_requires": ">=3.11",
        "package_data": {"dschat": ["**/*.html", "**/*.css", "**/*.js", "**/*.toml", "presets/*/*.yaml", "py.typed"]},
        "entry_points": {"console_scripts": ["dschat = dschat.cli:main"]},
        **package_arguments(package_dir, core_dir, trees_dir),
        **requirement_arguments(),
    }


def package_arguments(package_dir: str, core_dir: str, trees_dir: str) -> dict:
    """Packages and their folders; in an editable install with those of the other two distributions."""
    folders = {"": package_dir}
    packages = find_packages(str(PACKAGES), include=["dschat", "dschat.*"])
    if EDITABLE in os.environ:
        folders["macro_actions"] = f"{core_dir}/macro_actions"
        packages += find_packages(str(CORE), include=["macro_actions", "macro_actions.*"])
        folders["constituent_treelib"] = f"{trees_dir}/constituent_treelib"
        packages += find_packages(str(TREES), include=["constituent_treelib", "constituent_treelib.*"])
    return {"package_dir": folders, "packages": packages}


def requirement_arguments() -> dict:
    """Requirements and extras; without the other two distributions in an editable install, which holds them."""
    core = [f"macro-actions=={VERSION}"]
    trees = [f"ma-rlhf-constituent-treelib=={VERSION}"]
    if EDITABLE in os.environ:
        core = []
        trees = []
    return {"install_requires": [*core, *REQUIREMENTS], "extras_require": EXTRAS | {"parsing": [*trees, *PARSING]}}


if __name__ == "__main__":
    setup(**distribution("applications/DeepSpeed-Chat", "applications/macro-actions", "Constituent-Treelib"))
