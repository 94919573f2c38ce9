# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed keeps its figures of memory and its probing of ops to itself."""

import sys

import deepspeed
import torch

from cli_runs import run_command
from dschat.engine.process_group import SHARED_MEMORY, decide_on_shared_memory
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
