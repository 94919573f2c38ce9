# SPDX-License-Identifier: Apache-2.0
"""Work that every run would repeat, done once in the process from which runs are forked."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("gemma")  # compiles the patterns of all families: half a second
gc.collect()
gc.freeze()  # a run's collections leave these pages alone
