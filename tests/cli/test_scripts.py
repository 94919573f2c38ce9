# SPDX-License-Identifier: Apache-2.0
"""The training scripts: run_gemma.sh of each step through the deepspeed launcher, and what all of them share."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from cli_runs import STEPS, TRAINING, built_once, files_under, run_command, training_rows, warm_programs
from dschat.cli import main
from launches import free_port
from script_runs import GEMMA, VARIABLES, called, recorded, run_recorded
from warm_python import PROGRAM_OF_CHILDREN

SMALL = {
    "sft": "--data_split 1,0,0 --max_seq_len 192 --per_device_train_batch_size 8 --global_batch_size 8",
    "reward": "--data_split 0,32,32 --max_seq_len 192 --per_device_train_batch_size 8 --global_batch_size 8",
    "dpo": "--data_split 0,32,32 --max_seq_len 192 --per_device_train_batch_size 8 --global_batch_size 8",
    "ppo": "--data_split 0,32,32 --max_prompt_seq_len 160 --max_answer_seq_len 8 --per_device_generation_batch_size 16"
    " --per_device_training_batch_size 8 --global_batch_size 8",
}


def launcher_variables(tmp_path: Path, **variables: str) -> dict[str, str | None]:
    """A script's environment with the real launcher; its processes start without the seconds of imports."""
    programs = warm_programs()
    path = os.pathsep.join(map(str, (programs, Path(sys.executable).parent, os.environ["PATH"])))
    given = {"PROJ_PATH": str(tmp_path), "NUM_GPUS": "1", "MASTER_PORT": free_port(), "PATH": path}
    given[PROGRAM_OF_CHILDREN] = str(programs / "python")
    return dict.fromkeys(VARIABLES) | given | variables


REFUEL_ONLINE = TRAINING / "refuel" / "training_scripts" / "hh_llama3_8b_online.sh"


@pytest.fixture(scope="session")
def project(shared):
    """The scripts' PROJ_PATH."""
    return built_once(shared, "project", lambda folder: folder.mkdir())


@pytest.mark.parametrize("step", ["ppo", *(pytest.param(s, marks=pytest.mark.slow) for s in STEPS if s != "ppo")])
def test_a_script_runs_through_the_launcher(step, project, inputs, sft, reward):
    """Its PROJ_PATH, models and data come from the environment; flags given to it win."""
    variables = launcher_variables(
        project,
        MODEL=str(inputs / "model" if step == "sft" else sft),
        REWARD_MODEL=str(reward),
        DATA=str(inputs / "data" / ("demonstrations" if step == "sft" else "comparisons")),
    )
    words = shlex.split(SMALL[step]) + ["--num_train_epochs", "2", "--seed", "77", "--enable_tensorboard"]
    result = run_command(["bash", GEMMA[step], *words], cwd=project, **variables).expect(0)
    assert "Traceback" not in result.stderr + result.stdout
    (output,) = project.glob(f"models/*/{step}")
    record = json.loads((output / "run.json").read_text())
    assert record["finished"] is True and record["seeds"] == {"seed": 77} and record["step"] == step
    assert record["batches"]["global_batch"] == 8
    assert len(training_rows(output)) == (4 if step == "ppo" else 8)  # two epochs
    assert "tensorboard/events" in files_under(output)


# Of a step, and of another command; tests/cli/test_presets.py reads all of them.
@pytest.mark.parametrize("script", [GEMMA["ppo"], REFUEL_ONLINE], ids=lambda script: "-".join(called(script)))
def test_what_a_script_starts(script, tmp_path):
    """A rank per GPU; flags given to the script win, and words are passed on as they are."""
    (tmp_path / "scratch").mkdir()
    given = ["--output_dir", "two words", "--data_path", "a", "b*"]
    variables = {"TMPDIR": str(tmp_path / "scratch"), "RECORDER_STATUS": "7", "NUM_GPUS": "4"}
    run_recorded(script, tmp_path, *given, **variables).expect(7)
    words, environment = recorded(tmp_path, rank=3)
    assert environment["WORLD_SIZE"] == environment["LOCAL_SIZE"] == "4" and words[0] == called(script)[0].split()[0]
    flags = json.loads(environment["MA_RLHF_GIVEN"])["flags"]
    assert flags["output_dir"] == "two words" and flags["data_path"] == ["a", "b*"]
    assert not flags.keys() & {"config", "hostfile", "node_rank", "master_addr"}
    assert environment["MA_RLHF_DATA"] == f"{tmp_path}/data" and environment["PWD"] == str(tmp_path)
    assert Path(environment["MA_RLHF_ERROR_FILE"]).parent.parent == tmp_path / "scratch"
    assert not list((tmp_path / "scratch").iterdir()), "something is left behind"


def test_what_is_printed_are_the_sizes_for_all_processes(monkeypatch, capsys):
    """512 examples on 128 processes are 4 for each, on 256 they are 2."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="0"):
        main(["sft", "--config", "tldr_gemma_2b", "--print_config", "--num_gpus", "256"])
    printed = capsys.readouterr().out
    assert re.search(r"^per_device_train_batch_size: 2 .*# preset, 256 processes", printed, re.MULTILINE)
