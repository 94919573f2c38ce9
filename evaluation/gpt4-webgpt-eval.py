# SPDX-License-Identifier: Apache-2.0
"""Lets a judge model compare two models' answers: by accuracy, coherence and usefulness, whatever --dataset says."""

import sys

from dschat.common.script import run_script
from dschat.evaluation.judge.run import run_judge

if __name__ == "__main__":
    sys.exit(run_script(lambda: run_judge(sys.argv[1:], str(__doc__), dataset="webgpt"), print, goes_on=True))
