# SPDX-License-Identifier: Apache-2.0
"""Scores of a judge model (--reward_judge), from the flags of a run."""

from pathlib import Path

from dschat.base.chat_servers import OPENAI_URL, Endpoint, EndpointFlags, checked_address, with_key
from dschat.base.reply_cache import ReplyCache
from dschat.judge.client import JudgeClient
from dschat.judge.costs import Prices, Spending
from dschat.judge.rubrics import read_rubric
from dschat.judge.scores import JudgeScores, JudgeSettings
from dschat.judge.settings import RewardJudgeFlags
from dschat.run.distributed import world_size
from dschat.training.steps.scores import SourceParts

JUDGE_CACHE = ".judge-cache"  # below the output folder
JUDGE_FLAGS = EndpointFlags(
    url="--judge_url",
    model="--judge_model",
    max_tokens="--judge_max_tokens",
    timeout="--judge_timeout",
    tries="--judge_tries",
    cache="--judge_cache",
)


def build_judge(parts: SourceParts, rubric_file: str) -> JudgeScores:
    """Scores of the judge model by a rubric. No request is sent yet.

    Raises:
        UserError: key, address or the folder of cached answers cannot be used.
    """
    config = parts.config
    flags: RewardJudgeFlags = config.judge
    rubric = read_rubric(rubric_file, "--reward_judge")
    endpoint = Endpoint(
        model=flags.judge_model or "",
        base_url=checked_address(flags.judge_url or OPENAI_URL, JUDGE_FLAGS.url),
        max_tokens=flags.judge_max_tokens,
        timeout=flags.judge_timeout,
        tries=flags.judge_tries,
        flags=JUDGE_FLAGS,
    )

    # Each process may spend an equal share of the limit.
    prices: Prices | None = None
    if flags.judge_price_in is not None and flags.judge_price_out is not None:
        prices = Prices(flags.judge_price_in, flags.judge_price_out)
    limit = flags.judge_max_cost
    limit_name = "--judge_max_cost"
    if limit is not None and world_size() > 1:
        limit /= world_size()
        limit_name += f", of which each of {world_size()} processes has"  # messages continue with the limit
    spending = Spending(prices, limit, limit_name)

    folder = Path(flags.judge_cache or Path(config.output.output_dir) / JUDGE_CACHE)
    client = JudgeClient(with_key(endpoint), ReplyCache(folder), spending)
    return JudgeScores(client, JudgeSettings(rubric, flags.judge_concurrency, parts.patience, parts.skips))
