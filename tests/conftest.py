# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: one thread unless OMP_NUM_THREADS says more, one tokenizer, the process group of engines."""

import gc
import json
import os
import shutil
import signal
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
# What torch.compile generates is kept between tests, and not in the folder of whoever runs them.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "ma-rlhf-tests-compiled"))
# Tokenised examples are kept for these tests alone.
os.environ["MA_RLHF_CACHE"] = tempfile.mkdtemp(prefix="ma-rlhf-tests-cache-")
# A shell that starts the suite in the background lets it ignore Ctrl-C, and nohup a closed terminal; and with it the
# programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from factories import make_tokenizer
from published_set_copies import make_rows
from real_size import require_real_size
from warm_python import READ_ON_IMPORT

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# Examples of properties have no time limit: other test processes may take the processor for longer than one lasts.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def variables_of_libraries() -> Iterator[None]:
    """After a test they are as before it: with others, commands of later tests would start anew instead of forking."""
    before = dict(os.environ)
    yield
    for name in before.keys() | os.environ.keys():
        if not name.startswith(READ_ON_IMPORT):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests of minutes that nobody asked for, and keeps the groups of `--dist loadgroup` together."""
    leave_out_slow(config, items)
    for item in items:  # pytest 9.2 does not look at the name that xdist 3.8 sets
        named = vars(item).get("_nodeid")
        if named and item.nodeid != named:
            item._id = type(item._id).parse(named)


def pytest_collection_finish() -> None:
    """Collections of garbage leave everything alone that was imported until now: a million objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Removes the cache of these tests."""
    shutil.rmtree(os.environ["MA_RLHF_CACHE"], ignore_errors=True)


def leave_out_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of minutes run if -m says what to run, or if they are named, as in tests/cli/test_mains.py::test_x."""
    if config.option.markexpr:
        return
    words = [word.split("::", 1) for word in config.args if "::" in word]
    named = [((config.invocation_params.dir / file).resolve(), test) for file, test in words]

    def is_left_out(item: pytest.Item) -> bool:
        own = item.nodeid.split("::", 1)[1]
        is_long = item.get_closest_marker("slow") or item.get_closest_marker("mutants")
        return bool(is_long) and not any(item.path == file and own.startswith(test) for file, test in named)

    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item)]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all test processes of this run see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level BPE tokenizer of 100 ids: 0 <pad>, 1 <bos>, 2 <eos>."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def benepar_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A benepar checkpoint of random weights."""
    pytest.importorskip("benepar")
    from toy_parser import build_toy_parser

    return build_toy_parser(tmp_path_factory.mktemp("benepar") / "toy")


@pytest.fixture(scope="session")
def _group() -> Iterator[dict[str, str]]:
    """A process group of one; its variables are taken back, so that no subprocess of another test inherits them."""
    from dschat.engine.process_group import process_group

    require_real_size()
    before = dict(os.environ)
    with process_group():
        added = {name: value for name, value in os.environ.items() if before.get(name) != value}
        for name in added:
            del os.environ[name]
        os.environ.update({name: before[name] for name in added if name in before})
        yield added


@pytest.fixture
def group(_group: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The open process group, for tests that make engines."""
    for name, value in _group.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def bytes_tokenizer():
    """A tokenizer of 300 ids that can write any text: 0 <pad>, 1 <bos>, 2 <eos>."""
    from dschat.models.tiny import train_tokenizer

    return train_tokenizer([json.dumps(row) for name in ("tldr", "hh") for row in make_rows(name, 20)], 300)
