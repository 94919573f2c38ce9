# SPDX-License-Identifier: Apache-2.0
"""What is looked at before anything is loaded; a failure names the rank."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dschat.errors import UserError
from dschat.run.preflight import ProcessReport, check_reports, preflight
from launches import launch

FOLDER = Path("runs/ppo")
VERSIONS = (("torch", "2.13.0"), ("transformers", "5.23.0"))


def reports(*changes, hosts=("a", "a")):
    """One per rank, healthy but for the changes {rank: fields}."""
    healthy = [ProcessReport(rank, host, VERSIONS, None, 10**9, 10**8) for rank, host in enumerate(hosts)]
    for rank, fields in changes:
        healthy[rank] = replace(healthy[rank], **fields)
    return healthy


def test_healthy_processes_pass():
    check_reports(reports(), FOLDER)
    check_reports(reports(hosts=("a",)), FOLDER)


def test_another_version_is_named_with_its_rank_and_host():
    other = (("torch", "2.13.0"), ("transformers", "5.20.0"))
    with pytest.raises(UserError, match=r"rank 1 \(b\) has transformers 5\.20\.0, rank 0 \(a\) has 5\.23\.0"):
        check_reports(reports((1, {"versions": other}), hosts=("a", "b")), FOLDER)


def test_a_folder_that_a_rank_cannot_use_is_named():
    problem = "does not see the folder that rank 0 writes to"
    with pytest.raises(UserError, match=rf"--output_dir runs/ppo: rank 1 \(b\): {problem}"):
        check_reports(reports((1, {"folder_problem": problem}), hosts=("a", "b")), FOLDER)


def test_memory_is_shared_by_the_processes_of_a_node():
    """0.6 GB of weights fit into 1 GB, but not twice."""
    needed = {"needed_memory": 6 * 10**8}
    check_reports(reports((0, needed), (1, needed), hosts=("a", "b")), FOLDER)
    with pytest.raises(UserError, match=r"rank 0 \(a\) can use 0\.5 GB .*2 processes share.*take 0\.6 GB"):
        check_reports(reports((0, needed), (1, needed)), FOLDER)
    with pytest.raises(UserError, match=r"rank 1 \(b\) can use 1\.0 GB .*take 3\.0 GB"):
        check_reports(reports((1, {"needed_memory": 3 * 10**9}), hosts=("a", "b")), FOLDER)


def test_one_process_looks_for_itself(tmp_path):
    preflight(tmp_path / "new" / "run", [None, "a/hub-model", str(tmp_path)])
    assert list((tmp_path / "new" / "run").iterdir()) == []  # the mark is gone


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(UserError, match=r"--output_dir .*/run: rank 0 .*: cannot be written"):
        preflight(tmp_path / "run", [])


def test_a_folder_without_rights_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UserError, match=r"rank 0 .*: cannot be written"):
        preflight(tmp_path, [])


def test_weights_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(4 * 10**12)  # sparse
    with pytest.raises(UserError, match=r"rank 0 .*weights it loads take 4000\.0 GB"):
        preflight(tmp_path / "run", [str(tmp_path)])


APART = """
import os, sys
from pathlib import Path

os.chdir(Path(__file__).parent / os.environ["RANK"])  # two nodes without shared storage
sys.argv = [sys.argv[0], "--data_path", "unused", "--model_name_or_path", "unused", "--output_dir", "run"]

def train(config, stage):
    raise AssertionError("went on")

from dschat.config.sft import SFTConfig
from dschat.main import run_main

sys.exit(run_main("sft", SFTConfig, train))
"""


@pytest.mark.xdist_group("launcher")
def test_a_failure_on_one_rank_ends_all_and_says_why(tmp_path):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "apart.py").write_text(APART)
    result = launch(tmp_path / "apart.py", [])
    assert result.status != 0, result.stdout
    cause = "--output_dir run: rank 1 ("
    assert cause in result.stdout and "does not see the folder that rank 0 writes to" in result.stdout
    assert "Traceback" not in result.stdout and "went on" not in result.stdout
    assert not any((tmp_path / "0" / "run").iterdir())
