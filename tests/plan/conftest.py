# SPDX-License-Identifier: Apache-2.0
"""What a plan reads of the machine is set aside for its tests."""

import pytest

from script_runs import VARIABLES


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
