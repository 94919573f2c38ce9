# SPDX-License-Identifier: Apache-2.0
"""The pipeline on a real language model: short friendly answers, whose gold score a program computes."""
