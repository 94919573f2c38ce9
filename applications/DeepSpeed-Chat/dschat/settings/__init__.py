# SPDX-License-Identifier: Apache-2.0
"""Groups of flags, rules between them, YAML files and presets. Knows no torch, so that --help is quick."""
