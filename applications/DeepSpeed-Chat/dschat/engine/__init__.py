# SPDX-License-Identifier: Apache-2.0
"""The only importer of DeepSpeed. All other code uses the engines of `dschat.models.engines`, which are protocols."""
