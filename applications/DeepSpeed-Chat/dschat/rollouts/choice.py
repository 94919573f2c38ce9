# SPDX-License-Identifier: Apache-2.0
"""Which of the engines that draw with the model itself a run or an inference uses."""

import logging

from transformers import PreTrainedModel

from dschat.rollouts.compacting import CompactingEngine, supports
from dschat.rollouts.generate import GenerateEngine
from dschat.run.distributed import is_main

logger = logging.getLogger(__name__)


def choose_engine(name: str, rows: int, causal_lm: PreTrainedModel, flag: str) -> CompactingEngine | GenerateEngine:
    """The engine of that name; transformers' generate in place of the compacting one where that does not fit.

    Args:
        name: compacting or generate.
        rows: drawn together at most.
        causal_lm: that draws.
        flag: the command-line flag that named the engine, for messages.
    """
    if name == "compacting":
        if supports(causal_lm):
            return CompactingEngine(rows)
        if is_main():
            told = "%s compacting: it does not know how models of type %s remember a text, so %s draws"
            logger.warning(told, flag, causal_lm.config.model_type, "transformers' generate")
    return GenerateEngine(rows)
