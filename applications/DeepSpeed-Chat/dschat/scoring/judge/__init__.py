# SPDX-License-Identifier: Apache-2.0
"""A language model as a judge: questions, the client that asks them, answers, and answers as scores."""
