# SPDX-License-Identifier: Apache-2.0
"""Decoding steps of fixed shapes: a graph of one is one of all, and graphs last as long as weights stay in place."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from closeness import EPS, FORMULA, assert_near
from dschat.rollouts import scheduler, static
from dschat.rollouts.continuous import ContinuousEngine, sample
from dschat.rollouts.decoder import Capacity
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.static import StaticDecoder, rows_of_step
from factories import make_causal_lm, sampling_of
from rollout_cases import ENDS, check_logprobs, model_of, prompts_of, seeds_of

# Operators whose result has a shape or value that the host must know.
SYNCING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "bincount", "repeat_interleave"}


class Operators(TorchDispatchMode):
    """Lists operators with the shapes and dtypes of their tensors, and the places of those that were there before."""

    def __init__(self, before: list[torch.Tensor]) -> None:
        super().__init__()
        self._before = {tensor.untyped_storage().data_ptr() for tensor in before}
        self.list: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        self.list.append((str(func), [self._seen(x) if isinstance(x, torch.Tensor) else x for x in leaves]))
        return result

    def _seen(self, tensor: torch.Tensor) -> Any:
        stays = tensor.untyped_storage().data_ptr() in self._before
        place = (tensor.data_ptr(), tensor.stride()) if stays else None
        return tensor.dtype, tuple(tensor.shape), place


def decoder_in_use(family: str, sampling: Sampling, slots: int = 3) -> StaticDecoder:
    """A decoder whose slots have rows, of which none has drawn its second token."""
    decoder = StaticDecoder(model_of(family), Capacity(4, 60, slots, 20))
    decoder.begin(sampling, seeds_of(slots), 4)
    lengths = [9, 5, 2][:slots]
    decoder.take(slice(0, slots), list(range(slots)), lengths, 0, 9)
    for row, length in enumerate(lengths):
        prompt = torch.tensor([prompts_of(lengths)[row]])
        decoder.prefill(slice(row, row + 1), prompt, torch.ones(1, length, dtype=torch.bool), 9)
    decoder.rows_changed(slots, 9)
    return decoder


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}], ids=str
)
@pytest.mark.parametrize("family", ["gemma2", "gpt2", "llama"])
@torch.no_grad()
def test_two_steps_of_a_bucket_are_the_same_to_a_gpu(family: str, options: dict[str, Any]) -> None:
    """The same operators on tensors of the same shapes; weights, cache and states are where they were; no waiting."""
    decoder = decoder_in_use(family, sampling_of(20, ENDS, **options))
    decoder.step(3, 0, 9)  # the bucket's first, in which some things are made once for all
    states = [x for x in vars(decoder).values() if isinstance(x, torch.Tensor)]
    buffers = [buffer for layer in decoder.cache.slot_layers for buffer in (layer.keys, layer.values)]
    before = [*decoder._model.parameters(), *decoder._model.buffers(), *states, *buffers]
    steps = []
    for column in (10, 11):
        with Operators(before) as operators:
            decoder.step(3, 0, column)
        assert decoder.refusal is None and not SYNCING & {name.split(".")[1] for name, _ in operators.list}
        steps.append(operators.list)
    assert steps[0] == steps[1] and len(steps[0]) > 100
    assert decoder.sampled.tolist() == [4, 4, 4, 3]  # the fourth slot fills the bucket


class Actor:
    """A policy whose weights are whole."""

    def __init__(self, causal_lm: Any) -> None:
        self.inner = causal_lm

    @contextmanager
    def gathered(self) -> Iterator["Actor"]:
        yield self


def test_a_model_that_makes_the_host_wait_is_launched_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch warns of it on a GPU."""
    causal_lm, prompts, sampling, seeds = model_of("llama"), prompts_of(), sampling_of(12, ENDS), seeds_of(8)
    expected = sample(causal_lm, prompts, sampling, seeds, 3)

    def wait(module: torch.nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    causal_lm.model.layers[0].mlp.register_forward_hook(wait)
    told: list[str] = []
    engine = ContinuousEngine(3, decode_graphs=True, report=told.append)
    with engine.session(Actor(causal_lm)) as draw:  # type: ignore[arg-type]
        drawn = [draw(prompts, sampling, seeds) for _ in range(2)]
    assert engine._decoder is None  # its buffers go
    assert [x.rollout.response_rows() for x in drawn] == [expected.rollout.response_rows()] * 2
    assert told == ["launched one by one: the host waits for the GPU"]
    assert caplog.text.count("cannot be captured as CUDA graphs") == 1


def test_a_decoder_lasts_as_long_as_weights_stay_in_place() -> None:
    """An optimiser's update leaves it; other weights, and more than it has room for, make another one."""
    causal_lm, sampling = make_causal_lm("gemma2"), sampling_of(12, ENDS)
    engine, decoders = ContinuousEngine(3, decode_graphs=True), []

    def draw(count: int) -> None:
        prompts, seeds = prompts_of([5, 3, 8, 2, 6, 4][:count]), seeds_of(count)
        with engine.session(Actor(causal_lm)) as of_session:  # type: ignore[arg-type]
            drawn = of_session(prompts, sampling, seeds)
            decoders.append(engine._decoder)
        expected = sample(causal_lm, prompts, sampling, seeds, 3)
        assert drawn.rollout.response_rows() == expected.rollout.response_rows()
        assert_near(drawn.logprobs, expected.logprobs)

    draw(4)
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            parameter.mul_(1.1)
    draw(4)
    draw(2)
    assert decoders[0] is decoders[1] is decoders[2]
    draw(6)
    assert decoders[3] is not decoders[2]
    head = causal_lm.get_output_embeddings()
    head.weight.data = head.weight.data * 2
    draw(6)
    assert decoders[4] is not decoders[3]
    with engine.session(Actor(causal_lm)) as of_session:  # type: ignore[arg-type]
        of_session(prompts_of([3]), sampling, [1])
        head.weight.data = head.weight.data.clone()
    assert engine._decoder is None  # nothing is held for weights that are gone


def test_buckets_do_not_depend_on_what_was_drawn_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run makes its decoder anew, and rounds alike only in the same buckets."""
    monkeypatch.setattr(static, "COLUMN_STEP", 16)
    causal_lm, sampling = make_causal_lm("llama"), sampling_of(20, ENDS)
    used: list[tuple[int, int]] = []
    step = StaticDecoder._static_step

    def noted(decoder: StaticDecoder, rows: int, columns: int) -> None:
        used.append((rows, columns))
        step(decoder, rows, columns)

    monkeypatch.setattr(StaticDecoder, "_static_step", noted)

    def draw(engine: ContinuousEngine, *lengths: int) -> list[tuple[int, int]]:
        used.clear()
        with engine.session(Actor(causal_lm)) as of_session:  # type: ignore[arg-type]
            of_session(prompts_of(list(lengths)), sampling, seeds_of(len(lengths)))
        return [*used]

    fresh, other = ContinuousEngine(5, decode_graphs=True), ContinuousEngine(5, decode_graphs=True)
    draw(other, *[90] * 12)
    few = [4, 9, 2]
    many = [4, 9, 2, 7, 3] * 12  # so many that the columns are used up
    assert draw(fresh, *few) == draw(other, *few) and draw(fresh, *many) == draw(other, *many)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_in_bf16_a_static_step_rounds_as_the_model_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows beside it and wider windows round otherwise in bf16: tokens may differ, numbers hardly."""
    monkeypatch.setattr(static, "COLUMN_STEP", 16)
    causal_lm, prompts = model_of(family).bfloat16(), prompts_of()
    drawn = sample(causal_lm, prompts, sampling_of(20, ENDS), seeds_of(8), 3, StaticDecoder)
    check_logprobs(causal_lm, prompts, drawn, roundings=FORMULA * torch.finfo(torch.bfloat16).eps / EPS)


def test_buckets() -> None:
    """Of rows, the ones that the docstring names."""
    assert [rows_of_step(live) for live in (1, 2, 3, 5, 8, 9, 16, 17, 33)] == [2, 2, 4, 8, 8, 16, 16, 24, 40]


def test_prompts_are_read_in_groups_of_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of 4 × 9 tokens, of which 30 fit: 3 × 9 = 27, then 9, 5, 2 and 1 as 3 × 9 = 27 and 1."""
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", 30)
    assert scheduler.prefill_groups([9, 9, 9, 9, 5, 2, 1]) == [(0, 3), (3, 6), (6, 7)]
    assert scheduler.prefill_groups([40, 40, 4]) == [(0, 1), (1, 2), (2, 3)]
