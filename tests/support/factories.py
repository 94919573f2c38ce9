# SPDX-License-Identifier: Apache-2.0
"""Small models, tokenizers, batches, engines and configurations for the tests, all built in code."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from real_size import as_large_as

KINDS = ("gemma", "gemma2", "llama", "gpt2")
PAD, BOS, EOS = 0, 1, 2
FIRST_ORDINARY = 3  # ids from here on are ordinary tokens
HIDDEN = 32
TEXTS = (
    "the quick brown fox jumps over the lazy dog. ",
    "a cat sat on a mat, and ate an apple at a table. ",
    "we make zebra puzzles; vex, jinx, quartz and whisky follow. ",
)


def make_tokenizer(vocab_size: int = 100, texts: Sequence[str] = TEXTS, **special: Any) -> Any:
    """A byte-level BPE tokenizer over the bytes of `texts`, which puts its BOS before a text; `special` overrides its
    special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<pad>", "<bos>", "<eos>"], show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokens = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"} | special
    tokens = {name: token for name, token in tokens.items() if token is not None}
    put_before_texts(backend, tokens.get("bos_token"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **tokens)


def put_before_texts(backend: Any, bos: str | None) -> None:
    """Makes a backend put BOS before a text, as Llama's and Gemma's tokenizers do; nothing to do without BOS."""
    from tokenizers.processors import TemplateProcessing

    if bos is not None:
        special = [(bos, backend.token_to_id(bos))]
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=special)


def make_prompt(ids: list[int], text: str, index: int, extra: dict[str, Any] | None = None) -> Any:
    """A prompt to answer, of a row with the columns `extra`."""
    from dschat.data.examples import PromptExample
    from dschat.data.rows import Row

    return PromptExample(ids, text, Row(text, None, None, None, extra or {}, f"prompts.jsonl:{index + 1}"), index)


