# SPDX-License-Identifier: Apache-2.0
"""Forward passes that catch what would train silently wrong: before the first update, and of every rollout."""

import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from dschat.base.errors import UserError
from dschat.data.collate import collate_packed
from dschat.data.examples import SFTExample
from dschat.models.backbone import position_ids, reads_positions
from dschat.models.compiled import uncompiled
from dschat.models.engines import ModelEngine, PolicyEngine, Scalar, TrainedPolicy
from dschat.models.layout import PassSize
from dschat.models.lora import lora_config
from dschat.models.opening import EAGER, PLAIN_ATTENTION, SDPA, attention_by
from dschat.models.opening import FLAG as ATTENTION_FLAG
from dschat.models.scalar import last_scores
from dschat.models.vocabulary import missing_ids_of
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import device, first_over_ranks, gather_objects
from dschat.run.state import random_states, set_random_states
from dschat.training.ppo.models import response_logprobs
from macro_actions.masked import last_true
from macro_actions.types import ScoredRollout, Trajectory, select_rows

# Largest difference that rounding explains, by the precision of the forward pass; in units of the largest number that
# goes into what is compared, and of 1 at least.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
ROWS = 2
ATTENTION_TOKENS = 256  # of each row where attentions are compared: eager attention holds its weights
STALE_GAP = 1.0  # nats a token that no policy should move in one iteration
GAP_ROWS = 8  # of a rollout on each process, where log-probs are computed to be compared alone
POSITIONS = 32
WRONG = "The model's architecture is computed wrongly here, or actor and reference differ; please report the model."
RANDOM = (
    "Something in the model is random in training mode, such as dropout or noise of a router: an update would not see "
    "the numbers that samples are drawn with. Set it to 0 in the model's config.json, or use another model."
)


@torch.no_grad()
def check_policy(
    engine: TrainedPolicy, tokens: tuple[Tensor, Tensor], num_response: int, temperature: float, pad_id: int
) -> None:
    """Log-probs equal the model's own logits; neither padding nor training mode changes them. Else UserError.

    `tokens` are input_ids (B, T) long and attention_mask (B, T) bool, of which the first two rows are used; the last R
    < T columns are responses.
    """
    kept = min(num_response, POSITIONS)  # full logits of a whole response would be gigabytes
    end = tokens[0].shape[1] - num_response + kept
    input_ids, attention_mask = (x[:ROWS, :end] for x in tokens)
    num_response = kept
    policy = engine.module
    logprobs, _ = engine(input_ids, attention_mask, num_response, temperature)
    mask = attention_mask[:, -num_response:]
    output = policy.inner(
        input_ids=input_ids,
        attention_mask=attention_mask.long(),
        use_cache=False,
        **position_ids(policy.inner, attention_mask),
        **_keep_logits(policy.inner, num_response + 1),
    )
    logits = output.logits[:, -num_response - 1 : -1].float() / temperature
    own = logits.log_softmax(-1).gather(-1, input_ids[:, -num_response:, None]).squeeze(-1)
    size = float(torch.where(mask[..., None], logits.abs(), 0.0).max())
    _require_close("log-probs", "those of the model's own logits", logprobs, own, mask, engine, size)
    padded_ids = F.pad(input_ids, (3, 2), value=pad_id)
    padded_mask = F.pad(attention_mask, (3, 2), value=False)
    padded, _ = engine(padded_ids, padded_mask, num_response + 2, temperature)
    _require_close("log-probs with padding", "those without", padded[:, :num_response], logprobs, mask, engine, size)
    check_modes(engine, "log-probs", mask, lambda: engine(input_ids, attention_mask, num_response, temperature)[0])
    ids, seen = ragged_rows(padded_ids, padded_mask)
    check_attention_parity(
        engine, "log-probs", F.pad(mask, (0, 2)), lambda: engine(ids, seen, num_response + 2, temperature)[0], size
    )


