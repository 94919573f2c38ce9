# SPDX-License-Identifier: Apache-2.0
"""What the best of N responses of a model is worth to a reward model, by N and temperature."""
