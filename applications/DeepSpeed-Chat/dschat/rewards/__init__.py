# SPDX-License-Identifier: Apache-2.0
"""Where scores come from. Each source maps a rollout and its texts to one number per response."""
