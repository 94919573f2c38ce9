# SPDX-License-Identifier: Apache-2.0
"""The adapter in the real TRL, which trains with it: `make test-frameworks FRAMEWORK=trl`."""

import pytest
import torch
from torch import Tensor

from framework_cases import WORDS, record, words

pytest.importorskip("trl", reason="needs TRL: make test-frameworks FRAMEWORK=trl")

from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from macro_actions.conditions import fixed
from macro_actions.frameworks import MacroActionsConfig, UnsupportedError
from macro_actions.frameworks.trl import MacroGRPOTrainer
from macro_actions.losses import loss_weights, policy_loss
from macro_actions.segments import macro_logprobs, segment

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LENGTH = 12


def share_of_fox(completions: list[str], **_: object) -> list[float]:
    return [text.split().count("fox") + 0.1 * len(text.split()) for text in completions]


def make(folder, trainer: type = MacroGRPOTrainer, config: MacroActionsConfig | None = None, **settings):
    """A trainer of a tiny random model."""
    torch.manual_seed(0)
    tokenizer = words()
    shape = Qwen2Config(
        vocab_size=len(tokenizer), num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=None, **SIZES
    )
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "num_iterations": 3,  # updates of a rollout: from the second on the ratio is not 1
        "max_steps": 3,
        "max_completion_length": LENGTH,
        "learning_rate": 1e-2,
        "beta": 0.0,
        "loss_type": "grpo",
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 1,
    }
    data = Dataset.from_list([{"prompt": " ".join(WORDS[n : n + 3])} for n in range(8)])
    own = {} if config is None else {"macro_actions": config}
    model: Qwen2ForCausalLM | str = Qwen2ForCausalLM(shape)
    if settings.get("beta"):  # the reference is read from a folder
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model = str(folder)
    return trainer(
        model=model,
        reward_funcs=share_of_fox,
        args=GRPOConfig(**arguments | settings),
        train_dataset=data,
        processing_class=tokenizer,
        **own,
    )


class Compared(MacroGRPOTrainer):
    """Computes each loss once more, from the batch alone."""

    losses: list[tuple[float, float, float]]

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"].bool()
        with torch.no_grad():
            new = self._logprobs(model, inputs)
            old = inputs["old_per_token_logps"]
            macro = segment(fixed(mask, self.macro_actions.ngram), mask)
            ratios = [macro_logprobs(x, macro, self.macro_actions.policy_ratio) for x in (new, old)]
            advantages = inputs["advantages"][:, None].expand_as(new)
            weights = loss_weights("response", macro, mask)
            expected, stats = policy_loss(*ratios, advantages, mask, 0.2, len(mask), weights)
            token, _ = policy_loss(new, old, advantages, mask, 0.2, len(mask), weights)
        self.losses.append((float(loss), float(expected), float(token)))
        self.last = {"new": new, "old": old, "advantages": inputs["advantages"], "mask": mask, "loss": loss.detach()}
        return loss

    @staticmethod
    def _logprobs(model, inputs) -> Tensor:
        """(B, T) of the completion's tokens, by the model alone."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1]
        return logits.float().log_softmax(-1).gather(2, inputs["completion_ids"][:, :, None])[:, :, 0]


@pytest.mark.parametrize("ratio", ["macro", "macro_mean"])
def test_the_loss_of_three_updates_is_that_of_macro_ratios(ratio, tmp_path) -> None:
    trainer = make(tmp_path, Compared, MacroActionsConfig("fixed", 3, policy_ratio=ratio))
    trainer.losses = []
    trainer.train()
    assert len(trainer.losses) == 3
    for loss, expected, _ in trainer.losses:
        assert loss == pytest.approx(expected, abs=1e-5)
    assert any(abs(loss - token) > 1e-4 for loss, _, token in trainer.losses), "not the ratio of tokens"
    if ratio == "macro":
        record("trl", **trainer.last)  # another processor draws other tokens


def test_macro_actions_of_one_token_are_trls_own_loss(tmp_path) -> None:
    ours = make(tmp_path, config=MacroActionsConfig("fixed", 1))
    ours.train()
    theirs = make(tmp_path, GRPOTrainer)
    theirs.train()
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == 3
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("condition", ["randomized", "parsing"])
def test_conditions_that_read_the_batch(condition, tmp_path) -> None:
    config = MacroActionsConfig(condition, ngram_lengths=(1, 2, 3), tokenizer=words(), parser="chunker")
    trainer = make(tmp_path, config=config)
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss_type": "cispo"}, "loss_type=cispo: use grpo, bnpo"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level=sequence: use token"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold: leave it out"),
        ({"beta": 0.1}, "beta=0.1: use 0"),
    ],
)
def test_losses_without_a_place_for_the_ratio_are_refused(settings, said, tmp_path) -> None:
    with pytest.raises(UnsupportedError, match=f"trl: ratios of macro actions do not go with {said}"):
        make(tmp_path, config=MacroActionsConfig(), **settings)


def test_a_loss_that_is_computed_elsewhere_is_refused(tmp_path) -> None:
    trainer = make(tmp_path, config=MacroActionsConfig())
    assert not trainer._unsupported_settings()
    trainer.use_liger_kernel = True  # without the package, which GRPOConfig asks for
    assert trainer._unsupported_settings() == ["use_liger_kernel=True, which computes its loss elsewhere: use False"]


def test_a_version_without_the_hook_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.delattr(GRPOTrainer, "_get_per_token_logps_and_entropies")
    with pytest.raises(UnsupportedError, match=r"trl: .*GRPOTrainer\._get_per_token_logps_and_entropies, which"):
        make(tmp_path, config=MacroActionsConfig())
