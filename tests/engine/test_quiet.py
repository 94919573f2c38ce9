# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed keeps its figures of memory and its probing of ops to itself; locks of compilations."""

import logging
import os
import sys
from pathlib import Path

import deepspeed
import pytest
import torch
from torch.utils import cpp_extension

from cli_runs import run_command
from dschat.engine.process_group import SHARED_MEMORY, decide_on_shared_memory, prepare_op
from factories import engine_of, make_causal_lm


def test_an_engine_in_bf16_prints_nothing(group, capfd):
    engine_of(make_causal_lm().to(torch.bfloat16), dtype=torch.bfloat16)
    assert capfd.readouterr().out == ""


def test_only_the_wanted_op_is_looked_at(monkeypatch):
    known = {}
    monkeypatch.setitem(vars(deepspeed.ops), "__compatible_ops__", known)
    decide_on_shared_memory(False)
    assert known == {SHARED_MEMORY: False}
    known.clear()
    decide_on_shared_memory(True)
    assert list(known) == [SHARED_MEMORY]


def test_a_group_of_one_compiles_no_test_programs():
    """A process without captured output, as a user's: nothing on either stream."""
    program = (
        "import deepspeed.ops.op_builder.builder as b\n"
        "def has_function(*a, **k): print('probed', a)\n"
        "b.OpBuilder.has_function = has_function\n"
        "from dschat.engine.process_group import process_group\n"
        "with process_group(): pass\n"
    )
    done = run_command([sys.executable, "-c", program], DS_ACCELERATOR="cpu").expect(0)
    assert "probed" not in done.stdout and "laio" not in done.stderr


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where torch compiles cpu_adam in this test."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("LOCAL_RANK", "CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Path(cpp_extension._get_build_directory("cpu_adam", verbose=False))


def test_the_lock_of_a_process_that_compiles_stays_and_that_of_a_killed_one_goes(folder, caplog):
    with open(folder / "lock", "x"):
        prepare_op("cpu_adam")
        assert (folder / "lock").exists()
    prepare_op("cpu_adam")
    assert not (folder / "lock").exists()
    assert "the lock of a compilation that was killed" in caplog.text and str(folder) in caplog.text


def test_another_machine_may_hold_a_young_lock(folder, monkeypatch):
    monkeypatch.setenv("CROSS_SIZE", "2")
    (folder / "lock").touch()
    prepare_op("cpu_adam")
    assert (folder / "lock").exists()
    os.utime(folder / "lock", (1, 1))
    prepare_op("cpu_adam")
    assert not (folder / "lock").exists()


def test_a_compilation_is_announced_once(folder, caplog):
    caplog.set_level(logging.INFO)
    prepare_op("cpu_adam")
    assert "compiling DeepSpeed's cpu_adam" in caplog.text
    caplog.clear()
    (folder / "cpu_adam.so").touch()
    prepare_op("cpu_adam")
    assert not caplog.text
