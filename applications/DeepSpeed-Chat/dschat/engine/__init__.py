# SPDX-License-Identifier: Apache-2.0
"""The only place that knows DeepSpeed. Everything above receives engines and a process group it does not look into."""
