# SPDX-License-Identifier: Apache-2.0
"""Compiled decoder layers compute what the layers compute, in few graphs, and a refusal costs nothing but speed.

The fast tests trace and split layers as a run does, and leave out the code that is generated from that (aot_eager);
those marked slow generate it, too (inductor).
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from closeness import assert_near
from compiler_state import fresh_compiler
from dschat.models import compiled
from dschat.models.compiled import Compiler, compile_layers
from dschat.models.eager import compiler_of
from dschat.models.finetuning import enable_gradient_checkpointing
from dschat.models.lora import adapters_off, add_lora
from dschat.models.policy import PolicyModel
from dschat.rollouts.continuous import sample
from dschat.rollouts.static import StaticDecoder
from factories import sampling_of
from model_families import MODEL_FAMILIES
from rollout_cases import ENDS, FAMILIES, model_of, prompts_of, seeds_of


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """No graphs of other tests, and no settings for other tests."""
    with fresh_compiler():
        yield


def graphs() -> int:
    """How many graphs were made since the test began."""
    return counters["stats"]["unique_graphs"]


def batch_of(rows: int, width: int, seed: int = 0, padded: bool = False) -> tuple[Tensor, Tensor | None]:
    """Random ids (rows, width) and, with padding on the left of every second row, their mask."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, 100, (rows, width), generator=generator)
    if not padded:
        return input_ids, None
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[::2, : width // 3] = False
    return input_ids, mask


def step(model: PolicyModel, rows: int, width: int, padded: bool = False) -> list[Tensor]:
    """Log-probs of the last tokens of a batch and the gradients of their mean square."""
    input_ids, mask = batch_of(rows, width, padded=padded)
    logprobs, entropy = model(input_ids, mask, width // 3)
    model.zero_grad()
    logprobs.square().mean().backward()
    trained = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [logprobs.detach(), entropy.detach(), *(gradient.clone() for gradient in trained)]


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("family", sorted(MODEL_FAMILIES))
def test_logprobs_and_gradients_are_those_of_the_layers(family: str, backend: Any, padded: bool) -> None:
    model = PolicyModel(model_of(family))  # in evaluation mode: some families drop out
    expected = step(model, 3, 12, padded)
    compiler = compile_layers(model.inner, backend)
    model.compile_with(compiler)
    actual = step(model, 3, 12, padded)
    assert compiler.words == "compiled" and graphs() > 0
    for ours, theirs in zip(actual, expected, strict=True):
        assert_near(ours, theirs, 2**9)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_steps_of_fixed_shapes_draw_the_same_tokens(
    family: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several buckets of rows and columns, with rows that end and prompts that take their places."""
    monkeypatch.setattr("dschat.rollouts.static.COLUMN_STEP", 16)
    causal_lm, prompts, seeds = model_of(family), prompts_of(), seeds_of(8)
    sampling = sampling_of(24, ENDS)
    expected = sample(causal_lm, prompts, sampling, seeds, 5)
    compiler = compile_layers(causal_lm, backend)
    drawn = sample(causal_lm, prompts, sampling, seeds, 5, StaticDecoder)
    assert drawn.rollout.response_rows() == expected.rollout.response_rows()
    assert_near(drawn.logprobs, expected.logprobs, 2**9)
    assert compiler.words == "compiled"
    # A step that reads the whole buffer has a graph of its own, as its views are contiguous.
    sample(causal_lm, prompts_of([40, 30, 7]), sampling, seeds_of(3), 3, StaticDecoder)
    made = graphs()
    assert 1 < made <= 6
    sample(causal_lm, prompts_of([2, 30, 7, 11, 5, 6, 4] * 3), sampling, seeds_of(21), 9, StaticDecoder)
    assert graphs() == made  # other buckets, another cache


@pytest.mark.slow
def test_ragged_micro_batches_share_a_graph() -> None:
    """One graph for training and one without gradients, whatever the sizes; a single row has its own."""
    model = PolicyModel(model_of("gemma2"))
    compile_layers(model.inner, "aot_eager")

    def iteration(*sizes: tuple[int, int]) -> int:
        for rows, width in sizes:
            with torch.no_grad():
                model.eval()(*batch_of(rows, width), width // 3)
            step(model.train(), rows, width)
        return graphs()

    first = iteration((4, 12), (3, 20), (1, 9))
    assert iteration((8, 8), (2, 31), (1, 17), (5, 5), (12, 6)) == first
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_recomputed_layers_and_adapters(backend: Any) -> None:
    """Gradient checkpointing, LoRA and the reference with adapters off, in one model."""
    results = []
    for compiled_layers in (False, True):
        causal_lm = model_of("llama")
        torch.manual_seed(0)
        add_lora(causal_lm, 4, None, "base")
        for name, parameter in causal_lm.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        enable_gradient_checkpointing(causal_lm)
        model = PolicyModel(causal_lm).train()
        if compiled_layers:
            compile_layers(causal_lm, backend)
        with torch.no_grad(), adapters_off(model):
            reference = model(*batch_of(3, 12), 4)[0]
        results.append([reference, *step(model, 3, 12)])
    for ours, theirs in zip(results[1], results[0], strict=True):
        # A small element is a sum in which large terms cancel: rounding is that of the largest.
        assert_near(ours, theirs, 2**9, scale=float(theirs.abs().max()))
    assert (results[0][0] - results[0][1]).abs().max() > 0.01


def refusing(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    raise RuntimeError("no such instruction\nand more")


def test_a_model_that_cannot_be_compiled_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = PolicyModel(model_of("llama")).train()
    expected = step(model, 3, 12)
    compiler = compile_layers(model.inner, refusing)
    for _ in range(2):
        for ours, theirs in zip(step(model, 3, 12), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert compiler.words.startswith("not compiled: ") and "no such instruction" in compiler.words
    assert caplog.text.count("are not compiled from now on") == 1
    assert compiler_of(model.inner) is None


@pytest.mark.parametrize("refused", [1, 2])
def test_a_refusal_between_checkpointed_layers(refused: int) -> None:
    """Layers are computed again as they were computed, the first compiled and later ones as they are."""
    made = []

    def refuses_one(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        made.append(module)
        if len(made) == refused:
            raise RuntimeError("no such instruction")
        return aot_eager(module, inputs)

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.GELU(), *[nn.Tanh()] * number) for number in range(3)]

    def gradients(functions: list[Callable[[Tensor], Tensor]]) -> list[Tensor]:
        states = torch.ones(2, 4, requires_grad=True)
        x = states
        for function in functions:
            x = checkpoint(function, x, use_reentrant=False)
        parameters = [states, *(parameter for layer in layers for parameter in layer.parameters())]
        return list(torch.autograd.grad(x.square().sum(), parameters))

    expected = gradients([layer.forward for layer in layers])
    compiler = Compiler("toy", refuses_one)
    functions = [compiler.compile(layer.forward) for layer in layers]
    for _ in range(2):
        for ours, theirs in zip(gradients(functions), expected, strict=True):
            assert_near(ours, theirs)
    assert compiler.refusal is not None and "no such instruction" in compiler.refusal
    assert len(made) == refused


def test_a_model_with_too_many_graphs_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that the layer reads and that changes: a graph for each, up to the limit."""
    monkeypatch.setattr(compiled, "RECOMPILE_LIMIT", 3)
    torch._dynamo.config.recompile_limit = 3  # the fixture takes it back
    compiler = Compiler("counter", "aot_eager")
    compiled.prepare_compiler()
    state = {"n": "a"}

    def work(x: Tensor) -> Tensor:
        return x + len(state["n"])

    function = compiler.compile(work)
    for length in range(1, 8):
        state["n"] = "a" * length
        assert function(torch.zeros(2)).tolist() == [length, length]
    assert compiler.refusal is not None and "recompile_limit" in compiler.refusal
