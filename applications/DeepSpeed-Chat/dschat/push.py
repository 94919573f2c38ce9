# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.push FOLDER owner/name`: a finished model to the Hugging Face hub."""

import argparse
import sys
from pathlib import Path

from dschat.common.script import run_script


def main(words: list[str] | None = None) -> int:
    """Parses the command line and uploads; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dschat.push",
        description="Upload a model with its card, run.json and metrics to the Hugging Face hub.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="of a model, or step 3's output folder: its policy")
    parser.add_argument("repository", help="owner/name; made where it is missing, private")
    parser.add_argument("--public", action="store_true", help="a new repository is public; or push to one that is")
    options = parser.parse_args(words)

    def run() -> str:
        from dschat.run.hub import push

        return f"uploaded to {push(options.folder, options.repository, options.public)}"

    return run_script(run, print)


if __name__ == "__main__":
    sys.exit(main())
