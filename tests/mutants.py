# SPDX-License-Identifier: Apache-2.0
"""One-line changes of the package, each of which the tests named beside it must notice: `make mutants`.

`python tests/mutants.py WORD...` makes only those whose name holds one of the words.
"""

import importlib
import os
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "applications" / "DeepSpeed-Chat" / "dschat"
TIMEOUT = 300  # seconds for the tests of one mutant
# Imported once, before a process is forked for each mutant; nothing of the package itself.
PRELOADED = (
    *("pytest", "hypothesis", "torch", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "transformers"),
    *("transformers.generation", "transformers.models.gemma.modeling_gemma", "tokenizers", "peft", "tqdm"),
)
VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Mutant:
    """A change of one file of the package.

    Attributes:
        name: what goes wrong.
        file: below the package.
        old: occurs once in it.
        new: stands there instead.
        tests: ids below tests/; at least one of them must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def source(self) -> str:
        """The changed file. Raises ValueError unless the old text occurs exactly once."""
        text = (PACKAGE / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"mutant {self.name!r}: {self.file} holds {self.old!r} {text.count(self.old)} times")
        return text.replace(self.old, self.new)


def changes(file: str, *rows: tuple[str, str, str, str]) -> Iterator[Mutant]:
    """Mutants of one file. Rows: name, old text, new text, and ids of tests, separated by spaces."""
    for name, old, new, tests in rows:
        yield Mutant(name, file, old, new, tuple(tests.split()))


TRACKERS = "run/test_trackers.py::test_"
LOCK = "common/test_lock.py::test_"
TEXTS = "evaluation/text/test_text_report.py::test_"
TURN_RATES = "evaluation/turns/test_turns.py::test_win_rates_by_hand"
SHOWN_AT_A_TURN = "evaluation/turns/test_turns.py::test_what_is_compared_at_a_turn"
CACHED = "data/test_loading.py::test_the_cache_gives_what_reading_gives"
CACHE_KEY = "data/test_loading.py::test_the_key_is_of_all_that_matters"
REASONS = "data/test_prepared.py::test_reasons_in_their_order"
PREPARED = "data/test_prepared.py::test_a_folder_trains_like_its_source"
BEST_OF = "evaluation/best_of/test_best_of.py::test_the_"
BEST_OF_N = f"{BEST_OF}estimator_by_hand {BEST_OF}estimator_is_the_mean_over_all_subsets"
REPLY_REWARDS = "rl/test_refuel.py::test_reply_rewards_by_hand"
REFUEL_TURNS = (
    "trainers/test_refuel_online.py::test_the_turn_is_drawn_evenly_and_follows_from_seed_round_and_row_alone"
)
REFUEL_START = (
    "trainers/test_refuel_online.py::test_at_the_start_the_log_ratios_are_0_and_the_loss_is_that_of_the_rewards"
)
REFUEL_STEERED = "trainers/test_refuel_online.py::test_the_kl_coefficient_is_steered"
REFUEL_SCHEDULE = "trainers/test_refuel_online.py::test_the_updates_that_a_schedule_is_over"
REFUEL_FIT = "trainers/test_refuel_online.py::test_fit_writes_what_it_should"
PROGRAMS = "sandbox/test_programs.py::test_rewards"
PROGRAM_SCORES = "scoring/test_program_scores.py::test_a_row_without_an_outcome_has_no_score_and_leaves_the_mean"
WEIGHTED = "scoring/test_weighted.py::test_"
UNSCORED = "trainers/test_ppo.py::test_a_response_that_could_not_be_scored_is_not_trained_on"
RESUME = " ".join(
    f"trainers/test_resume.py::test_step_3_stops_anywhere[43-{name}]"
    for name in ("fixed", "randomized", "parsing", "ppl")
)
RESUME_1 = "trainers/test_resume.py::test_steps_1_and_2_stop_anywhere[sft-1]"
GAE = "rl/test_advantages.py::test_gae_by_hand"
LOGPROBS = "rl/test_logprobs.py::test_by_hand"
POLICY = "rl/test_losses.py::test_policy_loss_of_one_token_by_hand"
VALUE = "rl/test_losses.py::test_value_loss_of_one_token_by_hand"
SPLIT = "rl/test_losses.py::test_losses_do_not_depend_on_how_rows_are_split"
TRL_LOSS = "rl/test_losses.py::test_dpo_loss_is_that_of_trl"
DPO = "trainers/test_dpo.py::test_loss_and_gradient_are_those_of_plain_torch[0.0-False-gemma]"
DPO_SMOOTHED = "trainers/test_dpo.py::test_loss_and_gradient_are_those_of_plain_torch[0.2-False-gemma]"
SFT_LOSS = "rl/test_losses.py::test_sft_loss_is_the_mean_negative_logprob"
PAIRS = "rl/test_reward_losses.py::test_"
PACKED = "data/test_packing.py::test_a_batch_by_hand"
SMOOTHED = "rl/test_logprobs.py::test_smoothed_targets_are_those_of_torchs_cross_entropy"
REWARD_LOSSES = f"{PAIRS}the_losses_are_those_of_plain_python"
REWARD_SPLIT = " ".join(
    f"{PAIRS}the_gradient_does_not_depend_on_how_pairs_are_split[{k}]" for k in ("end", "per_sample")
)
TIE = f"{PAIRS}a_tie_is_wrong_and_a_margin_is_what_a_pair_must_win_by"
REWARD_UPDATE = "trainers/test_reward.py::test_an_update_of_each_loss_does_not_depend_on_the_accumulation"
SIGMA = "rl/test_macro_actions.py::test_sigma_of_five_tokens_by_hand"
SEGMENT = "rl/test_macro_actions.py::test_segment_by_hand"
MACRO_LOGPROBS = "rl/test_macro_actions.py::test_macro_logprobs_gradient_by_hand"
WHITENING = "rl/test_masked.py::test_whitening_by_hand"
ONE_ROW = "rl/test_ppo_batch.py::test_one_row_by_hand"
REWARDS = "rl/test_rewards.py::test_token_rewards_by_hand"
ESTIMATORS = "rl/test_rewards.py::test_kl_estimators_by_hand"
REWARD_CLIP = "rl/test_rewards.py::test_clipping_clamps_the_score_and_not_the_penalty"
MISSING_EOS = "rl/test_rewards.py::test_a_missing_eos_costs_the_penalty"
SHARED = "trainers/test_shared_base.py::test_updates_are_those_of_separate_models"
WHITE_ROWS = "rl/test_masked.py::test_whitening_rows_by_hand"
MOMENTS = "rl/test_rewards.py::test_moments_of_two_batches_by_hand"
NORMAL = "trainers/test_normalization.py::test_"
ADAPTIVE = "rl/test_rewards.py::test_adaptive_kl_by_hand"
FIXED = "rl/test_termination.py::test_fixed_by_hand"
PPL = "rl/test_termination.py::test_ppl_by_hand rl/test_termination.py::test_ppl_modes_differ_by_hand"
MULTISET = "rl/test_randomized.py::test_randomized_defaults_to_the_lengths_of_the_paper"
PERMUTATION = "rl/test_randomized.py::test_randomized_consumes_a_permutation_of_the_multiset"
ORDERS = "rl/test_randomized.py::test_randomized_draws_every_order_equally_often"
ROW_SEEDS = "rl/test_randomized.py::test_row_seeds_do_not_collide"
RLOO = "rl/test_rloo_batch.py::test_ragged_responses_by_hand[4-advantages2-0]"
RLOO_UNSCORED = "rl/test_rloo_batch.py::test_a_response_that_could_not_be_scored_is_no_baseline"
RLOO_RETURN = "rl/test_rloo_batch.py::test_the_return_is_the_sum_of_the_token_rewards"
RLOO_UPDATE = "trainers/test_rloo.py::test_an_update_is_plain_reinforce_with_a_leave_one_out_baseline[4]"
SAMPLES = "trainers/test_rloo.py::test_samples_of_a_prompt_depend_on_nothing_else"
SAMPLE_SEEDS = "trainers/test_rloo.py::test_seeds_of_rows_are_those_of_prompt_and_sample"
RESPONSES = "trainers/test_rloo.py::test_a_run_without_a_critic_leaves_none"
RESPONSE_COUNT = "config/test_config_rloo.py::test_updates_count_responses"
PRESET_RESPONSES = "config/test_config_rloo.py::test_a_rollout_of_a_preset_holds_the_responses_of_an_update"
CUT_SAMPLES = "rl/test_randomized.py::test_samples_of_a_prompt_are_cut_otherwise_and_the_first_as_an_only_one"
CREDIT = "trainers/test_ppo_flags_reach.py::test_credit_flags"
UPDATE_FLAGS = "trainers/test_ppo_flags_reach.py::test_update_flags"
METRICS = "trainers/test_ppo_metrics.py::test_rollout_metrics_by_hand"
IMPORTANCE = "rl/test_importance.py::test_the_weight_is_the_ratio_of_the_probabilities_up_to_the_clip"
IMPORTANT = "trainers/test_ppo_update.py::test_truncated_importance_weights_multiply_the_advantages"
PUSHED_NAMES = "rollouts/test_vllm_weights.py::test_names_are_those_of_the_familys_folders"
PUSHED_COLUMNS = "rollouts/test_vllm_weights.py::test_the_first_inputs_weights_are_noted"
PUSHED_LAYERS = "rollouts/test_vllm_weights.py::test_a_layer_with_other_weights_is_found"
GAP = "trainers/test_logprob_gap.py::test_mean_and_largest_gap_of_the_response_tokens"
UPDATE = "trainers/test_update.py::test_losses_are_means_over_the_rows_of_their_update"
ROW_ORDER = "trainers/test_update.py::test_the_seed_shuffles_the_rows"
UNIFORM = "rollouts/test_choose.py::test_uniform_numbers_are_the_upper_bits_of_splitmix64"
CHOOSE = "rollouts/test_choose.py::test_log_probs_are_those_of_the_whole_softmax"
FAMILY = "rollouts/test_compacting.py::test_every_family_is_drawn_as_by_hand[gemma2]"
DRAWS = "trainers/test_update.py::test_every_response_is_drawn_with_a_seed_of_its_own"
RUN_SEED = "trainers/test_update.py::test_another_seed_of_the_run_draws_and_shuffles_otherwise"
EVAL_DRAWS = "trainers/test_update.py::test_every_evaluation_draws_alike"
SHUFFLES = "trainers/test_update.py::test_every_iteration_is_shuffled_otherwise_and_alike_on_every_rank"
EPOCHS = "trainers/test_update.py::test_every_epoch_takes_every_prompt_in_another_order"
KL = "trainers/test_update.py::test_the_kl_coefficient_of_each_iteration"
AVERAGE = "trainers/test_update.py::test_the_moving_average_moves_once_in_every_iteration"
EVALUATION = "trainers/test_update.py::test_an_evaluation_is_the_mean_over_the_prompts"
SUPERVISED = "trainers/test_update.py::test_supervised_epochs_take_every_example_in_another_order"
TOTAL = "trainers/test_update.py::test_the_updates_that_a_schedule_is_over"
OPTIMISERS = "trainers/test_optimisers.py::test_actor_and_critic_have_optimisers_of_their_own"
SUPERVISED_OPTIMISERS = "trainers/test_optimisers.py::test_steps_1_and_2"
TWO_RANKS = "trainers/test_two_ranks.py::test_two_processes_make_the_updates_of_one"
FIT = "trainers/test_ppo.py::test_fit_writes_what_it_should"
TEMPERATURE = "trainers/test_ppo.py::test_the_rollouts_log_probs_are_hugging_faces_at_the_sampling_temperature"
SFT_EVALUATION = "trainers/test_sft.py::test_evaluation_is_the_perplexity_over_tokens"
TURNS = "data/test_turns.py::test_every_turn_of_the_assistant_is_trained_on_up_to_its_end"
TURNS_LOSS = "data/test_turns.py::test_the_loss_is_the_cross_entropy_over_these_tokens"
SFT_COUNT = "trainers/test_sft.py::test_the_loss_is_the_mean_over_the_tokens_of_the_whole_update"
SCORE = "rollouts/test_rollout.py::test_score_is_each_row_alone_under_each_model[gpt2-5]"
GRADIENTS = "rl/test_logprobs.py::test_values_and_gradients_are_those_of_the_full_logits"
REFERENCE = "trainers/test_late_credit.py::test_a_rollout_is_scored_by_the_reference_at_the_sampling_temperature"
LATE = "trainers/test_late_credit.py::test_weights_and_metrics_are_those_with_scoring_passes[0-flags4]"
LAYOUT = "models/test_layout.py::test_a_layout_by_hand"
LEAST_PADDING = " ".join(
    f"models/test_layout.py::test_groups_have_the_least_padding_of_all_cuts[{seed}]" for seed in range(5)
)
SCHEDULE = "engine/test_engine.py::test_schedule_and_warm_up_count_optimiser_updates"
PLAN, PASSES = "plan/test_arithmetic.py::", "plan/test_passes.py::"
IN_PARTS = "engine/test_sharded_loading.py::"
GROUPS = "engine/test_engine.py::test_weight_decay_acts_on_matrices_only"

# fmt: off
DRAWN_TURNS = "inference/refuel/test_generate.py::test_the_turns_are_uniform_and_follow_from_seed_and_number"
HELD_OUT = "inference/refuel/test_masks.py::test_one_in_ten_is_held_out_at_most"
REFUEL_LOSS = "trainers/test_refuel.py::test_the_loss_is_the_regression_on_the_replies_alone"
MUTANTS: tuple[Mutant, ...] = (
    *changes("rl/advantages.py",
        ("gamma of the next value is forgotten", "rewards + gamma * following", "rewards + following", GAE),
        ("GAE adds the value", "gamma * following - values", "gamma * following + values", GAE),
        ("GAE without lambda", "gamma * lam * running", "gamma * running", GAE),
        ("GAE decays by lambda alone", "gamma * lam * running", "lam * running", GAE),
        ("a value after the last step", "values[:, 1:], zeros[:, :1]", "values[:, 1:], values[:, -1:]",
         "rl/test_advantages.py::test_gae_is_the_double_sum"),
        ("GAE runs forwards", "reversed(range(values.shape[1]))", "range(values.shape[1])", GAE),
        ("returns lack the value", "advantages, advantages + values", "advantages, advantages - values", GAE),
        ("RLOO: the baseline holds the score itself", "scores.sum(1, keepdim=True) - scores)",
         "scores.sum(1, keepdim=True))", RLOO),
        ("RLOO: the baseline is divided by all", "counted.sum(1, keepdim=True) - 1", "counted.sum(1, keepdim=True)",
         RLOO),
        ("RLOO: no baseline", "scores - baseline, 0.0)", "scores, 0.0)", RLOO),
        ("RLOO: what does not count is a baseline of 0", "others = counted.sum(1, keepdim=True) - 1",
         "others = torch.ones_like(counted).sum(1, keepdim=True) - 1", RLOO_UNSCORED),
    ),
    *changes("rl/rloo_batch.py",
        ("RLOO: rows that could not be scored count", "mask.any(1).view(-1, samples)",
         "torch.ones_like(mask[:, 0]).view(-1, samples)", RLOO_UNSCORED),
        ("RLOO: the return is a mean over tokens", "rewards.sum(1)", "rewards.mean(1)", RLOO),
        ("RLOO: the return is the score alone", "rewards.sum(1)", "scores", RLOO),
        ("RLOO: samples of different prompts", "rewards.sum(1).view(-1, samples), mask",
         "rewards.sum(1).view(samples, -1).T, mask", RLOO_RETURN),
        ("RLOO: advantages beyond the response", "torch.where(mask, advantages[:, None], 0.0)",
         "advantages[:, None].expand_as(rewards)", RLOO),
    ),
    *changes("rl/logprobs.py",
        ("logits times the temperature", "softmax.div_(head.temperature)", "softmax.mul_(head.temperature)", LOGPROBS),
        ("log-probs are not normalised", "logprobs.append(own - total.log())", "logprobs.append(own)", LOGPROBS),
        ("entropy's sign", "total.log() - expected / total", "total.log() + expected / total", LOGPROBS),
        ("entropy is not normalised", "total.log() - expected / total", "total.log() - expected", LOGPROBS),
        ("softmax is not normalised", "torch.div(powers, total[:, None], out=block)", "block.copy_(powers)",
         GRADIENTS),
        ("the gradient without the temperature", "(grad / head.temperature)[:, None]", "grad[:, None]", GRADIENTS),
        ("the gradient without the token drawn", "(1 - head.smoothing) * grad)", "0 * grad)", GRADIENTS),
        ("the gradient's sign", "softmax.mul_(-grad)", "softmax.mul_(grad)", GRADIENTS),
        ("only the last chunk's gradient of the head",
         "else [total.add_(x) for total, x in zip(sums, found, strict=True)]", "else found", GRADIENTS),
        ("the head's gradient is added up in half precision", "torch.zeros_like(p, dtype=torch.float32)",
         "torch.zeros_like(p)", "rl/test_logprobs.py::test_the_heads_gradient_is_added_up_in_float32"),
        ("few positions to a chunk on a GPU", "max(GPU_POSITIONS, GPU_LOGITS // vocab_size)",
         "GPU_LOGITS // vocab_size", "rl/test_logprobs.py::test_a_chunk_holds_512_positions_at_least_on_a_gpu"),
    ),
    *changes("engine/zero3.py",
        ("weights in flight are gathered", "    offload = at_rest(engine)\n",
         "    offload = parameter_offload(engine)\n",
         "trainers/test_real_size.py::test_a_run_of_real_size_is_that_of_whole_weights[ppo-0]"),
        ("weights in flight are saved", "    at_rest(engine)\n    for name, parameter", "    for name, parameter",
         "trainers/test_real_size.py::test_weights_in_flight_are_waited_for"),
        ("each engine has its own fetches", "parameter.fetches = fetches", "pass",
         "trainers/test_shared_base.py::test_updates_are_those_of_separate_models["
         "zero_stage=3,ppo_epochs=1,critic_gradient_checkpointing=True]"),
    ),
    *changes("run/identity.py",
        ("a large model is known by its ends", "if size > 2 * SAMPLE:", "if False:",
         "test_sizes.py::test_the_identity_of_a_large_model_sees_every_weight"),
        ("every hash of a large model is another's", "now.startswith(f\"{before}-\")", "False",
         "test_sizes.py::test_the_identity_of_a_large_model_sees_every_weight"),
    ),
    *changes("rl/losses.py",
        ("the ratio is no exponential", "ratio = log_ratio.exp()", "ratio = 1 + log_ratio", POLICY),
        ("policy: no lower clip", "ratio.clamp(1 - cliprange, 1 + cliprange)", "ratio.clamp(max=1 + cliprange)",
         POLICY),
        ("policy: no upper clip", "ratio.clamp(1 - cliprange, 1 + cliprange)", "ratio.clamp(min=1 - cliprange)",
         POLICY),
        ("policy: sign", "unclipped = -advantages * ratio", "unclipped = advantages * ratio", POLICY),
        ("policy: the better branch", "weight * torch.maximum(", "weight * torch.minimum(", POLICY),
        ("policy: mean of the part", "(unclipped, clipped)).sum() / num_tokens", "(unclipped, clipped)).mean()",
         SPLIT),
        ("policy: weights are ignored", "torch.where(response_mask, weights, 0.0)", "response_mask.float()",
         "rl/test_policy_ratio.py::test_macro_ratios_have_their_closed_form"),
        ("approxkl without its half", "log_ratio.square()).sum() / 2", "log_ratio.square()).sum()",
         "rl/test_losses.py::test_approxkl_is_half_the_mean_square_for_small_steps"),
        ("policy: share that is not clipped", "weight * (clipped > unclipped)", "weight * (clipped < unclipped)",
         "rl/test_policy_ratio.py::test_several_updates_until_the_clip_binds"),
        ("mean ratio ignores weights", "(weight * ratio).sum()", "ratio.sum()",
         "rl/test_policy_ratio.py::test_macro_statistics_count_macro_actions"),
        ("value: no half", "(unclipped, clipped).sum() / 2", "(unclipped, clipped).sum()", VALUE),
        ("value: the better branch", " torch.maximum(unclipped, clipped).sum()",
         " torch.minimum(unclipped, clipped).sum()", VALUE),
        ("value: no upper clip", "torch.minimum(new_values, values + cliprange_value)", "new_values", VALUE),
        ("value: no lower clip", "values + cliprange_value), values - cliprange_value)",
         "values + cliprange_value), new_values)", "rl/test_losses.py::test_value_loss_is_the_scalar_rule"),
        ("value: clipped around the return", "values + cliprange_value)", "returns + cliprange_value)", VALUE),
        ("value: mean of the part", "(unclipped, clipped).sum() / 2 / num_tokens", "(unclipped, clipped).mean() / 2",
         SPLIT),
        ("value: share that is not clipped", '"clipfrac": (clipped > unclipped)', '"clipfrac": (clipped < unclipped)',
         VALUE),
        ("SFT: sign", "return -torch.where(response_mask, logprobs", "return torch.where(response_mask, logprobs",
         SFT_LOSS),
        ("SFT: divided by all positions", "logprobs, 0.0).sum() / num_tokens, {}", "logprobs, 0.0).mean(), {}",
         SFT_LOSS),
    ),
    *changes("rl/macro_actions.py",
        ("sigma equal: not divided", "weights = 1 / length.double()", "weights = 1 / length.double() ** 0", SIGMA),
        ("sigma unit: the first token", 'length - 1 if value_function == "unit" else 0', "0", SIGMA),
        ("sigma first: the last token", 'length - 1 if value_function == "unit" else 0', "length - 1", SIGMA),
        ("sigma position: early tokens weigh more", "(length - i).clamp(min=1)", "(i + 1).clamp(min=1)", SIGMA),
        ("sigma position: not harmonic", "harmonic[length - 1]", "length", SIGMA),
        ("every token gets the first action's number", "macro.index, x.shape[1]))", "0, x.shape[1]))",
         "rl/test_macro_actions.py::test_to_tokens_broadcasts"),
        ("an action starts at its end", "started[:, 1:] = (ends & response_mask)[:, :-1]",
         "started[:, :] = ends & response_mask", SEGMENT),
        ("rewards: mean for sum", 'if reduction == "mean":', 'if reduction != "mean":',
         "rl/test_macro_actions.py::test_pool_rewards_sums"),
        ("long actions weigh more", "1 / macro.lengths.clamp(min=1)", "1.0 * macro.lengths",
         "rl/test_macro_actions.py::test_token_weights_are_one_over_length"),
        ("macro ratio: sum and mean exchanged", '"mean" if mean else "sum"', '"sum" if mean else "mean"',
         MACRO_LOGPROBS),
    ),
    *changes("rl/masked.py",
        ("whitening rows: over all positions", "kept.sum(1, keepdim=True) / count", "kept.mean(1, keepdim=True)",
         WHITE_ROWS),
        ("whitening rows: variance of all positions", "centred.square().sum(1, keepdim=True) / count",
         "centred.square().mean(1, keepdim=True)", WHITE_ROWS),
        ("whitening: variance over n - 1", "(total_squares / count - mean", "(total_squares / (count - 1) - mean",
         WHITENING),
        ("whitening: mean over n - 1", "mean = total / count", "mean = total / (count - 1)", WHITENING),
        ("whitening: mean stays", "(x.double() - mean)", "x.double()", WHITENING),
        ("whitening: divided by the variance", "torch.rsqrt(variance + 1e-8)", "torch.reciprocal(variance + 1e-8)",
         WHITENING),
        ("the first for the last position", "following[:, :-1] = mask[:, 1:]", "following[:, 1:] = mask[:, :-1]",
         "rl/test_masked.py::test_the_last_position_of_each_row"),
        ("square of the sum", "kept.square().sum()", "kept.sum().square()",
         "rl/test_masked.py::test_masked_moments_are_count_sum_and_sum_of_squares"),
    ),
    *changes("rl/ppo_batch.py",
        ("tokens get returns as advantages", "advantages=to_tokens(advantages", "advantages=to_tokens(returns",
         ONE_ROW),
        ("tokens get advantages as returns", "returns=to_tokens(returns", "returns=to_tokens(advantages", ONE_ROW),
        ("values are not pooled by sigma", "(values, macro, value_function)", "(values, macro)",
         f"{CREDIT}[value_function]"),
        ("macro rewards are always sums", "(rewards, macro, macro_reward, value_function)", "(rewards, macro)",
         f"{CREDIT}[macro_reward]"),
        ("scores without the penalty", "trajectory.ref_logprobs, scores, mask",
         "trajectory.ref_logprobs, trajectory.scores, mask", f"{CREDIT}[missing_eos_penalty]"),
        ("gamma and lambda exchanged", "macro.mask, gamma, lam)", "macro.mask, lam, gamma)", f"{CREDIT}[gamma]"),
    ),
    *changes("rl/rewards.py",
        ("KL sign", "return -kl_coef * kl", "return kl_coef * kl", REWARDS),
        ("score on every token", "torch.where(last_true(response_mask), scores", "torch.where(response_mask, scores",
         REWARDS),
        ("log-ratio reversed", "d = logprobs - ref_logprobs", "d = ref_logprobs - logprobs", ESTIMATORS),
        ("k1 is not signed", "        return d\n", "        return d.abs()\n", ESTIMATORS),
        ("k2 without its half", "d.square() / 2", "d.square()", ESTIMATORS),
        ("k3 reversed", "torch.exp(-d) - 1 + d", "torch.exp(d) - 1 - d", ESTIMATORS),
        ("scores: no lower clip", "clamp(-clip_reward_value, clip_reward_value)", "clamp(max=clip_reward_value)",
         REWARD_CLIP),
        ("scores: no upper clip", "clamp(-clip_reward_value, clip_reward_value)", "clamp(min=-clip_reward_value)",
         REWARD_CLIP),
        ("KL target and horizon exchanged", "AdaptiveKL(kl_coef, target, horizon)",
         "AdaptiveKL(kl_coef, horizon, target)", KL),
        ("moments: the batch's share of the mean", "distance * count / total", "distance * self.count / total",
         MOMENTS),
        ("moments: nothing between batches", "self.squares + squares + between", "self.squares + squares", MOMENTS),
        ("moments: n - 1", "self.squares / self.count", "self.squares / (self.count - 1)", MOMENTS),
        ("moments: the mean stays", "(scores.double() - self.mean)", "scores.double()", MOMENTS),
        ("missing EOS: a bonus", "scores, scores - penalty)", "scores, scores + penalty)", MISSING_EOS),
        ("missing EOS: finished ones pay", "torch.where(finished, scores,", "torch.where(~finished, scores,",
         MISSING_EOS),
        ("adaptive KL: sign", "kl / self.target - 1", "1 - kl / self.target", ADAPTIVE),
        ("adaptive KL: no upper limit", "-0.2), 0.2)", "-0.2), 2.0)", ADAPTIVE),
        ("adaptive KL: no lower limit", "- 1, -0.2)", "- 1, -2.0)", ADAPTIVE),
        ("adaptive KL: samples are not counted", "error * num_samples / self.horizon", "error / self.horizon",
         ADAPTIVE),
        ("adaptive KL: added, not multiplied", "self.value * (1 + error", "self.value + (0 + error", ADAPTIVE),
    ),
    *changes("rl/termination.py",
        ("fixed: ends one token late", "position % int(ngram) == 0)", "position % int(ngram) == 1)", FIXED),
        ("fixed: the remainder does not end", "== 0) & response_mask) | last_true(response_mask)",
         "== 0) & response_mask)", FIXED),
        ("fixed: ends one token early", "torch.arange(1, response_mask.shape[1] + 1,",
         "torch.arange(2, response_mask.shape[1] + 2,", FIXED),
        ("randomized: the rest does not end", "(ends[:, :width] & response_mask) | last_true(response_mask)",
         "ends[:, :width] & response_mask", PERMUTATION),
        ("randomized: lengths are not repeated", "list(lengths) * repeat_times", "list(lengths)", MULTISET),
        ("randomized: no shuffle", "multiset[draws.argsort(dim=1, stable=True)]", "multiset.expand_as(draws)", ORDERS),
        ("randomized: with replacement", "draws.argsort(dim=1, stable=True)", "draws % len(multiset)", MULTISET),
        ("samples of a prompt are cut alike", "_mix(seeds + sample_index)", "seeds", CUT_SAMPLES),
        ("a first sample is not cut as an only one", "sample_index == 0, seeds", "sample_index < 0, seeds",
         CUT_SAMPLES),
        ("row seeds ignore the epoch", "torch.tensor([seed, epoch]", "torch.tensor([seed, 0]", ROW_SEEDS),
        ("row seeds ignore the seed", "torch.tensor([seed, epoch]", "torch.tensor([0, epoch]", ROW_SEEDS),
        ("row seeds ignore the prompt", "(prompt_index.long() + 1) * _GOLDEN", "(0 * prompt_index.long()) * _GOLDEN",
         ROW_SEEDS),
        ("lengths are no running sums", "lengths.cumsum(1).clamp(max=width + 1) - 1",
         "lengths.clamp(max=width + 1) - 1", MULTISET),
        ("ppl token: a tie cuts", "nll[:, 1:] > nll[:, :-1]", "nll[:, 1:] >= nll[:, :-1]", PPL),
        ("ppl prefix: sum for mean", "nll[:, 1:] * count > nll.cumsum(1)", "nll[:, 1:] > nll.cumsum(1)", PPL),
        ("ppl chunk: sum for mean", "cut = current * count > total", "cut = current > total", PPL),
        ("ppl chunk: sum of the whole prefix", "torch.where(cut, current, total + current)", "total + current", PPL),
        ("ppl chunk: length of the whole prefix", "torch.where(cut, 1.0, count + 1)", "count + 1", PPL),
        ("ppl: likelihood for surprise", "response_mask, -ref_logprobs", "response_mask, ref_logprobs", PPL),
        ("ppl: cuts one token late", "ends[:, :-1] = cut_before & response_mask[:, 1:]",
         "ends[:, 1:] = cut_before & response_mask[:, 1:]", PPL),
        ("isolating joins what was cut", "return ends | before_last", "return before_last | last_true(response_mask)",
         "rl/test_termination.py::test_isolate_last_token_by_hand"),
    ),
    *changes("conditions/termination.py",
        ("randomized is the same in every epoch", "prompt_index, epoch,", "prompt_index, 0,",
         "conditions/test_termination_condition.py::test_randomized_follows_seed_and_epoch"),
        ("ppl mode does not arrive", "mask, flags.ppl_mode)", "mask)",
         "conditions/test_termination_condition.py::test_ppl_looks_at_the_reference"),
        ("ppl looks at the policy", "perplexity_ends(trajectory.ref_logprobs", "perplexity_ends(trajectory.logprobs",
         "conditions/test_termination_condition.py::test_ppl_looks_at_the_reference"),
    ),
    *changes("trainers/ppo/credit.py",
        ("credit: the flag's KL coefficient", "kl_coef=kl_coef,", "kl_coef=config.kl_coef,", KL),
        ("credit: no gamma", "gamma=config.gamma", "gamma=1.0", f"{CREDIT}[gamma]"),
        ("credit: no lambda", "lam=config.lam", "lam=1.0", f"{CREDIT}[lam]"),
        ("credit: no value function", "value_function=config.value_function", 'value_function="equal"',
         f"{CREDIT}[value_function]"),
        ("credit: no macro reward", "macro_reward=config.macro_reward", 'macro_reward="sum"',
         f"{CREDIT}[macro_reward]"),
        ("credit: no KL estimator", "kl_estimator=config.kl_estimator", 'kl_estimator="k1"',
         f"{CREDIT}[kl_estimator]"),
        ("credit: no score clipping", "clip_reward_value=config.clip_reward_value", "clip_reward_value=None",
         f"{CREDIT}[clip_reward_value]"),
        ("credit: no missing-EOS penalty", "missing_eos_penalty=config.missing_eos_penalty",
         "missing_eos_penalty=None", f"{CREDIT}[missing_eos_penalty]"),
        ("score moments of each rank alone", "sum_over_ranks(distances.square().sum())", "distances.square().sum()",
         f"{NORMAL}moments_are_those_of_all_ranks"),
        ("score moments: rows without a token count", "scored.response_mask.any(1) & scored", "scored",
         f"{NORMAL}moments_of_a_rollout"),
        ("score moments: NaN counts", " & scored.scores.isfinite()", "", f"{NORMAL}moments_of_a_rollout"),
        ("scores are not normalised", "scores=moments.normalised(trajectory.scores)", "scores=trajectory.scores",
         f"{NORMAL}scores_are_normalised_before_the_penalty_and_clipping"),
        ("metrics of normalised scores", "batch = replace(batch, trajectory=given)", "pass",
         f"{NORMAL}scores_are_normalised_before_the_penalty_and_clipping"),
        ("rows are not normalised", 'config.normalized_over == "row"', "False",
         f"{NORMAL}one_token_responses_have_no_advantage_in_their_rows"),
        ("whitening inverted", "if config.normalized_over == \"batch\"", "if config.normalized_over != \"batch\"",
         f"{CREDIT}[plain]"),
        ("whitening of each rank alone", "sum_over_ranks(totals).unbind()", "totals.unbind()", TWO_RANKS),
    ),
    *changes("models/shared_base.py",
        ("a base of one's own", "{id(tensor): tensor for tensor in shared}", "{}", SHARED),
        ("the adapter is not loaded", "parameter.data.copy_(weights[name])", "pass",
         "models/test_shared_base.py::test_a_saved_adapter_gives_the_same_numbers"),
        ("the base trains", "parameter.requires_grad_(name in own)", "parameter.requires_grad_(True)", SHARED),
        ("the head of a new classifier is random", "nn.init.zeros_(classifier.score.weight)", "pass",
         "models/test_shared_base.py::test_the_classifier_is_that_of_transformers[llama]"),
    ),
    *changes("plan/states.py",
        ("a shared base is counted again", "weights.parameters - weights.shared", "weights.parameters",
         "plan/test_arithmetic.py::test_a_shared_base_is_counted_once"),
    ),
    *changes("trainers/ppo/update.py",
        ("no value coefficient", "settings.vf_coef * loss", "loss",
         f"{NORMAL}the_value_coefficient_scales_the_gradient_and_not_the_metric"),
        ("actor clipped with cliprange_value", "mask, settings.cliprange, count",
         "mask, settings.cliprange_value, count", UPDATE),
        ("critic clipped with cliprange", "mask, settings.cliprange_value, num_tokens",
         "mask, settings.cliprange, num_tokens", UPDATE),
        ("num_tokens of all rows", "lengths.responses[rows].sum()", "lengths.responses.sum()", UPDATE),
        ("num_tokens counts prompts", "lengths.responses[rows].sum()", "lengths.totals[rows].sum()", UPDATE),
        ("num_macro of all rows", "known.macro.mask.sum(1)[torch.as_tensor(rows, device=device)].sum()",
         "known.macro.mask.sum()", UPDATE),
        ("counts of one rank", "sum_over_ranks(own).clamp(min=1)", "own.clamp(min=1)", TWO_RANKS),
        ("macro ratio: product and mean exchanged", '== "macro_mean"', '!= "macro_mean"', UPDATE),
        ("macro ratio divided by tokens", "token_weights(part.macro), num_macro",
         "token_weights(part.macro), num_tokens", UPDATE),
        ("macro ratio: long actions weigh more", "weights, count = token_weights(part.macro),",
         "weights, count = None,", UPDATE),
        ("policy entropy is a sum", "entropy.sum() / num_tokens", "entropy.sum()", UPDATE),
        ("update at temperature 1", "chosen, settings.temperature)", "chosen, 1.0)", UPDATE),
        ("one PPO epoch only", "range(settings.ppo_epochs)", "range(1)", UPDATE),
        ("statistics are sums over updates", "else number / counted", "else number", UPDATE),
        ("an interrupted iteration begins anew", "updates[progress.done :]", "updates[0:]", RESUME),
        ("an update that is stopped leaves sums", "means = progress.means.copy()", "means = progress.means", RESUME),
        ("rows are not shuffled", "shuffle.permutation(count)", "np.arange(count)", ROW_ORDER),
        ("step 3: the schedule is over one epoch", "plan.updates_per_rollout * config.num_train_epochs",
         "plan.updates_per_rollout", TOTAL),
        ("step 3: the schedule is over rollouts", "rollouts * plan.updates_per_rollout *", "rollouts *", TOTAL),
        ("step 3: the schedule is over one rank's rollouts", "num_prompts // plan.global_rollout\n",
         "num_prompts // plan.rollout_per_rank\n", TOTAL),
        ("the shuffle has no seed", "RandomState(seed % 2**32)", "RandomState(0)", ROW_ORDER),
        ("a skipped update has a norm", "if engine.skipped:", "if not engine.skipped:",
         "trainers/test_update.py::test_an_update_that_fp16_left_out_is_counted_and_has_no_norm"),
        ("flag cliprange does not arrive", "cliprange=config.cliprange,", "cliprange=config.cliprange_value,",
         UPDATE_FLAGS),
        ("flag cliprange_value does not arrive", "cliprange_value=config.cliprange_value",
         "cliprange_value=config.cliprange", UPDATE_FLAGS),
        ("flag temperature does not arrive", "temperature=config.temperature", "temperature=1.0", UPDATE_FLAGS),
        ("an update is one micro-batch", "update_size=plan.update_per_rank", "update_size=plan.micro_batch",
         UPDATE_FLAGS),
        ("flag rollout_is_clip does not arrive", "rollout_is_clip=config.rollout_is_clip", "rollout_is_clip=None",
         UPDATE_FLAGS),
        ("importance weights replace advantages", "advantages * importance_weights(", "importance_weights(",
         IMPORTANT),
    ),
    *changes("rl/importance.py",
        ("importance weights inverted", "logprobs - drawn_logprobs", "drawn_logprobs - logprobs", IMPORTANCE),
        ("importance weights are not cut", ".clamp(max=clip)", "", IMPORTANCE),
    ),
    *changes("trainers/ppo/logprob_gap.py",
        ("the gap of the engine is a sum", "sum(sums) / max(sum(counts), 1)", "sum(sums)", GAP),
        ("the gap of the engine counts padding", "[rollout.response_mask]", "", GAP),
        ("the gap of the engine has a sign", ".abs().double()", ".double()", GAP),
    ),
    *changes("rollouts/vllm_weights.py",
        ("vLLM gets the names of modules", "in as_published(inner, whole)", "in whole", PUSHED_NAMES),
        ("vLLM's layers are compared at another input", ".T)[0].clone()", ".T)[1].clone()", PUSHED_COLUMNS),
        ("rows of vLLM's layers must not be moved", ".sort()[0], given.sort()[0]", ", given", PUSHED_LAYERS),
        ("vLLM's layers may be nearly the actor's", "not torch.equal(", "not torch.allclose(", PUSHED_LAYERS),
    ),
    *changes("trainers/ppo/sampler.py",
        ("samples of a prompt are drawn alike", "*([number] if number else [])", "*([] if number else [])", SAMPLES),
        ("a first sample is not drawn as an only one", "*([number] if number else [])", "number", SAMPLE_SEEDS),
        ("samples are numbered through the rollout", "list(range(samples)) * len(examples)",
         "list(range(samples * len(examples)))", SAMPLES),
        ("sampling seed ignores the run's", "row_seed(self._seed, kind", "row_seed(0, kind", RUN_SEED),
        ("sampling seed ignores its use", "(self._seed, kind, draw", "(self._seed, 0, draw", DRAWS),
        ("sampling seed the same in every iteration", "kind, draw, example.index,", "kind, 0, example.index,", DRAWS),
        ("sampling seed the same for every prompt", "kind, draw, example.index,", "kind, draw, 0,", DRAWS),
    ),
    *changes("trainers/ppo/trainer.py",
        ("the coefficient is not taken up", 'value=numbers["kl"]', "value=self.kl.value", RESUME),
        ("an epoch begins anew", "rollouts[self.iteration % per_epoch :]", "rollouts", RESUME),
        ("evaluation draws with training's seeds", "SeedKind.EVALUATION, draw=0", "SeedKind.TRAINING, draw=0",
         DRAWS),
        ("evaluations draw otherwise each time", "SeedKind.EVALUATION, draw=0",
         "SeedKind.EVALUATION, draw=self.iteration", EVAL_DRAWS),
        ("the self-check draws with training's seeds", "SeedKind.SELF_CHECK, draw=0", "SeedKind.TRAINING, draw=0",
         DRAWS),
        ("every prompt has one response", "self.iteration, samples)", "self.iteration, 1)", RESPONSES),
        ("credit takes every response for a prompt's only one", "self.credit(known, macro, samples, seen)",
         "self.credit(known, macro, 1, seen)", RLOO_UPDATE),
        ("all iterations draw alike", "SeedKind.TRAINING, self.iteration", "SeedKind.TRAINING, 0", DRAWS),
        ("iterations are not counted", "self.iteration += 1", "self.iteration += 0", DRAWS),
        ("shuffle seed the same in every iteration", "SeedKind.SHUFFLE, self.iteration)", "SeedKind.SHUFFLE, 0)",
         SHUFFLES),
        ("shuffle seed of each rank", "SeedKind.SHUFFLE, self.iteration)", "SeedKind.SHUFFLE, self.iteration, rank())",
         SHUFFLES),
        ("shuffle seed ignores the run's", "derive_seed(self.config.seed, SeedKind.SHUFFLE",
         "derive_seed(0, SeedKind.SHUFFLE", RUN_SEED),
        ("termination in epoch 0 always", "self.condition(known, epoch)", "self.condition(known, 0)",
         EPOCHS),
        ("prompts in the same order in every epoch", "epoch,\n                rank=rank()",
         "0,\n                rank=rank()", EPOCHS),
        ("every rank takes the first one's prompts", "rank=rank(),", "rank=0,", EPOCHS),
        ("the KL coefficient does not reach credit", "trajectory, ends, self.kl.value",
         "trajectory, ends, self.config.kl_coef", KL),
        ("the KL coefficient stays", "self.kl = self.kl.update(", "self.kl.update(", KL),
        ("KL per token for KL per sequence", 'self.kl.update(metrics["objective/kl"]',
         'self.kl.update(metrics["objective/kl_per_token"]', KL),
        ("KL samples of one rank", '["objective/kl"], self.run.plan.global_responses',
         '["objective/kl"], self.run.plan.rollout_per_rank', KL),
        ("KL samples are prompts", '["objective/kl"], self.run.plan.global_responses',
         '["objective/kl"], self.run.plan.global_rollout',
         "trainers/test_rloo.py::test_the_kl_coefficient_is_steered_by_responses"),
        ("the moving average is never updated", "self.average.update()", "pass", AVERAGE),
        ("scored at temperature 1", "temperature, most = self.config.temperature, self.run",
         "temperature, most = 1.0, self.run", TEMPERATURE),
        ("a rollout's reference at temperature 1", "texts, self.config.temperature, plan.micro_batch",
         "texts, 1.0, plan.micro_batch", REFERENCE),
        ("updates of a rollout count as one", "self.update += self.run.plan.updates_per_rollout", "self.update += 1",
         FIT),
    ),
    *changes("trainers/ppo/models.py",
        ("the reference is the actor", "response_logprobs(self.reference,", "response_logprobs(self.actor,",
         REFERENCE),
        ("log-probs at temperature 1", "rows.targets, temperature, False", "rows.targets, 1.0, False", SCORE),
    ),
    *changes("trainers/ppo/late_credit.py",
        ("log-probs and values exchanged", "self._logprobs, scored.ref_logprobs, self._values",
         "self._values, scored.ref_logprobs, self._logprobs", LATE),
        ("the credit of every row", "select_rows(self.pending, rows.rows)",
         "select_rows(self.pending, rows.rows.flip(0))", LATE),
    ),
    *changes("models/layout.py",
        ("values of the state after the token", "x.flatten()[self.targets - 1]", "x.flatten()[self.targets]", LAYOUT),
        ("the score before the last token", "starts, prompts + responses - 1,", "starts, prompts + responses - 2,",
         LAYOUT),
        ("groups of any size", "(area > 0) & (area <= budget)", "area > 0",
         "models/test_layout.py::test_no_group_is_larger_than_the_longest_rows_allow"),
        ("groups that cost their rows alone", "* ordered.astype(np.int64)", "* 1", LEAST_PADDING),
    ),
    *changes("trainers/ppo/moving_average.py",
        ("moving average: past and present exchanged", "1 - self._decay", "self._decay", AVERAGE),
        ("moving average: another decay", "DECAY = 0.992", "DECAY = 0.99", AVERAGE),
    ),
    *changes("trainers/ppo/metrics.py",
        ("KL is a mean over tokens", '"objective/kl", kl, responses', '"objective/kl", kl, tokens', METRICS),
        ("responses without a score lower the means", "kept = mask.any(1)", "kept = mask[:, 0] | True",
         "trainers/test_ppo_metrics.py::test_a_response_without_a_score_counts_in_no_mean_of_tokens"),
        ("KL per token is a mean over rows", '"objective/kl_per_token", kl, tokens',
         '"objective/kl_per_token", kl, rows', METRICS),
        ("objective/entropy's sign", "masked_sum(-trajectory.logprobs", "masked_sum(trajectory.logprobs", METRICS),
        ("macro length is the response's", '"macro/length", tokens, macros', '"macro/length", tokens, rows', METRICS),
        ("lambda_eff is a power, not a root", 'lam ** (1 / metrics["macro/length"])', 'lam ** metrics["macro/length"]',
         METRICS),
        ("explained variance is the unexplained", "1 - unexplained / spread", "unexplained / spread", METRICS),
        ("squares instead of variances", '- metrics.pop("residuals") ** 2', '- 0 * metrics.pop("residuals")', METRICS),
    ),
    *changes("trainers/ppo/evaluation.py",
        ("evaluation: ranks weigh alike", "counted[: len(own)].sum())", "1.0)", EVALUATION),
        ("evaluation: means of a rank", "[counted[: len(own)]].sum()", "[counted[: len(own)]].mean()", EVALUATION),
    ),
    *changes("trainers/supervised/trainer.py",
        ("an epoch of steps 1 and 2 begins anew", "updates[self.update % per_epoch : total", "updates[: total",
         RESUME_1),
        ("REFUEL: the last pass is whole", "per_epoch : total - epoch * per_epoch]", "per_epoch :]",
         "trainers/test_refuel.py::test_it_goes_through_the_pairs_until_so_many_were_seen"),
        ("steps 1 and 2: count of one rank", "count = sum_over_ranks(own_count)", "count = own_count", TWO_RANKS),
        ("steps 1 and 2: count of the first micro-batch", "self.task.count(batch) for batch in batches)",
         "self.task.count(batch) for batch in batches[:1])", SUPERVISED),
        ("steps 1 and 2: the same order in every epoch", "epoch,\n", "0,\n", SUPERVISED),
        ("steps 1 and 2: the order has no seed", "config.seed,\n", "0,\n", SUPERVISED),
        ("steps 1 and 2: evaluation of means", "examples, 1.0)", "examples, float(self.task.count(examples)))",
         SFT_EVALUATION),
        ("steps 1 and 2: evaluation weighs examples", "self.task.count(examples) if rows else 0)",
         "len(examples) if rows else 0)", SFT_EVALUATION),
        ("steps 1 and 2: the schedule is over micro-batches", "num_examples // plan.global_batch\n",
         "num_examples // plan.micro_batch\n", TOTAL),
    ),
    *changes("trainers/supervised/sft.py",
        ("SFT: the loss divided by all tokens", "example.num_targets for example", "len(example) for example",
         SFT_COUNT),
        ("SFT on the prompt: one token too many", "len(example) - 1 for example", "len(example) for example",
         SFT_COUNT),
        ("perplexity to the base 2", "math.exp(min(", "math.exp2(min(", SFT_EVALUATION),
    ),
    *changes("trainers/supervised/reward.py",
        ("chosen and rejected exchanged", "chosen, rejected = engine", "rejected, chosen = engine",
         "trainers/test_reward.py::test_evaluation"),
        ("per_sample: equal pairs are counted", 'self._loss == "per_sample"', 'self._loss == "end"',
         f"{REWARD_UPDATE}[per_sample]"),
        ("margins are not handed on", "other_mask, margins)", "other_mask)",
         "trainers/test_reward.py::test_margins_and_centring_reach_the_loss"),
        ("centring is not handed on", "pairs, self._centering, count)", "pairs, 0.0, count)",
         "trainers/test_reward.py::test_margins_and_centring_reach_the_loss"),
    ),
    *changes("rl/reward_losses.py",
        ("pairs: sign", "difference = chosen - rejected", "difference = rejected - chosen", f"{PAIRS}by_hand"),
        ("pairs: no logarithm", "-F.logsigmoid(", "-torch.sigmoid(", f"{PAIRS}by_hand"),
        ("pairs: mean of the part", "losses, 0.0).sum() / total", "losses, 0.0).mean()", REWARD_SPLIT),
        ("pairs: a tie counts as right", '"accuracy": margin > 0', '"accuracy": margin >= 0', TIE),
        ("pairs: a tie at the end counts as right", "at_end[0] > at_end[1]", "at_end[0] >= at_end[1]",
         "trainers/test_reward.py::test_a_new_head_ranks_nothing"),
        ("the margin is added", "difference - margins)", "difference + margins)", TIE),
        ("centring: of the difference", "(scores[0] + scores[1]).square()", "(scores[0] - scores[1]).square()",
         f"{PAIRS}centring_pulls_the_sum_of_a_pair_to_0_and_leaves_the_difference_alone"),
        ("last_token: the last one", "before if kind in BEFORE_END else", "at_end if kind in BEFORE_END else",
         f"{PAIRS}by_hand"),
        ("equal pairs count", 'counted = differ if kind == "per_sample"', 'counted = differ if kind == "end"',
         f"{PAIRS}without_a_pair_that_counts_loss_and_gradient_are_0"),
        ("no pair counts: 0 / 0", "torch.where(total > 0, total, 1)", "total",
         f"{PAIRS}without_a_pair_that_counts_loss_and_gradient_are_0"),
        ("the end of one sequence is no difference", "| (pairs.mask != pairs.other_mask)", "| False", REWARD_LOSSES),
        ("average: with the last token", "& (width <= before[:, None])", "& (width <= ends[:, None])",
         f"{PAIRS}by_hand"),
        ("average: the prompt, too", "width >= torch.minimum(first, before)[:, None]", "width >= 0",
         f"{PAIRS}by_hand"),
        ("per_sample: the prompt, too", "& (width >= first[:, None])", "& (width >= 0)", f"{PAIRS}by_hand"),
        ("per_sample: to the shorter end", "compared = (pairs.mask | pairs.other_mask)",
         "compared = (pairs.mask & pairs.other_mask)", f"{PAIRS}by_hand"),
        ("per_sample: sum over tokens", "costs.sum(1) / compared.sum(1)", "costs.sum(1)", f"{PAIRS}by_hand"),
        ("per_sample: the number at padding", "chosen.gather(1, torch.minimum(width, _last(pairs.mask)[:, None]))",
         "chosen", f"{PAIRS}by_hand"),
    ),
    *changes("rl/logprobs.py",
        ("smoothing: the mean is left out", "head.smoothing * block.mean(-1)", "0 * block.mean(-1)", SMOOTHED),
        ("smoothing: its gradient is left out", "softmax.add_(grad, alpha=head.smoothing / softmax.shape[1])", "pass",
         SMOOTHED),
    ),
    *changes("data/packing.py",
        ("packing: positions go on over examples", "places += range(len(example))",
         "places += range(len(places), len(places) + len(example))", PACKED),
        ("packing: targets of a row's first example", "start = len(ids) * longest + len(tokens)",
         "start = len(ids) * longest", PACKED),
        ("packing: rows overflow", "if lengths[number] <= left)", "if left > 0)",
         "data/test_packing.py::test_every_example_is_in_one_row_and_no_row_overflows"),
    ),
    *changes("models/packing.py",
        ("packing: the texts of a row see each other", "text[:, :, None] == text[:, None, :]",
         "text[:, :, None] >= text[:, None, :]",
         "trainers/test_packing.py::test_loss_and_gradients_are_those_of_a_row_each[opt-False]"),
    ),
    *changes("models/lora.py",
        ("LoRA: the given alpha is passed over", "ALPHA_PER_RANK * rank if alpha is None else alpha",
         "ALPHA_PER_RANK * rank", "models/test_finetuning.py::test_adapters_of_several_targets_with_their_own_scale"),
        ("LoRA: one scaling for all layers", "module.scaling[NAME]",
         "lora_config(model).lora_alpha / lora_config(model).r",
         "models/test_shared_base.py::test_a_users_adapter_is_merged_as_peft_merges_it"),
    ),
    *changes("models/finetuning.py",
        ("a last layer: everything trains", "model.requires_grad_(False)\n        head.", "head.",
         "models/test_finetuning.py::test_a_last_layer_is_the_head_alone[llama]"),
    ),
    *changes("models/gain.py",
        ("the gain does nothing", "super().forward(x) * self.gain.float()", "super().forward(x)",
         "models/test_gain.py::test_the_gain_multiplies_and_learns"),
        ("the gain is not folded in", "(x.float() * tensor.float())", "x.float()",
         "models/test_gain.py::test_a_saved_model_gives_the_same_scores_in_transformers"),
    ),
    *changes("trainers/supervised/dpo.py",
        ("DPO: without the reference", "chosen - chosen_ref, rejected - rejected_ref", "chosen, rejected", DPO),
        ("DPO: references exchanged", "chosen_ref, rejected_ref = ", "rejected_ref, chosen_ref = ", DPO),
        ("DPO: always against the reference", "if self._config.reference_free:\n            return",
         "if False:\n            return", "trainers/test_dpo.py::test_it_learns_to_prefer[True]"),
        ("DPO: no smoothing", "self._config.label_smoothing, count", "0.0, count", DPO_SMOOTHED),
        ("DPO: mean of the micro-batch", "self._config.label_smoothing, count)", "self._config.label_smoothing)",
         "trainers/test_dpo.py::test_a_step_reports_the_mean_over_the_pairs_of_the_whole_update"),
        ("DPO: a temperature of its own", "TEMPERATURE = 1.0", "TEMPERATURE = 0.7", DPO),
        ("DPO: held-out pairs that are not evaluated", "self._config.num_eval_examples(world_size()) or None", "None",
         "trainers/test_dpo.py::test_only_what_is_evaluated_is_held_out"),
    ),
    *changes("trainers/supervised/trainer.py",
        ("the reference is that of the checkpoint",
         "        self.task.prepare(self.engine)\n        self.go_on(self.checkpoints.load())\n",
         "        self.go_on(self.checkpoints.load())\n        self.task.prepare(self.engine)\n",
         "trainers/test_resume.py::test_a_lost_reference_is_computed_before_the_checkpoint_is_loaded"),
    ),
    *changes("trainers/supervised/pairs.py",
        ("log-probs of a response are averaged", "index_add(0, batch[\"sequence\"], logprobs)",
         "index_reduce(0, batch[\"sequence\"], logprobs, \"mean\", include_self=False)", DPO),
        ("chosen and rejected sums exchanged", "chosen, rejected = sums.chunk(2)", "rejected, chosen = sums.chunk(2)",
         DPO),
        ("the reference of another temperature", "pad_id, temperature)\n        own |=", "pad_id)\n        own |=",
         "trainers/test_dpo.py::test_the_reference_has_the_temperature_that_it_is_asked_for"),
        ("a reference of another run is used", "not is_same(found.get(name), identity[name])", "False",
         "trainers/test_dpo.py::test_a_run_names_the_file_that_is_not_its_own"),
        ("the reference does not look at responses",
         "[example.prompt_ids, example.chosen_ids, example.rejected_ids]", "[example.prompt_ids]",
         "trainers/test_dpo.py::test_another_response_is_other_data"),
    ),
    *changes("rl/losses.py",
        ("DPO: the label is smoothed twice", "-(1 - label_smoothing) * F.logsigmoid(margin)",
         "-(1 - 2 * label_smoothing) * F.logsigmoid(margin)", TRL_LOSS),
        ("DPO: a tie counts as right", '(margin > 0).sum() / num_pairs,\n            "margin"',
         '(margin >= 0).sum() / num_pairs,\n            "margin"',
         "rl/test_losses.py::test_dpo_of_an_untrained_policy_is_log_2"),
        ("DPO: beta on one side", "beta * (chosen_log_ratios - rejected_log_ratios)",
         "beta * chosen_log_ratios - rejected_log_ratios", TRL_LOSS),
        ("DPO: mean of the part", "losses.sum() / num_pairs, stats", "losses.mean(), stats",
         "rl/test_losses.py::test_preference_losses_are_divided_by_the_count_of_the_whole_update"),
    ),
    *changes("engine/engine.py",
        ("backward without the world size", "(world_size() * self._watch.factor(loss))",
         "self._watch.factor(loss)", TWO_RANKS),
        ("backward divided by the accumulation", "scale_wrt_gas=False", "scale_wrt_gas=True",
         "engine/test_engine.py::test_any_accumulation_gives_the_update_of_plain_torch[2]"),
        ("Adam's betas", "ADAM_BETAS = (0.9, 0.95)", "ADAM_BETAS = (0.9, 0.999)", GROUPS),
        ("weight decay on norms", '"weight_decay": 0.0}', '"weight_decay": weight_decay}', GROUPS),
        ("weight decay on no weight in parts", 'getattr(p, "ds_shape", p.shape)', "p.shape",
         f"{IN_PARTS}test_weight_decay_acts_on_matrices_in_parts"),
        ("no clipping without ZeRO", "if self._clipping:", "if False:",
         "engine/test_engine.py::test_clipping_acts_and_the_norm_is_that_before_clipping"),
        ("no warm-up", "num_warmup_steps=optimizer.warmup_updates", "num_warmup_steps=0", SCHEDULE),
        ("the schedule's total", "max(optimizer.total_updates, 1)", "max(2 * optimizer.total_updates, 1)", SCHEDULE),
        ("constant schedule", "        optimizer.schedule,\n", '        "constant",\n', SCHEDULE),
    ),
    *changes("engine/deepspeed_config.py",
        ("gradients added up in bf16", '"grad_accum_dtype": "fp32"', '"grad_accum_dtype": "bf16"',
         "engine/test_engine.py::test_in_bf16_small_gradients_add_up"),
    ),
    *changes("engine/sharded_loading.py",
        ("tied without looking", "return held if differ else given", "return given",
         f"{IN_PARTS}test_a_tie_that_does_not_hold_is_not_made"),
        ("nothing is cut on arrival", 'getattr(given, "_is_hf_initialized", False)', "False",
         f"{IN_PARTS}test_every_weight_of_the_files_is_cut_on_arrival"),
    ),
    *changes("plan/states.py",
        ("one moment of Adam", "MOMENTS = 2 * FLOAT32", "MOMENTS = FLOAT32", f"{PLAN}test_states_by_zero_stage"),
        ("no float32 copy", "else MOMENTS + FLOAT32", "else MOMENTS", f"{PLAN}test_states_by_zero_stage"),
        ("gradients sharded at stage 1", "share if stage >= 2 else", "share if stage >= 1 else",
         f"{PLAN}test_states_by_zero_stage"),
        ("offload without its gradients", "(2 * FLOAT32 + weights.width) * share", "weights.width * share",
         f"{PLAN}test_offload_moves_states_to_main_memory"),
        ("the tensor that is fetched is not counted", "LIVE_PARAMETERS + weights.largest", "LIVE_PARAMETERS",
         f"{PLAN}test_what_zero_holds_for_a_while"),
        ("the average lies on every process", "FLOAT32 * _share(weights.trained, processes)",
         "FLOAT32 * weights.trained", f"{PLAN}test_the_moving_average_is_shared_out"),
    ),
    *changes("plan/shapes.py",
        ("keys without values", "return int(2 * config", "return int(config",
         f"{PLAN}test_keys_and_values_of_a_token"),
    ),
    *changes("models/load.py",
        ("routers are random in training mode", "module.register_forward_pre_hook(_evaluate)", "pass",
         "models/test_load.py::test_an_opened_model_computes_in_training_mode_as_in_evaluation_mode[mixtral]"),
        ("layers are left out at random", '"drop" in name and', '"dropout" in name and',
         "models/test_load.py::test_an_opened_model_computes_in_training_mode_as_in_evaluation_mode[opt]"),
    ),
    *changes("trainers/selfcheck.py",
        ("the self-check compares a mode with itself", "engine.train()\n    trained", "engine.eval()\n    trained",
         "trainers/test_selfcheck.py::test_every_step_compares_both_modes[sft]"),
    ),
    *changes("models/float32_linear.py",
        ("a frozen head's gradient is computed", "grad.t() @ x if of_weight else None", "grad.t() @ x",
         "models/test_float32_linear.py::test_gradients_that_nothing_needs_are_not_computed"),
    ),
    *changes("plan/machine.py",
        ("main memory of a node with all processes", "return min(self.processes, self.gpus_per_node)",
         "return self.processes", f"{PLAN}test_main_memory_of_a_node"),
    ),
    *changes("plan/phases.py",
        ("vLLM's copy takes its share alone", "return max(share, weights)", "return share",
         "plan/test_cli.py::test_vllm_holds_the_actor_whole"),
    ),
    *changes("plan/logits.py",
        ("the head's gradient without its sum", "head.trained * FLOAT32 * head.weight", "0",
         f"{PLAN}test_logits_that_fit_are_kept"),
        ("logits in half precision", "logits = FLOAT32 * head.vocab", "logits = head.width * head.vocab",
         f"{PLAN}test_logits_of_half_precision_and_of_a_soft_cap"),
    ),
    *changes("plan/counts.py",
        ("the last, incomplete rollout counts", "examples // size * config", "-(-examples // size) * config",
         f"{PLAN}test_updates_and_samples_of_step_3"),
        ("no evaluation at the start", "return 2 + due", "return 1 + due",
         f"{PLAN}test_updates_and_samples_of_step_1"),
    ),
    *changes("plan/passes.py",
        ("gradients stay", "    parameter.grad = None", "    pass", f"{PASSES}test_gradients_are_handed_over"),
    ),
    *changes("run/distributed.py",
        ("parts rounded down", "-(-flat.numel() // world_size())", "flat.numel() // world_size()",
         "run/test_average_parts.py::test_ranks_share_a_weight"),
    ),
    *changes("models/attention.py",
        ("the cap is lost", 'None) is None else EAGER', 'None) is None else None',
         "models/test_attention.py::test_a_cap_in_a_family_that_has_sdpa_is_kept_too"),
    ),
    *changes("models/save.py",
        ("files grow", "size + tensor.nbytes > file_size", "tensor.nbytes > file_size",
         "models/test_save.py::test_a_large_model_lies_in_several_files"),
    ),
    *changes("builders/ppo.py",
        ("the actor with the critic's optimiser", "config.actor_learning_rate, config.actor_weight_decay",
         "config.critic_learning_rate, config.critic_weight_decay", OPTIMISERS),
        ("the critic with the actor's optimiser", "config.critic_learning_rate, config.critic_weight_decay",
         "config.actor_learning_rate, config.actor_weight_decay", OPTIMISERS),
    ),
    *changes("builders/settings.py",
        ("learning rate and weight decay exchanged", "config.learning_rate, config.weight_decay)",
         "config.weight_decay, config.learning_rate)", SUPERVISED_OPTIMISERS),
        ("the schedule does not know its total", "total_updates=total_updates,", "total_updates=1,", OPTIMISERS),
        ("the warm-up's ratio does not arrive", "config.warmup_updates(total_updates)", "config.num_warmup_steps",
         SUPERVISED_OPTIMISERS),
        ("the schedule's name does not arrive", "schedule=config.lr_scheduler_type", 'schedule="linear"', OPTIMISERS),
        ("gradient clipping does not arrive", "gradient_clipping=config.gradient_clipping", "gradient_clipping=1.0",
         OPTIMISERS),
    ),
    *changes("config/common.py",
        ("the warm-up is rounded down", "math.ceil(self.warmup_ratio * total_updates)",
         "int(self.warmup_ratio * total_updates)", SUPERVISED_OPTIMISERS),
    ),
    *changes("config/batches.py",
        ("a rollout is trained on once", "ppo_epochs * responses // update", "responses // update", TOTAL),
        ("updates count prompts", "ppo_epochs * responses // update", "ppo_epochs * rollout // update",
         RESPONSE_COUNT),
    ),
    *changes("config/preset_batches.py",
        ("a preset's rollout has too many responses", "prompts = share // samples", "prompts = share",
         PRESET_RESPONSES),
        ("a preset's generation counts prompts", "max(1, preset[GENERATION] // samples)", "preset[GENERATION]",
         PRESET_RESPONSES),
    ),
    *changes("data/examples.py",
        ("SFT on all turns: the loss divided by all tokens behind the first", "is None else sum(self.targets)",
         "is None else len(self.targets)", TURNS_LOSS),
    ),
    *changes("data/formats/conversations.py",
        ("preferences as messages: all that is shared is the prompt", "next(iter(whole.values()))[:-1]",
         "next(iter(whole.values()))[:-2]",
         "data/test_message_lists.py::test_what_is_shared_is_the_prompt_and_the_last_message_the_response"),
    ),
    *changes("evaluation/judge/run.py",
        ("verdicts of another rubric are gone on with", '{"rubric": setup.rubric.digest}', '{"rubric": ""}',
         "evaluation/judge/test_rubric_file.py::test_verdicts_of_another_rubric_are_not_gone_on_with"),
    ),
    *changes("data/turns.py",
        ("SFT on all turns: the end of a turn is not learnt", "len(ids) - ids[::-1].index(end.token_id) if",
         "len(ids) - ids[::-1].index(end.token_id) - 1 if", TURNS),
        ("SFT on all turns: users' turns are learnt", "if number % 2 and end", "if end", TURNS),
    ),
    *changes("data/collate.py",
        ("SFT on all turns: every token is learnt", "= torch.tensor(example.targets)", "= True", TURNS_LOSS),
        ("order of examples ignores the epoch", "RandomState([seed, epoch])", "RandomState([seed, 0])",
         "data/test_collate.py::test_order_depends_on_seed_and_epoch_only"),
        ("order of examples ignores the seed", "RandomState([seed, epoch])", "RandomState([0, epoch])",
         "data/test_collate.py::test_order_depends_on_seed_and_epoch_only"),
        ("ranks share rows", "own = rows[rank::world_size]", "own = rows[::world_size]",
         "data/test_collate.py::test_ranks_share_every_update"),
    ),
    *changes("data/stored.py",
        ("prompts from the cache are numbered within their batch", "values = [start + value for value in values]",
         "values = [value for value in values]", f"{CACHED}[PromptExample]"),
    ),
    *changes("data/loading.py",
        ("the cache does not know the lengths", "self._make.func.__qualname__, settings]",
         "self._make.func.__qualname__]", CACHE_KEY),
        ("the cache does not know the share", "flags.data_split, flags.step, flags.seed", "flags.step, flags.seed",
         CACHE_KEY),
        ("the cache does not know the seed", "flags.data_split, flags.step, flags.seed",
         "flags.data_split, flags.step", CACHE_KEY),
        ("the cache does not know the files", "[str(f), file_hash(f)]", "[str(f)]", CACHE_KEY),
    ),
    *changes("data/cache.py",
        ("damage of the cache goes unseen", "_checksum(file) != checksum", "False",
         "data/test_loading.py::test_damaged_entries_are_made_anew"),
    ),
    *changes("data/prepared/filters.py",
        ("prepare counts the end of a response", "[example.chosen_ids[:-1]]", "[example.chosen_ids]",
         "data/test_prepared.py::test_lengths_in_characters"),
        ("prepare keeps no prompt of the largest length", "lengths[0] > limits", "lengths[0] >= limits", REASONS),
        ("prepare looks at the chosen response alone", "min(lengths[1:])", "lengths[1]", REASONS),
        ("prepare forgets what it has seen", "self._seen.add((example.prompt, example.chosen))", "pass", REASONS),
    ),
    *changes("data/prepared/make.py",
        ("prepare draws its parts by no seed", "preparation.seed if preparation.shuffle", "0 if preparation.shuffle",
         f"{PREPARED}[parquet-SFTExample]"),
        ("prepare gives both stages the same rows", "1 + STAGES.index(preparation.stage)", "1",
         "data/test_prepared.py::test_the_parts_are_disjoint"),
    ),
    *changes("data/sources.py",
        ("what is held out follows no seed", "TRAIN_EVAL_SPLIT, part, seed)", "TRAIN_EVAL_SPLIT, part, 0)",
         "data/test_prepared.py::test_without_shuffling_the_last_rows_are_held_out"),
    ),
    *changes("data/prepared/write.py",
        (".pt files have one target too many", "targets[: len(prompt)]", "targets[: len(prompt) - 1]",
         "data/test_prepared.py::test_pt_files_are_sheeprls"),
    ),
    *changes("run/seeds.py",
        ("seeds depend on their first part alone", "SeedSequence(parts)", "SeedSequence(parts[:1])",
         "trainers/test_ppo.py::test_derived_seeds_differ"),
        ("evaluation is a kind of training", "EVALUATION = 1", "EVALUATION = 0", DRAWS),
    ),
    *changes("run/metrics.py",
        ("metrics of one rank", "sum_over_ranks(stacked).tolist()", "stacked.tolist()", TWO_RANKS),
        ("means are sums", "metrics[name] / weight if weight", "metrics[name] if weight",
         "run/test_metrics.py::test_means_are_weighted"),
    ),
    *changes("models/policy.py",
        ("log-probs of the token before", "states.flatten(0, 1)[targets - 1]", "states.flatten(0, 1)[targets]",
         "models/test_policy.py::test_log_probs_and_entropy_are_those_of_the_models_own_logits[gemma-1.0]"),
    ),
    *changes("rollouts/generate.py",
        ("every batch is drawn alike", "torch.manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))",
         "torch.manual_seed(0)",
         "rollouts/test_engines.py::test_seeds_give_the_same_draws_and_leave_the_global_state_alone"),
    ),
    *changes("rollouts/uniform.py",
        ("a uniform number too many bits down", "state, 31), 11)", "state, 31), 10)", UNIFORM),
        ("uniform numbers shift in signs", "return (x >> bits) & kept", "return x >> bits", UNIFORM),
        ("a row's sequence begins one step late", "torch.arange(1, count + 1", "torch.arange(2, count + 2", UNIFORM),
        ("row seeds of 32 bits", "generate_state(1, np.uint64)[0]) >> 1", "generate_state(1, np.uint64)[0]) >> 32",
         "rollouts/test_choose.py::test_row_seeds_are_of_63_bits_and_depend_on_every_part"),
    ),
    *changes("rollouts/choose.py",
        ("log-probs of what is allowed", "torch.cat([log_z[:, None], kept_out], dim=1)", "log_z[:, None]", CHOOSE),
        ("temperature 0 is drawn", "if self._temperature > 0 else logits.argmax(-1)", "if True else logits", CHOOSE),
        ("the temperature is left out", "logits = logits / self._temperature", "pass", CHOOSE),
        ("an id without weight at the edge", "torch.minimum(target - before, largest)", "target - before",
         "rollouts/test_choose.py::test_an_id_without_weight_is_never_drawn"),
        ("the search inside a block forgets those before", "torch.minimum(target - before,", "torch.minimum(target,",
         "rollouts/test_choose.py::test_the_drawn_id_is_where_the_running_sum_passes"),
    ),
    *changes("rollouts/slots.py",
        ("a sliding window one token too wide", "window.start - self.span + 1", "window.start - self.span", FAMILY),
    ),
    *changes("rollouts/masks.py",
        ("a step's mask shows the padding", ">= first[:, None]", ">= 0 * first[:, None]", FAMILY),
    ),
    *changes("rollouts/pool.py",
        ("positions of a step stay", "self._position[rows] += 1", "pass", FAMILY),
        ("a row reads another's numbers", "self._uniform[number, drawn]", "self._uniform[0 * number, drawn]", FAMILY),
        ("a response is one token short", "last = self._end + self._sampling.max_new_tokens - 1",
         "last = self._end + self._sampling.max_new_tokens - 2", FAMILY),
        ("what an ended row left is read", "self._cache.clear(rows, slice(self._low(), start))", "pass",
         "rollouts/test_compacting.py::test_what_a_row_left_in_its_slot_does_not_reach_the_next_one"),
        ("ended rows stay", "max(1, len(self.live) // DROP_SHARE)", "len(self.live)",
         "rollouts/test_compacting.py::test_only_live_rows_are_computed"),
    ),
    *changes("rollouts/assembly.py",
        ("the end token is cut off", "(ended.cumsum(1) - ended.long()) == 0", "ended.cumsum(1) == 0",
         "rollouts/test_engines.py::test_the_mask_is_a_prefix_that_holds_eos"),
    ),
    *changes("scoring/programs/outcome.py",
        ("a compile error costs less", "        return -1.0\n", "        return -0.9\n", PROGRAMS),
        ("an error costs more", "        return -0.6\n", "        return -0.7\n", PROGRAMS),
        ("tests passed weigh less", "-0.3 + 1.3 * outcome.passed", "-0.3 + 1.2 * outcome.passed", PROGRAMS),
        ("the share is of the tests that were run", "return outcome.passed / outcome.total\n",
         "return outcome.passed / len(outcome.tests)\n", PROGRAMS),
    ),
    *changes("rl/refuel.py",
        ("refuel: the penalty for those that ended", "scores.where(finished, penalty)",
         "scores.where(~finished, penalty)", REPLY_REWARDS),
        ("refuel: the KL is a reward", "penalty) - kl_coef * kl", "penalty) + kl_coef * kl", REPLY_REWARDS),
        ("refuel: the difference of a pair is turned", "return first - second", "return second - first",
         "rl/test_refuel.py::test_the_kl_and_the_difference_of_a_pair"),
        ("refuel: the KL is turned", "self.logprobs - self.ref_logprobs", "self.ref_logprobs - self.logprobs",
         "rl/test_refuel.py::test_the_kl_and_the_difference_of_a_pair"),
    ),
    *changes("trainers/refuel/sampler.py",
        ("refuel: the last turn is never compared", "TURN) % example.num_turns",
         "TURN) % max(1, example.num_turns - 1)", REFUEL_TURNS),
        ("refuel: every round compares the same turn", "TRAINING, iteration, example.index, TURN",
         "TRAINING, 0, example.index, TURN", REFUEL_TURNS),
        ("refuel: the turn does not depend on the run's seed", "row_seed(seed, SeedKind.TRAINING, iteration",
         "row_seed(0, SeedKind.TRAINING, iteration", REFUEL_TURNS),
        ("refuel: the second dialogue repeats the first", "for part in (FIRST, SECOND)", "for part in (FIRST, FIRST)",
         "trainers/test_refuel_online.py::test_both_dialogues_of_a_pair_are_one_up_to_the_state"),
        ("refuel: all rows draw with one seed", "iteration, example.index, part) for", "iteration, 0, part) for",
         "trainers/test_refuel_online.py::test_a_round_draws_with_a_seed_for_each_row"),
        ("refuel: a state without its question", "state(one.messages, turn)", "state(one.messages, 0)",
         "trainers/test_refuel_online.py::test_both_dialogues_of_a_pair_are_one_up_to_the_state"),
        ("refuel: evaluations draw at the temperature of training", "replace(self.sampling, temperature=temperature)",
         "self.sampling",
         "trainers/test_refuel_online.py::test_evaluations_draw_the_likeliest_tokens_or_the_same_ones_every_time"),
    ),
    *changes("trainers/refuel/update.py",
        ("refuel: the loss is a mean over a micro-batch", "plan.global_batch, plan.micro_batch, config.eta",
         "plan.micro_batch, plan.micro_batch, config.eta", REFUEL_START),
        ("refuel: eta is forgotten", "differences, settings.eta, settings", "differences, 1.0, settings",
         REFUEL_START),
        ("refuel: pairs of other log-probs", "- batch.logprobs[rows.rows]", "- batch.logprobs[: len(rows.rows)]",
         "trainers/test_refuel_online.py::test_the_gradient_is_that_of_the_mean_over_pairs_by_autograd "
         "trainers/test_refuel_online.py::test_micro_batches_and_accumulation_change_nothing"),
        ("refuel: one update fewer", "while progress.done < settings.updates",
         "while progress.done + 1 < settings.updates",
         "trainers/test_refuel_online.py::test_the_updates_of_a_round_take_the_same_pairs_and_lower_the_loss"),
    ),
    *changes("trainers/refuel/trainer.py",
        ("refuel: the KL coefficient is not steered", "self.kl = self.kl.update(metrics",
         "self.kl = self.kl or self.kl.update(metrics", REFUEL_STEERED),
        ("refuel: rounds of an epoch are rounded up", "per_epoch = num_dialogues // plan",
         "per_epoch = 1 + num_dialogues // plan", REFUEL_SCHEDULE),
        ("refuel: a schedule over rounds", "return rounds * plan.updates_per_rollout", "return rounds",
         REFUEL_SCHEDULE),
    ),
    *changes("trainers/refuel/evaluation.py",
        ("refuel: a score by turn is that of the whole", "conversations[number].messages[:end] for",
         "conversations[number].messages for", REFUEL_FIT),
        ("refuel: scores are those of the first turn", "of_dialogue[-1] for of_dialogue in scores",
         "of_dialogue[0] for of_dialogue in scores", REFUEL_FIT),
    ),
    *changes("config/refuel_online.py",
        ("refuel: evaluations are counted in updates", "self.print_sample_output_freq * self.noptepochs",
         "self.print_sample_output_freq * 1",
         "config/test_config_defaults.py::test_evaluations_of_refuel_are_counted_in_rounds"),
    ),
    *changes("data/dialogue_examples.py",
        ("a dialogue's replies are counted as the data have them", "- earlier + turns * limits.reply_tokens", "",
         "data/test_dialogue_examples.py::test_the_length_counts_every_reply_as_the_longest_that_may_be_drawn"),
    ),
    *changes("scoring/programs/scores.py",
        ("what was not run counts", 'values[missing] = values[~missing].mean()', "pass", PROGRAM_SCORES),
    ),
    *changes("rl/types.py",
        ("an unscored response is trained on", "response_mask=rollout.response_mask & keep",
         "response_mask=rollout.response_mask", UNSCORED),
    ),
    *changes("scoring/weighted.py",
        ("weights of scores are not used", "one.weight * scores.values.float()", "scores.values.float()",
         f"{WEIGHTED}a_sum_by_hand"),
        ("the mean of scores counts rows without one", "(~missing).double().sum()[None]",
         "torch.ones_like(missing).double().sum()[None]",
         f"{WEIGHTED}rows_without_a_number_are_missing_and_leave_means_as_they_are"),
    ),
    *changes("scoring/reward_reader.py",
        ("a cut response is scored as a whole one", "[self.tokenizer.eos_token_id] if is_end else []",
         "[self.tokenizer.eos_token_id]",
         "scoring/test_serve.py::test_served_scores_are_those_of_the_ids_and_of_plain_transformers"),
    ),
    *changes("scoring/url.py",
        ("the last request lacks a row", "range(first, min(first + size, len(texts.responses)))",
         "range(first, min(first + size, len(texts.responses) - 1))",
         "scoring/test_url.py::test_requests_hold_so_many_rows_and_nothing_else"),
    ),
    *changes("builders/ppo.py",
        ("actor and reference grow by different rows", "torch.manual_seed(config.seed)", "pass",
         "trainers/test_start.py::test_new_rows_of_actor_and_reference_are_the_same"),
    ),
    *changes("rollouts/sampling.py",
        ("padding ends a response", "set(own_ends) - {tokenizer.pad_token_id}", "set(own_ends)",
         "trainers/test_start.py::test_a_models_own_end_tokens_end_responses_but_padding_does_not"),
    ),
    *changes("evaluation/best_of/estimator.py",
        ("the best of N with replacement", "math.comb(below, n - 1) / subsets",
         "((below + 1) ** n - below ** n) / len(rewards) ** n", BEST_OF_N),
        ("the best of N counts one response too few below", "enumerate(sorted(rewards))",
         "enumerate(sorted(rewards), start=1)", BEST_OF_N),
        ("the first N are the last N", "max(rewards[:n])", "max(rewards[-n:])",
         f"{BEST_OF}first_n_in_the_order_of_the_draws"),
    ),
    *changes("evaluation/best_of/plot.py",
        ("curves of the first N", "means = [each.expected for each in cells]\n            label",
         "means = [each.first for each in cells]\n            label",
         "evaluation/best_of/test_best_of.py::test_curves_show_the_mean_over_all_subsets"),
    ),
    *changes("common/statistics.py",
        ("an interval of 90 %", "t.ppf(0.975,", "t.ppf(0.95,",
         "evaluation/best_of/test_best_of.py::test_the_means_of_a_file_by_hand"),
        ("a bounded mean by the values' own spread", "MeanInterval(rate.value, rate.low, rate.high)",
         "mean_interval([part for part, _ in parts])",
         "common/test_statistics.py::test_the_interval_of_a_bounded_mean_by_hand"),
    ),
    *changes("inference/policy.py",
        ("every draw has the first one's seed", "row_seed(self._seed, example.index, draw)",
         "row_seed(self._seed, example.index, 0)", "inference/test_run.py::test_best_of_n_keeps_the_best"),
        ("a sweep stays at one temperature", "replace(self._sampling, temperature=temperature)", "self._sampling",
         "inference/test_best_of_n.py::test_draws_are_those_of_single_runs"),
    ),
    *changes("inference/options.py",
        ("the smallest N is drawn", "dict.fromkeys(self.temperatures, max(self.best_of))",
         "dict.fromkeys(self.temperatures, min(self.best_of))",
         "inference/test_best_of_n.py::test_defaults_are_the_papers"),
    ),
    *changes("evaluation/turns/dialogues.py",
        ("a turn shows the next one", "self.texts[1 : 2 * turn]", "self.texts[1 : 2 * turn + 2]", SHOWN_AT_A_TURN),
        ("the score of the turn before", "dialogue.scores[turn - 1]", "dialogue.scores[turn - 2]", TURN_RATES),
    ),
    *changes("evaluation/turns/report.py",
        ("a turn's verdicts count as dialogues", "return win_rates(given, numbers)", "return win_rates(given)",
         "evaluation/turns/test_turns.py::test_intervals_over_all_turns_are_over_dialogues"),
    ),
    *changes("evaluation/programs/pass_at_k.py",
        ("pass@k with replacement", "1 - math.comb(samples - passed, k) / math.comb(samples, k)",
         "1 - (1 - passed / samples) ** k", "evaluation/programs/test_pass_at_k.py::test_the_estimator_by_hand"),
    ),
    *changes("inference/refuel/generate.py",
        ("L is one short", "int(random.integers(turns))", "int(random.integers(max(1, turns - 1)))", DRAWN_TURNS),
        ("h is below L", "int(random.integers(last + 1))", "int(random.integers(max(1, last)))", DRAWN_TURNS),
        ("turns without the seed", "default_rng((seed, number))", "default_rng(number)", DRAWN_TURNS),
        ("both rollouts have one seed", "SECOND_SEED = 20000", "SECOND_SEED = 0",
         "inference/refuel/test_generate.py::test_the_second_rollout_has_the_seed_plus_20000"),
        ("dialogues share their draws", "row_seed(seed, number) for", "row_seed(seed, 0 * number) for",
         "inference/refuel/test_generate.py::test_the_second_rollout_has_the_seed_plus_20000 "
         "inference/refuel/test_generate.py::test_a_dialogue_does_not_depend_on_its_batch"),
    ),
    *changes("inference/refuel/masks.py",
        ("one pair in five is held out", "MOST_HELD_OUT = 10", "MOST_HELD_OUT = 5", HELD_OUT),
        ("another seed holds out the same", "default_rng(seed)", "default_rng(0)", HELD_OUT),
    ),
    *changes("data/dialogue_pairs.py",
        ("of equal rewards the first is chosen", "pair.rewards[0][pair.last] > pair.rewards[1]",
         "pair.rewards[0][pair.last] >= pair.rewards[1]",
         "data/test_dialogue_pairs.py::test_chosen_has_the_strictly_higher_reward_at_the_last_scored_turn"),
        ("the reward of turn h is compared", "pair.rewards[0][pair.last] > pair.rewards[1][pair.last]",
         "pair.rewards[0][pair.turn] > pair.rewards[1][pair.turn]",
         "data/test_dialogue_pairs.py::test_chosen_has_the_strictly_higher_reward_at_the_last_scored_turn"),
        ("a failed reward of the second enters", "FAILED in pair.rewards[0] or FAILED in pair.rewards[1]",
         "FAILED in pair.rewards[0]",
         "data/test_dialogue_pairs.py::test_what_is_left_out_is_counted_by_reason"),
    ),
    *changes("trainers/supervised/refuel.py",
        ("the regression without temperature", "examples, self._pad_id, self._temperature)\n        old",
         "examples, self._pad_id)\n        old", REFUEL_LOSS),
        ("rewards are rounded before they are subtracted", "[e.chosen_reward - e.rejected_reward for e in examples],",
         "[float(torch.tensor(e.chosen_reward)) - float(torch.tensor(e.rejected_reward)) for e in examples],",
         "trainers/test_refuel.py::test_large_rewards_that_lie_close_together_keep_their_difference"),
        ("the reference of the rejected is the chosen one's", "rejected - old_rejected", "rejected - old_chosen",
         REFUEL_LOSS),
    ),
    *changes("common/lock.py",
        ("a child of a killed process keeps its lock",
         "os.register_at_fork(after_in_child=lambda: list(map(Lock._let_go, list(_HELD))))", "",
         f"{LOCK}a_killed_process_has_it_no_more_even_if_its_child_lives"),
        ("the lock of a file that was removed counts", "        if not self._is_in_place():\n            holder",
         "        if False:\n            holder", f"{LOCK}a_file_that_is_removed_before_it_is_locked"),
        ("a lock that another process has is removed", "if self in _HELD and self._is_in_place():",
         "if self in _HELD:", f"{LOCK}a_lock_that_was_taken_away_is_noticed"),
    ),
    *changes("run/metrics.py",
        ("a checkpoint may lack its last row", "range(step, update + 1, step)", "range(step, update, step)",
         "run/test_metrics.py::test_the_rows_of_a_checkpoint_are_whole"),
        ("the rows are written unread", "if text != \"\".join(self._written):", "if False:",
         "run/test_metrics.py::test_rows_that_somebody_changed_are_not_read_as_this_run_s"),
    ),
    *changes("run/metrics.py",
        ("the variance keeps the mean", "found.pop(name) - metrics[base] ** 2", "found.pop(name) - metrics[base]",
         REFUEL_LOSS),
    ),
    *changes("config/supervised.py",
        ("steps 1 and 2: the schedule is over one epoch", "return per_epoch * self.num_train_epochs",
         "return per_epoch", TOTAL),
    ),
    *changes("config/refuel.py",
        ("one update more", "max(1, self.total_episodes // global_batch)",
         "max(1, self.total_episodes // global_batch + 1)",
         "config/test_config_defaults.py::test_defaults_of_refuel_are_the_published_run"),
    ),
    *changes("demo/session.py",
        ("the demo: every answer is drawn with the same seed", "row_seed(self.options.seed, self._asked)",
         "row_seed(self.options.seed, 0)", "demo/test_stream.py::test_draws_follow_from_the_seed"),
        ("the demo: --seed is forgotten", "row_seed(self.options.seed, self._asked)", "row_seed(0, self._asked)",
         "demo/test_stream.py::test_draws_follow_from_the_seed"),
    ),
    *changes("demo/stream.py",
        ("the demo: the first letter of a marker is seen", "for size in range(longest, 0, -1)",
         "for size in range(longest, 1, -1)",
         "demo/test_stream.py::test_what_may_begin_a_marker_is_held_back"),
        ("the demo: an answer goes on after the marker", "over = marked or any", "over = any",
         "demo/test_stream.py::test_an_answer_ends_before_the_marker_of_the_next_turn_which_is_never_seen"),
        ("the demo: the draw of one token decides all", "self._uniform[:, input_ids.shape[1] - self._width]",
         "self._uniform[:, 0]", "demo/test_stream.py::test_draws_follow_from_the_seed"),
    ),
    *changes("run/trackers.py",
        ("a run that goes on begins another one at W&B", "self.run_id, self._goes_on = run_id, True",
         "self._goes_on = True", f"{TRACKERS}a_run_that_goes_on_keeps_its_id"),
        ("W&B is told twice what it knows", "for row in [] if self._goes_on else kept:", "for row in kept:",
         f"{TRACKERS}a_run_that_goes_on_keeps_its_id"),
        ("TensorBoard keeps what came after the checkpoint", "purge_step=update)", "purge_step=None)",
         f"{TRACKERS}a_run_that_goes_on_keeps_its_id"),
        ("a tracker that failed is asked again", "self._trackers.remove(tracker)", "pass",
         f"{TRACKERS}a_tracker_that_fails_is_left_out_after_one_warning"),
    ),
    *changes("run/hub.py",
        ("weights of an earlier push stay", "if name not in files]", "if False]",
         "run/test_hub.py::test_weights_of_an_earlier_push_do_not_stay"),
        ("repositories are public", "private=not public", "private=public", "run/test_hub.py::test_the_command"),
        ("a public repository gets what is private", "if not public and not found", "if public and not found",
         "run/test_hub.py::test_what_the_hub_refuses"),
    ),
    *changes("run/terminal.py",
        ("an evaluation's change has the wrong sign", "_signed(metrics[name] - before[name])",
         "_signed(before[name] - metrics[name])", "run/test_terminal.py::test_an_evaluation_is_a_line"),
    ),
    *changes("engine/process_group.py",
        ("DeepSpeed prints its memory", "bf16_optimizer.see_memory_usage = lambda", "unused = lambda",
         "engine/test_quiet.py::test_an_engine_in_bf16_prints_nothing"),
    ),
    *changes("evaluation/text/results.py",
        ("perplexity: every text counts alike", '(float(row["loss_sum"]), int(row["loss_tokens"]))',
         '(float(row["loss_sum"]) / int(row["loss_tokens"]), 1)', f"{TEXTS}perplexity_is_of_tokens_not_of_texts"),
        ("a tie of the reward model is right", "sum(margin > 0", "sum(margin >= 0",
         f"{TEXTS}reward_loss_and_accuracy_by_hand"),
        ("the reward loss rewards the rejected", "_softplus(-margin)", "_softplus(margin)",
         f"{TEXTS}reward_loss_and_accuracy_by_hand"),
    ),
    *changes("evaluation/text/rouge.py",
        ("ROUGE is recall", "score.fmeasure", "score.recall", f"{TEXTS}rouge_of_unequal_lengths_and_order"),
        ("ROUGE: words are stemmed", "use_stemmer=False", "use_stemmer=True",
         f"{TEXTS}rouge_of_unequal_lengths_and_order"),
    ),
    *changes("inference/text_work.py",
        ("text metrics: padding is read", 'batch["attention_mask"], mask', "None, mask",
         "inference/test_text.py::test_batches_of_one_and_of_sixteen_say_the_same"),
        ("text metrics: padding is counted", "torch.where(mask, logprobs, 0.0)", "logprobs",
         "inference/test_text.py::test_batches_of_one_and_of_sixteen_say_the_same"),
    ),
    *changes("inference/text.py",
        ("text metrics: responses are drawn, not the likeliest", "options, 0.0, device", "options, 1.0, device",
         "inference/test_text.py::test_responses_are_greedy_and_compared_with_the_data"),
    ),
)
# fmt: on


def make_overlay(folder: Path, mutant: Mutant) -> None:
    """folder/dschat: links to the package's files, but for the changed one."""
    place, source = folder / "dschat", PACKAGE
    for part in Path(mutant.file).parts:
        place.mkdir()
        for entry in source.iterdir():
            if entry.name not in (part, "__pycache__"):
                (place / entry.name).symlink_to(entry)
        place, source = place / part, source / part
    place.write_text(mutant.source(), encoding="utf-8")


