# SPDX-License-Identifier: Apache-2.0
"""The script as users start it: the documented command, a kill, messages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cli_runs import ROOT, TIMEOUT, environment, message_of, read_jsonl, run_command

SCRIPT = "inference/inference_with_rewards.py"
DOCUMENTED = r"""
python inference/inference_with_rewards.py --proj-path ${PROJ_PATH} --dataset summarize --model ${actor_model_path} \
    --reward-model ${reward_model_path} --temperature 0.8 --gpu 0 --batch-size 16
"""


def test_the_documented_command(project):
    """From the repository root; the data sets lie in PROJ_PATH/data."""
    result = run_command(
        ["bash", "-c", DOCUMENTED],
        cwd=ROOT,
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        PROJ_PATH=str(project),
        actor_model_path=str(project / "run" / "actor"),
        reward_model_path=str(project / "rm"),
        MA_RLHF_DATA=None,
    ).expect(0)
    path = project / "results" / "summarize" / "temperature=0.8" / "run.jsonl"
    rows = read_jsonl(path)
    assert len(rows) == 24
    assert all({"prompt", "response", "reward", "finished"} == row.keys() for row in rows)
    last = result.stdout.splitlines()[-1]
    assert last.startswith("mean reward ") and last.endswith(f"24 rows: {path}")
    warnings = [line for line in result.stderr.splitlines() if "--gpu 0" in line]
    assert len(warnings) == 1 and "CPU" in warnings[0]
    assert "24/24" in result.stderr  # the progress bar


def test_killed_half_way_and_started_again_gives_the_same_file(project, run, tmp_path):
    flags = {"dataset": "hh-rlhf", "max_new_tokens": 60, "batch_size": 1, "top_k": 0, "seed": 7}

    uninterrupted = run(proj_path=tmp_path / "uninterrupted", **flags).read_bytes()
    words = [f"--{name}={value}" for name, value in flags.items()]
    words += [f"--proj-path={tmp_path}", f"--model={project / 'run'}", f"--reward-model={project / 'rm'}"]
    command = [sys.executable, SCRIPT, "--device=cpu", *words]
    partial = tmp_path / "results" / "hh-rlhf" / "temperature=0.8" / "run.jsonl.partial"
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + TIMEOUT
        while not (partial.exists() and partial.read_bytes().count(b"\n") > 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = partial.read_bytes()
    assert 3 < kept.count(b"\n") < 24
    run_command(command, cwd=ROOT).expect(0)
    assert (partial.parent / "run.jsonl").read_bytes() == uninterrupted
    assert not partial.exists()


def test_bad_flags_are_refused_quickly(tmp_path):
    command = [sys.executable, SCRIPT, "--proj-path", tmp_path, "--dataset", "hh-rlhf", "--model", "m"]
    message_of(run_command([*command, "--reward-model", "r", "--temperature", "hot"], cwd=ROOT), "--temperature hot")
    program = "import sys; sys.argv[1:] = ['--help']; import runpy\n"
    program += f"try: runpy.run_path({SCRIPT!r}, run_name='__main__')\n"
    program += "except SystemExit: pass\nassert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    run_command([sys.executable, "-c", program], cwd=ROOT).expect(0)
