# SPDX-License-Identifier: Apache-2.0
"""A language model as the judge of responses: its client and rubrics, scores of step 3, and `dschat judge`."""
