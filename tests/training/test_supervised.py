# SPDX-License-Identifier: Apache-2.0
"""The tasks of step 1, step 2 and REFUEL on pairs: losses, gradients and evaluations by plain transformers."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from closeness import UPDATE, assert_near, near
from dschat.base.errors import UserError
from dschat.data.examples import PairExample, SFTExample
from dschat.models.layout import PassSize
from dschat.refuel.offline import RefuelTask
from dschat.refuel.token_pairs import RegressionExample
from dschat.run.metrics import with_variances
from dschat.training.reference import reference_logprobs, with_logprobs
from dschat.training.steps import common
from dschat.training.supervised.reward import margin_warning
from factories import (
    PAD,
    engine_of,
    hf_logprobs,
    hf_score,
    make_causal_lm,
    make_classifier,
    random_ids,
    supervised_loop,
)
from recorded_updates import DEMONSTRATIONS, PAIRS

HELD_OUT_DEMONSTRATIONS = DEMONSTRATIONS[10:13]


def sft_trainer(folder, micro=4, **overrides):
    flags = {"per_device_train_batch_size": micro, "per_device_eval_batch_size": 2, "learning_rate": 1e-2}
    return supervised_loop("sft", folder, DEMONSTRATIONS, HELD_OUT_DEMONSTRATIONS, **(flags | overrides))


def nll_of(examples, on_prompt=False):
    """Mean negative log-likelihood per trained token, from the model's own logits row by row."""
    model, rows = make_causal_lm(), [(e.prompt_ids, e.response_ids) for e in examples]
    if on_prompt:
        rows = [(p[:1], p[1:] + r) for p, r in rows]
    return -torch.cat([hf_logprobs(model, row)[0] for row in rows]).mean().item()


def nll_error_of(examples, on_prompt=False):
    """Its standard error over texts: √(n / (n − 1) · Σ(tokens of a text · (its mean − mean))²) / tokens of all."""
    lengths = [len(e) - 1 if on_prompt else len(e.response_ids) for e in examples]
    mean = nll_of(examples, on_prompt)
    residuals = [
        length * (nll_of([example], on_prompt) - mean) for length, example in zip(lengths, examples, strict=True)
    ]
    n = len(examples)
    return math.sqrt(n / (n - 1) * sum(x**2 for x in residuals)) / sum(lengths)


@pytest.mark.parametrize(
    ("on_prompt", "layout"), [(False, {}), (True, {}), (False, {"packing": True, "max_seq_len": 24})]
)
def test_evaluation_is_the_perplexity_over_tokens(on_prompt, layout, group, tmp_path):
    """The standard error is that of texts, also where several share a row."""
    metrics = sft_trainer(tmp_path, sft_on_prompt=on_prompt, **layout).evaluate()
    expected = nll_of(HELD_OUT_DEMONSTRATIONS, on_prompt)
    error = nll_error_of(HELD_OUT_DEMONSTRATIONS, on_prompt)
    assert metrics == near(
        {
            "eval/loss": expected,
            "eval/loss_stderr": error,
            "eval/perplexity": math.exp(expected),
            "eval/perplexity_stderr": math.exp(expected) * error,
            "eval/rows": 3.0,
        },
        UPDATE,
    )


@pytest.mark.parametrize("on_prompt", [False, True])
def test_the_loss_is_the_mean_over_the_tokens_of_the_whole_update(on_prompt, group, tmp_path):
    trainer = sft_trainer(tmp_path, micro=2, gradient_accumulation_steps=2, sft_on_prompt=on_prompt)
    metrics = trainer.iterate([[0, 1], [2, 4]])
    assert metrics["loss/sft"] == near(nll_of([DEMONSTRATIONS[i] for i in (0, 1, 2, 4)], on_prompt), UPDATE)
    assert metrics["lr"] == pytest.approx(1e-2) and metrics["grad_norm"] > 0


def test_label_smoothing_is_torchs_and_leaves_the_evaluation_alone(group, tmp_path):
    trainer = sft_trainer(tmp_path, micro=2, gradient_accumulation_steps=2, label_smoothing=0.2)
    held_out = trainer.evaluate()["eval/loss"]
    metrics = trainer.iterate([[0, 1], [2, 4]])
    model, logits, targets = make_causal_lm(), [], []
    for example in (DEMONSTRATIONS[i] for i in (0, 1, 2, 4)):
        ids = torch.tensor([example.prompt_ids + example.response_ids])
        logits.append(model(input_ids=ids).logits[0, len(example.prompt_ids) - 1 : -1])
        targets += example.response_ids
    expected = torch.nn.functional.cross_entropy(torch.cat(logits), torch.tensor(targets), label_smoothing=0.2)
    assert metrics["loss/sft"] == near(expected.item(), UPDATE)
    assert held_out == near(nll_of(HELD_OUT_DEMONSTRATIONS), UPDATE)


HELD_OUT_PAIRS = PAIRS[8:13]


