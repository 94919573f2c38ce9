# SPDX-License-Identifier: Apache-2.0
"""Looking at data before training on them: `python -m dschat.data check` and `preview`."""
