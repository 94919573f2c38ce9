# SPDX-License-Identifier: Apache-2.0
"""How well a model knows a data set's texts: perplexity, ROUGE, and a reward model's loss and accuracy."""