def make_config(kind: str, vocab_size: int = 100, **overrides: Any) -> Any:
    """A config of 2 layers, 32 wide, whose random weights give logits a spread of a few nats."""
    from transformers import Gemma2Config, GemmaConfig, GPT2Config, LlamaConfig, MixtralConfig, Qwen3MoeConfig

    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "vocab_size": vocab_size}
    if kind == "gpt2":
        own = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": 128}
        return GPT2Config(**{**ids, **own, "initializer_range": 0.3, **overrides})
    size: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN // 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    if kind == "gemma2":
        size |= {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 20.0, "sliding_window": 8}
        size |= {"query_pre_attn_scalar": HIDDEN // 2}
    if kind in ("mixtral", "qwen3_moe"):  # mixtures of experts
        size |= {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
    config_class = {
        "gemma": GemmaConfig,
        "gemma2": Gemma2Config,
        "llama": LlamaConfig,
        "mixtral": MixtralConfig,
        "qwen3_moe": Qwen3MoeConfig,
    }[kind]
    return config_class(**{**ids, **size, **overrides})


def make_causal_lm(kind: str = "gemma", seed: int = 0, vocab_size: int = 100, **overrides: Any) -> Any:
    """A random causal LM in float32, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(make_config(kind, vocab_size, **overrides)).float().eval()


def make_classifier(kind: str = "gemma", seed: int = 0, vocab_size: int = 100, **overrides: Any) -> Any:
    """A random sequence classifier with one label, in float32, in evaluation mode."""
    from transformers import AutoModelForSequenceClassification

    config = make_config(kind, vocab_size, num_labels=1, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_config(config).float().eval()


def make_binned_classifier(bins: Any, **options: Any) -> Any:
    """A random classifier with an output for each bin."""
    from dschat.models.opening import DEFAULT_OPTIONS
    from dschat.models.value_head import add_bins

    model = make_classifier(**options)
    add_bins(model, bins, DEFAULT_OPTIONS.placement)
    return model


def sampling_of(length: int = 8, end_ids: tuple[int, ...] = (EOS,), **options: Any) -> Any:
    """Responses of at most `length` tokens."""
    from dschat.rollouts.sampling import Sampling

    return Sampling(max_new_tokens=length, end_ids=end_ids, pad_id=PAD, bos_id=BOS, **options)


def favouring(token_ids: Sequence[int], bias: float = 6.0) -> Any:
    """A causal LM whose logits for some ids are raised by `bias`, wherever its head is used."""
    causal_lm = make_causal_lm("gpt2", tie_word_embeddings=False, initializer_range=0.02)
    head = torch.nn.Linear(HIDDEN, 100, bias=True)
    with torch.no_grad():
        head.weight.copy_(causal_lm.lm_head.weight)
        head.bias.zero_()
        head.bias[list(token_ids)] = bias
    causal_lm.lm_head = head
    return causal_lm.eval()


def same_rollout(first: Any, second: Any) -> bool:
    """Whether two rollouts hold the same tensors."""
    pairs = [(getattr(first, f.name), getattr(second, f.name)) for f in fields(first)]
    return all(x is y or torch.equal(x, y) for x, y in pairs)


def save_folder(folder: Path, model: Any, tokenizer: Any) -> str:
    """Saves both as a Hugging Face folder; its path."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def random_ids(length: int, seed: int, vocab_size: int = 100) -> list[int]:
    """Ordinary ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ORDINARY, vocab_size, (length,), generator=generator).tolist()


def ragged_rows(prompt_lengths: Sequence[int], response_lengths: Sequence[int], seed: int = 0) -> list[Any]:
    """(prompt ids, response ids) of each row; the numbers of a row depend on its place and the seed only."""
    lengths = zip(prompt_lengths, response_lengths, strict=True)
    return [
        (random_ids(p, 1000 * seed + 2 * i), random_ids(r, 1000 * seed + 2 * i + 1))
        for i, (p, r) in enumerate(lengths)
    ]


def pad_rows(rows: Sequence[Any], left: int = 0, right: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """input_ids (B, P+R), attention_mask (B, P+R) and response_mask (B, R), with extra padding on either side."""
    prompt_width = max(len(prompt) for prompt, _ in rows) + left
    width = max(len(response) for _, response in rows) + right
    ids, mask = [], []
    for prompt, response in rows:
        before, after = prompt_width - len(prompt), width - len(response)
        ids.append([PAD] * before + prompt + response + [PAD] * after)
        mask.append([False] * before + [True] * (len(prompt) + len(response)) + [False] * after)
    attention_mask = torch.tensor(mask)
    return torch.tensor(ids), attention_mask, attention_mask[:, prompt_width:]


@torch.no_grad()
def hf_logprobs(causal_lm: Any, row: Any, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of one row's response, from the model's own logits of the unpadded row."""
    prompt, response = row
    logits = causal_lm(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(torch.tensor(response)).float(), distribution.entropy().float()


@torch.no_grad()
def hf_score(classifier: Any, ids: Sequence[int]) -> float:
    """The classifier's own number for one unpadded row."""
    return float(classifier(input_ids=torch.tensor([list(ids)])).logits[0, 0])


def make_rollout(rows: Sequence[Any], left: int = 0, right: int = 0) -> Any:
    """A Rollout of these rows; a response counts as finished if it ends in EOS."""
    from macro_actions.types import Rollout

    input_ids, attention_mask, response_mask = pad_rows(rows, left, right)
    finished = torch.tensor([bool(response) and response[-1] == EOS for _, response in rows])
    return Rollout(input_ids, attention_mask, response_mask, torch.arange(len(rows)), finished)


def to_device(item: Any) -> Any:
    """Tensors, dicts or dataclasses of tensors on the device where engines compute."""
    from dschat.run.distributed import device
    from macro_actions.types import mapped

    return mapped(item, lambda x: x.to(device()))


def engine_of(model: Any, micro: int = 1, accumulation: int = 1, **options: Any) -> Any:
    """A training engine of a Hugging Face causal LM or classifier.

    Args:
        model: Hugging Face model; it is trained in place.
        micro, accumulation: rows of a micro-batch, micro-batches of an update.
        options: fields of OptimizerSettings and EngineSettings; learning rate 1e-3 and constant by default, and with
            ZeRO as a model of 7 billion weights; `bins` of a critic.
    """
    from dschat.engine.deepspeed_config import EngineSettings
    from dschat.engine.engine import OptimizerSettings, train_engine
    from dschat.models.policy import PolicyModel
    from dschat.models.scalar import ScalarModel

    optimizer: dict[str, Any] = {
        "learning_rate": 1e-3,
        "weight_decay": 0.0,
        "total_updates": 10,
        "schedule": "constant",
    }
    settings: dict[str, Any] = {"dtype": torch.float32, "plan": _plan(micro, accumulation)}
    names = {field.name for field in fields(OptimizerSettings)}
    optimizer |= {name: value for name, value in options.items() if name in names}
    settings |= {name: value for name, value in options.items() if name not in names}
    if settings.get("zero_stage"):
        settings.setdefault("config_file", as_large_as(7e9, model))
    bins = settings.pop("bins", None)
    model = model.to(settings["dtype"])
    wrapped = ScalarModel(model, bins) if hasattr(model, "score") else PolicyModel(model)
    return train_engine(wrapped, OptimizerSettings(**optimizer), EngineSettings(**settings))


def frozen_engine_of(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A frozen engine of a Hugging Face causal LM or classifier."""
    from dschat.engine.deepspeed_config import EngineSettings
    from dschat.engine.engine import frozen_engine
    from dschat.models.policy import PolicyModel
    from dschat.models.scalar import ScalarModel

    wrapper = ScalarModel if hasattr(model, "score") else PolicyModel
    return frozen_engine(wrapper(model.to(dtype)), EngineSettings(dtype, _plan(1, 1)))


def score(rollout: Any, scores: Any, actor: Any, reference: Any, critic: Any, temperature: float, most: int) -> Any:
    """The Trajectory of a rollout with the given scores (B,), at most so many rows of the longest length at once."""
    from dschat.models.layout import PassSize
    from dschat.training.ppo.models import response_logprobs, response_values
    from macro_actions.types import Trajectory

    size = PassSize(most)
    logprobs, ref_logprobs = (response_logprobs(model, rollout, temperature, size) for model in (actor, reference))
    return Trajectory(rollout, logprobs, ref_logprobs, response_values(critic, rollout, size), scores)


def _plan(micro: int, accumulation: int) -> Any:
    from dschat.run.distributed import world_size
    from dschat.settings.batches import BatchSizes, plan_batches

    return plan_batches(BatchSizes("per_device_train_batch_size", micro, accumulation), world_size())


_RUNS: dict[Path, Any] = {}  # this process's, by folder


def run_of(step: str, config: Any) -> Any:
    """The output folder of a run on the processes of this group; an earlier one in it is over, as if killed."""
    from dschat.base.glossary import metrics_of
    from dschat.run.distributed import is_main, world_size
    from dschat.run.output import RunOutput

    place = Path(config.output.output_dir).resolve()
    if is_main() and place in _RUNS:
        _RUNS.pop(place)._lock.close()
    run = _RUNS[place] = RunOutput(step, config, config.plan_batches(world_size()))
    run.begin()
    log, declared = run.metrics.log, metrics_of(step)

    def checked(update: int, samples: int, metrics: Mapping[str, float]) -> None:
        unknown = [name for name in metrics if "/" in name and not any(metric.fits(name) for metric in declared)]
        assert not unknown, f"declare {unknown} in dschat/base/glossary.py"
        log(update, samples, metrics)

    run.metrics.log = checked  # type: ignore[method-assign]
    return run


class NotedSaves:
    """Stands in for the folders of a run's models: notes when they are saved."""

    def __init__(self) -> None:
        self.saves: list[Any] = []

    def save_final(self) -> None:
        """Notes "final"."""
        self.saves.append("final")

    def save_after(self, updates: int) -> None:
        """Notes the number of updates."""
        self.saves.append(updates)

    def describe_final(self) -> None:
        """Notes "described"."""
        self.saves.append("described")


def loop_of(algorithm: Any, config: Any, run: Any, engines: Any, average: Any = None) -> Any:
    """A loop that notes when it would save models, on `loop.folders.saves`; its checkpoints hold the engines."""
    from dschat.training.loop import Loop

    checkpoints = checkpoints_of(config, run, None if average is None else average.parts, **engines)
    return Loop(algorithm, config, run, NotedSaves(), checkpoints)  # type: ignore[arg-type]


def supervised_loop_of(engine: Any, task: Any, config: Any, run: Any) -> Any:
    """The loop of a task."""
    from dschat.training.supervised.algorithm import Supervised

    return loop_of(Supervised(engine, task, config, run), config, run, {"model": engine})


def supervised_config(step: str, folder: Path, **overrides: Any) -> Any:
    """The flags of a task (sft, reward, dpo or refuel) whose loop gets its engine handed in; paths lead nowhere."""
    from dschat.cli import COMMANDS

    flags: dict[str, Any] = {"data_path": ["unused"], "output_dir": str(folder), "model_name_or_path": "unused"}
    return COMMANDS[step].flags_class()(**(flags | overrides))


def supervised_loop(
    step: str, folder: Path, train: Any, held_out: Any = (), model: Any = None, engine: Any = None, **overrides: Any
) -> Any:
    """The loop of a task on examples.

    Args:
        step: sft, reward, dpo or refuel.
        folder: of the run.
        train, held_out: examples of the task.
        model: Hugging Face model; a small one by default.
        engine: of a model, in the place of one with the learning rate and batch sizes of the flags.
        overrides: flags.
    """
    config = supervised_config(step, folder, **overrides)
    run = run_of(step, config)
    if engine is None:
        model = model or (make_classifier() if step == "reward" else make_causal_lm())
        options = {"learning_rate": config.model.learning_rate, "zero_stage": config.engine.zero_stage}
        options["gradient_checkpointing"] = config.engine.gradient_checkpointing
        engine = engine_of(model, run.plan.micro_batch, run.plan.accumulation, **options)
    return supervised_loop_of(engine, _task_of(step, train, held_out, config, run), config, run)


def _task_of(step: str, train: Any, held_out: Any, config: Any, run: Any) -> Any:
    from dschat.training.supervised.dpo import DPOTask
    from dschat.training.supervised.reward import RewardTask
    from dschat.training.supervised.sft import SFTTask

    if step == "sft":
        width = config.model.max_seq_len if config.sft.packing else None
        by_tokens = config.optimisation.max_tokens_per_micro_batch is not None
        return SFTTask(train, held_out, PAD, config.sft.sft_on_prompt, config.sft.label_smoothing, width, by_tokens)
    if step == "reward":
        return RewardTask(
            train, held_out, PAD, config.preferences.reward_loss, config.preferences.center_rewards_coefficient
        )
    if step == "dpo":
        return DPOTask(train, held_out, PAD, config, run, "the model")
    from dschat.refuel.offline import RefuelTask, saved_reference

    reference = saved_reference(config, PAD, "the model", run.folder)
    return RefuelTask(train, held_out, PAD, config.regression.eta, config.pairs.temperature, reference)


def make_prompts(count: int, **extra: Any) -> list[Any]:
    """Prompts p0, p1, … of two to five tokens after BOS; column n of a row is its number, others are `extra`."""
    return [make_prompt([BOS, *random_ids(2 + i % 4, i)], f"p{i}", i, {"n": i} | extra) for i in range(count)]


def ppo_loop(
    config: Any,
    reward: Any,
    prompts: Any,
    held_out: Any = (),
    actor: Any = None,
    reference: Any = None,
    critic: Any = None,
    rollouts: Any = None,
    estimator: Any = None,
    teacher: Any = None,
    **options: Any,
) -> Any:
    """The loop of PPO on small models.

    Args:
        config: the flags.
        reward: a function of prompts, responses and rows, or a source of scores.
        prompts, held_out: examples.
        actor, critic: Hugging Face models to train, small ones by default, or engines of them.
        reference: frozen; the default actor's weights if not given.
        rollouts: what draws; by default a generation batch at once.
        estimator: in the place of the flags'.
        teacher: a Hugging Face model, frozen; none by default.
        options: of `engine_of`; the learning rates are those of the flags by default.
    """
    from dschat.rollouts.continuous import ContinuousEngine
    from dschat.run.distributed import world_size
    from dschat.scoring.function import FunctionScores
    from dschat.training.ppo.models import MovingAverage, PPOModels

    plan = config.plan_batches(world_size())
    given = {"actor": actor or make_causal_lm(), "reference": reference or make_causal_lm()}
    if config.advantages.needs.critic:
        given["critic"] = critic or make_classifier()
    engines: dict[str, Any] = {"critic": None}
    for name, model in given.items():
        if hasattr(model, "module"):
            engines[name] = model
        elif name == "reference":
            engines[name] = frozen_engine_of(model)
        else:
            own = {"learning_rate": config.flat()[f"{name}_learning_rate"]} | options
            own_plan = config.critic_plan(plan) if name == "critic" else plan
            engines[name] = engine_of(model, own_plan.micro_batch, own_plan.accumulation, **own)
    source = reward if hasattr(reward, "model") else FunctionScores(reward, "--reward_function")
    rollouts = rollouts or ContinuousEngine(
        config.sampling.per_device_generation_batch_size * config.rollouts.samples_per_prompt
    )
    teacher_engine = None if teacher is None else frozen_engine_of(teacher)
    models = PPOModels(**engines, reward=source, rollouts=rollouts, teacher=teacher_engine)
    average = MovingAverage(models.actor) if config.memory.enable_ema else None
    return ppo_trainer_of(models, prompts, held_out, make_tokenizer(), config, estimator, average)


def ppo_trainer_of(
    models: Any,
    prompts: Any,
    held_out: Any,
    tokenizer: Any,
    config: Any,
    estimator: Any = None,
    average: Any = None,
    sampler: Any = None,
) -> Any:
    """The loop of PPO."""
    from dschat.training.ppo.algorithm import PPO

    run, condition = run_of("ppo", config), condition_of(config, tokenizer)
    parts = (models, prompts, held_out, tokenizer, condition, config, run, average)
    algorithm = PPO(*parts, estimator=estimator, sampler=sampler)
    return loop_of(algorithm, config, run, models.trained, average)


def collected(loop: Any, work: Any, iteration: int = 0) -> Any:
    """An iteration of PPO or REFUEL without updates so far, of which the loop knows nothing."""
    from dschat.training.iteration import Clock

    algorithm, clock = loop.algorithm, Clock()
    if algorithm.name == "refuel":
        examples = [algorithm.dialogues[number] for number in work]
        pairs = algorithm.sampler.sample_pairs(examples, iteration)
        return algorithm.finish_pairs(algorithm.score_pairs(pairs, examples), pairs, 0, clock)
    batch = algorithm.collect(work, iteration, clock)
    credit = algorithm.credit_of(batch.rows, algorithm.moments_with(batch.rows))
    return algorithm.finish_rollout(batch, credit, 0, clock)


def batch_of_iteration(loop: Any, work: Any) -> Any:
    """A collected rollout of PPO with advantages, which are known before the update."""
    rows = collected(loop, work).batch
    return loop.algorithm.credit_of(rows, loop.algorithm.moments_with(rows)).whole()


def credit_of_batch(algorithm: Any, batch: Any) -> Any:
    """The advantages of a collected batch, where they are known before the update."""
    from dschat.training.ppo.credit import with_scores

    moments = None if algorithm.moments is None else with_scores(algorithm.moments, batch.rows.scored)
    return algorithm.credit_of(batch.rows, moments).whole()


def taken_up(iteration: Any) -> Any:
    """An iteration, written down and taken up."""
    from dschat.training.iteration import Iteration, state_with

    return Iteration.from_state(state_with({}, iteration), type(iteration.batch))


def checkpoints_of(config: Any, run: Any, average: Any = None, /, **engines: Any) -> Any:
    """A run's checkpoints."""
    from dschat.run.checkpoint import Checkpoints

    return Checkpoints(engines, config, run, {}, average)


def save_engines(folder: Path, tokenizer: Any, **engines: Any) -> None:
    """Writes the folders of trained engines, by name: folder/actor and so on."""
    from dschat.run.model_folders import ModelFolders, SavedModel

    config = ppo_config(folder)
    models = [SavedModel(engine, name, "base", name) for name, engine in engines.items()]
    ModelFolders(models, tokenizer, config, run_of("ppo", config)).save_final()


def condition_of(config: Any, tokenizer: Any) -> Any:
    """The termination condition of a configuration."""
    from dschat.rollouts.termination import TerminationCondition

    return TerminationCondition(config.termination, tokenizer, EOS, config.optimisation.seed)


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """A copy of an engine's weights, on the CPU in float32."""
    return {name: p.detach().float().cpu().clone() for name, p in engine.module.named_parameters()}


def whole_state(source: Any) -> dict[str, torch.Tensor]:
    """Whole weights of an engine or a moving average on the main process, {} elsewhere. Every rank must call it."""
    from dschat.run.distributed import is_main

    return {name: x.detach().cpu().clone() for name, x in source.whole_weights() if is_main()}


def saved_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """What an engine of a model would hand to be saved."""
    names = model.state_dict().keys()
    return [*model.named_parameters(), *((name, x) for name, x in model.named_buffers() if name in names)]


def weights_of_all(**engines: Any) -> dict[str, torch.Tensor]:
    """A copy of the weights of several engines, by "role.name"."""
    return {f"{role}.{name}": w for role, engine in engines.items() for name, w in weights_of(engine).items()}


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Between two sets of weights of the same names."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def ppo_config(folder: Path, **overrides: Any) -> Any:
    """A PPOConfig for trainers that get their engines handed in; paths in it lead nowhere."""
    from dschat.settings.ppo import PPOConfig

    flags: dict[str, Any] = {
        "data_path": ["unused"],
        "output_dir": str(folder),
        "actor_model_name_or_path": "unused",
        "reward_function": ["unused.py:reward"],
        "max_answer_seq_len": 8,
        "per_device_generation_batch_size": 8,
        "per_device_training_batch_size": 8,
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "self_checks": True,
    }
    return PPOConfig(**(flags | overrides))


def update_flags(
    update_size: int, micro_batch: int, ppo_epochs: int, max_tokens: int | None = None, **flags: Any
) -> tuple[Any, Any]:
    """The flags of updates on a rollout of this rank alone, and the batch sizes."""
    from dschat.settings.batches import BatchPlan

    accumulation = update_size // micro_batch
    plan = BatchPlan(1, micro_batch, accumulation, update_size, update_size, max_tokens=max_tokens)
    return ppo_config(Path("unused"), ppo_epochs=ppo_epochs, **flags), plan


def replace_in_builders(monkeypatch: Any, name: str, value: Any) -> None:
    """Puts something in the place of a function or class, wherever dschat.training.steps uses it by that name."""
    from dschat.training.steps import (
        engines,
        functions,
        ppo,
        reward,
        reward_reading,
        reward_texts,
        scores,
        step3,
        supervised,
    )

    for module in (engines, functions, ppo, reward, reward_reading, reward_texts, scores, step3, supervised):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
