# SPDX-License-Identifier: Apache-2.0
"""The distribution ma-rlhf. applications/DeepSpeed-Chat/setup.py installs the same one."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
PACKAGES = ROOT / "applications" / "DeepSpeed-Chat"


def distribution(package_dir: str) -> dict:
    """Arguments of ``setup`` for the package as seen from a folder.

    Args:
        package_dir: where the folder ``dschat`` lies, relative to the folder that holds the running setup.py.
    """
    return {
        "name": "ma-rlhf",
        "version": "0.1.0",
        "description": "RLHF with macro actions: SFT, reward model and PPO on DeepSpeed",
        "long_description": (ROOT / "README.md").read_text(encoding="utf-8"),
        "long_description_content_type": "text/markdown",
        "license": "Apache-2.0",
        "python_requires": ">=3.11",
        "package_dir": {"": package_dir},
        "packages": find_packages(str(PACKAGES), include=["dschat", "dschat.*"]),
        "package_data": {"dschat": ["templates/*"]},
        "install_requires": [
            "torch>=2.6",
            "transformers>=5.17,<6",
            "deepspeed>=0.19,<1",
            "accelerate>=1.10",
            "datasets>=4",
            "peft>=0.21",
            "tensorboard>=2.20",
            "matplotlib>=3.9",
            "jinja2>=3.1",
            "markupsafe>=3",
            "psutil>=6",
            "pyarrow>=19",
            "safetensors>=0.5",
            "tqdm>=4.66",
            "numpy>=1.26",
        ],
        "extras_require": {
            "dev": ["pytest>=9", "pytest-xdist>=3.8", "hypothesis>=6.100", "ruff>=0.17,<0.18", "mypy>=2.4,<3"],
        },
    }


if __name__ == "__main__":
    setup(**distribution("applications/DeepSpeed-Chat"))
