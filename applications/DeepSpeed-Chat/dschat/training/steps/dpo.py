# SPDX-License-Identifier: Apache-2.0
"""DPO, the step 2 without a reward model: builds its data, its model and its task, and runs the loop."""

from functools import partial

from dschat.base.fingerprints import model_hash
from dschat.data.examples import PreferenceExample, preference_examples
from dschat.data.notes import warn_of_template
from dschat.models.tokenizer import end_token_id
from dschat.run.model_folders import SavedModel
from dschat.run.output import RunOutput, warn_unless_made_by
from dschat.settings.supervised import DPOConfig
from dschat.training.steps.common import load_step_data, open_tokenizer, plan_run
from dschat.training.steps.engines import MODEL
from dschat.training.steps.supervised import build_policy, fit_supervised
from dschat.training.supervised.dpo import DPOTask


def train_dpo(config: DPOConfig, run: RunOutput) -> None:
    """Step 2 as direct preference optimisation, without a reward model."""
    base = config.model.model_name_or_path
    tokenizer = open_tokenizer(config)
    warn_unless_made_by("sft", base, MODEL)
    end_id = end_token_id(tokenizer, config.data.end_of_conversation_token)
    make = partial(preference_examples, tokenizer=tokenizer, max_seq_len=config.model.max_seq_len, eos_id=end_id)
    validate = partial(warn_of_template, tokenizer, end_id=end_id, keys=config.columns)
    data = load_step_data(config, PreferenceExample, make, validate)
    plan = plan_run(config, run, data)
    engine = build_policy(config, plan, tokenizer, data.train)
    task = DPOTask(data.train, data.eval, tokenizer.pad_token_id, config, run, model_hash(base))
    saved = SavedModel(engine, "policy", base)
    fit_supervised("policy", saved, engine, task, tokenizer, config, run)
