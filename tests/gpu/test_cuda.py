# SPDX-License-Identifier: Apache-2.0
"""On CUDA: what is drawn, replayed, compiled and opened there is what it is on a CPU or without it."""

import pytest
import torch

from dschat.engine.deepspeed_config import EngineSettings
from dschat.models.compiled import compile_layers
from dschat.models.load import load_causal_lm
from dschat.models.opening import LoadOptions
from dschat.models.policy import PolicyModel
from dschat.rollouts.continuous import ContinuousEngine, sample
from dschat.rollouts.decoder import Decoder
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.static import StaticDecoder
from dschat.settings.batches import BatchSizes, plan_batches
from dschat.training.steps.engines import placement_of
from factories import (
    KINDS,
    engine_of,
    largest_difference,
    make_causal_lm,
    pad_rows,
    ragged_rows,
    random_ids,
    save_folder,
    whole_state,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_in_bf16_are_close_to_those_in_fp32(kind):
    ids, attention_mask, mask = (x.cuda() for x in pad_rows(ragged_rows([2, 5, 9], [7, 3, 4])))
    with torch.no_grad():
        exact, _ = PolicyModel(make_causal_lm(kind, initializer_range=0.05).cuda())(ids, attention_mask, mask.shape[1])
        rounded, _ = PolicyModel(make_causal_lm(kind, initializer_range=0.05).cuda().bfloat16())(
            ids, attention_mask, mask.shape[1]
        )
        on_cpu, _ = PolicyModel(make_causal_lm(kind, initializer_range=0.05))(
            ids.cpu(), attention_mask.cpu(), mask.shape[1]
        )
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(exact.cpu()[mask.cpu()], on_cpu[mask.cpu()], rtol=0, atol=1e-4)
    torch.testing.assert_close(rounded[mask], exact[mask], rtol=0, atol=0.1)


@pytest.mark.parametrize("decoder", [Decoder, StaticDecoder])
def test_continuous_batching_draws_on_cuda_what_it_draws_on_a_cpu(decoder):
    causal_lm = make_causal_lm(initializer_range=0.05)
    prompts, sampling = [random_ids(2 + i % 7, i) for i in range(20)], Sampling(12, (2, *range(3, 12)), 0, 1)
    on_cpu = sample(causal_lm, prompts, sampling, range(20), 6)
    on_cuda = sample(causal_lm.cuda(), prompts, sampling, range(20), 6, decoder)
    assert torch.equal(on_cuda.rollout.input_ids.cpu(), on_cpu.rollout.input_ids)
    torch.testing.assert_close(on_cuda.logprobs.cpu(), on_cpu.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_see_an_optimisers_weights_and_are_replayed_in_the_next_rollout(kind):
    causal_lm, prompts = make_causal_lm(kind, initializer_range=0.05).cuda(), [random_ids(3 + i, i) for i in range(9)]
    sampling, engine = Sampling(12, (2, *range(3, 12)), 0, 1), ContinuousEngine(4, decode_graphs=True)
    captured = []
    for scale in (1, 1.5, 0.5):
        with torch.no_grad():
            for parameter in causal_lm.parameters():
                parameter.mul_(scale)
        drawn = engine.sampler_for(causal_lm)(prompts, sampling, range(9))
        expected = sample(causal_lm, prompts, sampling, range(9), 4)
        assert torch.equal(drawn.rollout.input_ids, expected.rollout.input_ids)
        torch.testing.assert_close(drawn.logprobs, expected.logprobs, rtol=0, atol=1e-4)
        assert engine._decoder.refusal is None
        captured.append(dict(engine._decoder._steps))
    assert captured[0] and captured[0].items() <= captured[1].items()


def test_captured_steps_run_compiled_layers(caplog):
    """The kernels of a replayed step are the compiler's, and its tokens those of the layers as they are."""
    causal_lm = make_causal_lm("llama", initializer_range=0.05).cuda()
    prompts, sampling = [random_ids(2 + i % 7, i) for i in range(20)], Sampling(40, (2,), 0, 1)
    plain = sample(causal_lm, prompts, sampling, range(20), 6)
    compiler = compile_layers(causal_lm)
    decoders: list[StaticDecoder] = []

    def make_decoder(*arguments):
        decoders.append(StaticDecoder(*arguments))
        return decoders[-1]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        drawn = sample(causal_lm, prompts, sampling, range(20), 6, make_decoder)
        torch.cuda.synchronize()
    assert torch.equal(drawn.rollout.input_ids, plain.rollout.input_ids)
    torch.testing.assert_close(drawn.logprobs, plain.logprobs, rtol=0, atol=1e-4)
    assert compiler.words == "compiled" and decoders[0].launches == "CUDA graphs"
    compiled_kernels = sum(event.name.startswith("triton_") for event in profile.events())
    assert compiled_kernels >= 3 * causal_lm.config.num_hidden_layers * 40  # in at least 40 steps


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_train_as_the_layers_do(kind):
    """Log-probs, entropies and gradients in float32, over sizes that share a graph."""
    results = []
    for compiles in (False, True):
        model = PolicyModel(make_causal_lm(kind, initializer_range=0.05).cuda())
        if compiles:
            model.compile_with(compile_layers(model.inner))
        numbers = []
        for lengths in ([7, 3, 4], [5, 9]):
            ids, attention_mask, mask = (x.cuda() for x in pad_rows(ragged_rows([2, 5, 9][: len(lengths)], lengths)))
            logprobs, entropy = model(ids, attention_mask, mask.shape[1])
            logprobs[mask].square().mean().backward()
            numbers += [logprobs[mask].detach(), entropy[mask]]
        results.append(numbers + [p.grad for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_models_are_opened_on_the_gpu_as_on_a_cpu(stage, offload, group, tokenizer, tmp_path):
    """Whole, or in parts: on the GPU, or in CPU memory and gathered on the GPU. Their engines train."""
    folder = save_folder(tmp_path, make_causal_lm("llama"), tokenizer)
    settings = EngineSettings(torch.float32, plan_batches(BatchSizes("", 1), 1), zero_stage=stage, offload=offload)
    load_options = LoadOptions(placement_of(settings))
    model = load_causal_lm(folder, "--m", torch.float32, tokenizer, load_options=load_options)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    engine = engine_of(model, zero_stage=stage, offload=offload)
    expected = {f"inner.{name}": p.detach() for name, p in make_causal_lm("llama").named_parameters()}
    assert largest_difference(whole_state(engine), expected) == 0
    parts = {name: part.cpu() for name, part in engine.parts().items()}  # of the only rank
    assert largest_difference(parts, {name: weight.flatten() for name, weight in expected.items()}) == 0
    ids, attention_mask, mask = (x.cuda() for x in pad_rows(ragged_rows([3], [5])))
    engine.backward(-engine(ids, attention_mask, mask.shape[1])[0].mean())
    engine.step()
    assert largest_difference(whole_state(engine), expected) > 1e-4
