# SPDX-License-Identifier: Apache-2.0
"""A judge compares two models by WebGPT's rubric, whatever --dataset says: `dschat judge --dataset webgpt`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    names = [word.partition("=")[0] for word in sys.argv[1:]]
    if "--rubric" in names:
        sys.exit("error: --rubric: this script always judges by the webgpt rubric; give yours to gpt4-eval.py.")
    if "--dataset" in names:
        print("--dataset: judged by the webgpt rubric, and recorded as webgpt", file=sys.stderr)
    sys.exit(main(["judge", *sys.argv[1:], "--dataset", "webgpt"]))
