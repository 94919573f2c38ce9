# SPDX-License-Identifier: Apache-2.0
"""Data that were filtered, split and encoded once, in a folder that training takes."""