def reward_trainer(folder, micro=4, train=PAIRS, model=None, **overrides):
    flags = {"per_device_train_batch_size": micro, "per_device_eval_batch_size": 2, "learning_rate": 3e-3}
    return supervised_loop("reward", folder, train, HELD_OUT_PAIRS, model, **(flags | overrides))


def expected_of(examples):
    """Loss and statistics from the classifier's own scores, pair by pair."""
    model = make_classifier()
    scores = [(hf_score(model, e.chosen_ids), hf_score(model, e.rejected_ids)) for e in examples]
    n = len(scores)
    return {
        "loss": sum(math.log1p(math.exp(r - c)) for c, r in scores) / n,
        "accuracy": sum(c > r for c, r in scores) / n,
        "chosen": sum(c for c, _ in scores) / n,
        "rejected": sum(r for _, r in scores) / n,
        "margin": sum(c - r for c, r in scores) / n,
    }


def test_evaluation(group, tmp_path):
    rows = [expected_of([pair]) for pair in HELD_OUT_PAIRS]
    expected = {"eval/rows": float(len(rows))}
    for name, value in expected_of(HELD_OUT_PAIRS).items():
        spread = statistics.stdev([row[name] for row in rows])
        expected |= {f"eval/{name}": value, f"eval/{name}_stderr": spread / math.sqrt(len(rows))}
    assert reward_trainer(tmp_path).evaluate() == near(expected, UPDATE)


@pytest.mark.parametrize("loss", ["end", "per_sample"])
def test_an_update_of_each_loss_does_not_depend_on_the_accumulation(loss, group, tmp_path):
    """Nor on where the pair of equal sequences is, which only per_sample leaves out."""
    equal = PairExample(PAIRS[3].chosen_ids, PAIRS[3].chosen_ids)
    train, results = [*PAIRS[:3], equal, *PAIRS[4:]], []
    for micro in (2, 8):
        trainer = reward_trainer(
            tmp_path / str(micro), micro, train, gradient_accumulation_steps=8 // micro, reward_loss=loss
        )
        metrics = trainer.iterate([list(range(8))[i : i + micro] for i in range(0, 8, micro)])
        results.append({name: metrics[name] for name in ("loss/reward", "train/accuracy", "grad_norm")})
    assert results[1] == near(results[0], UPDATE)
    without = reward_trainer(tmp_path / "7", 7, train, reward_loss=loss).iterate([[0, 1, 2, 4, 5, 6, 7]])
    rest = results[0]["loss/reward"] * (7 if loss == "per_sample" else 8) - (loss != "per_sample") * math.log(2)
    assert without["loss/reward"] == near(rest / 7, UPDATE)


def test_margins_and_centring_reach_the_loss(group, tmp_path):
    train = [replace(example, margin=0.5 * i) for i, example in enumerate(PAIRS[:4])]
    trainer = reward_trainer(tmp_path, train=train, center_rewards_coefficient=0.2)
    model = make_classifier()
    scores = [(hf_score(model, e.chosen_ids), hf_score(model, e.rejected_ids)) for e in train]
    costs = [math.log1p(math.exp(r - c + 0.5 * i)) + 0.2 * (c + r) ** 2 for i, (c, r) in enumerate(scores)]
    assert trainer.iterate([[0, 1, 2, 3]])["loss/reward"] == near(sum(costs) / 4, UPDATE)


def test_a_new_head_ranks_nothing(group, tmp_path):
    model = make_classifier()
    torch.nn.init.zeros_(model.score.weight)
    found = reward_trainer(tmp_path, model=model, reward_loss="last_token").evaluate()
    assert found["eval/accuracy"] == found["eval/end_accuracy"] == 0
    assert found["eval/loss"] == near(math.log(2))


def test_a_margin_below_the_kl_penalty_is_said():
    """The policy's log-ratio moves by the margin divided by the coefficient, .05; five nats are enough."""
    warning = margin_warning(0.7, 0.06, 0.0)
    assert "only 0.06 on average (accuracy 0.700)" in warning and "at most 1.2 nats" in warning
    assert "--learning_rate" in warning and "--normalize_scores" in warning
    assert margin_warning(0.7, 0.25, 1.0) is None and margin_warning(0.7, 0.249, 1.0)


def test_rejected_responses_that_score_higher_are_said_only_beyond_two_standard_errors():
    assert "towards rejected responses" in margin_warning(0.4, -0.21, 0.1)
    assert "only -0.19 on average" in margin_warning(0.4, -0.19, 0.1)


ETA, TEMPERATURE = 3.0, 0.8
pytestmark = pytest.mark.usefixtures("group")


def scored_pairs(count=3):
    """Pairs of several lengths with rewards, all but the last of which differ."""
    made = []
    for n in range(count):
        ids = [random_ids(length, 10 * n + place) for place, length in enumerate((2 + n, 3 + n % 3, 6 - n % 4))]
        made.append(
            RegressionExample(*ids, chosen_reward=float(n + 1), rejected_reward=float(min(n + 1, count - 1) - n % 2))
        )
    return made


def task_of(train, eval=(), eta=ETA):
    return RefuelTask(train, list(eval), PAD, eta, TEMPERATURE)


