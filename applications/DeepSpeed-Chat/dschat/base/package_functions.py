# SPDX-License-Identifier: Apache-2.0
"""Functions of the package that flags such as --reward_function take by a short name instead of a file's."""

from pathlib import Path

MATH = "scoring/math_answers.py"
PACKAGE_FUNCTIONS = {"math": MATH, "math_format": MATH, "gsm8k": MATH}  # name → file below dschat


def function_path(spec: str) -> str:
    """``module.py:function`` of a function of the package; any other text as it is."""
    if spec not in PACKAGE_FUNCTIONS:
        return spec
    return f"{Path(__file__).resolve().parents[1] / PACKAGE_FUNCTIONS[spec]}:{spec}"
