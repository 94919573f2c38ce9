# SPDX-License-Identifier: Apache-2.0
"""Environments and simulated users, which answer the policy: episodes of several turns in step 3, dialogues."""
