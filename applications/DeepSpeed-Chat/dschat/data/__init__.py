# SPDX-License-Identifier: Apache-2.0
"""Sources, row formats, token ids, batches, and the cache of tokenised data. `command.py` is `dschat data`."""