def ragged_rows(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The last ATTENTION_TOKENS columns (B, T) of padded rows, which begin in different columns."""
    seen = attention_mask[:, -ATTENTION_TOKENS:].clone()
    seen[1:] &= seen[1:].cumsum(1) > 1  # without the row's first token
    return input_ids[:, -ATTENTION_TOKENS:], seen


def check_attention_parity(
    engine: ModelEngine, what: str, mask: Tensor, forward: Callable[[], Tensor], size: float
) -> None:
    """Numbers and gradients with the attention that was named are those with eager attention; else UserError.

    PyTorch's sdpa, the default, is not compared, nor are models that compute attention by code of their own. Sliding
    windows count as far as ATTENTION_TOKENS reach.

    Args:
        engine: of any model; gradients are compared where it is trained.
        what: the numbers, for the message.
        mask: bool, which numbers count.
        forward: a pass of the engine over padded rows → its numbers, of the mask's shape.
        size: of the largest number that goes into them.
    """
    model = engine.module.inner
    used = model.config.get_text_config()._attn_implementation
    if used in PLAIN_ATTENTION or not model._supports_attention_backend:
        return
    with uncompiled(model):
        numbers, norm = _numbers_and_gradient(engine, mask, forward)
        with attention_by(EAGER, model.config):
            expected, expected_norm = _numbers_and_gradient(engine, mask, forward)
    cause = f"{ATTENTION_FLAG} {used} computes other numbers on this device: use {ATTENTION_FLAG} {SDPA} or {EAGER}."
    _require_close(f"{what} with {used}", "those with eager attention", numbers, expected, mask, engine, size, cause)
    # A scalar model whose head is zero has no gradient before the head, with any attention.
    both_zero = (norm == 0) & (expected_norm == 0)
    ratio = torch.where(both_zero, 1.0, norm / expected_norm.clamp(min=torch.finfo(torch.float32).tiny))
    same, every = torch.ones_like(ratio), torch.ones_like(ratio, dtype=torch.bool)
    what, others = f"norms of gradients with {used}, divided by those with eager attention,", "1"
    _require_close(what, others, ratio, same, every, engine, 1.0, cause)


def _numbers_and_gradient(engine: ModelEngine, mask: Tensor, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Numbers of a pass, and the norm (0-d) of the gradient of their squares' sum by the embedded tokens.

    The norm is 1 where the model is not trained. The engine is afterwards in the mode that it was in, and no parameter
    has a gradient.
    """
    if not any(parameter.requires_grad for parameter in engine.module.parameters()):
        numbers = forward()
        return numbers, torch.ones((), device=numbers.device)
    embedded: list[Tensor] = []
    handle = engine.module.inner.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: embedded.append(output if output.requires_grad else output.requires_grad_())
    )
    states, restore = random_states(), engine.train if engine.module.training else engine.eval
    engine.train()
    try:
        with torch.enable_grad(), engine.rehearsing():
            numbers = forward()
            loss = torch.where(mask, numbers, 0.0).square().sum()
            (gradient,) = torch.autograd.grad(loss, embedded[:1])
    finally:
        handle.remove()
    restore()
    set_random_states(states)
    return numbers.detach(), gradient.float().norm()


@torch.no_grad()
def check_modes(engine: ModelEngine, what: str, mask: Tensor, forward: Callable[[], Tensor]) -> None:
    """Training mode gives the numbers of evaluation mode; else UserError. Mode and random states are afterwards what
    they were.

    `forward` is a pass of the engine, of any model, → its numbers, of which those of the mask, bool of the same shape,
    count. Of a model that is not trained, or with dropout that a flag asks for, nothing is compared.
    """
    config, trains = lora_config(engine.module.inner), any(p.requires_grad for p in engine.module.parameters())
    if not trains or (config is not None and config.lora_dropout):
        return
    states, restore = random_states(), engine.train if engine.module.training else engine.eval
    engine.train()
    trained = forward()
    engine.eval()
    evaluated = forward()
    restore()
    set_random_states(states)
    what, size = f"{what} in training mode", float(torch.where(mask, evaluated.abs(), 0.0).max())
    _require_close(what, "those in evaluation mode", trained, evaluated, mask, engine, size, RANDOM)


@torch.no_grad()
def check_packing(engine: TrainedPolicy, examples: Sequence[SFTExample], pad_id: int) -> None:
    """Log-probs of examples that share a row are those of each alone. Raises UserError where they are not, or where
    the model cannot be told where an example begins.
    """
    family = engine.module.inner.config.model_type
    remedy = f"{family} models cannot keep packed examples apart. Leave --packing out."
    if not reads_positions(engine.module.inner):
        raise UserError(f"--packing: {remedy}")
    ordered = sorted(examples, key=len, reverse=True)
    packed = _on_device(collate_packed(ordered, pad_id, sum(map(len, ordered)), sft_on_prompt=True))
    positions = packed["position_ids"]
    together, _ = engine(packed["input_ids"], None, packed["targets"], with_entropy=False, position_ids=positions)
    parts = []
    for example in ordered:
        batch = _on_device(collate_packed([example], pad_id, len(example), sft_on_prompt=True))
        parts.append(engine(batch["input_ids"], None, batch["targets"], with_entropy=False)[0])
    alone = torch.cat(parts)
    difference, size = float((together - alone).abs().max()), float(alone.abs().max())
    check_weights(engine, difference)
    if not difference <= TOLERANCE[next(engine.module.parameters()).dtype] * max(1.0, size):
        raise UserError(
            f"--packing: log-probs differ by up to {difference:.3g} from those of an example alone. {remedy}"
        )


