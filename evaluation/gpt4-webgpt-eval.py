# SPDX-License-Identifier: Apache-2.0
"""A judge compares two models by WebGPT's rubric, whatever --dataset says: `dschat judge`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["judge", *sys.argv[1:], "--dataset", "webgpt"]))
