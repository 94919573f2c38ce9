# SPDX-License-Identifier: Apache-2.0
"""Locks of compilations, and what is said before one."""

import logging
import os

import pytest

from dschat.engine.process_group import prepare_op


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where torch compiles cpu_adam in this test."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("LOCAL_RANK", "CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    from torch.utils import cpp_extension

    return type(tmp_path)(cpp_extension._get_build_directory("cpu_adam", verbose=False))


def test_the_lock_of_a_killed_compilation_goes(folder, caplog):
    (folder / "lock").touch()
    prepare_op("cpu_adam")
    assert not (folder / "lock").exists()
    assert "the lock of a compilation that was killed" in caplog.text and str(folder) in caplog.text


def test_the_lock_of_a_process_that_compiles_stays(folder):
    held = os.open(folder / "lock", os.O_CREAT | os.O_EXCL)
    try:
        prepare_op("cpu_adam")
        assert (folder / "lock").exists()
    finally:
        os.close(held)


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
