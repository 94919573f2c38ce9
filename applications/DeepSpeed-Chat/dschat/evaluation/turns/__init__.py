# SPDX-License-Identifier: Apache-2.0
"""Which of two policies serves a person better in dialogues of several turns, turn by turn."""
