# SPDX-License-Identifier: Apache-2.0
"""Step 1: builds its data, its model and its task, and runs the loop."""

from functools import partial

from dschat.data.examples import SFTExample, sft_examples
from dschat.data.messages import WEIGHT
from dschat.data.notes import RESPONSES_OF_STEPS, warn_of_template
from dschat.models.load import warn_without_classifier
from dschat.models.tokenizer import end_token_id
from dschat.run.model_folders import SavedModel
from dschat.run.output import RunOutput
from dschat.settings.supervised import SFTConfig
from dschat.training.steps.common import load_step_data, open_tokenizer, plan_run
from dschat.training.steps.supervised import build_policy, fit_supervised
from dschat.training.supervised.sft import SFTTask


def train_sft(config: SFTConfig, run: RunOutput) -> None:
    """Step 1: supervised fine-tuning."""
    base = config.model.model_name_or_path
    tokenizer = open_tokenizer(config)
    end_id = end_token_id(tokenizer, config.data.end_of_conversation_token)
    make = partial(
        sft_examples,
        tokenizer=tokenizer,
        max_seq_len=config.model.max_seq_len,
        eos_id=end_id,
        all_turns=config.sft.train_on == "all",
    )
    # With --sft_on_prompt every token is trained on, whatever the weights of messages.
    fields_read = () if config.sft.sft_on_prompt else (WEIGHT,)
    validate = partial(
        warn_of_template,
        tokenizer,
        end_id=end_id,
        keys=config.columns,
        reads=fields_read,
        responses=RESPONSES_OF_STEPS[1],
    )
    data = load_step_data(config, SFTExample, make, validate, config.sft.sft_on_prompt)
    plan = plan_run(config, run, data)
    warn_without_classifier(base)
    engine = build_policy(config, plan, tokenizer, data.train)
    task = SFTTask(
        data.train,
        data.eval,
        tokenizer.pad_token_id,
        sft_on_prompt=config.sft.sft_on_prompt,
        label_smoothing=config.sft.label_smoothing,
        packed_width=config.model.max_seq_len if config.sft.packing else None,
        by_tokens=config.optimisation.max_tokens_per_micro_batch is not None,
    )
    saved = SavedModel(engine, "policy", base)
    fit_supervised("policy", saved, engine, task, tokenizer, config, run)
