# SPDX-License-Identifier: Apache-2.0
"""Self-checks of a policy: forward passes that catch what would train silently wrong, before the first update.

Those of reward models and critics are in scalar_check.py, of rollouts in rollout_check.py, of --packing in
packing_check.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dschat.base.errors import UserError
from dschat.models.adapters import lora_config
from dschat.models.attention import ATTENTION_FLAG, EAGER, PLAIN_ATTENTION, SDPA, use_attention
from dschat.models.backbone import position_inputs
from dschat.models.eager import uncompiled
from dschat.models.engines import ModelEngine, PolicyEngine, TrainedPolicy
from dschat.run.distributed import first_over_ranks
from dschat.run.state import random_states, set_random_states

# Largest difference that rounding explains, by the precision of the forward pass; in units of the largest number that
# goes into what is compared, and of 1 at least.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
ROWS = 2  # that are checked
ATTENTION_TOKENS = 256  # maximum tokens per row where attentions are compared, since eager attention is quadratic
POSITIONS = 32
PADDING = (3, 2)  # columns before and after
WRONG = "The model's architecture is computed wrongly here, or actor and reference differ; please report the model."
RANDOM = (
    "Something in the model is random in training mode, such as dropout or noise of a router: an update would not see "
    "the numbers that responses are sampled with. Set it to 0 in the model's config.json, or use another model."
)


@torch.no_grad()
def check_policy(
    engine: TrainedPolicy, tokens: tuple[Tensor, Tensor], num_response: int, temperature: float, pad_id: int
) -> float:
    """Checks log-probs against the model's own logits, and that neither padding nor training mode changes them.

    Args:
        engine: the policy's engine.
        tokens: input_ids (B, T) long and attention_mask (B, T) bool; the first two rows are used.
        num_response: R < T, the number of response columns, which are the last ones.
        temperature: sampling temperature, which divides the logits.
        pad_id: id of the padding token.

    Returns:
        The largest logit in absolute value, divided by the temperature: log-probs are rounded as it is, however small
        they are themselves.

    Raises:
        UserError: they differ by more than rounding explains.
    """
    # Full logits of a whole response would be gigabytes: its first positions suffice.
    checked = min(num_response, POSITIONS)
    end = tokens[0].shape[1] - num_response + checked
    input_ids = tokens[0][:ROWS, :end]
    attention_mask = tokens[1][:ROWS, :end]
    mask = attention_mask[:, -checked:]

    # The model's own logits.
    logprobs, _ = engine(input_ids, attention_mask, checked, temperature)
    logits = _full_logits(engine, input_ids, attention_mask, checked) / temperature
    own_logprobs = logits.log_softmax(-1).gather(-1, input_ids[:, -checked:, None]).squeeze(-1)
    size = largest(logits, mask[..., None])
    require_close("log-probs", "those of the model's own logits", logprobs, own_logprobs, mask, engine, size)

    # Padding on both sides.
    padded_ids = F.pad(input_ids, PADDING, value=pad_id)
    padded_mask = F.pad(attention_mask, PADDING, value=False)
    padded_response = checked + PADDING[1]
    padded, _ = engine(padded_ids, padded_mask, padded_response, temperature)
    require_close("log-probs with padding", "those without", padded[:, :checked], logprobs, mask, engine, size)

    # Training mode, and the attention that a flag names.
    check_modes(engine, "log-probs", mask, lambda: engine(input_ids, attention_mask, checked, temperature)[0], size)
    ids, seen = ragged_rows(padded_ids, padded_mask)
    attention_columns = F.pad(mask, (0, PADDING[1]))
    check_attention_parity(
        engine, "log-probs", attention_columns, lambda: engine(ids, seen, padded_response, temperature)[0], size
    )
    return size


def _full_logits(engine: TrainedPolicy, input_ids: Tensor, attention_mask: Tensor, num_tokens: int) -> Tensor:
    """Logits of the model's own forward pass.

    Args:
        engine: the policy's engine.
        input_ids: shape ``(B, T)``.
        attention_mask: shape ``(B, T)``, bool.
        num_tokens: N, the last tokens, which the logits predict.

    Returns:
        Shape ``(B, N, V)``, float32.
    """
    causal_lm = engine.module.inner
    output = causal_lm(
        input_ids=input_ids,
        attention_mask=attention_mask.long(),
        use_cache=False,
        **position_inputs(causal_lm, attention_mask),
        **_keep_logits(causal_lm, num_tokens + 1),
    )
    logits: Tensor = output.logits[:, -num_tokens - 1 : -1]
    return logits.float()


def largest(numbers: Tensor, mask: Tensor) -> float:
    """Largest absolute number on a mask that broadcasts; 0 of none."""
    masked = torch.where(mask, numbers.abs(), 0.0)
    return float(masked.max()) if masked.numel() else 0.0


def tolerance_of(engine: ModelEngine | PolicyEngine, size: float = 1.0) -> float:
    """Largest difference that rounding explains between forward passes whose largest number is `size`."""
    return TOLERANCE[next(engine.module.parameters()).dtype] * max(1.0, size)


def ragged_rows(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The last ATTENTION_TOKENS columns (B, T) of padded rows, which begin in different columns."""
    seen = attention_mask[:, -ATTENTION_TOKENS:].clone()
    seen[1:] &= seen[1:].cumsum(1) > 1  # without the row's first token
    return input_ids[:, -ATTENTION_TOKENS:], seen


