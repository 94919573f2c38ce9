# SPDX-License-Identifier: Apache-2.0
"""The script as users start it: a kill, messages; the documented command is among those of all scripts."""

import signal
import subprocess
import sys
import time

from cli_runs import ROOT, TIMEOUT, environment, message_of, run_command

SCRIPT = "inference/inference_with_rewards.py"


def test_killed_half_way_and_started_again_gives_the_same_file(project, run, capsys, monkeypatch):
    """On a machine without a GPU, where --gpu 0 means the CPU; the data sets lie in PROJ_PATH/data.

    What is started again is the same run in this process, which has imported everything.
    """
    flags = {"dataset": "hh-rlhf", "max_new_tokens": 60, "batch_size": 1, "top_k": 0, "seed": 7}
    uninterrupted = run(**flags).read_bytes()
    words = [f"--{name}={value}" for name, value in flags.items()]
    words += [f"--proj-path={project}", f"--model={project / 'run'}", f"--reward-model={project / 'rm'}"]
    partial = project / "results" / "hh-rlhf" / "temperature=0.8" / "run.jsonl.partial"
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--gpu", "0", *words],
        cwd=ROOT,
        env=environment(MA_RLHF_DATA=None),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + TIMEOUT
        while not (partial.exists() and partial.read_bytes().count(b"\n") > 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        stderr = process.communicate()[1]
    warnings = [line for line in stderr.splitlines() if "--gpu 0" in line]
    assert len(warnings) == 1 and "CPU" in warnings[0]
    kept = partial.read_bytes()
    assert 3 < kept.count(b"\n") < 24
    capsys.readouterr()
    monkeypatch.setattr("dschat.common.progress.LINE_SECONDS", 0.0)
    assert run(proj_path=project, device=None, gpu=0, **flags).read_bytes() == uninterrupted
    assert "24/24" in capsys.readouterr().err  # the progress bar
    assert not partial.exists()


def test_bad_flags_are_refused_quickly(tmp_path):
    command = [sys.executable, SCRIPT, "--proj-path", tmp_path, "--dataset", "hh-rlhf", "--model", "m"]
    message_of(run_command([*command, "--reward-model", "r", "--temperature", "hot"], cwd=ROOT), "--temperature hot")
    program = "import sys; sys.argv[1:] = ['--help']; import runpy\n"
    program += f"try: runpy.run_path({SCRIPT!r}, run_name='__main__')\n"
    program += "except SystemExit: pass\nassert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    run_command([sys.executable, "-c", program], cwd=ROOT).expect(0)
