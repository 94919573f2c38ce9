# SPDX-License-Identifier: Apache-2.0
"""The distribution ma-rlhf. applications/DeepSpeed-Chat/setup.py installs the same one."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
PACKAGES = ROOT / "applications" / "DeepSpeed-Chat"
CORE = ROOT / "applications" / "macro-actions"
TREES = ROOT / "Constituent-Treelib"


def distribution(package_dir: str, core_dir: str, trees_dir: str | None = None) -> dict:
    """Arguments of ``setup`` for the packages as seen from a folder.

    Args:
        package_dir: where the folder ``dschat`` lies, relative to the folder that holds the running setup.py.
        core_dir: the folder that holds ``macro_actions``, likewise; that package has a setup of its own, too.
        trees_dir: the folder that holds ``constituent_treelib``, as core_dir.
    """
    folders = {"": package_dir, "macro_actions": f"{core_dir}/macro_actions"}
    packages = find_packages(str(PACKAGES), include=["dschat", "dschat.*"])
    packages += find_packages(str(CORE), include=["macro_actions", "macro_actions.*"])
    if trees_dir is not None:
        folders["constituent_treelib"] = f"{trees_dir}/constituent_treelib"
        packages += find_packages(str(TREES), include=["constituent_treelib", "constituent_treelib.*"])
    return {
        "name": "ma-rlhf",
        "version": "0.1.0",
        "description": "RLHF with macro actions: SFT, reward model and PPO on DeepSpeed",
        "long_description": (ROOT / "README.md").read_text(encoding="utf-8"),
        "long_description_content_type": "text/markdown",
        "license": "Apache-2.0",
        "python_requires": ">=3.11",
        "package_dir": folders,
        "packages": packages,
        "package_data": {
            "dschat": ["**/*.html", "**/*.css", "**/*.js", "presets/*/*.yaml"],
            "macro_actions": ["py.typed"],
            "constituent_treelib": ["py.typed"],
        },
        "entry_points": {"console_scripts": ["dschat = dschat.cli:main"]},
        "install_requires": [
            "torch>=2.8",
            "transformers>=5.17,<6",
            "deepspeed>=0.19.8,<1",
            "accelerate>=1.10",
            "datasets>=4",
            "peft>=0.21",
            "tensorboard>=2.20",
            "matplotlib>=3.9",
            "jinja2>=3.1",
            "markupsafe>=3",
            "psutil>=6",
            "pyyaml>=6",
            "pyarrow>=19",
            "safetensors>=0.5",
            "huggingface-hub>=1",
            "scipy>=1.14",
            "statsmodels>=0.14.4",
            "rouge-score>=0.1.2",
            "tqdm>=4.66",
            "numpy>=1.26",
            "fastapi>=0.115,<1",
            "uvicorn>=0.35,<1",
        ],
        "extras_require": {
            "judge": ["openai>=3,<4"],
            "wandb": ["wandb>=0.21"],
            "ui": ["gradio>=6.24,<7"],
            "vllm": ["vllm>=0.32,<0.34"],
            "parsing": [
                "spacy>=3.8",
                "benepar>=0.2",
                "nltk>=3.9",
                "sentencepiece>=0.2",
                "protobuf>=4",
                "tree-sitter>=0.25",
                "tree-sitter-python>=0.25",
            ],
            "dev": ["pytest>=9", "pytest-xdist>=3.8", "hypothesis>=6.100", "ruff>=0.17,<0.18", "mypy>=2.4,<3"],
        },
    }


if __name__ == "__main__":
    setup(**distribution("applications/DeepSpeed-Chat", "applications/macro-actions", "Constituent-Treelib"))
