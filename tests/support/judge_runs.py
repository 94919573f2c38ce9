# SPDX-License-Identifier: Apache-2.0
"""Two updates of step 3 whose responses a judge model scores, on the processes of this group."""

import json
from pathlib import Path
from typing import Any

from fake_judge import graded_in

URL = "TEST_JUDGE_URL"  # environment variable: the server's address for the workers of tests/distributed
REFUSES = "refuses"  # name of a judge that refuses the prompt below
REFUSED_PROMPT = "p5"
PRICES = {"judge_price_in": 1.0, "judge_price_out": 2.0}  # dollars per million tokens


def points_by_length(messages: list[dict[str, str]]) -> str:
    """Points that depend on prompt and response."""
    texts = "".join(graded_in(messages).values())
    return json.dumps({"score": sum(map(ord, texts)) % 11})


def refusal(body: dict[str, Any]) -> str | None:
    """Why the judge of that name refuses a question, if it does."""
    is_refused = graded_in(body["messages"])["prompt"] == REFUSED_PROMPT
    return "not this" if body["model"] == REFUSES and is_refused else None


def judged_loop(folder: Path, url: str, judge: str = "m") -> Any:
    """The loop of step 3 on small models, with 8 responses of a rollout, 16 prompts and 4 held-out ones; the judge's
    server is at `url`, and `judge` is the name of its model.
    """
    from dschat.run.distributed import barrier, is_main, world_size
    from dschat.training.steps.scores import SourceParts, reward_source
    from factories import make_prompts, make_tokenizer, ppo_config, ppo_loop

    rubric = folder.with_suffix(".toml")
    if is_main():
        rubric.write_text('task = "Grade the text."\n')
    barrier()
    rows = 8 // world_size()
    sizes = {
        "per_device_generation_batch_size": rows,
        "per_device_training_batch_size": rows,
        "per_device_eval_batch_size": 4 // world_size(),
        "num_train_epochs": 1,
        "eval_interval": 1,
        "actor_learning_rate": 1e-4,
        "critic_learning_rate": 1e-4,
        "self_checks": False,
    }
    asked = {"reward_function": None, "reward_judge": str(rubric), "judge_model": judge, "judge_url": url}
    config = ppo_config(folder, **sizes, **asked, **PRICES, judge_tries=1)
    source = reward_source(SourceParts(config, None, make_tokenizer(), None))  # type: ignore[arg-type]
    prompts = make_prompts(16)
    return ppo_loop(config, source, prompts, prompts[:4])


def judged_run(folder: Path, url: str) -> Any:
    """Weights, metrics and samples of such a run, on the main process; see `judged_loop`."""
    from resume_runs import result_of

    return result_of(judged_loop(folder, url), folder)


def message_of_failure(folder: Path, url: str) -> str:
    """What a run says that a refused response ends, on this rank; empty if it does not end."""
    from dschat.base.errors import UserError

    try:
        judged_loop(folder, url, judge=REFUSES).fit()
    except UserError as error:
        return str(error)
    return ""
