# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models as the trainers see them: tokenizer, policy (log-probs) and scalar models (scores, values)."""
