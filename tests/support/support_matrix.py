# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/support.md: which model families are tested with which feature, read from the tests.

    python tests/support/support_matrix.py

prints them; they stand in the page between the lines that say so. A column names tests that are parametrised by model
family. Its families are the values of that parameter, so a family that is added to a test appears in the table, and
one that is removed from it disappears. Tests marked `gpu` count as run on a GPU, all others as run on a CPU.
"""

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

TESTS = Path(__file__).resolve().parents[1]
NOT_TESTED = "–"


@dataclass(frozen=True)
class FamilyTest:
    """A test that is parametrised by model family.

    Attributes:
        file: path below tests/.
        function: name of the test.
        parameter: name of the parameter that holds the family, alone or followed by a blank and further words.
    """

    file: str
    function: str
    parameter: str


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        heading: what is tested.
        shows: what the tests show, in one sentence.
        tests: tests whose families have an entry in this column.
    """

    heading: str
    shows: str
    tests: tuple[FamilyTest, ...]


COLUMNS = (
    Column(
        "all steps",
        "SFT, reward model and PPO (ZeRO 0) run through their commands; transformers reads the saved models with the"
        " same log-probs and scores",
        (FamilyTest("cli/test_families.py", "test_a_family_in_all_steps", "family"),),
    ),
    Column(
        "ZeRO 3",
        "two processes hold half of every weight each; policy and critic equal the model loaded whole, to the bit",
        (FamilyTest("distributed/test_zero3.py", "test_loaded_in_parts_a_model_is_what_it_is_whole", "name"),),
    ),
    Column(
        "LoRA",
        "only adapters and heads get gradients; saved adapters and merged models give the live model's numbers",
        (
            FamilyTest("training/test_shared_base.py", "test_families_and_what_is_saved", "kind"),
            FamilyTest("distributed/test_lora.py", "test_only_adapters_and_the_score_head_get_gradients", "kind"),
        ),
    ),
    Column(
        "own decoding loop",
        "continuous batching samples the tokens that a loop over unpadded rows samples; on a GPU also as CUDA graphs",
        (
            FamilyTest("rollouts/test_compacting.py", "test_every_family_is_drawn_as_by_hand", "family"),
            FamilyTest(
                "gpu/test_cuda.py",
                "test_graphs_see_an_optimisers_weights_and_are_replayed_in_the_next_rollout",
                "kind",
            ),
        ),
    ),
    Column(
        "vLLM",
        "vLLM's log-probs are those of the actor, also after updates (`make test-vllm`, on a CPU)",
        (FamilyTest("vllm_engine/test_vllm.py", "test_log_probs_are_the_models_own", "name"),),
    ),
    Column(
        "compiled",
        "log-probs, entropies and gradients of compiled layers are those of the layers",
        (
            FamilyTest("models/test_compiled.py", "test_logprobs_and_gradients_are_those_of_the_layers", "family"),
            FamilyTest("gpu/test_cuda.py", "test_compiled_layers_train_as_the_layers_do", "kind"),
        ),
    ),
    Column(
        "packing",
        "`--packing` gives the loss and gradients of one example per row",
        (FamilyTest("training/test_packing.py", "test_loss_and_gradients_are_those_of_a_row_each", "kind"),),
    ),
    Column(
        "bf16",
        "log-probs in bf16 are close to those in float32",
        (FamilyTest("gpu/test_cuda.py", "test_log_probs_in_bf16_are_close_to_those_in_fp32", "kind"),),
    ),
)


def load_test_module(file: str) -> ModuleType:
    """Imports a test file by its path below tests/."""
    name = "support_matrix_" + file.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TESTS / file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def marks_of(marked: object) -> list[pytest.Mark]:
    """Marks of a test function or of a module (`pytestmark`)."""
    marks = getattr(marked, "pytestmark", [])
    if not isinstance(marks, list):
        marks = [marks]
    return [mark.mark if isinstance(mark, pytest.MarkDecorator) else mark for mark in marks]


def parameter_values(marks: Sequence[pytest.Mark], parameter: str) -> list[object]:
    """Values that a parametrised test takes for one of its parameters.

    Raises:
        LookupError: the test has no such parameter.
    """
    for mark in marks:
        if mark.name == "parametrize" and mark.args[0] == parameter:
            return [getattr(value, "values", (value,))[0] for value in mark.args[1]]
    raise LookupError(parameter)


def tested_families(test: FamilyTest) -> dict[str, str]:
    """Model families of a test → "CPU" or "GPU"."""
    module = load_test_module(test.file)
    is_gpu_test = any(mark.name == "gpu" for mark in marks_of(module))
    device = "GPU" if is_gpu_test else "CPU"
    values = parameter_values(marks_of(getattr(module, test.function)), test.parameter)
    words = [str(value).split()[0] for value in values]
    return {word: device for word in words if word in CONFIG_MAPPING_NAMES}


def devices_by_family(column: Column) -> dict[str, str]:
    """Model families of a column → devices that its tests run on, CPU first."""
    devices: dict[str, set[str]] = {}
    for test in column.tests:
        for family, device in tested_families(test).items():
            devices.setdefault(family, set()).add(device)
    return {family: ", ".join(sorted(names)) for family, names in devices.items()}


def rows() -> list[list[str]]:
    """Rows of the table of families: class, model type, one entry for each column."""
    columns = [devices_by_family(column) for column in COLUMNS]
    families = sorted(set().union(*columns))
    table = []
    for family in families:
        class_name = CONFIG_MAPPING_NAMES[family].removesuffix("Config")
        entries = [column.get(family, NOT_TESTED) for column in columns]
        table.append([class_name, f"`{family}`", *entries])
    return table


def tables() -> str:
    """The table of families and the table that explains its columns, as Markdown."""
    headings = ["family", "`model_type`", *(column.heading for column in COLUMNS)]
    lines = [markdown_row(headings), markdown_row(["---"] * len(headings))]
    lines += [markdown_row(row) for row in rows()]
    lines += ["", markdown_row(["column", "what the tests show", "tests"]), markdown_row(["---"] * 3)]
    for column in COLUMNS:
        names = [f"`{test.file}::{test.function}`" for test in column.tests]
        lines.append(markdown_row([column.heading, column.shows, ", ".join(names)]))
    return "\n".join(lines) + "\n"


def markdown_row(entries: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(entries)} |"


if __name__ == "__main__":
    sys.path += [str(TESTS), str(TESTS / "support")]
    with redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout when it is imported
        text = tables()
    sys.stdout.write(text)
