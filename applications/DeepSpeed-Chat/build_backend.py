# SPDX-License-Identifier: Apache-2.0
"""The build backend: that of setuptools, which tells setup.py whether an editable install is made.

An editable install (`pip install -e`) makes macro_actions and constituent_treelib importable from the checkout. A
wheel requires their distributions instead, so that no two distributions own the same files.
"""

import os

from setuptools import build_meta

EDITABLE = "MA_RLHF_EDITABLE"  # variable that setup.py reads

get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
build_wheel = build_meta.build_wheel
build_sdist = build_meta.build_sdist


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: dict[str, str | list[str] | None] | None = None
) -> str:
    """The metadata of an editable install."""
    os.environ[EDITABLE] = "1"
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, str | list[str] | None] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """A wheel that points to the checkout."""
    os.environ[EDITABLE] = "1"
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
