# SPDX-License-Identifier: Apache-2.0
"""Every metric that a run writes: its meaning, its unit, and when to worry. docs/metrics.md is made from it:

    python -m dschat.base.glossary > docs/metrics.md

Rows of metrics.jsonl, TensorBoard and W&B use these names.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

RUNS = {  # name of a step in run.json → its name in texts
    "sft": "SFT",
    "reward": "reward model",
    "dpo": "DPO",
    "refuel": "REFUEL on pairs",
    "ppo": "step 3",
    "refuel_online": "REFUEL online",
}


@dataclass(frozen=True)
class Metric:
    """A number in metrics.jsonl."""

    name: str  # its key; <…> is a name that depends on the run
    runs: str  # steps that write it, separated by spaces
    unit: str
    meaning: str
    worry: str = ""  # values that point to a problem; empty if any value may be right
    when: str = ""  # condition on which it is written; empty if every run of these steps writes it

    def fits(self, name: str) -> bool:
        """Whether a key of metrics.jsonl is this metric, or one of its family."""
        return re.fullmatch(re.sub("<[a-z]+>", r"\\w+", self.name), name) is not None


ALL = " ".join(RUNS)
SUPERVISED = "sft reward dpo refuel"
ONLINE = "ppo refuel_online"

# Conditions on which metrics are written.
OWN_SAMPLING = "own sampling, not ahead of training"
SEVERAL = "several sources, `--reward_weights` or `--metric_function`"
SKIP = "`--on_reward_error skip`"
NONFINITE = "`--on_nonfinite skip`"
NORMALISED = "`--normalize_scores`"
PARSING = "`--termination_condition parsing`"
PROGRAMS = "`--reward_source programs`"
EPISODES = "`--environment`"
TEACHER = "`--teacher_model_name_or_path`"
JUDGE = "`--reward_judge`"
JUDGE_PRICES = "`--reward_judge` and prices"
VLLM = "`--rollout_engine vllm`"
COMPLETIONS = "`--advantage_estimator segment_mc`"
GATE = "`--advantage_estimator evpo`"
AHEAD = "`--rollouts_ahead`"
REFILL = "`--refill_rounds`"
CRITIC = "a critic"
WARMUP = "`--critic_warmup_updates`, in these updates"
FP16 = "fp16"
KL = "a KL penalty"
GPU = "a GPU, whose peaks are measured at the start (run.json)"
AVERAGE = "`--reward_loss average`"
OTHER_TOKENS = "a loss that does not compare that number"

HEAD = ("update", "samples", "seconds")  # the first keys of every row
# The first metrics of an evaluation that is written in one line.
HEADLINES = (
    "loss",
    "perplexity",
    "accuracy",
    "scores",
    "kl",
    "kl_per_token",
)
# Step → the metric that makes a checkpoint the best, and whether a larger one is better.
BEST = {
    "sft": ("eval/loss", False),
    "reward": ("eval/accuracy", True),
    "dpo": ("eval/loss", False),
    "ppo": ("eval/scores", True),
    "refuel_online": ("eval/scores", True),
    "refuel": ("eval/loss", False),
}

_LOSSES: tuple[tuple[str, ...], ...] = (
    ("loss/sft", "sft", "nats per token", "cross-entropy of the tokens that are trained on"),
    ("loss/reward", "reward", "nats per pair", "loss of `--reward_loss`; 0.69 (ln 2) is chance level"),
    ("loss/dpo", "dpo", "nats per pair", "loss of DPO; 0.69 (ln 2) before training"),
    ("loss/refuel", "refuel refuel_online", "", "mean of (D − η ΔR)² over pairs"),
    ("train/accuracy", "reward dpo", "share", "pairs whose chosen response has the higher number; a tie is wrong",
     "near 1 early, while `eval/accuracy` stays behind: the model memorises the pairs"),
    ("train/chosen", "reward", "score", "mean of the chosen responses"),
    ("train/rejected", "reward", "score", "mean of the rejected ones"),
    ("train/margin", "reward", "score", "mean of chosen − rejected"),
    ("train/end_accuracy", "reward", "share", "accuracy by the number at the last token", "",
     OTHER_TOKENS),
    ("train/mean_accuracy", "reward", "share", "accuracy by the means that are compared", "", AVERAGE),
    ("train/chosen", "dpo", "nats per response", "mean log-ratio log π − log π_ref of the chosen responses",
     "it falls together with that of the rejected ones: raise `--beta`, or lower the learning rate"),
    ("train/rejected", "dpo", "nats per response", "mean log-ratio of the rejected ones"),
    ("train/margin", "dpo", "nats per pair", "β times the difference of the two"),
    ("train/log_ratio", "refuel", "nats per reply", "mean log π − log π_t of both replies, an estimate of −KL"),
    ("train/log_ratio_chosen", "refuel", "nats per reply", "that of the chosen replies"),
    ("train/log_ratio_rejected", "refuel", "nats per reply", "that of the rejected ones"),
    ("train/agreement", "refuel", "share", "pairs in which D has the sign of the rewards' difference",
     "it stays at 0.5: nothing is learnt"),
    ("train/ratio", "refuel", "", "mean of π / π_t", "far from 1: the step is too large"),
    ("train/ratio_variance", "refuel", "", "its variance", "it explodes: lower the learning rate or η"),
)  # fmt: skip
# Heading → rows of fields of Metric.
_TABLES: dict[str, tuple[tuple[str, ...], ...]] = {
    "Every row": (
        ("update", ALL, "updates", "optimiser updates so far"),
        ("samples", ALL, "examples", "demonstrations, pairs or responses trained on so far, on all processes"),
        ("seconds", ALL, "s", "since the beginning of the run, without interruptions"),
    ),
    "Optimiser": (
        ("lr", f"{SUPERVISED} refuel_online", "", "learning rate of the update; online, of a round's first one"),
        ("lr/actor", "ppo", "", "the actor's learning rate, of an iteration's first update"),
        ("lr/critic", "ppo", "", "the critic's", "", CRITIC),
        ("grad_norm", f"{SUPERVISED} refuel_online", "", "norm of the gradient before clipping",
         "it grows over many updates: lower the learning rate"),
        ("grad_norm/actor", "ppo", "", "the actor's, a mean over the iteration's updates", "as above"),
        ("grad_norm/critic", "ppo", "", "the critic's", "as above", CRITIC),
        ("skipped", SUPERVISED, "updates", "1 where fp16 left the update out, instead of grad_norm",
         "more than a few at the start: use `--dtype bf16`", FP16),
        ("skipped/actor", "ppo", "updates", "of an iteration that fp16 left out of the actor", "as above", FP16),
        ("skipped/critic", "ppo", "updates", "of an iteration that fp16 left out of the critic", "as above", FP16),
        ("skipped/policy", "refuel_online", "updates", "of a round that fp16 left out", "as above", FP16),
        ("skipped/nonfinite", ALL, "updates", "left out because a number was not finite", "any: see `nonfinite/`",
         NONFINITE),
    ),
    "Losses and what they are made of": _LOSSES,
    "Rollouts and their scores": (
        ("objective/kl", "ppo", "nats per response", "KL to the reference, as `--kl_estimator` estimates it; responses"
         " without a score left out", "above 20 or so the score is gamed: `--max_kl` warns or stops"),
        ("objective/kl", "refuel_online", "nats per reply", "log π − log π_ref of the compared replies", "as above",
         KL),
        ("objective/kl_per_token", "ppo", "nats per token", "the same over all tokens"),
        ("objective/kl_per_token", "refuel_online", "nats per token", "the same over all tokens", "", KL),
        ("objective/kl_coef", ONLINE, "", "weight of the KL in rewards; fixed without `--adaptive_kl_target`"),
        ("objective/entropy", ONLINE, "nats per response", "−log-prob of sampled tokens, an estimate of the entropy",
         "it falls to 0: every response becomes the same"),
        ("objective/scores", ONLINE, "score", "mean score as the source gave it; with"
         " `--advantage_estimator distillation` −`teacher/kl`"),
        ("objective/scores_std", "ppo", "score", "standard deviation of the scores of a rollout",
         "below `--kl_ctl` times the KL a warning: the penalty decides, not the scores"),
        ("objective/rlhf_reward", ONLINE, "score", "mean sum of rewards: the score that is trained on, less the KL"
         " penalty", "it falls while the scores rise: the KL costs more than is won"),
        ("objective/reward_gap", "refuel_online", "score", "mean \\|ΔR\\| of a pair", "0: nothing to learn from"),
        ("objective/normalized_scores", "ppo", "standard deviations", "mean score less the running mean", "",
         NORMALISED),
        ("objective/scores_running_mean", "ppo", "score", "of all scores so far", "", NORMALISED),
        ("objective/scores_running_std", "ppo", "score", "of all scores so far", "near 0: the scores do not differ",
         NORMALISED),
        ("objective/<source>", "ppo", "", "mean of one source of scores, or of the metric function", "", SEVERAL),
        ("objective/unscored", "ppo", "share", "responses that could not be scored", "above 0: see the log", SKIP),
        ("response/length", ONLINE, "tokens", "mean length, the end token included",
         "it grows with the scores: the policy may learn length alone; in step 3 a warning at a quarter of the"
         " first rollout's, or at 8 tokens and half of it"),
        ("response/eos_rate", ONLINE, "share", "responses that ended with an end token; with `--environment`"
         " episodes that the environment also ended",
         "0 after it was more: a warning says so"),
        ("response/repetition", "ppo", "share", "4-grams that the response has had before", "above 0.5 a warning"),
        ("response/score_length_correlation", "ppo", "", "Pearson's, of scores and lengths; in"
         " episodes, of scores and mean lengths of replies",
         "above 0.9 or below −0.9 a warning, from 32 responses on"),
        ("macro/count", "ppo", "macro actions", "per response"),
        ("macro/length", "ppo", "tokens", "of a macro action"),
        ("macro/lambda_eff", "ppo", "", "λ per token, λ^(1 / macro length): how far credit reaches back", "", CRITIC),
        ("dialogue/turn", "refuel_online", "", "mean number of the compared turn, counted from 1"),
        ("val/num_eos_tokens", "ppo", "responses", "that ended with an end token, on all processes"),
        ("val/explained_variance", "ppo", "share", "variance of the returns that the critic's values explain",
         "near 0 after the first updates: the critic knows nothing yet; below −1 a warning", CRITIC),
        ("val/gate_explained_variance", "ppo", "share", "variance of the sums of rewards from each macro action on"
         " that the critic's values explain; unlike GAE's returns, these sums contain no value", "", GATE),
        ("val/gate_open", "ppo", "", "1: advantages are GAE's; 0: the critic explains nothing, and the mean return of"
         " the rollout is the baseline", "0 for long: the critic does not learn", GATE),
        ("val/critic_warmup", "ppo", "updates", "of the iteration, which trained the critic alone: there is no"
         " `loss/policy`, `val/ratio`, `lr/actor` and so on, and the KL coefficient does not change", "", WARMUP),
        ("rollout/logprob_gap", "ppo", "nats per token", "mean difference of the engine's log-probs from the actor's",
         "more than rounding stops the run, unless the rollout was sampled ahead", VLLM),
        ("rollout/logprob_gap_max", "ppo", "nats", "the largest one", "", VLLM),
        ("rollout/importance_clipped", "ppo", "share", "tokens whose importance weight `--rollout_is_clip` bounds",
         "more than a few in a hundred: the weights that sample are too old", "`--rollout_is_clip`"),
        ("rollout/mc_tokens", "ppo", "tokens", "sampled to complete responses from where macro actions begin, by all"
         " processes", "what `segment_mc` costs in addition to the rollout", COMPLETIONS),
        ("rollout/refilled", "ppo", "prompts", "that replaced others whose responses all had the same score, on all"
         " processes; `objective/` and `response/` describe the responses that are trained on, a selection", "",
         REFILL),
        ("rollout/refill_tokens", "ppo", "tokens", "sampled for such replacements, used or not, by all processes",
         "what `--refill_rounds` costs in addition to the rollout", REFILL),
        ("rollout/staleness", "ppo", "iterations", "age of the weights that sampled the rollout", "", AHEAD),
        ("parsing/sentences", "ppo", "sentences", "in the responses of a rollout", "",
         PARSING),
        ("parsing/parsed", "ppo", "sentences", "that were parsed", "", PARSING),
        ("parsing/fell_back", "ppo", "sentences", "that the chunker cut instead of the parser",
         "most of them: the parser is of another language, or of programs", PARSING),
        ("parsing/seconds", "ppo", "s", "in parsers, over all processes", "", PARSING),
        ("programs/<outcome>", "ppo", "share", "programs that passed, gave wrong output, ended in a time-out, a"
         " runtime or compile error, or could not be run (invalid)", "invalid above 0: see the log", PROGRAMS),
        ("programs/tests_per_second", "ppo", "tests per s", "of one process, remembered ones too", "", PROGRAMS),
        ("programs/seconds", "ppo", "s", "of running programs", "", PROGRAMS),
        ("objective/judge_<criterion>", "ppo", "share of 10 points", "mean points of the judge on a criterion of its"
         " rubric", "", JUDGE),
        ("teacher/kl", "ppo", "nats per response", "log π − log π_T of sampled tokens, an estimate of the KL to the"
         " teacher", "it does not fall: see `--teacher_coef` and the learning rate", TEACHER),
        ("teacher/kl_per_token", "ppo", "nats per token", "the same over all tokens", "", TEACHER),
        ("judge/cached", "ppo", "share", "questions to the judge that the cache answered", "", JUDGE),
        ("judge/cost", "ppo", "US dollars per response",
         "of the judge's answers, those on completions of segment_mc too; cached ones cost nothing", "",
         JUDGE_PRICES),
        ("episode/turns", "ppo", "turns", "mean number of the policy's replies in an episode", "", EPISODES),
        ("episode/done", "ppo", "share", "episodes that the environment ended; a limit cut the others",
         "near 0: raise `--max_turns` or `--max_answer_seq_len`", EPISODES),
        ("episode/cut_turns", "ppo", "share", "replies without a token that ends them", "it grows: see"
         " `--missing_eos_penalty`", EPISODES),
        ("episode/environment_tokens", "ppo", "tokens", "mean of an environment's tokens between replies, which are"
         " not trained on", "", EPISODES),
        ("time/generation", ONLINE, "s", "of sampling, on the main process"),
        ("time/completions", "ppo", "s", "of sampling and scoring completions", "", COMPLETIONS),
        ("time/scoring", ONLINE, "s", "of scores, log-probs and values"),
        ("time/training", ALL, "s", "of updates"),
        ("time/sampled_per_second", ONLINE, "tokens per s", "tokens of responses, on all processes, over"
         " `time/generation`", "", OWN_SAMPLING),
        ("time/bandwidth", ONLINE, "share", "of the GPUs' memory bandwidth over `time/generation`: what must be read"
         " for these responses (weights in each step, keys and values for each token) in the fewest steps possible",
         "below 0.2: sample more prompts at once, see `--per_device_generation_batch_size`", GPU + ", own sampling"),
        ("time/trained_per_second", ALL, "tokens per s", "tokens of prompts and responses, without padding, on all"
         " processes, over `time/training`; several passes over a rollout count several times"),
        ("time/mfu", ALL, "share", "model FLOPs utilisation: operations of the updates' forward and backward passes,"
         " without recomputation and padding, over what the GPUs' matrix products could do in `time/training`",
         "below 0.2: larger micro-batches, see `--max_tokens_per_micro_batch`", GPU),
    ),
    "Updates of step 3 and of REFUEL online: means over those of a rollout": (
        ("loss/policy", "ppo", "", "PPO's clipped loss; `--loss_mean` says how it is averaged"),
        ("loss/kl", "ppo", "nats", "the KL to the reference, of the same mean as the loss", "", "`--kl_in loss`"),
        ("loss/value", "ppo", "score²", "half the squared error of values, clipped", "", CRITIC),
        ("policy/counted", "ppo", "share", "response tokens that the policy's loss is computed on",
         "near 0: hardly anything is learnt", "`--drop_equal_groups` or `--max_token_probability`"),
        ("policy/approxkl", "ppo", "nats per token", "half the mean squared log-ratio: how far an update has moved",
         "above 0.1: lower the learning rate or `--ppo_epochs`"),
        ("policy/clipfrac", "ppo", "share", "tokens whose ratio is clipped",
         "above 0.3: lower the learning rate or `--ppo_epochs`"),
        ("policy/entropy", "ppo", "nats per token", "entropy of the policy's distribution",
         "it falls to 0: nothing new is tried"),
        ("val/ratio", "ppo", "", "mean ratio π / π at rollout; 0 where no token counts",
         "far from 1: lower the learning rate or `--ppo_epochs`"),
        ("val/clipfrac", "ppo", "share", "tokens whose value is clipped", "", CRITIC),
        ("policy/log_ratio", "refuel_online", "nats per reply", "mean log π − log π_t of both replies"),
        ("policy/log_ratio_better", "refuel_online", "nats per reply", "that of replies with the higher reward"),
        ("policy/log_ratio_worse", "refuel_online", "nats per reply", "that of the others"),
        ("policy/agreement", "refuel_online", "share", "pairs in which D has the sign of the rewards' difference",
         "it stays at 0.5: nothing is learnt"),
        ("val/ratio", "refuel_online", "", "mean of π / π_t", "far from 1: the step is too large"),
        ("val/ratio_variance", "refuel_online", "", "its variance", "it explodes: lower the learning rate or η"),
    ),
    "Evaluations, on held-out rows": (
        ("eval/rows", ALL, "rows", "held-out rows of the evaluation", "below 30, with a warning"),
        ("eval/<metric>_stderr", ALL, "as the metric", "standard error of `eval/<metric>` over these rows, tokens of"
         " one row and replies of one dialogue taken together; from two rows on",
         "a difference of two evaluations within twice this is none"),
        ("eval/loss", SUPERVISED, "as above", "the same loss as in training; SFT's without label smoothing",
         "it rises while the training loss falls: fewer epochs"),
        ("eval/perplexity", "sft", "", "exp of the loss"),
        *((name.replace("train/", "eval/"), runs, unit, f"`{name}` of held-out rows", "", *rest[1:])
          for name, runs, unit, _, *rest in _LOSSES if name.startswith("train/")),
        ("eval/scores", ONLINE, "score", "mean score; of dialogues after the last turn",
         "it falls while `objective/scores` rises: what is learnt does not carry over"),
        ("eval/scores_turn_<number>", "refuel_online", "score", "of the dialogues up to that turn"),
        ("eval/kl", "ppo", "nats per response", "KL to the reference", "as `objective/kl`"),
        ("eval/kl", "refuel_online", "nats per reply", "KL to the reference", "as `objective/kl`", KL),
        ("eval/kl_per_token", "ppo", "nats per token", "the same over all tokens"),
        ("eval/kl_per_token", "refuel_online", "nats per token", "the same over all tokens", "", KL),
        ("eval/length", ONLINE, "tokens", "mean length"),
        ("eval/eos_rate", ONLINE, "share", "as `response/eos_rate`"),
        ("eval/<source>", "ppo", "", "as `objective/<source>`", "", SEVERAL),
        ("eval/unscored", "ppo", "share", "as `objective/unscored`", "", SKIP),
        ("eval/programs/<outcome>", "ppo", "share", "as `programs/<outcome>`", "", PROGRAMS),
        ("eval/programs/tests_per_second", "ppo", "tests per s", "as `programs/tests_per_second`", "", PROGRAMS),
        ("eval/programs/seconds", "ppo", "s", "as `programs/seconds`", "", PROGRAMS),
        ("eval/judge_<criterion>", "ppo", "share of 10 points", "as `objective/judge_<criterion>`", "", JUDGE),
        ("eval/teacher_kl", "ppo", "nats per response", "as `teacher/kl`", "", TEACHER),
        ("eval/judge/cached", "ppo", "share", "as `judge/cached`", "", JUDGE),
        ("eval/judge/cost", "ppo", "US dollars per response", "as `judge/cost`", "", JUDGE_PRICES),
        ("eval/episode/turns", "ppo", "turns", "as `episode/turns`", "", EPISODES),
        ("eval/episode/done", "ppo", "share", "as `episode/done`", "", EPISODES),
        ("eval/episode/cut_turns", "ppo", "share", "as `episode/cut_turns`", "", EPISODES),
        ("eval/episode/environment_tokens", "ppo", "tokens", "as `episode/environment_tokens`", "", EPISODES),
    ),
}  # fmt: skip
METRICS = tuple(Metric(*row) for rows in _TABLES.values() for row in rows)


def metrics_of(step: str) -> list[Metric]:
    """The metrics that a run of a step may write. `step`: its name in run.json."""
    return [metric for metric in METRICS if step in metric.runs.split()]


def names_under(
    prefix: str,
    step: str,
    always: bool = False,
) -> tuple[str, ...]:
    """Names of a step's metrics after a prefix such as `eval/`, without families.

    `always`: only those that every run of the step writes.
    """
    names = []
    for metric in metrics_of(step):
        is_family = "<" in metric.name
        is_conditional = always and metric.when
        if metric.name.startswith(prefix) and not is_family and not is_conditional:
            names.append(metric.name.removeprefix(prefix))
    return tuple(names)


def page() -> str:
    """The text of docs/metrics.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Metrics\n"
    yield (
        "`metrics.jsonl` has one object per update (of step 3 and REFUEL online per rollout) and one per evaluation;\n"
        "TensorBoard and W&B show the same under the same names ([tracking.md](tracking.md)). A number that is not\n"
        "finite is `null`. This page is made from `dschat/base/glossary.py`.\n"
    )
    yield 'Means are over all processes. "Step 3" is PPO; other estimators write those numbers that need no critic.\n'
    best = ", ".join(f"{RUNS[step]} `{name}`" for step, (name, _) in BEST.items())
    yield f"The best checkpoint (`--save_total_limit`) is chosen by: {best}."
    for heading, rows in _TABLES.items():
        yield f"\n## {heading}\n"
        yield "| name | of | unit | what it is | when to worry |"
        yield "|---|---|---|---|---|"
        for metric in (Metric(*row) for row in rows):
            runs = "all" if metric.runs == ALL else ", ".join(RUNS[run] for run in metric.runs.split())
            condition = f" (with {metric.when})" if metric.when else ""
            yield f"| `{metric.name}` | {runs} | {metric.unit} | {metric.meaning}{condition} | {metric.worry} |"


if __name__ == "__main__":
    print(page(), end="")
