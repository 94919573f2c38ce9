# SPDX-License-Identifier: Apache-2.0
"""What runs inside the sandbox before the program does: the standard library alone, in a process of its own."""