def own_sums(model, examples):
    """Σ log π by plain transformers: (n, 2)."""
    sides = [(e.prompt_ids, r) for e in examples for r in (e.chosen_ids, e.rejected_ids)]
    return torch.stack([hf_logprobs(model, side, TEMPERATURE)[0].sum() for side in sides]).view(-1, 2)


def test_the_loss_is_the_regression_on_the_replies_alone():
    model, before = make_causal_lm(), make_causal_lm(seed=4)
    examples = with_logprobs(scored_pairs(), own_sums(before, scored_pairs()))
    expected = own_sums(model, examples) - own_sums(before, examples)
    rewards = torch.tensor([e.chosen_reward - e.rejected_reward for e in examples])
    assert 0 in rewards and rewards.min() >= 0 and rewards.max() > 0
    differences = expected[:, 0] - expected[:, 1]
    wanted = (differences - ETA * rewards).square().mean()
    loss, stats = task_of(examples).loss(engine_of(model), examples, 3)
    assert_near(loss.cpu(), wanted, UPDATE)
    found = with_variances({name: float(x) for name, x in stats.items()})
    ratios = expected.exp()
    assert found == {
        "log_ratio": near(float(expected.mean()), UPDATE),
        "log_ratio_chosen": near(float(expected[:, 0].mean()), UPDATE),
        "log_ratio_rejected": near(float(expected[:, 1].mean()), UPDATE),
        "agreement": pytest.approx(float((differences * rewards > 0).float().mean())),
        "ratio": near(float(ratios.mean()), 8 * UPDATE),
        "ratio_variance": near(float(ratios.var(unbiased=False)), 8 * UPDATE),
    }


def test_large_rewards_that_lie_close_together_keep_their_difference():
    (example,) = scored_pairs(1)
    example = replace(example, chosen_reward=1e6 + 1 / 64, rejected_reward=1e6)
    (example,) = with_logprobs([example], own_sums(make_causal_lm(), [example]))
    loss, _ = task_of([example]).loss(engine_of(make_causal_lm()), [example], 1)
    assert loss.item() == near((ETA / 64) ** 2, UPDATE)


def test_log_probs_of_other_weights_are_refused_at_the_start(tmp_path):
    engine = engine_of(make_causal_lm())
    kept = reference_logprobs(engine, scored_pairs(), PAD, PassSize(2), TEMPERATURE, tmp_path / "r.safetensors", {})
    examples = with_logprobs(scored_pairs(), kept)
    task = task_of(examples)
    task.check_start(engine, examples)
    wrong = with_logprobs(
        examples, torch.tensor([[chosen, rejected + 1] for chosen, rejected in (e.ref_logprobs for e in examples)])
    )
    with pytest.raises(UserError, match="self-check: .*log-probs of replies of up to .*Remove the file of"):
        task.check_start(engine, wrong)


def trainer_of(folder, **flags):
    """A run on 5 scored_pairs, two to an update."""
    flags = {"learning_rate": 1e-2, "gradient_accumulation_steps": 2, "eval_interval": 2, "eta": 1.0} | flags
    flags = {"total_episodes": 10, "temperature": TEMPERATURE} | flags
    return supervised_loop("refuel", folder, scored_pairs(5), scored_pairs(5)[:2], **flags)


def test_it_goes_through_the_pairs_until_so_many_were_seen(tmp_path, monkeypatch):
    trainer, seen = trainer_of(tmp_path), []
    real = trainer.iterate
    monkeypatch.setattr(trainer, "iterate", lambda batches: seen.append(batches) or real(batches))
    result = trainer.fit()
    rows = [sorted(i for batch in update for i in batch) for update in seen]
    assert len(rows) == 5 and all(len(row) == 2 for row in rows)  # 10 episodes; an epoch is two updates
    assert all(len(set(rows[n] + rows[n + 1])) == 4 for n in (0, 2))
    assert trainer.update == 5 and "eval/ratio_variance" in result


@pytest.mark.parametrize(("is_main", "reading"), [(True, "make"), (False, "read")])
def test_others_wait_at_a_barrier_while_a_process_reads(is_main, reading, monkeypatch):
    """A barrier waits for --save_timeout, a broadcast or what follows only for --ddp_timeout; no cache is kept."""
    events = []

    class Loader:
        @property
        def key(self):
            events.append("key")

        def open(self, key, show=False):
            return None

        def make(self, show=False):
            events.append("make")
            return "data"

        def read(self):
            events.append("read")
            return "data"

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(common, "ExampleLoader", lambda *_: Loader())
    monkeypatch.setattr(common, "is_main", lambda: is_main)
    monkeypatch.setattr(common, "barrier", lambda: events.append("barrier"))
    monkeypatch.setattr(common, "broadcast_object", lambda key: events.append("broadcast"))
    assert common.load_step_data(None, SFTExample, None) == "data"
    assert events[:2] == (["key", "barrier"] if is_main else ["barrier", "broadcast"])
    assert "barrier" in events[events.index(reading) :]
