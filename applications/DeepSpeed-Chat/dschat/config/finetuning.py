# SPDX-License-Identifier: Apache-2.0
"""What of the models is trained: everything, the output layer, or LoRA adapters."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.config import rules
from dschat.config.rules import default_of, flag
from dschat.errors import UserError

logger = logging.getLogger(__name__)

FinetuneMode = Literal["all", "last_layer", "lora"]
DEFAULT_RANK = 8


@dataclass(kw_only=True)
class FinetuningFlags:
    """Which weights are trained.

    Attributes:
        compares_logprobs: log-probs of an update are compared with earlier ones, which dropout would make differ.
    """

    _argument_group_name = "what is trained"
    compares_logprobs: ClassVar[bool] = False

    finetune_mode: FinetuneMode | None = flag(
        "train all weights, the output layer alone (last_layer: of a language model its head, with the input embedding"
        " where they are one; of a reward model or critic the score), or adapters (lora); lora if lora_dim is given,"
        " else all",
        None,
    )
    lora_dim: int = flag(f"rank of the LoRA adapters; 0 = none, or {DEFAULT_RANK} with --finetune_mode lora", 0)
    lora_module_name: list[str] | None = flag(
        "parts of the names of the layers that get LoRA adapters; all linear layers but the heads if not given", None
    )
    lora_alpha: int | None = flag(
        "the adapters' output is scaled by this over their rank; twice the rank if not given", None
    )
    lora_dropout: float = flag("part of the adapters' inputs that is dropped in training; not in step 3", 0.0)
    merge_lora: bool = flag("with LoRA, save the merged model beside the adapter", True)

    def fill_in_rank(self) -> None:
        """Gives --finetune_mode lora a rank."""
        if self.finetune_mode == "lora" and self.lora_dim == 0:
            self.lora_dim = DEFAULT_RANK

    def check_finetuning(self, ranks: Sequence[int]) -> None:
        """Checks the flags of this section.

        Args:
            ranks: of each trained model's adapters; 0 = none.

        Raises:
            UserError: for the first broken rule.
        """
        rules.check_numbers(self, ["lora_dim"], rules.AT_LEAST_0)
        rules.check_numbers(self, ["lora_alpha"], rules.AT_LEAST_1)
        rules.check_numbers(self, ["lora_dropout"], (lambda part: 0 <= part < 1, "a number of at least 0 and below 1"))
        rules.check_not_empty(self, ["lora_module_name"])
        if self.finetune_mode == "lora" and not any(ranks):
            raise UserError("--finetune_mode lora: no model has adapters of a rank above 0; give --lora_dim.")
        if self.finetune_mode in ("all", "last_layer") and any(ranks):
            raise UserError(
                f"--finetune_mode {self.finetune_mode} and --lora_dim both say what is trained: drop one of them."
            )
        if self.lora_dropout and self.compares_logprobs:
            raise UserError(
                f"--lora_dropout {self.lora_dropout}: log-probs of an update are compared with those of the policy"
                " that drew the responses; with dropout they would differ before anything is learnt. Drop the flag."
            )
        if not any(ranks):
            self._warn_without_lora()

    def finetuning(self, rank: int) -> tuple[bool, int, tuple[str, ...] | None, int | None, float]:
        """The fields of a model's `dschat.models.finetuning.Finetuning`; `rank` is that of its adapters."""
        if not rank:
            return self.finetune_mode == "last_layer", 0, None, None, 0.0
        targets = None if self.lora_module_name is None else tuple(self.lora_module_name)
        return False, rank, targets, self.lora_alpha, self.lora_dropout

    def _warn_without_lora(self) -> None:
        names = ("lora_module_name", "lora_alpha", "lora_dropout", "merge_lora")
        given = [name for name in names if getattr(self, name) != default_of(FinetuningFlags, name)]
        for name in given:
            shown = "--no_merge_lora" if name == "merge_lora" else f"--{name}"
            logger.warning("%s does nothing without --lora_dim.", shown)
