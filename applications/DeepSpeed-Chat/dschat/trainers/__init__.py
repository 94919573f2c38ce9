# SPDX-License-Identifier: Apache-2.0
"""The three training loops. They receive engines, examples and settings, and read no flags by name elsewhere."""
