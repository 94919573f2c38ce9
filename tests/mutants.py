# SPDX-License-Identifier: Apache-2.0
"""Small changes of the package, each of which the tests named beside it must notice: `make mutants`.

`python tests/mutants.py WORD...` makes only those whose name holds one of the words.

A row of the table: what goes wrong; the function; what stands there; what stands there instead; tests.

- The function is `function` or `Class.method`, in whatever file of the package. A constant (`DECAY`,
  `SeedKind.EVALUATION`) and what a module calls (`os.register_at_fork`) are named alike. Where several have the name,
  either the change fits one of them only, or its module is named, too: `slots.refill`.
- What stands there is found by syntax tree (`support/syntax_patterns.py`). It fits one place, or `  # 2` says which.
- A test is a function, in whatever file; where several have its name, the file is named, too: `test_losses::test_x`.
"""

import ast
import functools
import importlib
import os
import re
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.syntax_patterns import defined, definitions, filled, parse, places, replaced, same, unknown_names

ROOT = Path(__file__).resolve().parents[1]
APPLICATIONS = ROOT / "applications"
PACKAGES = (APPLICATIONS / "DeepSpeed-Chat" / "dschat", APPLICATIONS / "macro-actions" / "macro_actions")
TIMEOUT = 300  # seconds for the tests of one mutant; two more for each test
# Imported once, before a process is forked for each mutant; nothing of the package itself.
PRELOADED = (
    *("pytest", "hypothesis", "torch", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "transformers"),
    *("transformers.generation", "transformers.models.gemma.modeling_gemma", "tokenizers", "peft", "tqdm"),
)
VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Mutant:
    """A change of one place of the package.

    Attributes:
        name: what goes wrong.
        function: where.
        old: what stands there.
        new: what stands there instead.
        tests: at least one of them must fail; separated by spaces.
    """

    name: str
    function: str
    old: str
    new: str
    tests: str

    def made(self) -> tuple[Path, str]:
        """The file, and its text with the change.

        Raises:
            ValueError: there is no such function, or not one such place in it, or the change names what is not there.
        """
        text, _, number = self.old.partition("  # ")
        old, new = parse(text, self.new)
        sources = {file: file.read_text(encoding="utf-8") for file, _ in self._definitions()}
        trees = {file: ast.parse(source) for file, source in sources.items()}
        fitting = [
            (file, scope, *place)
            for file, name in self._definitions()
            for found, scope in defined(trees[file])
            if found == name
            for place in places(scope, old)
        ]
        if len(fitting) < int(number or 1) or (len(fitting) > 1 and not number):
            raise ValueError(f"mutant {self.name!r}: {self.function} holds {text!r} {len(fitting)} times")
        file, scope, nodes, found = fitting[int(number or 1) - 1]
        if unknown := unknown_names(new, trees[file], scope):
            raise ValueError(f"mutant {self.name!r}: {self.function} does not know {', '.join(sorted(unknown))}")
        if same(nodes, instead := filled(new, found)):
            raise ValueError(f"mutant {self.name!r}: {self.function} stays as it is")
        return file, replaced(sources[file], scope, nodes, instead)

    def _definitions(self) -> list[tuple[Path, str]]:
        if not (found := _defined().get(self.function)):
            raise ValueError(f"mutant {self.name!r}: the package has no {self.function}")
        return found

    def test_ids(self) -> list[str]:
        """For pytest, below tests/. Raises ValueError if a test is missing, or one of several."""
        return [self._test_id(test) for test in self.tests.split()]

    def _test_id(self, test: str) -> str:
        file, _, name = test.partition("[")[0].rpartition("::")
        found = [path for path in _tests().get(name, ()) if not file or f"/{path}".endswith(f"/{file}.py")]
        if len(found) != 1:
            raise ValueError(f"mutant {self.name!r}: {len(found)} tests are called {test}")
        return f"{found[0]}::{test.rpartition('::')[2]}"


@functools.cache
def _defined() -> dict[str, list[tuple[Path, str]]]:
    """Name → (file, name in it), of all packages."""
    found: dict[str, list[tuple[Path, str]]] = {}
    for package in PACKAGES:
        for name, found_here in definitions(package).items():
            found.setdefault(name, []).extend((package / file, inside) for file, inside in found_here)
    return found


