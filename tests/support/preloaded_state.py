# SPDX-License-Identifier: Apache-2.0
"""Work that every run would repeat, done once in the process from which runs are forked."""

import functools
import gc

import cpuinfo
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("gemma")  # compiles the patterns of all families: half a second
# DeepSpeed asks twice when a group of several processes begins, and is answered by a program of its own.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()
gc.collect()
gc.freeze()  # a run's collections leave these pages alone
