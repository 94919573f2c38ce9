# SPDX-License-Identifier: Apache-2.0
"""The teacher of step 3 (--teacher_model_name_or_path): whether its tokens are the actor's."""

from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.models.limits import check_length
from dschat.models.pretrained import open_config
from dschat.models.tokenizer import load_tokenizer
from dschat.models.vocabulary import id_count, lacks_rows, row_count, vocabulary_difference
from dschat.settings.ppo import PPOConfig
from dschat.training.steps.step3 import ACTOR, TEACHER


def check_teacher(config: PPOConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError if a teacher cannot give the log-probs of every token that the actor may sample."""
    teacher_tokenizer = load_tokenizer(path, TEACHER, end_token=config.data.end_of_conversation_token)
    difference = vocabulary_difference(tokenizer, teacher_tokenizer)
    if difference is not None:
        raise UserError(
            f"{TEACHER} {path} and {ACTOR} {config.models.actor_model_name_or_path} have different vocabularies"
            f" ({difference}), but the teacher must give the probability of"
            " each token that the actor samples. Give a teacher of the actor's family, with the same tokenizer."
        )
    teacher_config = open_config(path, TEACHER)
    if lacks_rows(teacher_config, tokenizer):
        raise UserError(
            f"{TEACHER} {path}: its embeddings have {row_count(teacher_config)} rows, but its tokenizer has ids up to"
            f" {id_count(tokenizer) - 1}, whose probabilities it was never trained to give. Give a teacher that has"
            " all of them, such as a model of step 1."
        )
    tokens = config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len
    check_length(path, TEACHER, tokens, "--max_prompt_seq_len + --max_answer_seq_len")
