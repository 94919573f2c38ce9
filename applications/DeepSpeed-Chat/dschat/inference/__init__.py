# SPDX-License-Identifier: Apache-2.0
"""What finished models answer, and what that is worth: each command is a function of its flags, for one runner."""