def _on_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(device()) for name, x in batch.items()}


@torch.no_grad()
def check_scalar(engine: Scalar, tokens: tuple[Tensor, Tensor], pad_id: int) -> None:
    """Scores equal the Hugging Face classifier's own; neither padding on either side nor training mode changes them.
    Else UserError.

    `tokens` are input_ids (B, T) long and attention_mask (B, T) bool, of which the first two rows are used.
    """
    input_ids, attention_mask = (x[:ROWS] for x in tokens)
    model = engine.module
    numbers = engine(input_ids, attention_mask)
    scores, size = last_scores(numbers, attention_mask), float(torch.where(attention_mask, numbers.abs(), 0.0).max())
    every = torch.ones_like(scores, dtype=torch.bool)
    theirs = _own_scores(model.inner, input_ids, attention_mask)
    _require_close("scores", "those of the classifier's own forward", scores, theirs, every, engine, size)
    padded_mask = F.pad(attention_mask, (3, 2), value=False)
    padded = last_scores(engine(F.pad(input_ids, (3, 2), value=pad_id), padded_mask), padded_mask)
    _require_close("scores with padding", "those without", padded, scores, every, engine, size)
    check_modes(engine, "scores", attention_mask, lambda: engine(input_ids, attention_mask))
    ids, seen = ragged_rows(F.pad(input_ids, (3, 2), value=pad_id), padded_mask)
    check_attention_parity(engine, "scores", seen, lambda: engine(ids, seen), size)


