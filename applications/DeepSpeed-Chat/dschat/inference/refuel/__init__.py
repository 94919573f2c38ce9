# SPDX-License-Identifier: Apache-2.0
"""REFUEL's data: dialogues drawn twice (`generate`), scored (`rank`), made into pairs of tokens (`masks`)."""