@functools.cache
def _tests() -> dict[str, list[str]]:
    """Name of a test → files below tests/."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name, []).append(path.relative_to(ROOT / "tests").as_posix())
    return found


ADAPTIVE = "test_adaptive_kl_by_hand"
AVERAGE = "test_the_moving_average_moves_once_in_every_iteration"
BATCHES = "test_batches_of_one_and_of_sixteen_say_the_same"
BEST_OF_N = "test_best_of::test_the_estimator_by_hand test_the_estimator_is_the_mean_over_all_subsets"
CACHE_KEY = "test_the_key_is_of_all_that_matters"
CHOOSE = "test_log_probs_are_those_of_the_whole_softmax"
CHOSEN = "test_chosen_has_the_strictly_higher_reward_at_the_last_scored_turn"
CUT_SAMPLES = "test_samples_of_a_prompt_are_cut_otherwise_and_the_first_as_an_only_one"
DEMO_SEED = "test_draws_follow_from_the_seed"
DPO = "test_loss_and_gradient_are_those_of_plain_torch[0.0-False-gemma]"
DRAWN_TURNS = "test_the_turns_are_uniform_and_follow_from_seed_and_number"
DRAWS = "test_every_response_is_drawn_with_a_seed_of_its_own"
EPOCHS = "test_every_epoch_takes_every_prompt_in_another_order"
ESTIMATORS = "test_kl_estimators_by_hand"
EVALUATION = "test_an_evaluation_is_the_mean_over_the_prompts"
FAMILY = "test_every_family_is_drawn_as_by_hand[gemma2]"
FIXED = "test_fixed_by_hand"
LASTS = "test_a_decoder_lasts_as_long_as_weights_stay_in_place"
LEFT = "test_what_a_row_left_in_its_slot_does_not_reach_the_next_one[Decoder]"
LAYOUTS = "models/test_side_by_side::test_layouts_that_differ_are_not_one"
NEIGHBOURS = "models/test_side_by_side::test_neighbours_of_one_input_are_one_product"
ONE_TOKEN = "rollouts/test_attention::test_one_token_by_hand"
STATIC_LEFT = "test_what_a_row_left_in_its_slot_does_not_reach_the_next_one[StaticDecoder]"
WAITS = "test_a_model_that_makes_the_host_wait_is_launched_as_before[nonzero]"
GAE = "test_gae_by_hand"
AHEAD = "test_a_run_stops_anywhere[ahead]"
GAP = "test_mean_and_largest_gap_of_the_response_tokens"
GRADIENTS = "test_values_and_gradients_are_those_of_the_full_logits"
IMPORTANCE = "test_the_weight_is_the_ratio_of_the_probabilities_up_to_the_clip"
KL = "test_the_kl_coefficient_of_each_iteration"
OTHER_RANKS = "test_weights_and_moments_that_other_ranks_wrote"
OF_OTHERS = "test_places_of_a_rank_are_taken_by_prompts_of_others"
OTHER_PIECES = "test_zero_3_goes_on_from_states_in_other_pieces"
KL_APART = "test_of_equal_scores_the_kl_penalty_is_all_that_is_left"
KL_NORMALISED = "test_the_kl_penalty_is_no_part_of_what_is_normalised"
LARGE_MODEL = "test_the_identity_of_a_large_model_sees_every_weight"
LATE = "test_weights_and_metrics_are_those_with_scoring_passes[0-flags5]"
LOGPROBS = "test_logprobs::test_by_hand"
METRICS = "test_rollout_metrics_by_hand"
MOMENTS = "test_moments_of_two_batches_by_hand"
MULTISET = "test_randomized_defaults_to_the_lengths_of_the_paper"
NORMALISED = "test_scores_are_normalised_before_the_penalty_and_clipping"
NO_PAIR = "test_without_a_pair_that_counts_loss_and_gradient_are_0"
ONE_STATE = "test_both_dialogues_of_a_pair_are_one_up_to_the_state"
OPTIMISERS = "test_actor_and_critic_have_optimisers_of_their_own"
PAIRS = "test_reward_losses::test_by_hand"
POLICY = "test_policy_loss_of_one_token_by_hand"
PPL = "test_ppl_by_hand"
PRESET_RESPONSES = "test_a_rollout_of_a_preset_holds_the_responses_of_an_update"
PROGRAMS = "test_rewards"
REASONS = "test_reasons_in_their_order"
VALUES = "test_values_are_means_of_completions_drawn_by_hand[2]"
COPIES = "test_completions_are_drawn_as_by_hand[Decoder-llama-16-8192]"
REFERENCE = "test_a_rollout_is_scored_by_the_reference_at_the_sampling_temperature"
REFUEL_FIT = "test_refuel_online::test_fit_writes_what_it_should"
REFUEL_LOSS = "test_the_loss_is_the_regression_on_the_replies_alone"
REFUEL_START = "test_at_the_start_the_log_ratios_are_0_and_the_loss_is_that_of_the_rewards"
REFUEL_TURNS = "test_the_turn_is_drawn_evenly_and_follows_from_seed_round_and_row_alone"
RESUME = "test_a_run_stops_anywhere[fixed] test_a_run_stops_anywhere[randomized] test_a_run_stops_anywhere[ahead]"
REWARD_CLIP = "test_clipping_clamps_the_score_and_not_the_penalty"
RLOO = "test_ragged_responses_by_hand[4-advantages2-0]"
RLOO_UNSCORED = "test_a_response_that_could_not_be_scored_is_no_baseline"
ROW_SEEDS = "test_row_seeds_do_not_collide"
RUN_ID = "test_a_run_that_goes_on_keeps_its_id"
RUN_SEED = "test_another_seed_of_the_run_draws_and_shuffles_otherwise"
SAME_BUCKETS = "test_buckets_do_not_depend_on_what_was_drawn_before"
SAMPLES = "test_samples_of_a_prompt_depend_on_nothing_else"
SCHEDULE = "test_schedule_and_warm_up_count_optimiser_updates"
SFT_COUNT = "test_the_loss_is_the_mean_over_the_tokens_of_the_whole_update"
SFT_EVALUATION = "test_evaluation_is_the_perplexity_over_tokens"
SHUFFLES = "test_every_iteration_is_shuffled_otherwise_and_alike_on_every_rank"
SIGMA = "test_sigma_of_five_tokens_by_hand"
SMOOTHED = "test_smoothed_targets_are_those_of_torchs_cross_entropy"
SPLIT = "test_losses_do_not_depend_on_how_rows_are_split"
STATES = "test_states_by_zero_stage"
SUPERVISED = "test_supervised_epochs_take_every_example_in_another_order"
SUPERVISED_OPTIMISERS = "test_flags_reach::test_steps_1_and_2"
TIE = "test_a_tie_is_wrong_and_a_margin_is_what_a_pair_must_win_by"
TOTAL = "test_the_updates_that_a_schedule_is_over"
EPISODE_IDS = "test_an_episode_is_the_ids_of_both_sides"
TURN_BASELINES = "test_baselines_by_turn_by_hand"
TURNS = "test_every_turn_of_the_assistant_is_trained_on_up_to_its_end"
WEIGHTS = "test_turns_of_weight_0_are_not_trained_on"
BEHIND_MESSAGES = "test_prompt_and_response_are_the_templates_text"
TURNS_LOSS = "test_the_loss_is_the_cross_entropy_over_these_tokens"
TWO_RANKS = "test_two_processes_make_the_updates_of_one"
UNIFORM = "test_uniform_numbers_are_the_upper_bits_of_splitmix64"
SAE = "test_sae_by_hand"
EVPO = "test_the_mean_baseline_by_hand"
GATE = "test_a_critic_that_explains_nothing_is_none"
GATE_OF_RANKS = "test_all_ranks_decide_together"
WARM_UP = "test_the_actor_stays_to_the_bit_and_moves_afterwards"
UPDATE = "test_losses_are_means_over_the_rows_of_their_update"
VALUE = "test_value_loss_of_one_token_by_hand"
WHITENING = "test_whitening_by_hand"
# fmt: off
MUTANTS = tuple(Mutant(*row) for row in (
    # macro_actions, for masks of any kind and other trainers
    ("a macro action spans a hole", "segment", "_a & _b | last_true(_b)", "_a & _b",
     "test_a_macro_action_never_spans_a_hole_whatever_the_ends_say"),
    ("weights count the holes", "value_weights", "_a.cumsum(1) - 1 - _b",
     "torch.arange(_a.shape[1], device=_a.device) - _b",
     "test_gae_follows_the_macro_actions_of_a_row_over_holes[position]"),
    ("a row's runs are cut alike at random", "conditions.randomized", "mix(_a + _b)", "_a",
     "test_random_lengths_of_a_second_run_are_other_ones_and_depend_on_the_rows_seed_alone"),
    ("few bits stay few", "pool_values", "torch.promote_types(_a, torch.float32)", "_a",
     "test_log_probabilities_of_few_bits_are_pooled_in_float32[mean]"),
    ("few bits of rewards stay few", "pool_rewards", "torch.promote_types(_a, torch.float32)", "_a",
     "test_log_probabilities_of_few_bits_are_pooled_in_float32[sum]"),
    ("numbers of few bits stay so in GAE", "gae", "torch.promote_types(_a, torch.float32)", "_a",
     "test_values_of_few_bits_are_computed_in_float32"),
    ("slime: a tool's answer costs KL", "slime.estimator", "_padded(_a) * _b", "_padded(_a)",
     "test_a_tools_answer_costs_no_kl_in_slime"),
    ("a score behind a tool's answer is lost", "MacroActionsConfig.gae", "_a.scatter_add(1, _b, _c)", "_c",
     "test_a_score_behind_a_tools_answer_is_that_of_the_policys_last_token"),
    ("other trainers: samples of a prompt are cut alike", "MacroActionsConfig._row_seeds", "_a.append(_b[_c])",
     "_a.append(0)", "test_a_uid_of_letters_cuts_the_same_in_every_process"),
    ("other trainers: every prompt is cut alike", "MacroActionsConfig._row_seeds", "_number(_a)", "0",
     "test_a_uid_of_letters_cuts_the_same_in_every_process"),
    ("slime: the KL is no penalty", "slime.estimator", "-_a.kl_coef * _b", "0 * _b",
     "test_slime_gets_what_step_3_computes[fixed-equal]"),
    ("OpenRLHF: tokens are one off", "openrlhf.experience_maker", "_a.sequences[:, 1:]", "_a.sequences[:, :-1]",
     "test_openrlhf_gets_what_step_3_computes[parsing-equal]"),
    ("completions that are kept take no random numbers", "SegmentValueCollector.measure", "set_random_states(_a)",
     "_a",
     "test_parts_that_are_done_are_not_drawn_again"),
    ("tokens that are left out are whitened along", "whiten_advantages",
     "masked_moments(_a.advantages, _b.policy_mask)", "masked_moments(_a.advantages, _b.response_mask)",
     "test_tokens_that_are_left_out_count_in_no_mean_and_deviation[batch]"),
    ("tokens that are left out count in their row", "normalise", "whiten_rows(_a.advantages, _b.policy_mask)",
     "whiten_rows(_a.advantages, _b.response_mask)",
     "test_tokens_that_are_left_out_count_in_no_mean_and_deviation[row]"),
    ("the scale of scores: a KL of zero excuses it", "scale_alarm", "max(_a, SMALLEST_KL)", "_a",
     "test_scores_without_a_scale_are_seen_in_the_first_rollout"),
    ("the scale of scores: normalised ones as they were given", "spread_of", "_a / _b", "_a",
     "test_normalised_scores_have_their_scale"),
    ("the spread of scores is their variance", "score_length_statistics",
     "ScoreLengthStatistics(math.sqrt(_a), _b)", "ScoreLengthStatistics(_a, _b)",
     "test_the_correlation_is_pearsons"),
    ("updates without a token are silent", "count_alarm", "_a.get(_b) != 0", "True",
     "test_each_alarm_is_one_line[counted]"),
    # data
    ("a folder in which a file grows is abandoned", "last_written", "(_a, *_a.rglob('*'))", "(_a,)",
     "test_a_folder_in_which_a_file_grows_is_not_abandoned"),
    ("templates read the clock of the machine", "TemplateClock.now", "_a.fromisoformat(template_date())",
     "_a.today()", "test_a_template_reads_the_date_of_the_run"),
    ("a run that goes on takes today's date", "begin_date", "_a or _b or _c", "_b or _c",
     "test_users_may_set_the_date_of_a_new_run"),
    ("instruction and input of Alpaca are one word", "alpaca_messages", "'\\n'.join(_a)", "''.join(_a)",
     "test_alpaca_is_read_as_a_conversation[raw0-said0-responses0]"),
    # rl
    ("gamma of the next value is forgotten", "gae", "_a + _b * _c - _d", "_a + _c - _d", GAE),
    ("GAE adds the value", "gae", "_a - _b", "_a + _b", GAE),
    ("GAE without lambda", "gae", "_a * _b * _c", "_a * _c", GAE),
    ("GAE decays by lambda alone", "gae", "_a * _b * _c", "_b * _c", GAE),
    ("a value after the last step", "gae", "torch.zeros_like(_a)", "_a.clone()",
     "test_gae_is_the_double_sum"),
    ("GAE runs forwards", "gae", "reversed(_a)", "_a", GAE),
    ("returns lack the value", "gae", "(_a, _a + _b)", "(_a, _a - _b)", GAE),
    ("RLOO: the baseline holds the score itself", "rloo", "_a.sum(1, keepdim=True) - _a", "_a.sum(1, keepdim=True)",
     RLOO),
    ("RLOO: the baseline is divided by all", "rloo", "_a.sum(1, keepdim=True) - 1", "_a.sum(1, keepdim=True)", RLOO),
    ("RLOO: no baseline", "rloo", "torch.where(_a, _b - _c, 0.0)", "torch.where(_a, _b, 0.0)", RLOO),
    ("RLOO: what does not count is a baseline of 0", "rloo", "_a.sum(1, keepdim=True) - 1",
     "torch.ones_like(_a).sum(1, keepdim=True) - 1", RLOO_UNSCORED),
    ("RLOO: rows that could not be scored count", "rloo_batch", "_a.any(1)", "torch.ones_like(_a[:, 0])",
     RLOO_UNSCORED),
    ("RLOO: the return is a mean over tokens", "rloo_batch", "_a.sum(1)", "_a.mean(1)", RLOO),
    ("RLOO: the return is the score alone", "rloo_batch", "_a.sum(1)", "trajectory.scores[:, None].sum(1)", RLOO),
    ("RLOO: advantages beyond the response", "rloo_batch", "torch.where(_a, _b, 0.0)", "_b.expand_as(_a)", RLOO),
    ("groups: rows that could not be scored count", "_group_batch", "_a.any(1)", "torch.ones_like(_a[:, 0])",
     "test_a_group_leaves_out_what_could_not_be_scored"),
    ("groups: the KL is compared", "_group_batch", "_compared_scores(_a, _b)", "rewards.sum(1)", KL_APART),
    ("groups: no KL", "_group_batch", "_a + response_penalty(_b, _c)", "_a", KL_APART),
    ("groups: a mean of the KL over tokens", "response_penalty", "_a.sum(1)", "_a.mean(1)", KL_APART),
    ("groups: the KL is a bonus", "response_penalty", "-_a * _b", "_a * _b", KL_APART),
    ("groups: scores as they were given", "_compared_scores", "_penalised_scores(_a, _b)", "_a.scores",
     "test_scores_are_compared_as_they_are_trained_on"),
    ("groups: scores beyond the bound", "_compared_scores", "_a.clamp(-_b, _b)", "_a",
     "test_scores_are_compared_as_they_are_trained_on"),
    ("TEMPO: the KL is compared", "tempo_batch", "_compared_scores(_a, _b)", "rewards.sum(1)", KL_APART),
    ("TEMPO: no KL", "tempo_batch", "_a + penalty[:, None]", "_a", KL_APART),
    ("normalised: the KL, too", "normalise", "_a - apart", "_a", KL_NORMALISED),
    ("normalised: the KL is lost", "normalise", "_a + torch.where(_b, apart, 0.0)", "_a", KL_NORMALISED),
    ("normalised: RLOO's KL is left out", "assign_credit", "config.advantages.needs.kl_apart and estimator is None",
     "True", "test_rloo_is_normalised_with_its_kl_penalty"),
    ("normalised: GRPO's KL, too", "assign_credit", "config.advantages.needs.kl_apart and estimator is None",
     "False", KL_NORMALISED),
    ("groups: samples of different prompts", "_by_group", "_a.unflatten(0, (-1, _b))",
     "_a.unflatten(0, (_b, -1)).transpose(0, 1)", "test_the_return_is_the_sum_of_the_token_rewards"),
    ("groups: advantages beyond the response", "_group_batch", "torch.where(_a, _b, 0.0)", "_b.expand_as(_a)",
     "test_a_group_leaves_out_what_could_not_be_scored"),
    ("Dr. GRPO: no baseline", "dr_grpo", "_a - _b", "_a", "test_dr_grpo_by_hand"),
    ("GRPO: no deviation", "grpo", "_a / _b", "_a", "test_grpo_by_hand"),
    ("GRPO: equal scores have advantages", "scale", "torch.where(_a, _b, _c)", "_c", "test_grpo_by_hand"),
    ("GRPO: the deviation of all, not of one less", "moments", "_a - 1", "_a", "test_grpo_by_hand"),
    ("GRPO: a variance for a deviation", "moments", "_a.sqrt()", "_a", "test_grpo_by_hand"),
    ("equal groups: what does not count is a score", "are_equal", "torch.where(_a, _b, torch.inf)", "_b",
     "test_equal_groups_are_those_of_one_score"),
    ("refilled: groups of equal scores take places", "groups.refilled", "(~_a).nonzero()", "_a.nonzero()",
     "test_places_of_equal_groups_by_hand"),
    ("refilled: places of groups that are of use", "groups.refilled", "_a.nonzero()  # 1", "(~_a).nonzero()",
     "test_places_of_equal_groups_by_hand"),
    ("refilled: prompts move to the right", "join", "max(_a) - _b", "0 * _b", "test_joined_rows_are_padded_by_hand"),
    ("refilled: a rank passes on what others have", "replace_prompts", "_a >= num_slots and _a % ranks == rank()",
     "_a >= num_slots", OF_OTHERS),
    ("refilled: what a rank keeps is passed on, too", "replace_prompts", "slot % ranks != group % ranks", "True",
     OF_OTHERS),
    ("refilled: places of another rank", "replace_prompts", "_a[rank() :: ranks]", "_a[: num_slots // ranks]",
     OF_OTHERS),
    ("refilled: another rank's numbers", "replace_prompts", "(group - num_slots) // ranks", "group - num_slots",
     OF_OTHERS),
    ("refilled: sums are of the first rows", "replace_prompts", "batch.stats.with_sums_of(_a)", "batch.stats",
     OF_OTHERS),
    ("refilled: the number of processes says which places", "groups.refilled", "_a[:count]  # 1", "_a",
     "test_places_of_equal_groups_by_hand"),
    ("refilled: no rank keeps what it has drawn", "groups.refilled", "range(ranks)", "range(0)",
     "test_places_of_equal_groups_by_hand"),
    ("refilled: prompts of the iteration are not the last", "further_examples", "sorted(_a, key=_b)", "_a",
     "test_further_examples_are_others_first"),
    ("refilled: every round draws alike", "RefillCollector._collect_further", "derive_seed(_a, _b)", "_a",
     "test_a_prompt_that_is_asked_twice_is_answered_anew"),
    ("refilled: draws of the iteration's own seeds", "RefillCollector._collect_further", "SeedKind.REFILL",
     "SeedKind.TRAINING",
     "test_places_are_taken_by_others"),
    ("TEMPO: prefixes of which some token is alike", "prefix_values", "_a.cumprod(2, **_b)", "_a.to(torch.uint8)",
     "test_the_value_of_a_prefix_by_hand"),
    ("TEMPO: a sum for a mean", "prefix_values", "_a / _b", "_a", "test_the_value_of_a_prefix_by_hand"),
    ("TEMPO: the value after twice", "tempo_batch", "_a - macro.lengths", "_a", "test_tempo_by_hand"),
    ("TEMPO: the difference alone", "tempo_batch", "response_advantages[:, None] + _a", "_a", "test_tempo_by_hand"),
    ("TEMPO: the difference is not scaled", "tempo_batch", "_a / _b", "_a", "test_tempo_by_hand"),
    ("REINFORCE++: no discount", "reinforce_batch", "_a.gamma", "1.0", "test_reinforce_pp_by_hand"),
    ("REINFORCE++: only the next reward", "_discounted_sums", "1.0", "0.0", "test_reinforce_pp_by_hand"),
    ("adaptive lambda: one too many", "adaptive_lam", "1 - 1 / _a", "1 - 2 / _a",
     "test_the_lambda_of_a_response_by_hand"),
    ("adaptive lambda: below 0", "adaptive_lam", "_a.clamp(min=0)", "_a", "test_the_lambda_of_a_response_by_hand"),
    ("VAPO: the policy's lambda for the critic", "gae_batch", "_a.lam_critic  # 2", "_a.lam", "test_vapo_by_hand"),
    ("VAPO: lambda of tokens", "_policy_lam", "_a.mask.sum(1)", "_a.lengths.sum(1)",
     "test_a_lambda_by_length_counts_macro_actions"),
    ("SAE: the macro action's value as baseline", "sae_batch", "_a - earlier_rewards - values",
     "_a - earlier_rewards - to_tokens(macro_values, macro)", SAE),
    ("SAE: earlier rewards count", "sae_batch", "rewards_before - before_macro_action",
     "torch.zeros_like(rewards_before)", SAE),
    ("SAE: rewards before the macro action are left out", "sae_batch", "rewards_before - before_macro_action",
     "rewards_before", "test_sae_is_the_recursion_over_tokens"),
    ("SAE: the token's own reward is an earlier one", "sae_batch", "_a.cumsum(1) - _a", "_a.cumsum(1)", SAE),
    ("SAE: the mean value at a segment's beginning", "sae_batch", "pool_values(values, _a, 'first')",
     "pool_values(values, _a, 'equal')", "test_sae_is_the_recursion_over_tokens"),
    ("SAE: the policy's lambda for the critic", "sae_batch", "_a if _b is None else _c", "_a",
     "test_the_critic_of_sae_has_a_lambda_of_its_own"),
    ("EVPO: the baseline is added", "with_mean_baseline", "_a - _b", "_a + _b", EVPO),
    ("EVPO: no discount", "critic_targets", "_a.gamma", "1.0", EVPO),
    ("EVPO: the gate is open at 0", "CriticGate.is_open", "_a > 0", "_a >= 0",
     "test_returns_that_are_all_the_same_shut_the_gate"),
    ("EVPO: the gate is never shut", "assign_credit", "not _a.is_open", "False", GATE),
    ("EVPO: the mean of this rank", "critic_gate", "_sum_over_ranks(_a)", "_a", GATE_OF_RANKS),
    ("EVPO: GAE's returns are explained", "critic_gate", "critic_targets(_a, _b)",
     "(_a.trajectory.values, _a.returns)", GATE),
    ("EVPO: credit by micro-batch", "PPOConfig.credit_is_fused", "_a.group or _b.gates_critic or _c", "_a.group or _c",
     "test_a_run_logs_the_gate"),
    ("length penalty: of all tokens", "penalise_length", "_a.clamp(0, 1)", "_a.clamp(max=1)",
     "test_the_penalty_of_length_by_hand"),
    ("length penalty: from the end on", "penalise_length", "_a - _b  # 3", "_a",
     "test_the_penalty_of_length_by_hand"),
    ("KL in the loss: a mean of the part", "kl_loss", "_a.sum() / _b", "_a.mean()", "test_losses_are_trls"),
    ("KL in the loss: weights are ignored", "kl_loss", "_a * _b", "_b", "test_losses_are_trls"),
    ("means of a loss: responses weigh by their length", "loss_weights", "_a == 'response'", "False",
     "test_means_of_a_loss_by_hand"),
    ("means of a loss: what is not counted has a length", "loss_weights", "_a.sum(1, keepdim=True)",
     "torch.ones_like(_a).sum(1, keepdim=True)", "test_means_of_a_loss_by_hand"),
    ("means of a loss: macro actions without a token that counts", "loss_count", "_a > 0", "_a >= 0",
     "test_means_of_a_loss_by_hand"),
    ("means of a loss: responses without a token that counts", "loss_count", "_a.any(1)", "_a.any(1).logical_not()",
     "test_means_of_a_loss_by_hand"),
    ("ratio of a response: no mean", "sequence_logprobs", "_a / _b", "_a",
     "test_the_ratio_of_a_response_is_that_of_one_macro_action"),
    ("the upper clip range is the lower", "policy_loss", "1 + cliprange_high", "1 + cliprange",
     "test_the_clip_range_above_1_is_its_own"),
    ("surprise: likely tokens", "conditions.surprise", "_a.float() < _b", "_a.float() > _b", "test_surprise_by_hand"),
    ("surprise: the token ends one", "_ends_before", "begins[:, 1:]", "begins[:, :-1]", "test_surprise_by_hand"),
    ("unlikely tokens of another run count", "_count_in_run", "_a - _b", "_a",
     "test_every_run_of_a_mask_is_cut_as_a_response_of_its_own[surprise]"),
    ("a run begins in the middle of another", "_run_numbers", "~mask[:, :-1]", "mask[:, :-1]",
     "test_random_lengths_of_a_run_follow_from_its_number_wherever_it_is"),
    ("ppl: the mean goes on over a hole", "_rises_above_mean", "begins | _a", "begins",
     "test_every_run_of_a_mask_is_cut_as_a_response_of_its_own[ppl-chunk]"),
    ("ppl prefix: the mean begins anew", "_rises_above_mean", "_a if restart else _b", "_a",
     "test_ppl_looks_at_the_reference[prefix]"),
    ("an end in a hole", "_ends_before", "_a & mask[:, :-1]", "_a",
     "test_every_run_of_a_mask_is_cut_as_a_response_of_its_own[isolated]"),
    ("lengths count the holes", "_ends_after", "mask.cumsum(1)",
     "torch.arange(1, width + 1, device=mask.device).expand(num_rows, -1)", "test_given_lengths_count_over_holes"),
    ("joined over a hole", "at_most", "_a & (_b | _c)", "_a & _c",
     "test_at_most_joins_neighbours_but_never_over_a_hole"),
    ("equal groups stay", "tokens_that_count", "_a & ~_b", "_a", "test_tokens_that_count_by_hand"),
    ("likely tokens count alone", "tokens_that_count", "_a <= _b", "_a > _b", "test_tokens_that_count_by_hand"),
    ("KL in the loss and in the rewards", "assign_credit", "_a if _b == 'reward' else 0.0", "_a",
     "test_an_update_is_plain_grpo"),
    ("KL in the loss: no coefficient", "_actor_step", "_a + kl_coef * _b", "_a + _b",
     "test_an_update_is_plain_grpo"),
    ("a token of a sentence belongs to the one before", "UnitCondition._lengths", "bisect_right(_a, _b)",
     "bisect_right(_a, _b - 1)", "test_units_of_the_text"),
    ("logits times the temperature", "_softmax", "_a.div_", "_a.mul_", LOGPROBS),
    ("log-probs are not normalised", "softmax_in_place", "_a - _b.log()", "_a", LOGPROBS),
    ("entropy's sign", "softmax_in_place", "_a - _b / _c", "_a + _b / _c", LOGPROBS),
    ("entropy is not normalised", "softmax_in_place", "_a / _b", "_a", LOGPROBS),
    ("softmax is not normalised", "softmax_in_place", "torch.div(_a, _b, out=_c)", "_c.copy_(_a)", GRADIENTS),
    ("smoothing: the mean is left out", "softmax_in_place", "smoothing * _b", "0 * _b", SMOOTHED),
    ("the gradient without the temperature", "_TokenLogprobs.backward", "_a / _b.temperature", "_a", GRADIENTS),
    ("the gradient without the token drawn", "gradient_in_place", "1 - _a", "0", GRADIENTS),
    ("the gradient's sign", "gradient_in_place", "-_a", "_a", GRADIENTS),
    ("only the last chunk's gradient of the head", "_TokenLogprobs.backward",
     "_a.add_(_b)", "_a.copy_(_b)", GRADIENTS),
    ("the head's gradient is added up in half precision", "_TokenLogprobs.backward", "torch.zeros_like(_a, dtype=_b)",
     "torch.zeros_like(_a)", "test_the_heads_gradient_is_added_up_in_float32"),
    ("smoothing: its gradient is left out", "gradient_in_place", "_a.add_(_b, alpha=_c)", "pass", SMOOTHED),
    ("few positions to a chunk on a GPU", "chunk_positions", "max(GPU_POSITIONS, _a)", "_a",
     "test_a_chunk_holds_512_positions_at_least_on_a_gpu"),
    ("the ratio is no exponential", "policy_loss", "_a.exp()", "1 + _a", POLICY),
    ("policy: no lower clip", "policy_loss", "_a.clamp(_b, _c)", "_a.clamp(max=_c)", POLICY),
    ("policy: no upper clip", "policy_loss", "_a.clamp(_b, _c)", "_a.clamp(min=_b)", POLICY),
    ("policy: sign", "policy_loss", "-_a  # 1", "_a", POLICY),
    ("policy: the better branch", "policy_loss", "torch.maximum", "torch.minimum", POLICY),
    ("policy: mean of the part", "policy_loss", "_a = _b.sum() / _c", "_a = _b.mean()", SPLIT),
    ("policy: weights are ignored", "policy_loss", "torch.where(_a, weights, 0.0)", "response_mask.float()",
     "test_macro_ratios_have_their_closed_form"),
    ("approxkl without its half", "policy_loss", "_a / 2", "_a",
     "test_approxkl_is_half_the_mean_square_for_small_steps"),
    ("policy: share that is not clipped", "policy_loss", "_a > _b", "_a < _b",
     "test_several_updates_until_the_clip_binds"),
    ("mean ratio ignores weights", "policy_loss", "_a * _b  # 6", "_b", "test_macro_statistics_count_macro_actions"),
    ("value: no half", "value_loss", "_a / 2", "_a", VALUE),
    ("value: the better branch", "value_loss", "torch.maximum(_a, _b).sum", "torch.minimum(_a, _b).sum", VALUE),
    ("value: no upper clip", "value_loss", "torch.minimum(_a, _b)", "_a", VALUE),
    ("value: no lower clip", "value_loss", "torch.maximum(clipped_values, _a)",
     "clipped_values", "test_clipped_losses_are_the_scalar_rules[value]"),
    ("value: clipped around the return", "value_loss", "_a + _b", "returns + _b", VALUE),
    ("value: mean of the part", "value_loss", "_a.sum() / 2 / _b", "_a.mean() / 2", SPLIT),
    ("value: share that is not clipped", "value_loss", "_a > _b", "_a < _b", VALUE),
    ("SFT: sign", "sft_loss", "-_a", "_a", "test_sft_loss_is_the_mean_negative_logprob"),
    ("SFT: divided by all positions", "sft_loss", "_a.sum()  # 2", "_a.mean() * num_tokens",
     "test_sft_loss_is_the_mean_negative_logprob"),
    ("DPO: the label is smoothed twice", "dpo_loss", "1 - _a", "1 - 2 * _a", "test_dpo_loss_is_that_of_trl"),
    ("DPO: a tie counts as right", "dpo_loss", "_a > 0", "_a >= 0", "test_dpo_of_an_untrained_policy_is_log_2"),
    ("DPO: the rejected ones without beta", "dpo_loss", "_a * _b.sum()  # 2", "_b.sum()",
     "test_dpo_loss_is_that_of_trl"),
    ("DPO: beta on one side", "dpo_loss", "_a * (_b - _c)", "_a * _b - _c", "test_dpo_loss_is_that_of_trl"),
    ("DPO: mean of the part", "dpo_loss", "(_a.sum() / _b, _c)", "(_a.mean(), _c)",
     "test_preference_losses_are_divided_by_the_count_of_the_whole_update"),
    ("sigma equal: not divided", "value_weights", "_a = 1 / _b.double()", "_a = 1 / _b.double() ** 0", SIGMA),
    ("sigma unit: the first token", "value_weights", "i == m - 1", "i == 0", SIGMA),
    ("sigma first: the last token", "value_weights", "i == 0", "i == m - 1", SIGMA),
    ("sigma position: early tokens weigh more", "value_weights", "(_a - _b).clamp", "(_b + 1).clamp", SIGMA),
    ("sigma position: not harmonic", "value_weights", "_a[_b - 1]", "_b", SIGMA),
    ("every token gets the first action's number", "to_tokens", "torch.where(_a, _b, _c)", "torch.where(_a, 0, _c)",
     "test_to_tokens_broadcasts"),
    ("an action starts at its end", "segment", "_a[:, 1:] = _b[:, :-1]", "_a[:, :] = _b", "test_segment_by_hand"),
    ("rewards: mean for sum", "pool_rewards", "_a == 'mean'", "_a != 'mean'", "test_pool_rewards_sums"),
    ("long actions weigh more", "loss_weights", "_a / _b.clamp(min=1)", "_a",
     "test_weights_of_macro_actions_are_one_over_length"),
    ("macro ratio: sum and mean exchanged", "macro_logprobs", "'mean' if _a else 'sum'", "'sum' if _a else 'mean'",
     "test_macro_logprobs_gradient_by_hand"),
    ("whitening rows: over all positions", "whiten_rows", "_a - _b", "_a - _a.mean(1, keepdim=True)",
     "test_whitening_rows_by_hand"),
    ("whitening rows: variance of all positions", "whiten_rows", "_a = _b.sum(1, keepdim=True) / _c  # 2",
     "_a = _b.mean(1, keepdim=True)", "test_whitening_rows_by_hand"),
    ("whitening: variance over n - 1", "whiten", "_a / _b - _c", "_a / (_b - 1) - _c", WHITENING),
    ("whitening: mean over n - 1", "whiten", "_a = _b / _c", "_a = _b / (_c - 1)", WHITENING),
    ("whitening: mean stays", "whiten", "(_a - _b) * _c", "_a * _c", WHITENING),
    ("whitening: divided by the variance", "whiten", "torch.rsqrt", "torch.reciprocal", WHITENING),
    ("the first for the last position", "last_true", "_a[:, :-1] = _b[:, 1:]", "_a[:, 1:] = _b[:, :-1]",
     "test_the_last_position_of_each_row"),
    ("square of the sum", "masked_moments", "_a.square().sum", "_a.sum().square",
     "test_masked_moments_are_count_sum_and_sum_of_squares"),
    ("tokens get returns as advantages", "gae_batch",
     "PPOBatch(**_a, advantages=to_tokens(_b, _c), returns=to_tokens(_d, _c))",
     "PPOBatch(**_a, advantages=to_tokens(_d, _c), returns=to_tokens(_d, _c))", "test_one_row_by_hand"),
    ("tokens get advantages as returns", "gae_batch",
     "PPOBatch(**_a, advantages=to_tokens(_b, _c), returns=to_tokens(_d, _c))",
     "PPOBatch(**_a, advantages=to_tokens(_b, _c), returns=to_tokens(_b, _c))", "test_one_row_by_hand"),
    ("values are not pooled by sigma", "gae_batch", "pool_values(_a, _b, _c)", "pool_values(_a, _b)",
     "test_credit_flags[value_function]"),
    ("macro rewards are always sums", "gae_batch", "pool_rewards(_a, _b, _c, _d)", "pool_rewards(_a, _b)",
     "test_credit_flags[macro_reward]"),
    ("scores without the penalty", "penalised", "penalise_missing_eos(_a, *_b)", "_a",
     "test_credit_flags[missing_eos_penalty]"),
    ("gamma and lambda exchanged", "gae_batch", "gae(_a, _b, _c, _d, _e)  # 1", "gae(_a, _b, _c, _e, _d)",
     "test_credit_flags[gamma]"),
    ("KL sign", "token_rewards", "-_a * _b", "_a * _b", "test_token_rewards_by_hand"),
    ("score on every token", "token_rewards", "last_of_row(_a)", "_a", "test_token_rewards_by_hand"),
    ("scores: no lower clip", "token_rewards", "_a.clamp(_b, _c)", "_a.clamp(max=_c)", REWARD_CLIP),
    ("scores: no upper clip", "token_rewards", "_a.clamp(_b, _c)", "_a.clamp(min=_b)", REWARD_CLIP),
    ("log-ratio reversed", "kl_estimate", "_a = _b - _c", "_a = _c - _b", ESTIMATORS),
    ("k1 is not signed", "kl_estimate", "if _a == 'k1': return _b", "if _a == 'k1': return _b.abs()", ESTIMATORS),
    ("k2 without its half", "kl_estimate", "_a / 2", "_a", ESTIMATORS),
    ("k3 reversed", "kl_estimate", "_a + _b", "torch.exp(_b) - 1 - _b", ESTIMATORS),
    ("KL target and horizon exchanged", "kl_controller", "AdaptiveKL(_a, _b, _c)", "AdaptiveKL(_a, _c, _b)", KL),
    ("moments: the batch's share of the mean", "ScoreMoments.merged", "_a.mean + _b * _c / _d",
     "_a.mean + _b * _a.count / _d", MOMENTS),
    ("moments: nothing between batches", "ScoreMoments.merged", "_a + _b + _c", "_a + _b", MOMENTS),
    ("moments: n - 1", "ScoreMoments.deviation", "_a / _b", "_a / (_b - 1)", MOMENTS),
    ("moments: the mean stays", "ScoreMoments.normalised", "_a - _b", "_a", MOMENTS),
    ("missing EOS: a bonus", "penalise_missing_eos", "_a - _b", "_a + _b", "test_a_missing_eos_costs_the_penalty"),
    ("missing EOS: finished ones pay", "penalise_missing_eos", "torch.where(_a, *_b)", "torch.where(~_a, *_b)",
     "test_a_missing_eos_costs_the_penalty"),
    ("adaptive KL: sign", "AdaptiveKL.update", "_a - 1", "1 - _a", ADAPTIVE),
    ("adaptive KL: no upper limit", "AdaptiveKL.update", "min(_a, 0.2)", "min(_a, 2.0)", ADAPTIVE),
    ("adaptive KL: no lower limit", "AdaptiveKL.update", "-0.2", "-2.0", ADAPTIVE),
    ("adaptive KL: samples are not counted", "AdaptiveKL.update", "_a * _b / _c", "_a / _c", ADAPTIVE),
    ("adaptive KL: added, not multiplied", "AdaptiveKL.update", "self.value * _a", "self.value + _a - 1", ADAPTIVE),
    ("fixed: ends one token late", "conditions.fixed", "_a == 0", "_a == 1", FIXED),
    ("fixed: the remainder does not end", "conditions.fixed", "_a | _b", "_a", FIXED),
    ("fixed: positions go on from run to run", "conditions.fixed", "_count_in_run(_a, _a)", "_a.cumsum(1)",
     "test_every_run_of_a_mask_is_cut_as_a_response_of_its_own[fixed]"),
    ("randomized: the rest does not end", "_ends_after", "_a | _b", "_a",
     "test_randomized_consumes_a_permutation_of_the_multiset"),
    ("lengths are no running sums", "_ends_after", "lengths.cumsum(1)", "lengths", MULTISET),
    ("randomized: lengths are not repeated", "conditions.randomized", "list(_a) * _b", "list(_a)", MULTISET),
    ("randomized: no shuffle", "conditions.randomized", "multiset[order]", "multiset.expand_as(order)",
     "test_randomized_draws_every_order_equally_often"),
    ("randomized: with replacement", "conditions.randomized", "_a.argsort(dim=1, stable=True)", "_a % len(multiset)",
     MULTISET),
    ("samples of a prompt are cut alike", "make_row_seeds", "torch.where(_a, _b, _c)", "torch.where(_a, _b, _b)",
     CUT_SAMPLES),
    ("a first sample is not cut as an only one", "make_row_seeds", "_a == 0", "_a < 0", CUT_SAMPLES),
    ("row seeds ignore the epoch", "make_row_seeds", "[_a, _b]", "[_a, 0]", ROW_SEEDS),
    ("row seeds ignore the seed", "make_row_seeds", "[_a, _b]", "[0, _b]", ROW_SEEDS),
    ("row seeds ignore the prompt", "make_row_seeds", "_a.long() + 1", "0 * _a.long()", ROW_SEEDS),
    ("ppl token: a tie cuts", "conditions.ppl", "_a[:, 1:] > _b", "_a[:, 1:] >= _b", PPL),
    ("ppl: sum for mean", "_rises_above_mean", "_a * _b", "_a", PPL),
    ("ppl: likelihood for surprise", "conditions.ppl", "torch.where(_a, -_b, _c)", "torch.where(_a, _b, _c)", PPL),
    ("ppl: cuts one token late", "_ends_before", "_a[:, :-1] = _b", "_a[:, 1:] = _b", PPL),
    ("ppl: chunk is prefix", "conditions.ppl", "mode == 'chunk'", "False", PPL),
    ("ppl: prefix is chunk", "conditions.ppl", "mode == 'chunk'", "True", PPL),
    ("ppl: the sum goes on", "_rises_above_mean", "torch.where(_a, _b, _c + _b)", "_c + _b", PPL),
    ("ppl: the count goes on", "_rises_above_mean", "torch.where(_a, 1.0, _b)", "_b", PPL),
    ("isolating joins what was cut", "isolate_last_token", "_a | _b", "_b",
     "test_isolate_last_token_by_hand"),
    ("importance weights inverted", "importance_weights", "_a - _b", "_b - _a", IMPORTANCE),
    ("importance weights are not cut", "importance_weights", "_a.clamp(max=_b)", "_a", IMPORTANCE),
    ("pairs: sign", "_costs", "chosen - rejected", "rejected - chosen", PAIRS),
    ("pairs: no logarithm", "_costs", "F.logsigmoid", "torch.sigmoid", PAIRS),
    ("the margin is added", "_costs", "difference - margins", "difference + margins", TIE),
    ("pairs: mean of the part", "reward_loss", "(_a.sum() / _b, _c)", "(_a.mean(), _c)",
     "test_the_gradient_does_not_depend_on_how_pairs_are_split[end] "
     "test_the_gradient_does_not_depend_on_how_pairs_are_split[per_sample]"),
    ("pairs: a tie counts as right", "reward_loss", "scores > other_scores", "scores >= other_scores", TIE),
    ("pairs: a tie at the end counts as right", "reward_loss", "_a['end_accuracy'] = _b > _c",
     "_a['end_accuracy'] = _b >= _c", "test_a_new_head_ranks_nothing"),
    ("centring: of the difference", "reward_loss", "scores + other_scores", "scores - other_scores",
     "test_centring_pulls_the_sum_of_a_pair_to_0_and_leaves_the_difference_alone"),
    ("last_token: the last one", "reward_loss", "kind in BEFORE_END  # 1", "False", PAIRS),
    ("equal pairs count", "reward_loss", "counted = differ", "pass", NO_PAIR),
    ("no pair counts: 0 / 0", "reward_loss", "torch.where(_a, _b, 1)", "_b", NO_PAIR),
    ("the end of one sequence is no difference", "first_difference", "_a.mask != _b", "False",
     "test_the_losses_are_those_of_plain_python"),
    ("average: with the last token", "_mean_before", "_a <= _b", "_a <= ends[:, None]", PAIRS),
    ("average: the prompt, too", "_mean_before", "_a >= _b", "_a >= 0", PAIRS),
    ("per_sample: the prompt, too", "_mean_over_tokens", "_a >= _b", "_a >= 0", PAIRS),
    ("per_sample: to the shorter end", "_mean_over_tokens", "_a | _b", "_a & _b", PAIRS),
    ("per_sample: sum over tokens", "_mean_over_tokens", "_a / _b", "_a", PAIRS),
    ("per_sample: the number at padding", "_mean_over_tokens", "chosen.gather(1, until_end)", "chosen",
     PAIRS),
    ("refuel: the penalty for those that ended", "reply_rewards", "_a.where(_b, _c)", "_a.where(~_b, _c)",
     "test_reply_rewards_by_hand"),
    ("refuel: the KL is a reward", "reply_rewards", "_a - _b", "_a + _b", "test_reply_rewards_by_hand"),
    ("refuel: the difference of a pair is turned", "PairBatch.reward_differences", "_a - _b", "_b - _a",
     "test_the_kl_and_the_difference_of_a_pair"),
    ("refuel: the KL is turned", "PairBatch.kl", "_a - _b", "_b - _a", "test_the_kl_and_the_difference_of_a_pair"),
    ("an unscored response is trained on", "without_responses", "_a.response_mask & _b", "_a.response_mask",
     "test_a_response_that_could_not_be_scored_is_not_trained_on"),
    # episodes of several turns
    ("an episode: the score in every turn", "last_of_row", "_a & (_b == 1)", "last_true(_a)",
     "test_the_last_token_and_the_width_of_a_row_with_holes"),
    ("an episode: its width without holes", "widths", "_a.amax(1)", "mask.sum(1)",
     "test_the_last_token_and_the_width_of_a_row_with_holes"),
    ("an episode: the length penalty without holes", "_penalised_scores", "widths(_a)", "_a.sum(1)",
     "test_the_length_penalty_counts_the_environments_tokens"),
    ("an episode: cut turns cost nothing", "_penalised_scores", "_a - _b * _c.sum(1)", "_a",
     "test_a_missing_end_is_punished_in_its_turn"),
    ("an episode: one penalty for all cut turns", "_penalised_scores", "_a.sum(1)", "_a.any(1)",
     "test_a_missing_end_is_punished_in_its_turn"),
    ("an episode: not done is a missing EOS", "_penalised_scores", "torch.ones_like(_a)", "_a",
     "test_a_missing_end_is_punished_in_its_turn"),
    ("an episode: the penalty of a turn at the end", "_token_rewards", "torch.where(_a, _b - _c, _b)", "_b",
     "test_a_missing_end_is_punished_in_its_turn"),
    ("turns: the baseline holds the return itself", "rloo_turns", "_a.sum(1, keepdim=True) - _a",
     "_a.sum(1, keepdim=True)", TURN_BASELINES),
    ("turns: the baseline is divided by all", "rloo_turns", "_a.sum(1, keepdim=True) - _a.long()",
     "_a.sum(1, keepdim=True)", TURN_BASELINES),
    ("turns: no baseline where no other response reached the turn", "rloo_turns", "torch.where(_a, _b, _c)  # 2",
     "torch.where(_a, _b, 0.0)", TURN_BASELINES),
    ("turns: no baseline", "rloo_turns", "_a - _b  # 3", "_a", TURN_BASELINES),
    ("turns: rewards without those to come", "rloo_turns_batch", "_discounted_sums(_a, _b, _c)", "_a",
     "test_the_estimator_puts_returns_from_turns_on_their_tokens"),
    ("turns: no discount", "rloo_turns_batch", "_discounted_sums(_a, _b, _c)", "_discounted_sums(_a, _b, 1.0)",
     "test_the_estimator_puts_returns_from_turns_on_their_tokens"),
    ("holes: an environment's tokens are trained on", "lay_out", "~_a[_b][_c, _d]", "_a[_b][_c, _d] | True",
     "test_a_forward_pass_reads_all_and_predicts_the_policys_tokens_alone"),
    ("holes: counted as sampled", "Lengths.sampled", "_a.responses - _b", "_a.responses",
     "test_lengths_tell_prompts_episodes_and_sampled_tokens_apart"),
    ("holes: part of the prompt", "Lengths.of", "_a.sum(1) - _b", "_a.sum(1) - rollout.response_mask.sum(1)",
     "test_lengths_tell_prompts_episodes_and_sampled_tokens_apart"),
    ("holes: inside 4-grams", "repeated_4grams", "_a[:, 2:] & _b", "mask[:, 3:]",
     "test_4grams_do_not_span_an_environments_tokens"),
    ("holes: the table of tokens ends early", "token_table", "int(widths(_a))", "int(_a.sum())",
     "test_the_token_table_shows_both_sides"),
    ("holes: units of a text across turns", "_runs_of", "enumerate(_a.response_runs())",
     "enumerate([[row] for row in _a.response_rows()])", "test_conditions_read_each_turn_as_a_text"),
    ("turns: a condition of single responses", "termination.turn", "last_true(_a)", "_a",
     "test_masks_with_holes::test_a_macro_action_never_spans_a_hole[turn]"),
    ("episodes: an environment's tokens count as sampled", "Episode.append_observation", "[False] * _a", "[True] * _a",
     EPISODE_IDS),
    ("episodes: every turn has the first one's seed", "EpisodePlayer._sample_replies",
     "row_seed(_a, _b) if _b else _a", "_a", EPISODE_IDS),
    ("episodes: a reply's end is written twice", "ConversationEncoder.following", "_a and self._end.written", "False",
     EPISODE_IDS),
    ("episodes: the end of a cut reply is missing", "ConversationEncoder.following", "_a and self._end.written",
     "self._end.written", "test_a_cut_reply_is_followed_by_the_end_of_its_turn"),
    ("episodes: the budget without the environment's tokens", "EpisodePlayer._budget", "len(_a.ids)",
     "sum(_a.sampled)", "test_the_budget_of_an_episode_counts_the_environments_tokens"),
    ("episodes: environments of a prompt begin differently", "EpisodeSampler.sample",
     "environment_seed(_a, _b, _c, _d)", "requested.seeds[len(environment_seeds)]",
     "test_episodes_of_a_prompt_begin_alike"),
    ("episodes: the reward on the turn's first token", "EpisodeSampler._texts_of", "_a[_b, _c] = _d",
     "_a[_b, 0] += _d", "test_the_batch_of_an_episode"),
    ("episodes: a failure has a score", "EnvironmentScores.__call__", "torch.where(_a, torch.nan, _b)", "_b",
     "test_all_environments_fail"),
    ("episodes: metrics count rows that are answered twice", "evaluate_responses", "replace(_a, counted=_b)", "_a",
     "test_an_episode_that_is_answered_twice_is_in_no_metric"),
    ("episodes: the environment's metrics are of all rows", "EnvironmentScores.__call__", "_a & ~_b.failed",
     "~_b.failed", "test_metrics_of_episodes_are_of_the_rows_that_count"),
    ("episodes: scores follow the number of turns", "rollout_metrics", "_a.sum(1) / _b", "_a.sum(1)",
     "test_scores_are_compared_with_the_lengths_of_replies"),
    ("episodes: all of it is the program", "ProgramScores.__call__", "_a.last_replies", "_a.responses",
     "test_the_program_of_an_episode_is_in_its_last_reply"),
    ("episodes: a rank that sampled nothing goes on alone", "agreed_source", "gather_objects(_a)", "[_a]",
     "test_log_probs_are_those_that_the_engine_of_any_rank_reports"),
    ("episodes: finished though its last reply was cut", "Episode.finished", "not _a.cut[-1]", "True",
     "test_an_episode_whose_last_reply_is_cut_is_not_finished"),
    ("simulated user: the last reply is answered", "SimulatedDialogue.step", "_a == self._max_turns",
     "_a > self._max_turns", "test_a_function_answers_until_the_last_turn"),
    ("simulated user: one seed for all rows", "SimulatedDialogue.step", "[self._seed]", "[0]",
     "test_a_server_is_asked_with_the_seed_of_the_row"),
    ("simulated user: the last answer to a question stays", "writing_once", "os.link(_a, _b)", "os.replace(_a, _b)",
     "test_the_first_answer_to_a_question_stays"),
    ("simulated user: a dialogue whose user failed has a score", "combine_sources",
     'weighted.append(Weighted("", 1.0, _a))', "pass", "test_a_user_that_fails_is_left_out_and_counted"),
    ("simulated user: a preview has other seeds than training", "begin_episodes", "environment_seed(_a, _b, 0, _c)",
     "environment_seed(_a, _b, 1, _c)", "test_the_messages_of_reset_are_shown"),
    # models
    ("a base of one's own", "classifier_beside", "{_a: _b for _b in _c}", "{}",
     "test_updates_are_those_of_separate_models"),
    ("a new reward head has another variance", "draw_head", "math.sqrt(_a + 1)", "(_a + 1)",
     "test_a_new_reward_head_has_the_published_variance"),
    ("a new reward head is drawn without its seed", "draw_head", "torch.Generator().manual_seed(_a)",
     "torch.Generator()", "test_the_seed_alone_decides_a_new_reward_head"),
    ("a reward model starts at zero", "build_reward_model", "_a(_b, _c, _d, _e, load_options=_f, head_seed=_g)",
     "_a(_b, _c, _d, _e, load_options=_f)", "test_the_seed_decides_how_a_reward_model_starts"),
    ("the head of a new classifier is random", "classifier_beside", "zero_head(_a)", "pass",
     "test_the_classifier_is_that_of_transformers[llama]"),
    ("the adapter is not loaded", "load_adapter", "_a.copy_(_b)", "pass",
     "test_a_saved_adapter_gives_the_same_numbers"),
    ("values of the state after the token", "Layout.before", "_a - 1", "_a", "test_a_layout_by_hand"),
    ("the score before the last token", "lay_out", "totals - 1", "totals - 2", "test_a_layout_by_hand"),
    ("groups of any size", "_best_cuts", "_a & (area <= budget)", "_a",
     "test_no_group_is_larger_than_the_longest_rows_allow"),
    ("groups by tokens: of any number of rows", "_best_cuts", "_a & (row_counts <= max_rows)", "_a",
     "test_groups_by_tokens_are_the_fewest_with_little_padding[0] "
     "test_groups_by_tokens_are_the_fewest_with_little_padding[1] "
     "test_groups_by_tokens_are_the_fewest_with_little_padding[2]"),
    ("groups by tokens: any padding", "_best_cuts", "1 - padding", "0.1", "test_groups_by_tokens_of_ragged_rollouts"),
    ("groups by tokens: as many as this process needs", "group_by_length", "agree(_a)", "_a",
     "test_a_process_makes_as_many_groups_as_another_needs"),
    ("passes without gradients are no larger", "PassSize.without_gradient", "WITHOUT_GRADIENT * _a.tokens",
     "_a.tokens", "test_passes_without_gradients_hold_four_times_as_much_where_tokens_count"),
    ("an update by tokens ends with its last micro-batch but one", "Engine.backward", "_a == 1", "_a == 2",
     "test_the_same_numbers_in_passes_of_so_many_tokens[rloo]"),
    ("a pair counts as one sequence", "Supervised._micro_batches", "_a * np.array(_b)", "np.array(_b)",
     "test_the_same_numbers_in_passes_of_so_many_tokens[reward]"),
    ("groups that cost their rows alone", "_best_cuts", "row_counts * _a", "row_counts * 1",
     "test_groups_have_the_least_padding_of_all_cuts[0] "
     "test_groups_have_the_least_padding_of_all_cuts[1] "
     "test_groups_have_the_least_padding_of_all_cuts[2] "
     "test_groups_have_the_least_padding_of_all_cuts[3] "
     "test_groups_have_the_least_padding_of_all_cuts[4]"),
    ("packing: the texts of a row see each other", "packed_inputs", "(_a == _b).tril", "(_a >= _b).tril",
     "test_loss_and_gradients_are_those_of_a_row_each[opt-False]"),
    ("LoRA: the given alpha is passed over", "add_lora", "lora_alpha=_a if _b else _c", "lora_alpha=_a",
     "test_adapters_of_several_targets_with_their_own_scale"),
    ("LoRA: one scaling for all layers", "merged", "_a[NAME]", "lora_config(model).lora_alpha / lora_config(model).r",
     "test_a_users_adapter_is_merged_as_peft_merges_it"),
    ("untrained embeddings: those at zero are trained", "untrained_ids", "(mean, torch.zeros_like(mean))", "(mean,)",
     "test_also_with_rows_that_another_program_has_added[zero-dtype0]"),
    ("untrained embeddings: not relative to the others", "untrained_ids", "UNTRAINED * _a", "UNTRAINED**4",
     "test_also_with_rows_that_another_program_has_added[mean-dtype0]"),
    ("untrained embeddings: far from the others, too", "untrained_ids", "UNTRAINED * _a", "_a",
     "test_tokens_that_are_or_will_be_trained_or_do_not_occur_are_accepted"),
    ("a last layer: everything trains", "choose_trained", "_a.requires_grad_(False)", "pass",
     "test_a_last_layer_is_the_head_alone[llama]"),
    ("the gain does nothing", "GainedLinear.forward", "_a * _b", "_a", "test_the_gain_multiplies_and_learns"),
    ("the gain is not folded in", "folded", "_a * _b", "_a",
     "test_a_saved_model_gives_the_same_scores_in_transformers"),
    ("routers are random in training mode", "open_pretrained", "_a.register_forward_pre_hook(_b)", "pass",
     "test_an_opened_model_computes_in_training_mode_as_in_evaluation_mode[mixtral]"),
    ("layers are left out at random", "_disable_dropout", "'drop' in _a", "'dropout' in _a",
     "test_an_opened_model_computes_in_training_mode_as_in_evaluation_mode[opt]"),
    ("a frozen head's gradient is computed", "_Product.backward", "_a if needs_weight_grad else None", "_a",
     "test_gradients_that_nothing_needs_are_not_computed"),
    ("an attention is compared with itself", "check_attention_parity", "use_attention(EAGER, _a)",
     "use_attention(used, _a)", "test_an_attention_with_wrong_numbers_is_refused"),
    ("rows begin together", "ragged_rows", "_a.cumsum(1) > 1", "_a.cumsum(1) > 0",
     "test_rows_begin_in_different_columns_and_are_not_long"),
    ("a refusal changes what is computed again", "is_recomputing", "torch.is_grad_enabled() and _a", "False",
     "test_a_refusal_between_checkpointed_layers"),
    ("prompts that wait need no columns", "ContinuousEngine.kept_bytes", "_a if _b < _c else 0", "0",
     "test_memory_that_sampling_keeps_by_hand"),
    ("the cap is lost", "resolve_attention", "EAGER if _a else None", "None",
     "test_a_cap_in_a_family_that_has_sdpa_is_kept_too"),
    ("files grow", "_write_files", "_a + _b > _c", "_b > _c", "test_a_large_model_lies_in_several_files"),
    ("log-probs of the token before", "PolicyModel.forward", "_a - 1", "_a",
     "test_log_probs_and_entropy_are_those_of_the_models_own_logits[gemma-1.0]"),
    # engine
    ("weights in flight are gathered", "gathered", "wait_for_prefetch(_a)", "pass",
     "test_a_run_of_real_size_is_that_of_whole_weights[ppo-0]"),
    ("weights in flight are saved", "whole_weights", "wait_for_prefetch(_a)", "pass",
     "test_weights_in_flight_are_waited_for"),
    ("each engine has its own fetches", "share_fetches", "_a.fetches = _b", "pass",
     "test_updates_are_those_of_separate_models[zero_stage=3,ppo_epochs=1,critic_gradient_checkpointing=True]"),
    ("backward without the world size", "Engine.backward", "world_size() * _a", "_a", TWO_RANKS),
    ("backward divided by the accumulation", "Engine.backward", "scale_wrt_gas=False", "scale_wrt_gas=True",
     "test_any_accumulation_gives_the_update_of_plain_torch[2]"),
    ("Adam's betas", "ADAM_BETAS", "0.95", "0.999", "test_weight_decay_acts_on_matrices_only"),
    ("weight decay on norms", "_parameter_groups", "{'params': _a, 'weight_decay': 0.0}",
     "{'params': _a, 'weight_decay': weight_decay}", "test_weight_decay_acts_on_matrices_only"),
    ("weight decay on no weight in parts", "_parameter_groups", "whole_shape(_a)", "_a.shape",
     "test_weight_decay_acts_on_matrices_in_parts"),
    ("no clipping without ZeRO", "Engine._clip", "if _a._clipping: _b", "if False: _b",
     "test_clipping_acts_and_the_norm_is_that_before_clipping"),
    ("no warm-up", "schedule_of", "_a.warmup_updates", "0", SCHEDULE),
    ("the warm-up begins at a rate of 0", "schedule_of", "_a + 1", "_a", SCHEDULE),
    ("the schedule's total", "schedule_of", "max(_a, 1)", "max(2 * _a, 1)", SCHEDULE),
    ("constant schedule", "schedule_of", "_a.schedule", "'constant'", SCHEDULE),
    ("gradients added up in bf16", "deepspeed_settings", "{'grad_accum_dtype': 'fp32'}",
     "{'grad_accum_dtype': 'bf16'}", "test_in_bf16_small_gradients_add_up"),
    ("tied without looking", "Sharded._tied", "_a if _b else _c", "_c", "test_a_tie_that_does_not_hold_is_not_made"),
    ("nothing is cut on arrival", "Sharded._partition_on_registration", "_a and _b", "False and _b",
     "test_every_weight_of_the_files_is_cut_on_arrival"),
    ("DeepSpeed prints its memory", "quieten_deepspeed", "_a.see_memory_usage = _b", "unused = _b",
     "test_an_engine_in_bf16_prints_nothing"),
    # ids without a token, adapters alone, pad tokens
    ("missing ids stay in log-probs", "_softmax", "_a.index_fill_(_b, head.missing, _c)", "_a",
     "test_log_probs_are_of_the_distribution_over_the_tokenizer_s_ids"),
    ("missing ids are drawn", "_mask_logits", "_a.index_fill_(_b, missing, _c)", "_a",
     "test_ids_without_a_token_are_never_drawn_and_drawn_log_probs_are_the_policy_s"),
    ("holes of a vocabulary are not missing ids", "missing_ids", "set(range(rows))",
     "set(range(id_count(tokenizer), rows))", "test_exactly_the_ids_that_the_tokenizer_lacks_are_missing"),
    ("missing ids: embeddings grow to the number of tokens", "id_count", "max(_a) + 1", "len(tokenizer)",
     "test_embeddings_grow_to_the_highest_id_of_a_vocabulary_with_holes"),
    ("an adapter alone: rank-stabilised scaling", "_scaling", "_a if config.use_rslora else _b", "_b",
     "test_an_adapter_of_peft_s_is_merged_as_peft_merges_it"),
    ("a reward model's text: BOS is left out", "plain_reading", "puts_bos(_a) and not _b", "False",
     "test_a_template_without_the_bos_that_texts_get_writes_it"),
    ("a reward model's example: padding is scored", "score_of", "_a[0, -1]", "_a[0, 0]",
     "test_a_reward_model_of_texts_shows_the_token_that_ends_them"),
    ("a reward model's template is read by our commands", "open_tokenizer", "original_template(_a)", "_a",
     "test_card_and_obvious_lines_give_the_trained_score[False-chatml]"),
    ("an adapter alone: any model is its base", "is_model", "_a == _b", "True",
     "test_another_model_at_the_base_s_path_is_refused[load_causal_lm]"),
    ("an adapter's base counts by its path", "_folder_hash", "_a['base_model_name_or_path'] = _b", "pass",
     "test_an_adapter_whose_base_has_moved_keeps_its_hash"),
    ("an adapter alone: GPT-2's matrices", "LoraUpdate.added_to", "_a.T if inputs_first else _b", "_b",
     "test_an_adapter_of_peft_s_is_merged_as_peft_merges_it"),
    ("an adapter's head overwrites tied embeddings", "merge_adapter", "torch.equal(value, tensor)", "True",
     "test_an_adapter_of_a_tied_head_is_merged_as_peft_computes_it"),
    ("the adapter of a tied head reaches the embeddings", "merge_adapter",
     "len(_names_of(model, module.weight)) > 1", "False",
     "test_an_adapter_of_a_tied_head_is_merged_as_peft_computes_it"),
    ("a chosen pad writes turns", "_unused_token", "token not in template and _b", "_b",
     "test_without_a_reserved_token_the_unknown_one_pads_then_another_special_token"),
    ("a classifier's pad is EOS", "drop_eos_as_pad", "config.pad_token_id = None", "pass",
     "test_a_reward_model_whose_tokenizer_cannot_pad_is_read_row_by_row"),
    # rollouts
    ("vLLM gets the names of modules", "plain_weights", "as_published(_a, _b)", "_b",
     "test_names_are_those_of_the_familys_folders"),
    ("vLLM's layers are compared at another input", "record_columns", "_a[::_b]", "_a[1::_b]",
     "test_the_first_inputs_weights_are_noted"),
    ("GPT-2's matrices are taken for others", "record_columns", "_a if _b in transposed else _c", "_c",
     "test_the_first_inputs_weights_are_noted"),
    ("pieces of a weight without its last", "pieces", "_a.split(_b)", "_a.split(_b)[:-1]", "test_pieces_of_a_weight"),
    ("every server's GPUs begin at rank 1", "join_requests", "rank_offset += _a", "pass",
     "test_every_gpu_has_a_rank_of_its_own"),
    ("all rows go to the first server", "BackgroundGeneration._generate_on_all", "_a[_b % len(_c)]", "_a[0]",
     "test_weights_arrive_to_the_bit_and_rows_are_dealt_out"),
    ("other weights draw unseen", "ServerClient.generate", "used_version != version", "False",
     "test_another_run_uses_the_server"),
    ("a lost server leaves no checkpoint", "Checkpoints.stopping", "(Stopped, ServerLost)", "Stopped",
     "test_a_lost_server_ends_the_run_with_a_checkpoint"),
    ("a session does not wait for what draws ahead", "VllmServers._wait_for_pending",
     "self._pending.generation.wait()", "pass", "test_what_was_begun_is_there_later"),
    ("a server with weights of another run is taken", "VllmServers._check", "_a.version.startswith(_b)", "True",
     "test_another_run_uses_the_server"),
    ("rows of vLLM's layers must not be moved", "wrong_layers", "torch.equal(_a[:len(_b)].sort()[0], _c)",
     "torch.equal(_a[:len(_b)], _b)", "test_a_layer_with_other_weights_is_found"),
    ("vLLM's layers may be nearly the actor's", "wrong_layers", "torch.equal", "torch.allclose",
     "test_a_layer_with_other_weights_is_found"),
    ("every batch is drawn alike", "generate", "int(_a)", "0",
     "test_seeds_give_the_same_draws_and_leave_the_global_state_alone"),
    ("a uniform number too many bits down", "uniforms", "shift_right(_a, 11)", "shift_right(_a, 10)", UNIFORM),
    ("a row's sequence begins one step late", "random_words", "torch.arange(1, _a + 1, device=_b)",
     "torch.arange(2, _a + 2, device=_b)", UNIFORM),
    ("uniform numbers shift in signs", "shift_right", "_a & _b", "_a", UNIFORM),
    ("row seeds of 32 bits", "row_seed", "_a >> 1", "_a >> 32",
     "test_row_seeds_are_of_63_bits_and_depend_on_every_part"),
    ("an update without reason is taken for one", "Engine.step", "not self._engine.was_step_applied() and _a", "False",
     "test_an_update_that_deepspeed_leaves_out_by_itself_is_skipped"),
    ("an update with NaN may be applied", "Engine.step", "not _a and not torch.equal(_b, _c)", "False",
     "test_an_update_that_is_applied_all_the_same_is_refused"),
    ("the reduction: rounding explains anything", "rounding_error", "_a * (_b / 2 * _c + _d)",
     "_a * (_b * 256 * _c + _d)", "test_what_rounding_explains_by_hand"),
    ("the reduction: one column alone", "sampled_indices", "_a + _b % _c", "_a",
     "test_sampled_elements_are_not_of_one_column"),
    ("the reduction: the first elements alone", "sampled_indices", "numbers * _a // _b", "numbers",
     "test_sampled_elements_are_everywhere"),
    ("log-probs of what is allowed", "TokenSampler.__call__", "torch.cat([_a, _b], dim=1)", "_a", CHOOSE),
    ("log Z of the largest logit alone", "inverse_cdf", "_a.double() + _b.log()", "_a.double() + 0 * _b.log()",
     CHOOSE),
    ("a block's sum is relative to its own largest logit", "block_sums", "_a * (_b - _c).exp()", "_a", CHOOSE),
    ("an infinite logit has a log-prob", "TokenSampler.__call__", "_a + (_a - _a)", "_a",
     "test_rows_that_are_not_finite_have_no_log_prob_and_are_drawn_evenly"),
    ("temperature 0 is drawn", "TokenSampler.__call__", "_a = torch.where(_b, _c.argmax(-1), _a)", "pass", CHOOSE),
    ("temperature 0 takes any id of a row that is not finite", "TokenSampler.__call__",
     "torch.where(_b, _c.argmax(-1), _a)", "_c.argmax(-1)",
     "test_rows_that_are_not_finite_have_no_log_prob_and_are_drawn_evenly"),
    ("the temperature is left out", "TokenSampler.__call__", "_a = _a / _b", "pass", CHOOSE),
    ("an id without weight at the edge", "inverse_cdf", "torch.minimum(_a, _b)", "_a",
     "test_an_id_without_weight_is_never_drawn"),
    ("the search inside a block forgets those before", "inverse_cdf", "torch.minimum(_a - _b, _c)",
     "torch.minimum(_a, _c)", "test_the_drawn_id_is_where_the_running_sum_passes"),
    ("a sliding window one token too wide", "SlotLayer.read_start", "_a + 1", "_a", FAMILY),
    ("a step's mask shows the padding", "StepMasks.update", "_a >= _b", "_a >= 0 * _b", FAMILY),
    ("positions of a step stay", "Decoder.step", "_a[_b] += 1", "pass", FAMILY),
    ("a row reads another's numbers", "Decoder._sample_tokens", "_a.uniform[_b, _c]",
     "_a.uniform[0 * _b, _c]", FAMILY),
    ("a static step's mask shows the padding", "StepMasks.of_static_step", "_a >= _b[:, None]",
     "_a >= 0 * _b[:, None]", FAMILY),
    ("a static step's mask shows what is not there yet", "StepMasks.of_static_step", "_a <= _b", "_a <= _b + 1",
     FAMILY),
    ("a static step's sliding window is too wide", "StepMasks.of_static_step", "_a - _b", "_a - _b - 1", FAMILY),
    ("linear layers of several layouts are merged", "common_layout", "len(layouts) == 1", "True", LAYOUTS),
    ("weights with a gap between them are merged", "neighbours",
     "_a and linear.start == previous.end", "_a", NEIGHBOURS),
    ("weights that lie otherwise than when compiled are merged", "Compiler.may_merge",
     "layout != self._merged_layout", "False",
     "models/test_side_by_side::test_a_layout_other_than_the_compiled_one_is_not_merged"),
    ("weights of a foreign buffer are moved", "can_be_moved", "not owns_storage", "False",
     "models/test_side_by_side::test_matrices_that_others_read_are_not_moved"),
    ("a merged layer loses its bias", "merge_run", "linear.bias is not None", "False", NEIGHBOURS),
    ("one token's attention: no scale", "attend_by_products", "_a.float() * scale", "_a.float()", ONE_TOKEN),
    ("one token's attention: no cap", "attend_by_products", "softcap * torch.tanh(_a / softcap)", "_a", ONE_TOKEN),
    ("one token's attention: the mask is left out", "attend_by_products", "_a + attention_mask.float()", "_a",
     ONE_TOKEN),
    ("one token's attention: the sink has a value", "attend_by_products", "torch.cat([_a, sinks], dim=-1)", "_a",
     ONE_TOKEN),
    ("a step that was looked at is not taken back", "StaticDecoder._check_capturable", "state.copy_(value)",
     "pass", FAMILY),
    ("a static step writes where the last one did", "StaticDecoder._static_step", "self._column += 1", "pass", FAMILY),
    ("a static step reads what an ended row left", "StaticDecoder._clear", "super()._clear(_a, 0, _b)",
     "super()._clear(_a, 0, 0)", STATIC_LEFT),
    ("a row that moves leaves columns behind", "StaticDecoder.move", "super().move(_a, _b, _c)",
     "super().move(_a, _b, columns)", STATIC_LEFT),
    ("slots without a row write into a prompt's", "StaticDecoder.rows_changed", "self.number[_a:] = _b", "pass",
     "test_a_row_depends_neither_on_slots_nor_on_looks_nor_on_order[StaticDecoder-7-24]"),
    ("graphs of weights that are gone", "StaticDecoder.is_valid", "_a == _b", "True", LASTS),
    ("a step's rows depend on what was drawn before", "StaticDecoder.step", "min(_a, self._used_slots)",
     "min(_a, self.capacity.slots)", SAME_BUCKETS),
    ("a draw's columns depend on what was drawn before", "BatchScheduler.__init__", "self._columns = columns",
     "self._columns = self._decoder.capacity.columns", SAME_BUCKETS),
    ("the host may wait inside of an operator", "host_syncs", "any(_a)", "False",
     "test_a_model_that_makes_the_host_wait_is_launched_as_before[operator]"),
    ("the host may wait for the device", "HostSyncs.__torch_dispatch__", "_a in _b", "False", WAITS),
    ("a group of prompts is one too large", "prefill_groups", "_a - _b + 1", "_a - _b",
     "test_prompts_are_read_in_groups_of_so_many_tokens"),
    ("a response is one token short", "BatchScheduler.refill", "_a + _b - 1", "_a + _b - 2", FAMILY),
    ("what an ended row left is read", "Decoder._clear", "_a.clear(_b, _c)", "pass", LEFT),
    ("ended rows stay", "BatchScheduler.drop_finished", "_a < max(1, _b)", "_a < len(self.live) + 1",
     "test_only_live_rows_are_computed"),
    ("the end token is cut off", "assemble", "_a - _b", "_a", "test_the_mask_is_a_prefix_that_holds_eos"),
    ("padding ends a response", "actor_sampling", "_a - _b", "_a",
     "test_a_models_own_end_tokens_end_responses_but_padding_does_not"),
    # conditions
    ("randomized is the same in every epoch", "termination.randomized", "make_row_seeds(_a, _b, _c, _d)",
     "make_row_seeds(_a, _b, 0, _d)", "test_randomized_follows_seed_and_epoch"),
    ("ppl mode does not arrive", "perplexity", "macro.ppl(_a, _b, _c)", "macro.ppl(_a, _b)",
     "test_ppl_looks_at_the_reference"),
    ("ppl looks at the policy", "perplexity", "_a.ref_logprobs", "_a.logprobs",
     "test_ppl_looks_at_the_reference"),
    # scoring
    ("a compile error costs less", "paper_reward", "-1.0", "-0.9", PROGRAMS),
    ("an error costs more", "paper_reward", "-0.6", "-0.7", PROGRAMS),
    ("tests passed weigh less", "paper_reward", "1.3 * _a", "1.2 * _a", PROGRAMS),
    ("the share is of the tests that were run", "ratio_reward", "_a.total", "len(_a.tests)", PROGRAMS),
    ("what was not run counts", "ProgramScores.__call__", "_a[_b] = _c", "pass",
     "test_a_row_without_an_outcome_has_no_score_and_leaves_the_mean"),
    ("weights of scores are not used", "WeightedScores.__call__", "weighted.weight * scores.values.float()",
     "scores.values.float()", "test_a_sum_by_hand"),
    ("the mean of scores counts rows without one", "_fill_missing", "~_a", "torch.ones_like(_a)",
     "test_rows_without_a_number_are_missing_and_leave_means_as_they_are"),
    ("a cut response is scored as a whole one", "RewardReader._encode_parts", "if finished[_a]: _b", "_b",
     "test_served_scores_are_those_of_the_ids_and_of_plain_transformers"),
    ("the last request lacks a row", "UrlScores.__call__", "min(_a, _b)", "min(_a, _b - 1)",
     "test_requests_hold_so_many_rows_and_nothing_else"),
    ("points are not weighted", "weighted_points", "weight * number", "number", "test_points_are_weighted_by_hand"),
    ("points are of 9", "MOST_POINTS", "10", "9", "test_points_are_weighted_by_hand"),
    ("the sum of weights does not divide", "weighted_points", "MOST_POINTS * _a", "MOST_POINTS",
     "test_points_are_weighted_by_hand"),
    ("ranks are not centred", "centred_ranks", "_a - 0.5", "_a", "test_ranks_are_centred_by_hand"),
    ("ties count for nothing", "centred_ranks", "_a / 2", "0", "test_ranks_are_centred_by_hand"),
    ("a response beats itself by half", "centred_ranks", "sum(_a) - 1", "sum(_a)", "test_ranks_are_centred_by_hand"),
    ("ranks grow with the size of the group", "centred_ranks", "_a / others", "_a", "test_ranks_are_centred_by_hand"),
    ("the texts decide the order shown", "shuffled", "content_hash(_a + _b)", "_b",
     "test_no_response_chooses_the_place_where_it_is_shown"),
    ("completions cost nothing", "with_judge_of_completions", "total + part_total", "total",
     "test_completions_are_paid_for"),
    ("responses of all prompts are ranked together", "_groups_of_prompts", "_a == 0", "_a == -1",
     "test_a_group_is_one_question"),
    ("criteria are not parts of a sum", "WeightedScores.__call__", "parts |= _a", "pass",
     "test_sums_with_other_sources_keep_the_criteria"),
    ("a teacher's log-ratios are reversed", "Trajectory.teacher_log_ratios", "_a.teacher_logprobs - _a.logprobs",
     "_a.logprobs - _a.teacher_logprobs", "test_log_ratios_are_added_by_hand"),
    ("log-ratios count off the response", "Trajectory.teacher_log_ratios", "torch.where(_a, _b, 0.0)", "_b",
     "test_holes_and_padding_have_no_log_ratio"),
    ("a teacher has no coefficient", "with_teacher", "coef * log_ratios", "log_ratios",
     "test_log_ratios_are_added_by_hand"),
    ("log-ratios are never pooled", "with_teacher", "by_macro_action", "False", "test_log_ratios_are_added_by_hand"),
    ("log-ratios are always pooled", "with_teacher", "by_macro_action", "True", "test_log_ratios_are_added_by_hand"),
    ("distillation reads scores", "distillation_batch", "torch.zeros_like(_a.scores)", "_a.scores",
     "test_distillation_reads_neither_scores_nor_later_rewards"),
    ("a teacher's temperature is 1", "RolloutScorer._scored_rollout",
     "response_logprobs(self.models.teacher, _a, self._temperature, _b)",
     "response_logprobs(self.models.teacher, _a, 1.0, _b)", "test_advantages_are_the_teachers_log_ratios"),
    ("the KL to a teacher has the other sign", "rollout_metrics", "-_a.teacher_log_ratios.sum()",
     "_a.teacher_log_ratios.sum()", "test_a_policy_comes_close_to_its_teacher"),
    # trainers
    ("credit: the flag's KL coefficient", "PPO.credit", "_a.kl.value", "_a.config.kl.kl_coef", KL),
    ("scores are not normalised", "assign_credit", "_a.normalised(_b)", "_b", NORMALISED),
    ("metrics of normalised scores", "assign_credit", "replace(_a, trajectory=_b, **_c)", "replace(_a, **_c)",
     NORMALISED),
    ("rows are not normalised", "normalise", "_a == 'row'", "False",
     "test_one_token_responses_have_no_advantage_in_their_rows"),
    ("advantages are always normalised", "normalise", "_a is None", "False", "test_credit_flags[plain]"),
    ("score moments of each rank alone", "with_scores", "sum_over_ranks(_a.sum())", "_a.sum()",
     "test_moments_are_those_of_all_ranks"),
    ("score moments: rows without a token count", "with_scores", "_a & _b", "_b", "test_moments_of_a_rollout"),
    ("score moments: NaN counts", "with_scores", "_a & _b", "_a", "test_moments_of_a_rollout"),
    ("whitening of each rank alone", "whiten_advantages", "sum_over_ranks(_a)", "_a", TWO_RANKS),
    ("no value coefficient", "_critic_step", "_a * _b", "_b",
     "test_the_value_coefficient_scales_the_gradient_and_not_the_metric"),
    ("critic clipped with cliprange", "_critic_step", "_a.cliprange_value", "_a.cliprange", UPDATE),
    ("actor clipped with cliprange_value", "_actor_step", "_a.cliprange", "_a.cliprange_value", UPDATE),
    ("macro ratio: product and mean exchanged", "_logprobs_of_ratio", "_a == 'macro_mean'",
     "_a != 'macro_mean'", UPDATE),
    ("macro ratio divided by tokens", "_count_update", "loss_count(_a, _b, _c, _d)", "loss_count('token', _b, _c, _d)",
     UPDATE),
    ("macro ratio: long actions weigh more", "_actor_step", "loss_weights(_a, _b, _c)", "None", UPDATE),
    ("importance weights of tokens in a macro action's ratio", "_actor_step",
     "_logprobs_of_ratio(sampled_logprobs, _a, _b)", "sampled_logprobs",
     "test_importance_weights_are_of_what_the_ratio_is_of[macro-True]"),
    ("importance weights replace advantages", "_actor_step", "_a * importance_weights(_b, _c, _d)",
     "importance_weights(_b, _c, _d)",
     "test_truncated_importance_weights_multiply_the_advantages"),
    ("num_tokens of all rows", "_one_update", "_a.sampled[_b]", "_a.sampled", UPDATE),
    ("num_tokens counts prompts", "_one_update", "_a.sampled", "_a.totals", UPDATE),
    ("num_macro of all rows", "_count_update", "select_rows(_a, _b)", "_a", UPDATE),
    ("counts of one rank", "_count_update", "sum_over_ranks(_a)  # 1", "_a", TWO_RANKS),
    ("policy entropy is a sum", "_train_micro_batch", "_a / _b", "_a", UPDATE),
    ("update at temperature 1", "_train_micro_batch", "_a.temperature", "1.0", UPDATE),
    ("one PPO epoch only", "rows_of_updates", "range(ppo_epochs)", "range(1)", UPDATE),
    ("statistics are sums over updates", "run_updates", "_a / _b", "_a", UPDATE),
    ("an interrupted iteration begins anew", "run_updates", "_a[_b:]", "_a[0:]", RESUME),
    ("an update that is stopped leaves sums", "run_updates", "_a.copy()", "_a", RESUME),
    ("rows are not shuffled", "rows_of_updates", "_a.permutation", "np.arange", "test_the_seed_shuffles_the_rows"),
    ("the shuffle has no seed", "rows_of_updates", "_a % 2 ** 32", "0", "test_the_seed_shuffles_the_rows"),
    ("step 3: the schedule is over one epoch", "CommonConfig.total_iterations", "_a * _b", "_a", TOTAL),
    ("step 3: the schedule is over one rank's rollouts", "BatchPlan.iteration_size", "_a.global_rollout",
     "_a.rollout_per_rank", TOTAL),
    ("--max_steps is not what ends a run", "CommonConfig.total_updates", "_a.max_steps is not None", "False", TOTAL),
    ("--max_steps may end inside a rollout", "BatchPlan.check_whole_rollouts", "_a % _b", "False",
     "test_max_steps_inside_a_rollout_is_refused"),
    ("responses that shrink to a quarter are not said", "short_alarm", "SHRUNK_TO * _a", "0 * _a",
     "test_responses_that_shrink"),
    ("a user's file is shared out between the steps", "split_for", "_a if _b else None", "_a",
     "test_every_step_takes_all_rows_of_a_users_file"),
    ("a published set is not shared out", "split_for", "_a if _b else None", "None",
     "test_published_sets_keep_their_shares_in_a_mixture"),
    ("step 3: the schedule is over rollouts", "CommonConfig.total_updates", "_a * _b", "_a", TOTAL),
    ("a skipped update has a norm", "run_updates", "_a.skipped  # 2", "not _a.skipped",
     "test_an_update_that_fp16_left_out_is_counted_and_has_no_norm"),
    ("flag cliprange does not arrive", "_actor_step", "_a.cliprange", "_a.cliprange_value", UPDATE),
    ("flag cliprange_value does not arrive", "_critic_step", "_a.cliprange_value", "_a.cliprange", UPDATE),
    ("flag temperature does not arrive", "_train_micro_batch", "_a.sampling.temperature", "1.0", UPDATE),
    ("the critic's warm-up is a rollout longer", "PPO.warms_up", "_a * _b < _c", "_a * _b <= _c", WARM_UP),
    ("the KL coefficient adapts in the critic's warm-up", "PPO.iterate", "not self.warms_up(_a)", "True", WARM_UP),
    ("the actor's schedule counts the critic's warm-up", "build_ppo_models", "_a.updates - _b", "_a.updates",
     "test_the_actors_schedule_is_shorter_by_the_critics_warm_up"),
    ("the critic's warm-up counts the actor's operations", "Throughput.trained", "_a is None or _b in _a", "True",
     "test_updates_of_the_critic_alone_by_hand"),
    ("an update is one micro-batch", "update.ppo_update", "_a.update_per_rank", "_a.micro_batch", UPDATE),
    ("flag rollout_is_clip does not arrive", "_actor_step", "_a.rollout_is_clip", "None",
     "test_truncated_importance_weights_multiply_the_advantages"),
    ("the gap of the engine is a sum", "_gap_over_ranks", "sum(sums) / _a", "sum(sums)", GAP),
    ("the gap of the engine counts padding", "check_gap", "_a[_b].double", "_a.double", GAP),
    ("the gap of the engine has a sign", "_gap_over_ranks", "_a.abs()", "_a", GAP),
    ("weights are clipped at the clip's own number", "_gap_over_ranks", "math.log(clip)", "clip",
     "test_the_share_of_clipped_weights"),
    ("a rollout of old weights stops the run", "check_gap", "STALE_GAP if is_stale else _a", "_a",
     "test_each_rollout_is_drawn_with_the_weights_of_an_iteration_ago"),
    ("what is scored is not in the checkpoint", "AheadSampler.state", "_a._taken if _b else _c", "_c", AHEAD),
    ("a scored rollout stays in the checkpoint", "AheadSampler.accept", "self._is_scoring = False",
     "pass", AHEAD),
    ("the rollout after next is drawn ahead", "AheadSampler.sample",
     "self._prompts_of_iteration(work.iteration + 1)", "self._prompts_of_iteration(work.iteration + 2)",
     "test_each_rollout_is_drawn_with_the_weights_of_an_iteration_ago"),
    ("work ahead ends with the epoch", "work_of", "divmod(iteration, _a)", "(0, iteration % _a)",
     "test_each_rollout_is_drawn_with_the_weights_of_an_iteration_ago"),
    ("samples of a prompt are drawn alike", "ActorSampler.request", "[number] if number else []", "[]", SAMPLES),
    ("a first sample is not drawn as an only one", "ActorSampler.request", "[number] if number else []",
     "[number]", "test_seeds_of_rows_are_those_of_prompt_and_sample"),
    ("samples are numbered through the rollout", "ActorSampler.request", "sample_numbers.append(number)",
     "sample_numbers.append(len(sample_numbers))", SAMPLES),
    ("sampling seed ignores the run's", "ActorSampler.request", "_a.seed", "0", RUN_SEED),
    ("sampling seed ignores its use", "ActorSampler.request", "row_seed(_a, _b, _c, _d, *_e)",
     "row_seed(_a, 0, _c, _d, *_e)", DRAWS),
    ("sampling seed the same in every iteration", "ActorSampler.request", "row_seed(_a, _b, _c, _d, *_e)",
     "row_seed(_a, _b, 0, _d, *_e)", DRAWS),
    ("sampling seed the same for every prompt", "ActorSampler.request", "row_seed(_a, _b, _c, _d, *_e)",
     "row_seed(_a, _b, _c, 0, *_e)", DRAWS),
    ("the coefficient is not taken up", "PPO.load_state_dict", "replace(_a, value=_b)", "replace(_a, value=_a.value)",
     RESUME),
    ("an epoch begins anew", "Loop.train_epoch", "_a[_b:_c]", "_a[:_c]", RESUME),
    ("prompts in the same order in every epoch", "work_of_epoch", "update_batches(_a, _b, _c, _d, _e, **_f)",
     "update_batches(_a, _b, _c, _d, 0, **_f)", EPOCHS),
    ("every rank takes the first one's prompts", "work_of_epoch", "rank()", "0", EPOCHS),
    ("evaluation draws with training's seeds", "PPO.evaluate", "SeedKind.EVALUATION", "SeedKind.TRAINING", DRAWS),
    ("evaluations draw otherwise each time", "PPO.evaluate", "iteration=0",
     "iteration=int(torch.randint(2 ** 31, ()))",
     "test_every_evaluation_says_the_same[ppo]"),
    ("the self-check draws with training's seeds", "PPO.self_check", "SeedKind.SELF_CHECK", "SeedKind.TRAINING",
     DRAWS),
    ("every prompt has one response", "CurrentSampler.sample", "_a.sample(*_b, _c)", "_a.sample(*_b, 1)",
     "test_a_run_without_a_critic_leaves_none"),
    ("credit takes every response for a prompt's only one", "PPO.credit_of", "_a.credit(_b, _c, _d, _e)",
     "_a.credit(_b, _c, 1, _e)", "test_an_update_is_plain_reinforce_with_a_leave_one_out_baseline[4]"),
    ("all iterations draw alike", "CurrentSampler.sample", "_a.sample(_b, _c, _d, _e)",
     "_a.sample(_b, _c, 0, _e)", DRAWS),
    ("termination in epoch 0 always", "RolloutScorer.score_rollout", "self.find_ends(_a, _b, _c, _d)",
     "self.find_ends(_a, _b, _c, 0)", EPOCHS),
    ("a rollout's reference at temperature 1", "RolloutScorer._scored_rollout",
     "response_logprobs(_a, _b, _c, _d)  # 1", "response_logprobs(_a, _b, 1.0, _d)", REFERENCE),
    ("a prefix's number is its macro action's reward", "Segments.rewards",
     "_a.diff(prepend=_b)", "_a", "test_rewards_of_numbers"),
    ("completions are as long as responses", "SegmentValueCollector._sample_completions", "_a.max_new_tokens - _b",
     "_a.max_new_tokens",
     VALUES),
    ("completions of a state are all the same", "SegmentValueCollector._sample_completions",
     "row_seed(_a, _b, *_c, _d)", "row_seed(_a, _b, *_c, 0)", VALUES),
    ("completions without a score count in the mean", "SegmentValueCollector._mean_scores", "counts.clamp(min=1)",
     "self._completions", "test_completions_without_a_score_are_left_out"),
    ("completions begin with the prompt", "SegmentValueCollector._sample_completions", "_a[_b.row][: _b.start]",
     "_a[_b.row][:0]", VALUES),
    ("parts of another rollout are taken up", "SegmentValueCollector.measure", "_a != (iteration, checksum)", "False",
     "test_parts_that_are_done_are_not_drawn_again"),
    ("a value of the state after the macro action's first token", "segment_mc_batch", "'first'", "'unit'",
     "test_advantages_by_hand"),
    ("the KL penalty of a macro action alone", "segment_mc_batch", "_discounted_sums(_a, _b, _c)",
     "_a", "test_advantages_by_hand"),
    ("the first macro actions are cut off", "at_most", "_a * most // _b", "_a // most",
     "test_neighbours_are_joined[lengths3-3-joined3]"),
    ("a completion's length is not punished", "trained_scores",
     "replace(config.estimator, longest=config.sampling.max_answer_seq_len)", "config.estimator",
     "test_the_longest_response_is_read_when_scores_are_penalised"),
    ("completions' scores stay as given where scores are normalised", "trained_scores", "moments.normalised(scores)",
     "scores", "test_completions_are_scored_as_they_are_trained_on"),
    ("what follows a limit is the response's", "assemble", "within & _a", "_a",
     "test_what_follows_a_limit_ends_nothing"),
    ("copies draw from the first text's logits", "Decoder.prefill", "_a[_b - rows.start]", "_a[0 * _b]", COPIES),
    ("copies have no keys", "Decoder.prefill", "slice(start, end)", "slice(end, end)", COPIES),
    ("macro actions leave the whole score to the end", "token_rewards", "scores - _a", "scores",
     "test_rewards_of_macro_actions_stand_where_they_are_and_leave_the_rest_to_the_end"),
    ("rewards of macro actions stay as given where scores are normalised", "assign_credit", "_a / moments.deviation",
     "_a", "test_normalised_scores_scale_the_rewards"),
    ("parts are taken up for other macro actions", "segment_values._checksum", "(rollout.response_rows(), _a)",
     "(rollout.response_rows(), 0 * _a)", "test_parts_of_other_macro_actions_are_not_taken_up"),
    ("every part is sent the weights", "SegmentValueCollector.measure", "first > _a", "first < 0",
     "test_weights_are_sent_once_for_all_parts"),
    ("a returned set is a list", "values.plain", "_a | set | frozenset", "_a", "test_a_set_has_no_order"),
    ("a program is the first block by default", "find_program", '0 if _a == "first" else -1', "0",
     "test_the_first_or_the_last_of_equal_blocks"),
    ("an untagged block counts as one of Python", "find_program", "names_python(_a)", "True",
     "test_the_right_program_is_taken"),
    ("HTML hides a fence", "MARKDOWN", "_a.disable('html_block')", "_a", "test_the_right_program_is_taken"),
    ("a quote is searched up to the end of the text", "_quote", "blockquote(state, start, number, silent)",
     "blockquote(state, start, end, silent)", "test_time_grows_linearly_with_the_number_of_fences_and_quotes"),
    ("a thought that ends behind a fence leaves it open", "fenced_blocks", "FENCE_MARK.sub('x', _a)", "_a",
     "test_time_grows_linearly_with_the_number_of_fences_and_quotes"),
    ("a place in a program leaves out its indentation", "Program.position_in_response", "_a.start + _b", "_b",
     "test_places_in_the_response"),
    ("a program's tests stand at its end", "rewards_by_segment", "functions[_a]", "None",
     "test_what_tests_are_worth"),
    ("a cut response ends as its template writes it", "_up_to_mark", "_a if _b else _c", "_a",
     "test_a_cut_response_ends_where_its_content_ends"),
    ("a cut response ends with step 2's end token", "_encode_as_trained", "[_a] if _b else []", "[_a]",
     "test_a_response_that_was_cut_is_read_without_its_end"),
    ("evaluations score all responses as whole ones", "respond_and_score", "response.finished", "True",
     "test_rows_path_rewards_and_the_last_line"),
    ("the first dialogue's replies hide the second's", "DialogueSampling.sample", "_a.replies | _b.replies",
     "_b.replies | _a.replies", "test_rows_say_which_replies_were_cut"),
    ("the last text of a response has not ended", "prefix_texts", "[_a.finished[number]]", "[False]",
     "test_a_reward_model_with_a_tokenizer_of_its_own_and_its_server"),
    ("iterations are not counted", "Loop.iterate", "_a.algorithm.iterate(_b, _c)", "_a.algorithm.iterate(_b, 0)",
     DRAWS),
    ("the KL coefficient stays", "PPO.iterate", "_a.kl = _b", "_b", KL),
    ("KL per token for KL per sequence", "PPO.iterate", "_a['objective/kl']", "_a['objective/kl_per_token']", KL),
    ("KL samples of one rank", "PPO.iterate", "_a.plan.global_responses", "_a.plan.rollout_per_rank", KL),
    ("KL samples are prompts", "PPO.iterate", "_a.plan.global_responses", "_a.plan.global_rollout",
     "test_the_kl_coefficient_is_steered_by_responses"),
    ("updates of a rollout count as one", "Loop.update", "_a * _b", "_a",
     "test_the_updates_of_a_round_take_the_same_pairs_and_lower_the_loss"),
    ("shuffle seed the same in every iteration", "PPO.update", "derive_seed(_a, _b, _c)", "derive_seed(_a, _b, 0)",
     SHUFFLES),
    ("shuffle seed of each rank", "PPO.update", "derive_seed(_a, *_b)",
     "derive_seed(_a, *_b, torch.distributed.get_rank())", SHUFFLES),
    ("shuffle seed ignores the run's", "PPO.update", "_a.seed", "0", RUN_SEED),
    ("the moving average is never updated", "PPO.update", "_a.update()", "pass", AVERAGE),
    ("the KL coefficient does not reach credit", "PPO.credit", "_a.kl.value", "_a.config.kl_coef", KL),
    ("scored at temperature 1", "RolloutScorer.score_rollout", "response_logprobs(_a, _b, _c, _d)",
     "response_logprobs(_a, _b, 1.0, _d)",
     "test_every_condition_comes_before_the_scores[ppl]"),
    ("the reference is the actor", "RolloutScorer._scored_rollout", "_a.reference", "_a.actor", REFERENCE),
    ("log-probs at temperature 1", "response_logprobs.logprobs", "_a(_b, None, _c, _d, False)",
     "_a(_b, None, _c, 1.0, False)", "test_score_is_each_row_alone_under_each_model[gpt2-5]"),
    ("log-probs and values exchanged", "FusedCredit.whole", "_a.with_numbers(_b, _c)",
     "_a.with_numbers(_c, _b)", LATE),
    ("the credit of every row", "FusedCredit.part", "select_rows(_a, _b)", "select_rows(_a, _b.flip(0))", LATE),
    ("moving average: past and present exchanged", "MovingAverage.update", "1 - _a", "_a", AVERAGE),
    ("moving average: another decay", "DECAY", "0.992", "0.99", AVERAGE),
    ("KL is a mean over tokens", "rollout_metrics",
     "_a.add('objective/kl', _b, _c); _a.add('objective/kl_per_token', _b, _d)",
     "_a.add('objective/kl', _b, _d); _a.add('objective/kl_per_token', _b, _d)", METRICS),
    ("responses without a score lower the means", "rollout_metrics", "_a.any(1)", "_a[:, 0] | True",
     "test_a_response_without_a_score_counts_in_no_mean"),
    ("KL per token is a mean over rows", "rollout_metrics",
     "_a.add('objective/kl', _b, _c); _a.add('objective/kl_per_token', _b, _d)",
     "_a.add('objective/kl', _b, _c); _a.add('objective/kl_per_token', _b, _c)", METRICS),
    ("objective/entropy's sign", "rollout_metrics", "-_a.logprobs", "_a.logprobs", METRICS),
    ("macro length is the response's", "rollout_metrics",
     "_a.add('macro/count', _b, _c); _a.add('macro/length', _d, _b)",
     "_a.add('macro/count', _b, _c); _a.add('macro/length', _d, _c)", METRICS),
    ("lambda_eff is a power, not a root", "lambda_per_token", "1 / _a", "_a", METRICS),
    ("explained variance is the unexplained", "explained_variance", "1 - _a", "_a", METRICS),
    ("squares instead of variances", "explained_variance", "(residual_sum / count) ** 2", "0 * residual_sum", METRICS),
    ("evaluation: ranks weigh alike", "RowMeans.add", "_a.add(_b, _c.sum(), _d.sum())",
     "_a.add(_b, _c.sum(), 1.0)", EVALUATION),
    ("evaluation: means of a rank", "RowMeans.add", "_a.add(_b, _c.sum(), _d.sum())",
     "_a.add(_b, _c.mean(), _d.sum())", EVALUATION),
    ("an epoch of steps 1 and 2 begins anew", "Loop.train_epoch", "_a[_b:_c]", "_a[:_c]",
     "test_a_run_stops_anywhere[sft]"),
    ("REFUEL: the last pass is whole", "Loop.train_epoch", "_a[_b:_c]", "_a[_b:]",
     "test_it_goes_through_the_pairs_until_so_many_were_seen"),
    ("steps 1 and 2: the same order in every epoch", "work_of_epoch", "update_batches(_a, _b, _c, _d, _e, **_f)",
     "update_batches(_a, _b, _c, _d, 0, **_f)", SUPERVISED),
    ("steps 1 and 2: the order has no seed", "work_of_epoch", "_a.seed", "0", SUPERVISED),
    ("steps 1 and 2: count of one rank", "Supervised.iterate", "sum_over_ranks(_a)", "_a", TWO_RANKS),
    ("steps 1 and 2: count of the first micro-batch", "Supervised.iterate", "(_a for _b in _c)",
     "(_a for _b in _c[:1])", SUPERVISED),
    ("steps 1 and 2: evaluation weighs examples", "Supervised.evaluate", "_a.counts * _b",
     "torch.ones_like(_a.counts) * _b", SFT_EVALUATION),
    ("SFT: all texts of a packed row are one", "SFTTask.row_statistics", "(_a == 0).cumsum(0) - 1", "_a * 0",
     "test_the_standard_error_is_that_of_texts_in_every_layout"),
    ("a standard error of population, not sample", "RowMeans.reduce", "_a / (_a - 1) * _b", "_b",
     "test_standard_errors_over_rows"),
    ("a standard error of all rows' weights as 1", "RowMeans.reduce", "2 * _a * _b", "_a * _b",
     "test_standard_errors_over_rows"),
    ("rows without weight count in a standard error", "RowMeans.add", "_a > 0", "_a >= 0",
     "test_standard_errors_over_rows"),
    ("parts of missing scores count in an evaluation", "_response_means", "TOKEN_METRICS | _a.score_parts",
     "TOKEN_METRICS", "test_a_response_without_a_score_is_no_measurement"),
    ("eval KL per token is per response", "_response_means", "_a['length'][:count]",
     "_a['length'][:count] * 0 + 1", "test_an_evaluation_is_the_mean_over_the_prompts"),
    ("steps 1 and 2: the schedule is over micro-batches", "BatchPlan.iteration_size", "_a.global_batch",
     "_a.micro_batch", TOTAL),
    ("the reference is that of the checkpoint", "Loop.fit", "_a.prepare(); _b.random = _c; _d.load_state_dict(_e)",
     "_b.random = _c; _d.load_state_dict(_e); _a.prepare()",
     "test_a_lost_reference_is_computed_before_the_checkpoint_is_loaded"),
    ("SFT: the loss divided by all tokens", "SFTTask.count", "_a.num_targets", "len(_a)", SFT_COUNT),
    ("SFT on the prompt: one token too many", "SFTTask.count", "_a - 1", "_a", SFT_COUNT),
    ("perplexity to the base 2", "SFTTask.summary", "math.exp", "math.exp2", SFT_EVALUATION),
    ("chosen and rejected exchanged", "RewardTask._scores", "_a, _b = engine(**_c).chunk(2)",
     "_b, _a = engine(**_c).chunk(2)",
     "test_supervised::test_evaluation"),
    ("a margin in nats is multiplied by the coefficient", "margin_warning", "_a / _b", "_a * _b",
     "test_a_margin_below_the_kl_penalty_is_said"),
    ("margins are not handed on", "RewardTask._scores", "Pairs(_a, _b, _c, _d, _e)", "Pairs(_a, _b, _c, _d)",
     "test_margins_and_centring_reach_the_loss"),
    ("centring is not handed on", "RewardTask.loss", "_a._centering", "0.0",
     "test_margins_and_centring_reach_the_loss"),
    ("per_sample: equal pairs are counted", "RewardTask.count", "_a == 'per_sample'", "_a == 'end'",
     "test_an_update_of_each_loss_does_not_depend_on_the_accumulation[per_sample]"),
    ("DPO: without the reference", "DPOTask._log_ratios", "(_a - _b, _c - _d)", "(_a, _c)", DPO),
    ("DPO: references exchanged", "DPOTask._log_ratios", "_a, _b = _c.unbind(1)", "_b, _a = _c.unbind(1)", DPO),
    ("DPO: no smoothing", "DPOTask.loss", "_a.label_smoothing", "0.0",
     "test_loss_and_gradient_are_those_of_plain_torch[0.2-False-gemma]"),
    ("DPO: mean of the micro-batch", "DPOTask.loss", "dpo_loss(_a, _b, _c, _d, _e)", "dpo_loss(_a, _b, _c, _d)",
     "test_dpo::test_a_step_reports_the_mean_over_the_pairs_of_the_whole_update"),
    ("DPO: always against the reference", "DPOTask.prepare", "_a.reference_free", "False",
     "test_it_learns_to_prefer[True]"),
    ("DPO: held-out pairs that are not evaluated", "DPOTask.prepare", "_a or None", "None",
     "test_only_what_is_evaluated_is_held_out"),
    ("DPO: a temperature of its own", "TEMPERATURE", "1.0", "0.7", DPO),
    ("log-probs of a response are averaged", "pair_logprobs", "_a.index_add(0, *_b)",
     "_a.index_reduce(0, *_b, 'mean', include_self=False)", DPO),
    ("chosen and rejected sums exchanged", "pair_logprobs", "_a, _b = _c.chunk(2)", "_b, _a = _c.chunk(2)", DPO),
    ("the reference of another temperature", "_compute", "pair_logprobs(_a, _b, _c, _d)", "pair_logprobs(_a, _b, _c)",
     "test_the_reference_has_the_temperature_that_it_is_asked_for"),
    ("a reference of another run is used", "_read", "changed_names(_a, _b)", "[]",
     "test_a_run_names_the_file_that_is_not_its_own"),
    ("the reference does not look at responses", "describe_reference", "[_a, _b, _c]", "[_a]",
     "test_another_response_is_other_data"),
    ("the self-check compares a mode with itself", "check_modes", "_a.train()", "_a.eval()",
     "test_every_step_compares_both_modes[sft]"),
    ("refuel: the last turn is never compared", "compared_turn", "_a % _b", "_a % max(1, _b - 1)", REFUEL_TURNS),
    ("refuel: every round compares the same turn", "compared_turn", "row_seed(_a, _b, _c, _d, TURN)",
     "row_seed(_a, _b, 0, _d, TURN)", REFUEL_TURNS),
    ("refuel: the turn does not depend on the run's seed", "compared_turn", "row_seed(_a, _b, _c, _d, TURN)",
     "row_seed(0, _b, _c, _d, TURN)", REFUEL_TURNS),
    ("refuel: the second dialogue repeats the first", "DialogueSampler.sample_pairs", "SECOND", "FIRST",
     ONE_STATE),
    ("refuel: all rows draw with one seed", "DialogueSampler.sample_pairs",
     "row_seed(_a, _b, _c, example.index, FIRST)", "row_seed(_a, _b, _c, 0, FIRST)",
     "test_a_round_draws_with_a_seed_for_each_row"),
    ("dialogues: seeds by the place in the batch", "roll_out", "turn_seeds(assistants_turn)",
     "turn_seeds(range(len(assistants_turn)))", "test_a_batch_equals_its_dialogues_alone"),
    ("refuel: a state without its question", "roll_out_pairs", "state(_a, _b)", "state(_a, 0)", ONE_STATE),
    ("refuel: evaluations draw at the temperature of training", "DialogueSampler.answers",
     "replace(_a, temperature=_b)", "_a", "test_evaluations_draw_the_likeliest_tokens_or_the_same_ones_every_time"),
    ("refuel: the loss is a mean over a micro-batch", "refuel.algorithm._one_update", "_a.global_batch",
     "_a.micro_batch", REFUEL_START),
    ("refuel: eta is forgotten", "_one_update", "_a.eta", "1.0", REFUEL_START),
    ("refuel: pairs of other log-probs", "_one_update", "_a[_b.rows]", "_a[:len(_b.rows)]",
     "test_the_gradient_is_that_of_the_mean_over_pairs_by_autograd "
     "test_micro_batches_and_accumulation_change_nothing"),
    ("refuel: one update fewer", "refuel_update", "range(_a)", "range(_a - 1)",
     "test_the_updates_of_a_round_take_the_same_pairs_and_lower_the_loss"),
    ("refuel: the KL coefficient is not steered", "Refuel.iterate", "_a.kl = _b", "_a.kl = _a.kl or _b",
     "test_the_kl_coefficient_is_steered"),
    ("refuel: rounds of an epoch are rounded up", "CommonConfig.total_updates", "_a // _b", "1 + _a // _b", TOTAL),
    ("refuel: a schedule over rounds", "CommonConfig.total_updates", "_a * _b", "_a", TOTAL),
    ("refuel: a score by turn is that of the whole", "_scores_by_turn", "_a[:_b]", "_a", REFUEL_FIT),
    ("refuel: scores are those of the first turn", "_add_scores", "-1", "0", REFUEL_FIT),
    ("the regression without temperature", "RefuelTask._regression_inputs", "pair_logprobs(_a, _b, _c, _d)",
     "pair_logprobs(_a, _b, _c)", REFUEL_LOSS),
    ("rewards are rounded before they are subtracted", "RefuelTask._regression_inputs", "_a.chosen_reward - _b",
     "float(torch.tensor(_a.chosen_reward)) - float(torch.tensor(_b))",
     "test_large_rewards_that_lie_close_together_keep_their_difference"),
    ("the reference of the rejected is the chosen one's", "RefuelTask._regression_inputs", "(_a - _b, _c - _d, _e)",
     "(_a - _b, _c - _b, _e)", REFUEL_LOSS),
    # builders
    ("the actor with the critic's optimiser", "build_ppo_models", "optimizer_settings(_a, _b, _c, _d)",
     "optimizer_settings(_a, _b, _a.critic_learning_rate, _a.critic_weight_decay)", OPTIMISERS),
    ("the critic with the actor's optimiser", "_build_critic", "optimizer_settings(_a, _b, _c, _d)",
     "optimizer_settings(_a, _b, _a.actor_learning_rate, _a.actor_weight_decay)", OPTIMISERS),
    ("actor and reference grow by different rows", "seed_new_rows", "torch.manual_seed(_a)", "pass",
     "test_new_rows_of_actor_and_reference_are_the_same"),
    ("learning rate and weight decay exchanged", "one_optimizer", "optimizer_settings(_a, _b, _c, _d)",
     "optimizer_settings(_a, _b, _d, _c)", SUPERVISED_OPTIMISERS),
    ("the schedule does not know its total", "optimizer_settings", "total_updates=_a", "total_updates=1", OPTIMISERS),
    ("the warm-up's ratio does not arrive", "optimizer_settings", "_a.warmup_updates(_b)", "_a.num_warmup_steps",
     SUPERVISED_OPTIMISERS),
    ("the schedule's name does not arrive", "optimizer_settings", "_a.lr_scheduler_type", "'linear'", OPTIMISERS),
    ("gradient clipping does not arrive", "optimizer_settings", "_a.gradient_clipping", "1.0", OPTIMISERS),
    # config
    ("the warm-up is rounded down", "CommonConfig.warmup_updates", "math.ceil", "int", SUPERVISED_OPTIMISERS),
    ("a rollout is trained on once", "plan_batches", "_a * _b // _c", "_b // _c", TOTAL),
    ("updates count prompts", "plan_batches", "_a * _b.responses // _c", "_a * _b.rollout // _c",
     "test_updates_count_responses"),
    ("an update need not divide the rollout", "_problem", "_a.responses % _b == 0", "True",
     "test_updates_that_do_not_fit_a_rollout"),
    ("remedy: the rollout does not grow to whole updates", "_with_update", "math.ceil(_a / _b) * _b", "_a + _b",
     "test_every_remedy_works_and_one_keeps_the_update"),
    ("remedy: the update is the farthest", "_within_rollout", "min(_a, key=_b)", "max(_a, key=_b)",
     "test_updates_that_do_not_fit_a_rollout"),
    ("remedy: one process's share of the rows", "smaller_sizes", "_a // _b  # 1", "_a",
     "test_smaller_sizes_for_few_examples_work"),
    ("a preset's rollout has too many responses", "batch_sizes", "_a // _b  # 2", "_a", PRESET_RESPONSES),
    ("a preset's generation counts prompts", "batch_sizes", "max(1, _a[GENERATION] // _b)", "_a[GENERATION]",
     PRESET_RESPONSES),
    ("refuel: evaluations are counted in updates", "RefuelOnlineConfig.derive", "_a * _b", "_a * 1",
     "test_evaluations_of_refuel_are_counted_in_rounds"),
    ("steps 1 and 2: the schedule is over one epoch", "CommonConfig.total_iterations", "_a * _b", "_a", TOTAL),
    ("one update more", "RefuelConfig.total_iterations", "_a // _b", "_a // _b + 1",
     "test_defaults_of_refuel_are_the_published_run"),
    # data
    ("packing: positions go on over examples", "collate_packed", "_a += range(_b)",
     "_a += range(len(_a), len(_a) + _b)", "test_a_batch_by_hand"),
    ("packing: targets of a row's first example", "collate_packed", "_a + len(_b)", "_a", "test_a_batch_by_hand"),
    ("packing: rows overflow", "pack", "_a > _b", "_b <= 0", "test_every_example_is_in_one_row_and_no_row_overflows"),
    ("SFT on all turns: the loss divided by all tokens behind the first", "SFTExample.num_targets", "sum(_a)",
     "len(_a)", TURNS_LOSS),
    ("preferences as messages: all that is shared is the prompt", "message_lists_row", "_a[:-1]", "_a[:-2]",
     "test_what_is_shared_is_the_prompt_and_the_last_message_the_response"),
    ("SFT on all turns: the end of a turn is not learnt", "TurnEnd.length", "_a - _b", "_a - _b - 1", TURNS),
    ("SFT on all turns: users' turns are learnt", "encode_turns", "_a and _b and _c", "_a and _c", TURNS),
    ("SFT on all turns: turns of weight 0 are learnt", "encode_turns", "_a and _b and _c", "_a and _b", WEIGHTS),
    ("SFT on all turns: a response of weight 0 is learnt", "fit_demonstration", "[_a] * len(_b)", "[True] * len(_b)",
     WEIGHTS),
    ("behind messages: the blank behind a response is lost", "TurnEnd.without_end",
     "_a.removesuffix(_b.removeprefix(_c))", "_a.removesuffix(_b)", BEHIND_MESSAGES),
    ("behind messages: a thought is ended twice", "TurnEnd.around", "_a and _b", "False",
     "test_a_content_that_brings_the_end_of_its_thought_gets_no_other"),
    ("behind messages: tools do not reach the template", "prompt_text", "_a.template_arguments", "None",
     "test_tools_reach_the_template_in_every_step"),
    ("pairs: a response that is not written ends at once", "EncodedRow.is_unwritten", "_a or _b", "False",
     "test_calls_that_the_template_does_not_write_are_left_out_and_counted"),
    ("SFT on all turns: a turn that is not written ends at once", "_is_trained", "_a and not _b", "_a",
     "test_an_earlier_turn_that_the_template_leaves_out_does_not_teach_to_end_at_once"),
    ("scores are of texts with their end token", "decode_sampled", "_a[:-1] if _b else _a", "_a",
     "test_scores_are_of_texts_without_an_end_of_conversation_that_is_not_special"),
    ("SFT on all turns: every token is learnt", "collate_sft", "torch.tensor(_a)", "True", TURNS_LOSS),
    ("order of examples ignores the epoch", "update_batches", "[_a, _b]", "[_a, 0]",
     "test_order_depends_on_seed_and_epoch_only"),
    ("order of examples ignores the seed", "update_batches", "[_a, _b]", "[0, _b]",
     "test_order_depends_on_seed_and_epoch_only"),
    ("ranks share rows", "update_batches", "_a = _b[_c::_d]", "_a = _b[::_d]", "test_ranks_share_every_update"),
    ("prompts from the cache are numbered within their batch", "table_of", "start + _a", "_a",
     "test_the_cache_gives_what_reading_gives[PromptExample]"),
    ("the cache does not know the lengths", "ExampleLoader.made_from", "[_a, _b, _c]", "[_a, _b]", CACHE_KEY),
    ("the cache does not know the share", "ExampleLoader.made_from", "[split_for(_a, _b) for _a in _c]", "[]",
     CACHE_KEY),
    ("the cache does not know the seed", "ExampleLoader.made_from", "_a.seed", "0", CACHE_KEY),
    ("the cache does not know the files", "ExampleLoader.made_from", "file_hash(_a)", "0", CACHE_KEY),
    ("damage of the cache goes unseen", "CacheEntry.open", "_a != _b", "False", "test_damaged_entries_are_made_anew"),
    ("prepare counts the end of a response", "Filter._reason", "len(_a) - 1", "len(_a)",
     "test_lengths_in_characters"),
    ("prepare keeps no prompt of the largest length", "Filter._reason", "_a > _b", "_a >= _b", REASONS),
    ("prepare looks at the chosen response alone", "Filter._reason", "min(_a)", "_a[0]", REASONS),
    ("prepare forgets what it has seen", "Filter.passing", "_a.add(_b)", "pass", REASONS),
    ("prepare draws its parts by no seed", "make._read_rows", "_a.seed", "0",
     "test_a_folder_trains_like_its_source[arrow-SFTExample]"),
    ("prepare gives both stages the same rows", "make._read_rows", "1 + _a", "1", "test_the_parts_are_disjoint"),
    ("what is held out follows no seed", "with_held_out", "split_part(_a, TRAIN_EVAL_SPLIT, 1, _b)",
     "split_part(_a, TRAIN_EVAL_SPLIT, 1, 0)", "test_without_shuffling_the_last_rows_are_held_out"),
    ("evaluations of several sources begin with the first one's rows", "in_proportion", "_a / len(_b)", "0",
     "test_a_short_evaluation_reads_every_data_path"),
    ("the text after a turn is encoded without the turn's token", "encode_continuations",
     "_a.last_of(_b)", "None", "test_the_text_between_turns_has_the_ids_of_the_whole_text"),
    ("a reward model of step 2 is read at EOS", "_encode_as_trained", "[end_id]",
     "[tokenizer.eos_token_id]", "test_a_reward_model_of_step_2_reads_the_ids_that_it_was_trained_on"),
    ("a checkpoint's tensors share memory", "_separate_copies", "_a.clone()", "_a",
     "test_a_run_stops_anywhere[refuel-online-without-KL]"),
    ("a launcher gets SIGHUP", "_signal_launcher", "signal.SIGTERM if _a == signal.SIGHUP else _b", "_b",
     "test_a_closed_terminal_is_told_to_the_launcher_as_sigterm"),
    ("a rollout's requests have a whole time-out at the end", "UrlScores._request",
     "min(_a, max(_b - time.monotonic(), TICK))", "_a",
     "test_requests_of_a_rollout_end_before_other_processes_stop_waiting"),
    ("responses of equal scores differ with a critic alone", "SEGMENT_RULES", "'gamma' in _a.reads", "_a.critic",
     "test_refusals"),
    ("the sum of macro actions' rewards is clipped", "_has_inner_rewards", "_a or _b", "_a", "test_refusals"),
    (".pt files have one target too many", "pt_files._row_of", "_a[:_b]", "_a[:_b - 1]", "test_pt_files_are_sheeprls"),
    ("a dialogue's replies are counted as the data have them", "dialogues._length", "_a - _b + _c", "_a",
     "test_the_length_counts_every_reply_as_the_longest_that_may_be_drawn"),
    ("of equal rewards the first is chosen", "_pair_row", "_a.reward > _b.reward",
     "_a.reward >= _b.reward", CHOSEN),
    ("the reward of turn h is compared", "_tokenize_chunk", "_a.first_rewards[_a.last]",
     "_a.first_rewards[_a.turn]",
     CHOSEN),
    ("a failed reward of the second enters", "_unusable", "_a in _b or _a in _c", "_a in _b",
     "test_what_is_left_out_is_counted_by_reason"),
    # run
    ("a large model is known by its ends", "_weight_samples", "_a > 2 * END_BYTES", "False", LARGE_MODEL),
    ("parts rounded down", "own_part", "-(-_a // world_size())", "_a // world_size()", "test_ranks_share_a_weight"),
    ("parts of other ranks rounded down", "SavedParts.fill", "-(-_a // _b)", "_a // _b", OTHER_RANKS),
    ("parts of other ranks without padding", "SavedParts.__init__", "-(-_a // _b)", "_a // _b", OTHER_RANKS),
    ("sub-groups of parameters share a step counter", "load_resized", "copy.deepcopy(_a)", "_a", OTHER_PIECES),
    ("all parameters decay as the first group's", "load_resized", '_a | {"params": _b}',
     'saved_groups[0] | {"params": _b}', OTHER_PIECES),
    ("seeds depend on their first part alone", "derive_seed", "_a.SeedSequence(_b)", "_a.SeedSequence(_b[:1])",
     "test_derived_seeds_differ"),
    ("environments have the seeds of the policy's draws", "environment_seed",
     "derive_seed(seed, kind, iteration, index, ENVIRONMENT)", "derive_seed(seed, kind, iteration, index)",
     "test_every_part_changes_the_seed_of_an_environment"),
    ("evaluation is a kind of training", "SeedKind.EVALUATION", "1", "0", DRAWS),
    ("metrics of one rank", "Means.reduce", "sum_over_ranks(_a)", "_a", TWO_RANKS),
    ("means are sums", "Means.reduce", "_a / _b", "_a", "test_means_are_weighted"),
    ("a checkpoint may lack its last row", "rows_problem", "_a + 1", "_a", "test_the_rows_of_a_checkpoint_are_whole"),
    ("the rows are written unread", "MetricsLog.text", "_a != _b", "False",
     "test_rows_that_somebody_changed_are_not_read_as_this_run_s"),
    ("the variance keeps the mean", "with_variances", "_a ** 2", "_a", REFUEL_LOSS),
    ("a run that goes on begins another one at W&B", "WandB.resume", "_a.run_id = _b", "pass", RUN_ID),
    ("W&B is told twice what it knows", "WandB.open", "not _a._is_resumed", "True", RUN_ID),
    ("TensorBoard keeps what came after the checkpoint", "TensorBoard.open", "purge_step=_a", "purge_step=None",
     RUN_ID),
    ("a tracker that failed is asked again", "Trackers._each", "_a.remove(_b)", "pass",
     "test_a_tracker_that_fails_is_left_out_after_one_warning"),
    ("weights of an earlier push stay", "push", "_a not in _b", "False",
     "test_weights_of_an_earlier_push_do_not_stay"),
    ("a public repository gets what is private", "push", "not _a and _b", "_a and _b", "test_what_the_hub_refuses"),
    ("repositories are public", "push", "_a.create_repo(_b, private=not _c, exist_ok=True)",
     "_a.create_repo(_b, private=_c, exist_ok=True)", "run/test_hub::test_the_command"),
    ("an evaluation's change has the wrong sign", "evaluation_line", "_signed(_a - _b)", "_signed(_b - _a)",
     "test_an_evaluation_is_a_line"),
    # common
    ("an interval ends below its value", "MeanInterval.__post_init__", "max(_a, _b)", "_a",
     "test_an_interval_contains_its_value test_all_or_no_pairs_right"),
    ("an interval begins above its value", "MeanInterval.__post_init__", "min(_a, _b)", "_a",
     "test_an_interval_contains_its_value"),
    ("an interval of 90 %", "mean_interval", "t.ppf(0.975, _a)", "t.ppf(0.95, _a)",
     "test_the_means_of_a_file_by_hand"),
    ("a bounded mean by the values' own spread", "bounded_interval", "return _a",
     "return mean_interval(totals)", "test_the_interval_of_a_bounded_mean_by_hand"),
    ("a child of a killed process keeps its lock", "os.register_at_fork", "os.register_at_fork(after_in_child=_a)",
     "pass", "test_a_killed_process_has_it_no_more_even_if_its_child_lives"),
    ("the lock of a file that was removed counts", "Lock._try_once", "not _a._is_in_place()", "False",
     "test_a_file_that_is_removed_before_it_is_locked"),
    ("a lock that another process has is removed", "Lock.close", "_a and _b", "_a",
     "test_a_lock_that_was_taken_away_is_noticed"),
    # plan
    ("a shared base is counted again", "model_states", "_a - _b", "_a", "test_a_shared_base_is_counted_once"),
    ("gradients sharded at stage 1", "model_states", "_a >= 2", "_a >= 1", STATES),
    ("offload without its gradients", "model_states", "2 * FLOAT32 + _a", "_a",
     "test_offload_moves_states_to_main_memory"),
    ("one moment of Adam", "MOMENTS", "2 * FLOAT32", "FLOAT32", STATES),
    ("no float32 copy", "_optimizer_bytes", "MOMENTS + FLOAT32", "MOMENTS", STATES),
    ("the tensor that is fetched is not counted", "pass_weight_bytes", "_a.live + _b", "_a.live",
     "test_what_zero_holds_for_a_while"),
    ("the average lies on every process", "ema_bytes", "_share(_a, _b)", "_a",
     "test_the_moving_average_is_shared_out"),
    ("two buckets become one", "Zero.of", "_a * int(_b)", "int(_b)", "test_a_deepspeed_config_is_read"),
    ("tokens of a micro-batch make whole texts alone", "Texts.filling", "-(-_a // _b)", "_a // _b",
     "test_the_largest_micro_batch"),
    ("rows of an evaluation count for nothing", "_scored_batch", "max(sampled, held_out)", "sampled",
     "test_an_evaluation_may_score_more_rows_at_once_than_a_rollout"),
    ("vLLM sleeps on a CPU", "_sampling_parts", "_a + VLLM_CPU_CACHE", "0", "test_vllm_never_sleeps_on_a_cpu"),
    ("operations without additions", "cost_of", "2.0 * matrix.elements * _a", "1.0 * matrix.elements * _a",
     "test_forward_and_backward_by_hand"),
    ("frozen weights have gradients", "cost_of", "matrix.is_trained + _a", "1 + _a",
     "test_lora_computes_no_gradients_of_frozen_weights"),
    ("gradients pass below the trained layers", "_passes_gradients", "_a and layer >= first_trained", "_a",
     "test_nothing_goes_backward_below_the_trained_layers"),
    ("attention goes backward once", "cost_of", "2 * attention", "attention", "test_forward_and_backward_by_hand"),
    ("a token does not see itself", "seen_keys", "within + 1", "within - 1", "test_keys_within_a_window"),
    ("a window sees everything", "seen_keys", "(lengths - within) * within", "(lengths - within) * lengths",
     "test_keys_within_a_window"),
    ("all experts are active", "_active_share", "active / total", "1.0", "test_active_experts_count"),
    ("the head is read for nothing", "cost_of", "head.elements + _a", "_a", "test_operations::test_decoding_by_hand"),
    ("slots are free", "decoding_steps", "-(-_a // slots)", "0", "test_the_fewest_steps"),
    ("MFU of one of several GPUs", "Throughput.trained", "_a * world_size()", "_a",
     "test_two_processes_have_two_gpus"),
    ("updates that are done count again", "PPO.texts_left", "_a[current.updates.done:]", "_a",
     "test_a_rollouts_updates"),
    ("rounds that refill sample nothing", "RefillCollector._collect_further", "work.clock.sampled += _a", "pass",
     "test_refilled_prompts_were_sampled_too"),
    ("a copy is read alone", "_bytes_per_second", "2 * _a / _b", "_a / _b", "test_peaks_by_their_times"),
    ("results of compiled layers shrink", "_counted", "alive.count_whole(_a)", "None",
     "test_compiled_layers_hold_a_measured_share"),
    ("a recomputed layer is not compiled", "_counted_checkpoint", "_counted(function, alive)", "function",
     "test_compiled_layers_are_smaller_when_they_are_made_again"),
    ("PPO epochs take no time", "_expect_rollouts", "config.rollouts.ppo_epochs * _a", "_a",
     "test_an_iteration_by_hand"),
    ("data sheets are reached", "named_gpu", "REACHED_OPERATIONS * _a", "_a", "test_gpus_by_name_and_by_peaks"),
    ("keys without values", "cached_per_token", "2 * _a", "_a", "test_keys_and_values_of_a_token"),
    ("main memory of a node with all processes", "Machine.on_a_node", "min(_a, _b)", "_a",
     "test_main_memory_of_a_node"),
    ("a server's weight is passed on twice", "_vllm_parts", "not _a.runs_vllm", "not _a.uses_vllm",
     "test_servers_take_nothing_of_the_gpus_that_train"),
    ("GPUs that train hold what servers draw with", "Plan.sampling_actor", "_a.vllm_url", "None",
     "test_servers_take_nothing_of_the_gpus_that_train"),
    ("each GPU of an engine holds the whole actor", "engines", "-(_a // k)", "-(_a // 1)",
     "test_what_an_engine_of_vllm_needs"),
    ("engines reach over nodes", "engines", "min(_a, _b)", "_a", "test_what_an_engine_of_vllm_needs"),
    ("later turns begin with the prompt", "sampling_lengths", "_a + _b - 1", "_a",
     "test_later_turns_need_more_columns"),
    ("environments do not wait for each other", "longest_wait", "math.ceil(_a / _b)", "1",
     "test_refusals"),
    ("smaller micro-batches make smaller updates", "_smaller_micro_batch", "_a * rows // half", "_a",
     "test_smaller_micro_batches_of_the_same_updates"),
    ("each neighbour's vLLM holds the whole actor", "_vllm_parts", "-(_a // _b)", "-(_a // 1)",
     "test_vllm_holds_the_actor_whole"),
    ("a GPU that draws needs no room for the actor", "check_reports", "_a + _b > _c", "_a > _c",
     "test_a_gpu_that_cannot_hold_the_whole_actor"),
    ("vLLM needs the whole actor on each GPU", "minimum_memory", "_a and not _b", "_a",
     "test_what_a_run_surely_needs"),
    ("each neighbour compares the first input of all", "wrong_layers", "shard if _a else 0", "0",
     "test_a_part_of_a_layer_with_other_weights_is_found"),
    ("shared memory in use is removed", "remove_stale_memory", "str(_a) not in _b", "True",
     "test_what_a_process_uses_stays_until_it_ends"),
    ("vLLM's copy takes its share alone", "_vllm_parts", "max(_a, _b)", "_a", "test_vllm_holds_the_actor_whole"),
    ("the head's gradient without its sum", "training_logits", "_a * FLOAT32 * _b", "0",
     "test_logits_that_do_not_fit_are_computed_again"),
    ("real model: repetition is free", "gold_score", "_a - _repetition(_b)", "_a",
     "test_gold_score_of_neutral_answers"),
    ("real model: labels are never wrong", "make_comparisons", "_a.random() < LABEL_NOISE", "False",
     "test_comparisons_prefer_the_better_answer_nine_times_of_ten"),
    ("self-check: log-probs are rounded by their own size", "check_rollout", "max(_a, _largest(_b, _c))",
     "_largest(_b, _c)", "test_log_probs_may_be_rounded_as_the_logits_behind_them"),
    ("one chunk's gradient has a sum, too", "training_logits", "0 if is_one_chunk else _a * _b", "_a * _b",
     "test_logits_that_fit_are_kept"),
    ("metrics of a finite rollout go with its updates", "PPO.iterate", "not _a.needs_update or _b", "_b",
     "test_nonfinite::test_what_is_left_out_changes_nothing[0]"),
    ("a mask may hold other numbers than ones", "token_pairs._split", "_a != [1] * sum(_b)", "not all(_a)",
     "test_a_pair_of_tokens_that_is_none_is_named"),
    ("logits in half precision", "training_logits", "FLOAT32 * _a.vocab", "_a.width * _a.vocab",
     "test_logits_of_half_precision_and_of_a_soft_cap"),
    ("no evaluation at the start", "_evaluations", "2 + _a", "1 + _a", "test_updates_and_samples_of_step_1"),
    ("gradients stay", "_free_gradient", "_a = None", "pass", "test_gradients_are_handed_over"),
    # inference
    ("every draw has the first one's seed", "SamplingPolicy.respond", "row_seed(*_a, _b)", "row_seed(*_a, 0)",
     "test_best_of_n_keeps_the_best"),
    ("a sweep stays at one temperature", "SamplingPolicy.at", "replace(_a, temperature=_b)", "_a",
     "test_draws_are_those_of_single_runs"),
    ("the smallest N is drawn", "SweepFlags.responses_per_prompt", "max(_a)", "min(_a)",
     "test_defaults_are_the_papers"),
    ("L is one short", "sampled_turns", "_a = int(_b.integers(_c))", "_a = int(_b.integers(max(1, _c - 1)))",
     DRAWN_TURNS),
    ("h is below L", "sampled_turns", "_a + 1", "max(1, _a)", DRAWN_TURNS),
    ("turns without the seed", "sampled_turns", "_a.default_rng((_b, _c))", "_a.default_rng(_c)", DRAWN_TURNS),
    ("both rollouts have one seed", "SECOND_SEED", "20000", "0", "test_the_second_rollout_has_the_seed_plus_20000"),
    ("dialogues share their draws", "DialogueSampling.sample", "row_seed(self.seed, number)",
     "row_seed(self.seed, 0 * number)",
     "test_the_second_rollout_has_the_seed_plus_20000 test_a_dialogue_does_not_depend_on_its_batch"),
    ("one pair in five is held out", "MOST_HELD_OUT", "10", "5", "test_one_in_ten_is_held_out_at_most"),
    ("another seed holds out the same", "held_out_rows", "_a.default_rng(_b)", "_a.default_rng(0)",
     "test_one_in_ten_is_held_out_at_most"),
    ("text metrics: padding is read", "read_and_answer",
     "model(_a, attention_mask, _b, with_entropy=False)", "model(_a, None, _b, with_entropy=False)", BATCHES),
    ("text metrics: padding is counted", "read_and_answer", "torch.where(_a, _b, 0.0)", "_b", BATCHES),
    ("text metrics: responses are drawn, not the likeliest", "_policy_part.prepare",
     "load_policy(*_a, 0.0, _b)", "load_policy(*_a, 1.0, _b)",
     "test_responses_are_greedy_and_compared_with_the_data"),
    # evaluation
    ("answers to another rubric are used", "JudgeQuestion.digest", "self.messages", "()",
     "test_the_words_of_a_rubric_make_its_questions"),
    ("six failures in a row end a run", "MOST_FAILURES", "5", "6", "test_five_failures_in_a_row_end_the_run"),
    ("a judge's round ends with the one before", "JudgeClient.new_round", "AskingRound()", "self.round",
     "test_requests_that_a_rollout_gave_up_do_not_touch_the_next_one"),
    ("the repetition of a question belongs to the next round", "JudgeScores._judge",
     "_a.ask(_b, is_usable, _c)  # 2", "_a.ask(_b, is_usable)",
     "test_requests_that_a_rollout_gave_up_do_not_touch_the_next_one"),
    ("a judge's cost is of all rollouts", "JudgeScores.__call__", "self._reported_cost = _a", "pass",
     "test_what_is_spent_between_two_rollouts_is_counted_once"),
    ("fp16 adds gradients up in float32", "_gradient_dtype", "('bf16', 'fp16')", "('bf16',)",
     "test_gradients_are_summed_in_the_type_that_deepspeed_takes"),
    ("a server on this machine is reached through a proxy", "proxy_of", "is_local(_a)", "False",
     "test_a_server_on_this_machine_is_reached_without_a_proxy"),
    ("the proxy of all schemes hides that of one", "proxy_of", "_a.get(_b.scheme)", "False",
     "test_the_variable_of_the_scheme_comes_first"),
    ("the key of OpenAI is sent without encryption", "with_key", "_a.scheme == 'https'", "True",
     "test_the_key_of_openai_goes_to_its_own_hosts_alone"),
    ("the key of OpenAI is sent to hosts that end alike", "with_key", "f'.{OPENAI_HOST}'", "f'{OPENAI_HOST}'",
     "test_the_key_of_openai_goes_to_its_own_hosts_alone"),
    ("the verdict on one criterion counts for all", "_content_of", "depth == 1", "depth >= 1",
     "test_unreadable test_nearly_json_is_no_lost_vote"),
    ("one of two values of a key counts", "values_of", "len(_a) > 1", "False", "test_unreadable"),
    ("a pause of the limit is not waited for", "with_retries", "_a > LONGEST_RETRY_AFTER", "_a >= LONGEST_RETRY_AFTER",
     "test_a_pause_that_is_not_waited_for_is_said_and_not_called_a_number_of_tries"),
    ("every retry is logged", "RepeatedLines.add", "'10*'", "'.*'", "test_retries_are_logged_once_with_their_count"),
    ("waits between tries do not grow", "with_retries", "2 * _a", "_a", "test_waits_between_tries_grow_up_to_a_limit"),
    ("a short Retry-After shortens a wait", "with_retries", "max(_a, _b)", "_a or _b",
     "test_waits_between_tries_grow_up_to_a_limit"),
    ("rewards of different reward models are compared", "is_same_scorer", "_a == _b", "_a == _a",
     "test_rewards_of_different_reward_models_are_not_compared"),
    ("a function that takes other arguments passes", "takes", "_a.bind(*_b)", "_a",
     "test_a_function_of_other_arguments_is_refused_when_loaded"),
    ("the best of N with replacement", "expected_best", "math.comb(_a, _b - 1) / _c",
     "((_a + 1) ** _b - _a ** _b) / len(rewards) ** _b", BEST_OF_N),
    ("the best of N counts one response too few below", "expected_best", "range(len(_a))", "range(1, len(_a) + 1)",
     BEST_OF_N),
    ("the first N are the last N", "best_of_first", "_a[:_b]", "_a[-_b:]",
     "test_the_first_n_in_the_order_of_the_draws"),
    ("curves of the first N", "_chart_by_n", "_a['expected']", "_a['first']",
     "test_curves_show_the_mean_over_all_subsets"),
    ("a turn shows the next one", "Dialogue.after_opening", "2 * _a", "2 * _a + 2",
     "test_what_is_compared_at_a_turn"),
    ("the score of the turn before", "turns._response_at", "_b.scores[_a - 1]", "_b.scores[_a - 2]",
     "test_win_rates_by_hand"),
    ("a turn's verdicts count as dialogues", "_dialogue_rates", "win_rates(_a, _b)", "win_rates(_a)",
     "test_intervals_over_all_turns_are_over_dialogues"),
    ("pass@k with replacement", "pass_at_k", "math.comb(_a - _b, _c) / _d", "(1 - _b / _a) ** _c",
     "test_pass_at_k::test_the_estimator_by_hand"),
    ("perplexity: every text counts alike", "policy_result", "bounded_interval(_a, _b)  # 1",
     "bounded_interval([total / count for total, count in zip(_a, _b)], [1] * len(_a))",
     "test_perplexity_is_of_tokens_not_of_texts"),
    ("a tie of the reward model is right", "reward_result", "_a > 0", "_a >= 0",
     "test_reward_loss_and_accuracy_by_hand"),
    ("the reward loss rewards the rejected", "reward_result", "-_a", "_a", "test_reward_loss_and_accuracy_by_hand"),
    ("ROUGE is recall", "rouge", "_a.fmeasure", "_a.recall", "test_rouge_of_unequal_lengths_and_order"),
    ("ROUGE: words are stemmed", "_scorer", "use_stemmer=False", "use_stemmer=True",
     "test_rouge_of_unequal_lengths_and_order"),
    # demo
    ("the demo: every answer is drawn with the same seed", "Session.answer", "row_seed(_a, _b)", "row_seed(_a, 0)",
     DEMO_SEED),
    ("the demo: --seed is forgotten", "Session.answer", "_a.seed", "0", DEMO_SEED),
    ("the demo: the first letter of a marker is seen", "longest_marker_start", "range(1, _a)", "range(2, _a)",
     "test_the_start_of_a_marker_is_held_back"),
    ("the demo: an answer goes on after the marker", "_StopAnswer.__call__", "_a or _b", "_b",
     "test_an_answer_ends_before_the_marker_of_the_next_turn_which_is_never_seen"),
    ("the demo: the draw of one token decides all", "_SampleToken.__call__", "_a - _b", "0", DEMO_SEED),
    # the longest micro-batch before the first update
    ("a rehearsal's gradients reach DeepSpeed", "gradients_dropped", "setattr(_a, _b, receive)", "receive",
     "test_a_rehearsed_run_is_the_run_without[zero2-fp32]"),
    ("a rehearsal drops gradients of ZeRO 1 at once", "gradients_dropped", "_keep if _a else _drop", "_drop",
     "test_gradients_live_as_long_as_in_training[1-fp32]"),
    ("a rehearsal's gradients stay", "gradients_dropped", "_a.grad = None", "_a.grad = _a.grad",
     "test_a_rehearsed_run_is_the_run_without[sft]"),
    ("a rehearsal goes on with the random numbers", "rehearsal.rehearsal", "set_random_states(_a)", "_a",
     "test_a_rehearsed_run_is_the_run_without[adapters-with-dropout]"),
    ("a rehearsal has no room for Adam's moments", "first_update_bytes", "_a += ADAM_BYTES * _b", "_a += _b",
     "test_room_for_what_the_first_update_takes_by_hand[2-bf16]"),
    ("a rehearsal packs the longest examples together", "Supervised.longest_micro_batch",
     "_a *= _b.plan.accumulation", "_a *= 1", "test_sizes_by_hand[sft-packed]"),
    ("a rehearsal takes texts that have no room", "rows_of", "_a.tokens // _b", "_a.tokens",
     "test_sizes_by_hand[sft-fewer-tokens]"),
    # recomputation of some layers
    ("the other layers are recomputed", "enable_gradient_checkpointing", "_a % _b == 0", "_a % _b != 0",
     "test_gradient_checkpointing_of_some_layers_gives_the_same_update[2-0]"),
    ("the plan has all layers recomputed", "training_pass", "enable_gradient_checkpointing(_a, _b)",
     "enable_gradient_checkpointing(_a)", "test_checkpointing_of_some_layers_is_in_between[gemma]"),
))
# fmt: on


def make_overlay(folder: Path, mutant: Mutant) -> None:
    """Links to the packages' files in the folder, but for the changed one."""
    file, text = mutant.made()
    for package in PACKAGES:
        if not file.is_relative_to(package):
            (folder / package.name).symlink_to(package)
    source = next(package for package in PACKAGES if file.is_relative_to(package))
    place = folder / source.name
    for part in file.relative_to(source).parts:
        place.mkdir()
        for entry in source.iterdir():
            if entry.name not in (part, "__pycache__"):
                (place / entry.name).symlink_to(entry)
        place, source = place / part, source / part
    place.write_text(text, encoding="utf-8")


def run_tests(tests: Sequence[str], packages: Sequence[Path], folder: Path) -> None:
    """Becomes a process that runs tests on the packages in these folders; never returns."""
    signal.alarm(TIMEOUT + 2 * len(tests))
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    paths = [str(place) for place in packages]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of the processes that tests start
    sys.path[:0] = paths
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
    name = f"{mutant.name} ({mutant.function})" if mutant else "the package as it is"
    if mutant and status == 0:
        return f"{name}: its tests do not notice"
    return f"{name}: pytest ended with {status}\n{textwrap.indent(output[-3000:], '    ')}"


def run_all(mutants: Sequence[Mutant], place: Path) -> list[str]:
    """Runs the tests of each mutant, and before them all tests on the package as it is; what was wrong."""
    everything = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.test_ids()))
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
                places = [folder] if mutant else [package.parent for package in PACKAGES]
                run_tests(mutant.test_ids() if mutant else everything, places, folder)
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
        mutant.made()
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
