# SPDX-License-Identifier: Apache-2.0
"""Perplexity, ROUGE and accuracy of finished models: `dschat text`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["text", *sys.argv[1:]]))