def run_tests(tests: Sequence[str], packages: Path, folder: Path) -> None:
    """Becomes a process that runs tests on the package in `packages`; never returns."""
    signal.alarm(TIMEOUT)
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["PYTHONPATH"] = str(packages)  # of the processes that tests start
    sys.path.insert(0, str(packages))
    import pytest

    options = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}"]
    status = 3
    try:
        status = int(pytest.main([*options, *(f"tests/{test}" for test in tests)]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def judge(mutant: Mutant | None, status: int, output: str) -> str:
    """What is wrong with the outcome of a mutant's tests, or of all tests on the package as it is; empty if nothing.

    Args:
        mutant: None for the package as it is.
        status: pytest's: 0 if all tests passed, 1 if some failed; anything else says nothing about the mutant.
        output: pytest's.
    """
    if status == (1 if mutant else 0):
        return ""
    name = f"{mutant.name} ({mutant.file})" if mutant else "the package as it is"
    if mutant and status == 0:
        return f"{name}: its tests do not notice"
    return f"{name}: pytest ended with {status}\n{textwrap.indent(output[-3000:], '    ')}"


def run_all(mutants: Sequence[Mutant], place: Path) -> list[str]:
    """Runs the tests of each mutant, and before them all tests on the package as it is; what was wrong."""
    everything = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    slowest_first = sorted(mutants, key=lambda mutant: TWO_RANKS not in mutant.tests)
    waiting: list[Mutant | None] = [None, *slowest_first]
    running: dict[int, tuple[Mutant | None, Path]] = {}
    wrong = []
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            mutant, folder = waiting.pop(0), place / str(len(waiting))
            folder.mkdir()
            if mutant is not None:
                make_overlay(folder, mutant)
            if (pid := os.fork()) == 0:
                run_tests(mutant.tests if mutant else everything, folder if mutant else PACKAGE.parent, folder)
            running[pid] = mutant, folder
        pid, status = os.wait()
        mutant, folder = running.pop(pid)
        output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
        problem = judge(mutant, os.waitstatus_to_exitcode(status), output)
        print(f"\n{problem}" if problem else ".", end="\n" if problem else "", flush=True)
        wrong += [problem] if problem else []
    return wrong


def main(words: Sequence[str]) -> int:
    """Makes the mutants; 0 if the tests notice each of them."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    for mutant in chosen:
        mutant.source()
    os.environ.update(VARIABLES)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.chdir(ROOT)
    begun = time.monotonic()
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        wrong = run_all(chosen, Path(place))
    killed = len(chosen) - sum(not problem.startswith("the package as it is") for problem in wrong)
    print("\n".join(["", *(problem.splitlines()[0] for problem in wrong)]))
    print(f"{killed} of {len(chosen)} mutants killed in {time.monotonic() - begun:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