def _own_scores(classifier: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B,) float32: what the forward of transformers gives, which finds each row's last token by the pad token.

    Rows are read alone and without padding where the model has no pad token.
    """
    if classifier.config.pad_token_id is None:
        rows = zip(input_ids, attention_mask, strict=True)
        alone = [classifier(input_ids=ids[mask][None], use_cache=False).logits[0, 0] for ids, mask in rows]
        return torch.stack(alone).float()
    positions = position_ids(classifier, attention_mask)
    mask = attention_mask.long()
    output = classifier(input_ids=input_ids, attention_mask=mask, use_cache=False, **positions)
    scores: Tensor = output.logits[:, 0].float()
    return scores


@torch.no_grad()
def check_rollout(
    actor: TrainedPolicy, trajectory: Trajectory, sampling: Sampling, drawn_logprobs: Tensor | None = None
) -> None:
    """Before the first update, the ratio is 1, the KL to the reference 0, and every sampled token was allowed. Else
    UserError.

    The actor is in evaluation mode, the trajectory the first of the run; `drawn_logprobs` (B, R) are those of the pass
    that drew the tokens, if it gave them.
    """
    rollout, mask, temperature = trajectory.rollout, trajectory.response_mask, sampling.temperature
    missing = missing_ids_of(actor.module.inner)
    if missing is not None and bool((torch.isin(rollout.response_ids, missing) & mask).any()):
        raise UserError("self-check: the policy sampled an id that its tokenizer does not have.")
    check_policy(actor, (rollout.input_ids, rollout.attention_mask), mask.shape[1], temperature, sampling.pad_id)
    part = select_rows(rollout, torch.arange(min(ROWS, len(mask)), device=mask.device))
    again, _ = actor(part.input_ids, part.attention_mask, mask.shape[1], temperature)
    stored = trajectory.logprobs[: len(again)]
    size = float(torch.where(mask, trajectory.logprobs, 0.0).abs().max())
    _require_close("log-probs at the update", "those of the rollout", again, stored, part.response_mask, actor, size)
    if drawn_logprobs is not None:
        what, drawn = "log-probs of the drawing pass", drawn_logprobs[: len(again)]
        _require_close(what, "those of the actor", drawn, again, part.response_mask, actor, size)
    own, others = trajectory.logprobs, trajectory.ref_logprobs
    _require_close("actor's log-probs", "the reference's", own, others, mask, actor, size)
    for token_id in sampling.forbidden:
        if bool(((rollout.response_ids == token_id) & mask).any()):
            raise UserError(f"self-check: the policy sampled token {token_id}, a pad or BOS token.")
    if not bool((mask.cumsum(1) == torch.arange(1, mask.shape[1] + 1, device=mask.device))[mask].all()):
        raise UserError("self-check: a response is not a prefix of its row.")
    end_ids = torch.tensor(sampling.end_ids, device=mask.device)
    ended = (torch.isin(rollout.response_ids, end_ids) & last_true(mask)).any(1)
    if not bool((ended == rollout.finished)[mask.any(1)].all()):
        raise UserError("self-check: a finished response does not end with EOS, or one that was cut does.")


def _keep_logits(causal_lm: nn.Module, count: int) -> dict[str, int]:
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(causal_lm.forward).parameters else {}


def _require_close(
    what: str, others: str, x: Tensor, y: Tensor, mask: Tensor, engine: ModelEngine, size: float, cause: str = WRONG
) -> None:
    """Raises UserError where x and y differ on the mask by more than rounding of numbers of this size explains."""
    difference = float(torch.where(mask, (x - y).abs(), 0.0).max()) if mask.numel() else 0.0
    tolerance = TOLERANCE[next(engine.module.parameters()).dtype] * max(1.0, size)
    check_weights(engine, difference)
    if not difference <= tolerance:
        raise UserError(
            f"self-check: {what} differ from {others} by up to {difference:.3g} (rounding explains {tolerance:g}). "
            f"{cause} --no_self_checks skips this check."
        )


def check_weights(engine: ModelEngine, number: float) -> None:
    """Where this rank's number of a forward pass, or another rank's, is not finite, the weights are: UserError names
    the weight and its file. Every rank must call it.
    """
    if first_over_ranks(None if math.isfinite(number) else 0) is None:
        return
    bad = [name for name, x in engine.whole_weights() if not bool(torch.isfinite(x).all())]
    if bad:
        name, where = bad[0].removeprefix("inner.").replace(".base_layer.", "."), engine.module.inner.name_or_path
        for file in sorted(Path(where).glob("*.safetensors")):
            with safe_open(file, "pt") as content:
                if name in content.keys() and not bool(torch.isfinite(content.get_tensor(name)).all()):
                    where = str(file)
        remedy = "Fetch or train it again, or, where this run has trained it already, lower the learning rate."
        raise UserError(f"self-check: {name} of {where} holds numbers that are not finite. {remedy}")


def check_gap(
    known: Trajectory | ScoredRollout,
    actor: PolicyEngine,
    temperature: float,
    size: PassSize,
    clip: float | None = None,
    is_stale: bool = False,
) -> dict[str, float]:
    """How far the log-probs of the engine that drew the tokens are from the actor's, as it was then. Every rank must
    call it.

    Of a scored rollout, the actor's log-probs are computed for GAP_ROWS. `clip` is the largest importance weight.
    `is_stale`: the tokens were drawn with the weights of an iteration ago, so that a gap below STALE_GAP is no fault.

    Returns rollout/logprob_gap and rollout/logprob_gap_max, the mean and the largest difference in nats over the
    response tokens of all ranks, and with a clip rollout/importance_clipped, the share of tokens whose weight it
    bounds; {} where the engine has no log-probs of its own. Raises UserError, on every rank, where the mean is more
    than rounding explains.
    """
    rollout, drawn = known.rollout, known.rollout.drawn_logprobs
    if drawn is None:
        return {}
    if isinstance(known, Trajectory):
        logprobs = known.logprobs
    else:
        rows = torch.arange(min(size.rows, GAP_ROWS, len(drawn)), device=drawn.device)
        rollout, drawn = select_rows(rollout, rows), drawn[rows]
        logprobs = response_logprobs(actor, rollout, temperature, size)
    differences = (logprobs - drawn)[rollout.response_mask].double()
    gaps, clipped = differences.abs(), 0 if clip is None else int((differences > math.log(clip)).sum())
    own = (float(gaps.sum()), gaps.numel(), float(gaps.amax()) if gaps.numel() else 0.0, clipped)
    sums, counts, largest, clips = zip(*gather_objects(own), strict=True)
    tokens = max(sum(counts), 1)
    mean = sum(sums) / tokens
    tolerance = STALE_GAP if is_stale else TOLERANCE[next(actor.module.parameters()).dtype]
    if not mean <= tolerance:
        raise UserError(
            f"--rollout_engine: the engine's log-probs differ from the actor's by {mean:.3g} on average "
            f"({'an iteration' if is_stale else 'rounding'} explains {tolerance:g}): it draws with other weights than "
            "the actor's, or computes this model in another way. Use --rollout_engine continuous, and please report "
            "the model."
        )
    metrics = {"rollout/logprob_gap": mean, "rollout/logprob_gap_max": max(largest)}
    return metrics if clip is None else metrics | {"rollout/importance_clipped": sum(clips) / tokens}