def check_attention_parity(
    engine: ModelEngine, what: str, mask: Tensor, forward: Callable[[], Tensor], size: float
) -> None:
    """Checks that the attention that a flag names gives the numbers and gradients of eager attention.

    PyTorch's sdpa, the default, is not compared, nor are models with their own attention code. Sliding
    windows count as far as ATTENTION_TOKENS reach.

    Args:
        engine: engine of any model; gradients are compared where it is trained.
        what: the numbers, for the message.
        mask: bool, which numbers count.
        forward: a pass of the engine over padded rows → its numbers, of the mask's shape.
        size: size of the largest number that goes into them.

    Raises:
        UserError: they differ by more than rounding explains.
    """
    model = engine.module.inner
    used = model.config.get_text_config()._attn_implementation
    if used in PLAIN_ATTENTION or not model._supports_attention_backend:
        return
    with uncompiled(model):
        numbers, norm = _numbers_and_gradient(engine, mask, forward)
        with use_attention(EAGER, model.config):
            expected, expected_norm = _numbers_and_gradient(engine, mask, forward)
    cause = f"{ATTENTION_FLAG} {used} computes other numbers on this device: use {ATTENTION_FLAG} {SDPA} or {EAGER}."
    require_close(f"{what} with {used}", "those with eager attention", numbers, expected, mask, engine, size, cause)

    # A scalar model whose head is zero has no gradient before the head, with any attention.
    both_zero = (norm == 0) & (expected_norm == 0)
    smallest = torch.finfo(torch.float32).tiny
    ratio = torch.where(both_zero, 1.0, norm / expected_norm.clamp(min=smallest))
    what = f"norms of gradients with {used}, divided by those with eager attention,"
    all_numbers = torch.ones_like(ratio, dtype=torch.bool)
    require_close(what, "1", ratio, torch.ones_like(ratio), all_numbers, engine, 1.0, cause)


