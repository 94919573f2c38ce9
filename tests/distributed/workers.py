# SPDX-License-Identifier: Apache-2.0
"""What the launched processes do: `workers.py FOLDER CHECK...`; each check leaves its results in the folder.

A check is a function of the folder and of `keep`, and runs on every process. The others are in tests/support.
"""

import json
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from dschat.engine.process_group import process_group
from dschat.run.distributed import barrier, is_main, rank


def keep(folder: Path, name: str, numbers: Any = None, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Writes name-RANK.json and name-RANK.safetensors."""
    if numbers is not None:
        (folder / f"{name}-{rank()}.json").write_text(json.dumps(numbers))
    if tensors:
        save_file({key: x.contiguous() for key, x in tensors.items()}, folder / f"{name}-{rank()}.safetensors")


# Logits at a time, 3 positions of a vocabulary of 100: a rank with longer responses uses the head more often.
CHUNK = 300


def updates(folder: Path, keep: Callable[..., None]) -> None:
    """The cases of cases.json, one after another, with log-probs in chunks."""
    from recorded_updates import Case, run_case

    for given in json.loads((folder / "cases.json").read_text()):
        case = Case(**given)
        with patch("macro_actions.logprobs.CPU_LOGITS", CHUNK):
            weights, metrics = run_case(case, folder)
        keep(folder, f"updates-{case.name}", metrics, weights)


def critic_updates(folder: Path, keep: Callable[..., None]) -> None:
    """Eight updates of the critic beside one of the actor."""
    from critic_updates import BINS, cut_on_first_rank, holed_batch
    from critic_updates import critic_updates as updated

    weights, metrics = updated(holed_batch())
    keep(folder, "critic-updates", metrics, weights)
    keep(folder, "cut-on-first-rank", *reversed(updated(cut_on_first_rank())))
    weights, metrics = updated(holed_batch(), 3, **BINS)
    keep(folder, "value-bins", metrics, weights)


def refuel(folder: Path, keep: Callable[..., None]) -> None:
    """Two rounds of dialogues at ZeRO 0 and 3, with micro-batches of a number of rows or of tokens."""
    from refuel_runs import two_rounds

    for stage, tokens in ((0, None), (3, 150)):
        place = folder / f"refuel-{stage}-{tokens}"
        place.mkdir(exist_ok=True)
        weights, metrics = two_rounds(place, stage, tokens)
        keep(folder, f"refuel-zero{stage}-{tokens}", metrics, weights)


def episodes(folder: Path, keep: Callable[..., None]) -> None:
    """Two updates on episodes of several turns at ZeRO 0 and 3; and with environments that all break on rank 1."""
    from dschat.rollouts.generate import GenerateEngine
    from turn_cases import two_updates_on_episodes

    place = folder / "episodes-broken"
    place.mkdir(exist_ok=True)
    _, metrics, _ = two_updates_on_episodes(place, name="OnFirstRank", engine=GenerateEngine(8))
    keep(folder, "episodes-broken", metrics)
    for stage in (0, 3):
        place = folder / f"episodes-{stage}"
        place.mkdir(exist_ok=True)
        weights, metrics, samples = two_updates_on_episodes(place, stage)
        keep(folder, f"episodes-zero{stage}", {"metrics": metrics, "samples": samples}, weights)


def judged(folder: Path, keep: Callable[..., None]) -> None:
    """Two updates with a judge's scores; and runs in which it refuses a response of one rank alone."""
    from judge_runs import URL, judged_run, message_of_failure

    url = os.environ[URL]
    weights, metrics, samples = judged_run(folder / "judged", url)
    keep(folder, "judged", {"metrics": metrics, "samples": samples}, weights)
    keep(folder, "judged-refused", message_of_failure(folder / "refused", url))


def untied(folder: Path, keep: Callable[..., None]) -> None:
    """ZeRO 3 with a head of its own, and log-probs in chunks."""
    from recorded_updates import Case, untied_updates

    with patch("macro_actions.logprobs.CPU_LOGITS", CHUNK):
        weights, held = untied_updates(Case(3, 2), folder)
    keep(folder, "untied", {"held": held}, weights)


def shared_base(folder: Path, keep: Callable[..., None]) -> None:
    """Two updates of models on one base, at several ZeRO stages."""
    from factories import make_tokenizer
    from shared_base_runs import trainer_of, two_updates, write_adapter, write_base

    tokenizer = make_tokenizer()
    place = folder / "shared-base"
    if is_main():
        write_adapter(place / "reward", write_base(place, tokenizer), tokenizer)
    barrier()
    base = str(place / "base")
    critic = str(place / "reward")
    for stage in (0, 2, 3):
        trainer = trainer_of(place / str(stage), base, tokenizer, zero_stage=stage, critic_model_name_or_path=critic)
        weights, metrics = two_updates(trainer)
        keep(folder, f"shared-base-zero{stage}", metrics, weights)


def resume(folder: Path, keep: Callable[..., None]) -> None:
    """Runs that are stopped inside a rollout, or between micro-batches, and taken up again."""
    cases = {"ppo": (SHARDED_3, 1000, 31), "ppo refilled": (SHARDED_3, 1000, 14), "sft": (SHARDED_2, 1000, 3)}
    keep(folder, "resume", _resumed(folder, cases))


def resume_everywhere(folder: Path, keep: Callable[..., None]) -> None:
    """Runs that are stopped at many more places than in `resume`, at ZeRO 2 and 3 and with adapters."""
    points = {}
    for setup, every in ((SHARDED_2, 23), (SHARDED_3, 23), (SHARDED_2 | {"lora_dim": 2}, 41)):
        points |= _resumed(folder / str(len(points)), {"ppo": (setup, every, 7), "sft": (setup, 4, 1)})
    keep(folder, "resume-everywhere", points)


def resized(folder: Path, keep: Callable[..., None]) -> None:
    """Runs to their end, resumed from the checkpoints that another number of processes has left, if there are any."""
    from resume_runs import RESIZED, result_of

    for name, make in RESIZED.items():
        place = folder / name
        place.mkdir(exist_ok=True)
        made = make(place, save_steps=1, save_total_limit=0, resume_from_checkpoint="latest")
        keep(folder, name, tensors=result_of(made, place)[0])


def stopped(folder: Path, keep: Callable[..., None]) -> None:
    """Runs that are stopped after their second rollout, before its update."""
    from dschat.training.ppo import algorithm
    from resume_runs import NORMALISED, stop_in_call

    for name, make in NORMALISED.items():
        stop_in_call(make(folder / name).fit, algorithm, "ppo_update", 2)
    keep(folder, "stopped", {})


def resumed_inside(folder: Path, keep: Callable[..., None]) -> None:
    """Those runs to their end, stopped by another number of processes."""
    from resume_runs import NORMALISED, result_of

    for name, make in NORMALISED.items():
        place = folder / name
        keep(folder, name, tensors=result_of(make(place, resume_from_checkpoint="latest"), place)[0])


SHARDED_2 = {"zero_stage": 2}
SHARDED_3 = {"zero_stage": 3}


def _resumed(folder: Path, cases: dict[str, Any]) -> dict[str, int]:
    from resume_runs import REFILL, check_every_stop, length, ppo, supervised

    # The first process has no place to fill; what it draws takes the places of the other's.
    refilled = REFILL if rank() else REFILL | {"reward": length}
    makers = {"ppo": ppo, "ppo refilled": partial(ppo, **refilled), "sft": partial(supervised, "sft")}
    points = {}
    for step, (setup, every, first) in cases.items():
        make = partial(_made, makers[step], setup)
        name = f"{step}-zero{setup['zero_stage']}-lora{setup.get('lora_dim', 0)}"
        points[name] = check_every_stop(make, folder / name, every, first)
    return points


def _made(make: Callable[..., Any], setup: dict[str, Any], place: Path, **flags: Any) -> Any:
    from resume_runs import Setup

    place.mkdir(parents=True, exist_ok=True)
    return make(place, Setup(**setup), **flags)


def vllm(folder: Path, keep: Callable[..., None], shares: int = 1) -> None:
    """At ZeRO 3, draws of two prompts on one rank and three on the other, before and after an update.

    `rows`: how the first draws begin. `held`: share of the layers' weights that this rank's engine holds. `passed`:
    the most that were whole here at a time, the actor's own and those on their way to the engine. `drawing`: the
    actor's that are whole while the engine draws.
    """
    from transformers import AutoModelForCausalLM

    from dschat.rollouts.sampling import Sampling
    from dschat.vllm import engine as engines
    from dschat.vllm.engine import VllmEngine
    from factories import BOS, EOS, PAD, engine_of, random_ids

    causal_lm = AutoModelForCausalLM.from_pretrained(folder / "model")
    actor = engine_of(causal_lm, zero_stage=3, learning_rate=0.01)
    engine = VllmEngine(str(folder / "model"), 32, 0.3, shares)
    alive = Counter[str]()
    most = Counter[str]()
    plain_weights = engines.plain_weights

    def counted(*given: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in plain_weights(*given):
            alive["weights"] += tensor.numel()
            weakref.finalize(tensor.untyped_storage(), alive.subtract, {"weights": tensor.numel()})
            most["weights"] = max(most["weights"], alive["weights"] + whole())
            yield name, tensor

    def whole() -> int:
        return sum(x.data.numel() for x in actor.module.parameters() if x.data.numel() == x.ds_numel)

    engines.plain_weights = counted
    answer = 8 if shares > 1 else 4 + 4 * rank()
    sampling = Sampling(max_new_tokens=answer, end_ids=(EOS,), pad_id=PAD, bos_id=BOS)
    prompts = [random_ids(3 + i, i) for i in range(2 + rank())]
    gaps: list[float] = []
    rows: list[list[int]] = []
    for _ in range(2):
        with engine.session(actor) as draw:
            drawn = draw(prompts, sampling, range(len(prompts)))
            most["drawing"] = max(most["drawing"], whole())
        rollout = drawn.rollout
        mask = rollout.response_mask
        rows += [row[:4] for row in rollout.response_rows()]
        actor.train()
        logprobs, _ = actor(rollout.input_ids, rollout.attention_mask, mask.shape[1])
        gaps.append(float((logprobs.detach() - rollout.drawn_logprobs)[mask].abs().max()))
        actor.backward(-logprobs[mask].sum())
        actor.step()
        actor.eval()
    matrices = engine._llm.apply_model(
        lambda model: [m for m in model.modules() if hasattr(m, "input_size_per_partition")]
    )[0]
    held = sum(m.input_size_per_partition * m.output_size_per_partition for m in matrices)
    held /= sum(m.input_size * m.output_size for m in matrices)
    numbers = {"gaps": gaps, "rows": rows[: len(prompts)], "held": held, "passed": most["weights"]}
    numbers["drawing"] = most["drawing"]
    keep(folder, f"vllm-{shares}", numbers)


def vllm_served(folder: Path, keep: Callable[..., None]) -> None:
    """Ten updates at ZeRO 3 with an engine in each process, and with a server."""
    from dschat.vllm.engine import VllmEngine

    _beside_vllm(folder, "inside", VllmEngine(str(folder / "model"), 16, 0.3)).fit()
    _beside_vllm(folder, "served", _served(folder)).fit()


def vllm_lost(folder: Path, keep: Callable[..., None]) -> None:
    """The run with a server, whose fifth reward waits until it has been killed; called again, it goes on."""
    from dschat.base.errors import ServerLost

    if (folder / "killed").exists():
        _beside_vllm(folder, "lost", _served(folder), resume_from_checkpoint="latest").fit()
        return
    with suppress(ServerLost):
        _beside_vllm(folder, "lost", _served(folder), waits=True).fit()


def _served(folder: Path) -> Any:
    """The engine of a server; `url` is a file with its address."""
    from dschat.vllm.servers import ServerNeeds, VllmServers

    needs = ServerNeeds(vocabulary=100, max_tokens=16, temperature=0.8)
    return VllmServers([(folder / "url").read_text()], needs)


def _beside_vllm(folder: Path, run: str, engine: Any, waits: bool = False, **flags: Any) -> Any:
    """A loop that samples with an engine of vLLM."""
    from transformers import AutoModelForCausalLM

    from factories import engine_of, frozen_engine_of, make_classifier, make_prompts, ppo_config, ppo_loop

    calls = Counter[str]()

    def reward(prompts: list[str], responses: list[str], rows: list[Any]) -> torch.Tensor:
        calls[run] += 1
        if waits and calls[run] == 5:
            (folder / f"fifth-{rank()}").touch()
            while not (folder / "killed").exists():
                time.sleep(0.1)
        return torch.tensor([response.count("a") / max(len(response), 1) for response in responses])

    model = folder / "model"
    config = ppo_config(
        folder / run,
        per_device_generation_batch_size=4,
        per_device_training_batch_size=4,
        num_train_epochs=5,
        temperature=0.8,
        actor_learning_rate=1e-2,
        **flags,
    )
    torch.manual_seed(0)
    actor = engine_of(AutoModelForCausalLM.from_pretrained(model), 4, zero_stage=3, learning_rate=1e-2)
    reference = frozen_engine_of(AutoModelForCausalLM.from_pretrained(model))
    critic = make_classifier(initializer_range=0.05)
    return ppo_loop(config, reward, make_prompts(16), (), actor, reference, critic, engine)


CHECKS: dict[str, Callable[..., None]] = {
    "updates": updates,
    "critic_updates": critic_updates,
    "episodes": episodes,
    "judged": judged,
    "untied": untied,
    "refuel": refuel,
    "resume": resume,
    "resume-everywhere": resume_everywhere,
    "resized": resized,
    "stopped": stopped,
    "resumed_inside": resumed_inside,
    "vllm": vllm,
    "vllm_shared": partial(vllm, shares=2),
    "vllm_served": vllm_served,
    "vllm_lost": vllm_lost,
    "shared_base": shared_base,
}


def main() -> None:
    """Runs the checks named on the command line."""
    from nonfinite_cases import CHECKS as NONFINITE
    from real_size import require_real_size
    from reduction_cases import CHECKS as REDUCTION
    from rehearsal_cases import CHECKS as REHEARSAL
    from sharded_checks import CHECKS as SHARDED
    from sharded_loading_checks import CHECKS as LOADING

    torch.set_num_threads(1)
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    folder = Path(words[0])
    require_real_size()
    with process_group():
        for name in words[1:]:
            start = time.perf_counter()
            (CHECKS | LOADING | SHARDED | NONFINITE | REDUCTION | REHEARSAL)[name](folder, keep)
            barrier()
            if is_main():
                print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
