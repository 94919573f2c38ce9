# SPDX-License-Identifier: Apache-2.0
"""Runs a script of benchmarks/ and reads the JSON object that it prints."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "applications" / "DeepSpeed-Chat" / "benchmarks"


def run_benchmark(script: str, flags: str) -> dict[str, Any]:
    """The script's figures; machine and settings are there, too."""
    command = [sys.executable, str(FOLDER / script), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"machine", "settings", "figures"}
    assert {"cpu", "cpu_cores", "gpus", "torch"} <= set(report["machine"])
    figures: dict[str, Any] = report["figures"]
    return figures