def _numbers_and_gradient(engine: ModelEngine, mask: Tensor, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Numbers of a pass, and the norm (0-d) of the gradient of their squares' sum by the embedded tokens.

    The norm is 1 where the model is not trained. The engine is afterwards in the mode that it was in, and no parameter
    has a gradient.
    """
    if not any(parameter.requires_grad for parameter in engine.module.parameters()):
        numbers = forward()
        return numbers, torch.ones((), device=numbers.device)

    embedded: list[Tensor] = []

    def keep_embedded(module: nn.Module, inputs: object, output: Tensor) -> None:
        embedded.append(output if output.requires_grad else output.requires_grad_())

    handle = engine.module.inner.get_input_embeddings().register_forward_hook(keep_embedded)
    with _mode_and_random_states(engine):
        engine.train()
        try:
            with torch.enable_grad(), engine.rehearsing():
                numbers = forward()
                loss = torch.where(mask, numbers, 0.0).square().sum()
                (gradient,) = torch.autograd.grad(loss, embedded[:1])
        finally:
            handle.remove()
    return numbers.detach(), gradient.float().norm()


@contextmanager
def _mode_and_random_states(engine: ModelEngine) -> Iterator[None]:
    """Restores afterwards whether the engine is in training mode, and the global random states."""
    was_training = engine.module.training
    states = random_states()
    yield
    if was_training:
        engine.train()
    else:
        engine.eval()
    set_random_states(states)


@torch.no_grad()
def check_modes(
    engine: ModelEngine, what: str, mask: Tensor, forward: Callable[[], Tensor], size: float = 0.0
) -> None:
    """Checks that training mode gives the numbers of evaluation mode. Mode and random states stay what they were.

    Nothing is compared of a model that is not trained, or with dropout that a flag asks for.

    Args:
        engine: engine of any model.
        what: the numbers, for the message.
        mask: bool, which numbers count.
        forward: a pass of the engine → its numbers, of the mask's shape.
        size: size of the largest number that they are computed from, such as a logit; at least their own counts.

    Raises:
        UserError: they differ by more than rounding explains.
    """
    is_trained = any(parameter.requires_grad for parameter in engine.module.parameters())
    config = lora_config(engine.module.inner)
    if not is_trained or (config is not None and config.lora_dropout):
        return
    with _mode_and_random_states(engine):
        engine.train()
        trained = forward()
        engine.eval()
        evaluated = forward()
    size = max(size, largest(evaluated, mask))
    others = "those in evaluation mode"
    require_close(f"{what} in training mode", others, trained, evaluated, mask, engine, size, RANDOM)


def _keep_logits(causal_lm: nn.Module, count: int) -> dict[str, int]:
    """Arguments with which a causal LM computes its last logits alone, if it can."""
    parameters = inspect.signature(causal_lm.forward).parameters
    return {"logits_to_keep": count} if "logits_to_keep" in parameters else {}


def require_close(
    what: str,
    others: str,
    numbers: Tensor,
    expected: Tensor,
    mask: Tensor,
    engine: ModelEngine,
    size: float,
    cause: str = WRONG,
) -> None:
    """Raises UserError if numbers on the mask differ by more than rounding of numbers of this size explains."""
    difference = largest(numbers - expected, mask)
    tolerance = TOLERANCE[next(engine.module.parameters()).dtype] * max(1.0, size)
    check_weights(engine, difference)
    if not difference <= tolerance:
        raise UserError(
            f"self-check: {what} differ from {others} by up to {difference:.3g} (rounding explains {tolerance:g}). "
            f"{cause} --no_self_checks skips this check."
        )


def check_weights(engine: ModelEngine, number: float) -> None:
    """Names the bad weight where a forward pass gave a number that is not finite. Every rank must call it.

    Args:
        engine: engine of the model.
        number: this rank's number.

    Raises:
        UserError: on every rank, if a rank's number is not finite and a weight is not; it names weight and model.
    """
    if first_over_ranks(None if math.isfinite(number) else 0) is None:
        return
    bad_weights = []
    for name, weight in engine.whole_weights():  # every rank must read all of them
        if not bool(torch.isfinite(weight).all()):
            bad_weights.append(name)
    if not bad_weights:
        return
    name = bad_weights[0].removeprefix("inner.").replace(".base_layer.", ".")
    raise UserError(
        f"self-check: {name} of {engine.module.inner.name_or_path} holds numbers that are not finite. Fetch or train"
        " it again, or, where this run has trained it already, lower the learning rate."
    )
