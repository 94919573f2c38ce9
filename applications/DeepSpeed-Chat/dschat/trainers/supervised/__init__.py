# SPDX-License-Identifier: Apache-2.0
"""Steps 1 and 2: one loop; the tasks sft, reward and dpo."""
