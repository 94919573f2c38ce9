# SPDX-License-Identifier: Apache-2.0
"""Names of settings and commands in TRL, LLaMA-Factory and Axolotl, and what they are called here.

Messages about unknown flags use them, and the tables of docs/coming-from-trl.md are made of them:

    python -m dschat.reference names
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

_STEPS = ("sft", "reward", "dpo", "ppo")  # the commands that other trainers have, too
TRAINERS = {"T": "TRL", "L": "LLaMA-Factory", "A": "Axolotl"}


@dataclass(frozen=True)
class OtherName:
    """A setting of another trainer.

    Attributes:
        trainers: keys of TRAINERS, one letter for each trainer that has the setting: "TL" is TRL and LLaMA-Factory.
        flags: our flags for it, some with a value. A message names the first one that the command has.
        note: an explanation; if there is no flag, why not. A page of the documents is named as docs/turns.md.
    """

    trainers: str
    flags: tuple[str, ...] = ()
    note: str = ""

    @property
    def trainer_names(self) -> str:
        """Names of the trainers that have the setting."""
        return ", ".join(TRAINERS[letter] for letter in self.trainers)


@dataclass(frozen=True)
class OtherCommand:
    """A command or an algorithm of another trainer.

    Attributes:
        commands: our commands for it.
        note: an explanation.
    """

    commands: tuple[str, ...]
    note: str = ""

    def described(self, quote: str = "") -> str:
        """The commands as the end of a sentence, each between two quotes."""
        quoted = [f"{quote}{command}{quote}" for command in self.commands]
        return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted)


_QUANTISED = "weights are not quantised: --lora_dim with --gradient_checkpointing, or --zero_stage 3, saves memory"
_TEMPLATE = "the tokenizer's own chat template is used"
_WORKERS = "nothing to set: large data are tokenised by worker processes and cached"
_HELD_OUT = "fixed: 5 % of the rows are held out if a source has no evaluation rows"
_OPTIMISER = "the optimiser is AdamW"
_BETAS = "the betas of AdamW are 0.9 and 0.95"
_WANDB = "set the variables of W&B, such as WANDB_PROJECT and WANDB_NAME"
_BEST = "the best checkpoint is kept beside the newest (--save_total_limit)"
_STAGE = "the command selects it: sft, reward, dpo or ppo"
_COLUMNS = "name the columns: --prompt_key, --chosen_key, --rejected_key, --response_key, --messages_key"
_PLAIN_TEXTS = "plain texts are not read: each row needs a prompt, such as a text's first words, and a response"
_LENGTH = "prompt and response together; in ppo, the limit of the prompt alone"
_CRITIC = "the critic has its own"
_WHITENED = (
    "similar, not equal: here scores are normalised by the running mean and standard deviation of all scores; there"
    " the rewards of tokens are whitened within a batch"
)
_END = "EOS ends a response; here a token is given by its text, not by its id"
_IS_CLIP = "the largest importance ratio of a token; larger ratios are truncated, not masked"
_EPISODES = "the environment is a class with reset and step, see docs/turns.md"

OTHER_NAMES: dict[str, OtherName] = {
    # Models
    "model_name_or_path": OtherName("TL", ("--model_name_or_path", "--actor_model_name_or_path", "--model")),
    "base_model": OtherName("A", ("--model_name_or_path", "--actor_model_name_or_path", "--model")),
    "sft_model_path": OtherName("T", ("--actor_model_name_or_path",)),
    "reward_model": OtherName("L", ("--reward_model_name_or_path",)),
    "reward_model_path": OtherName("T", ("--reward_model_name_or_path",)),
    "value_model": OtherName("T", ("--critic_model_name_or_path",)),
    "ref_model": OtherName(
        "TL",
        (),
        "the reference is a frozen copy of the initial model; with LoRA, the actor with its adapters off",
    ),
    "torch_dtype": OtherName("TA", ("--dtype",)),
    "fp16": OtherName("TLA", ("--dtype fp16",)),
    "bf16": OtherName("TLA", ("--bf16",), "the default on a GPU"),
    "tf32": OtherName("TA", (), "TF32 is not used: products of float32 matrices are computed in float32"),
    "load_in_4bit": OtherName("TA", (), _QUANTISED),
    "load_in_8bit": OtherName("TA", (), _QUANTISED),
    "quantization_bit": OtherName("L", (), _QUANTISED),
    "trust_remote_code": OtherName("TLA", (), "refused: code from a model repository is never run"),
    "flash_attn": OtherName("L", ("--attn_implementation flash_attention_2",)),
    "flash_attention": OtherName("A", ("--attn_implementation flash_attention_2",)),
    "use_liger_kernel": OtherName("TL", (), "not needed: log-probs are computed in chunks"),
    "disable_dropout": OtherName("T", (), "dropout is always off, except --lora_dropout"),
    "sync_ref_model": OtherName("T", (), "the reference stays frozen"),
    # What is trained
    "use_peft": OtherName("T", ("--lora_dim",), "the rank; any rank above 0 turns LoRA on"),
    "finetuning_type": OtherName("L", ("--finetune_mode",)),
    "adapter": OtherName("A", ("--finetune_mode lora",)),
    "lora_r": OtherName("TA", ("--lora_dim",)),
    "lora_rank": OtherName("L", ("--lora_dim",)),
    "lora_target": OtherName("L", ("--lora_module_name",)),
    "lora_target_modules": OtherName("TA", ("--lora_module_name",)),
    "lora_target_linear": OtherName("A", ("--lora_module_name",), "all linear layers if not given"),
    "use_dora": OtherName("TL", (), "only plain LoRA is offered"),
    "deepspeed": OtherName("TLA", ("--deepspeed_config",), "a JSON file; every run uses DeepSpeed"),
    # Data
    "dataset": OtherName("L", ("--data_path",), "files, folders or hub ids"),
    "datasets": OtherName("A", ("--data_path",), "files, folders or hub ids"),
    "dataset_name": OtherName("T", ("--data_path",), "files, folders or hub ids"),
    "dataset_dir": OtherName("L", ("--data_path",)),
    "dataset_config": OtherName(
        "T", (), "a hub id means its default configuration: write another to a folder with save_to_disk"
    ),
    "streaming": OtherName("TLA", (), "data are read completely before training starts"),
    "dataset_text_field": OtherName("T", (), _PLAIN_TEXTS),
    "field_messages": OtherName("A", ("--messages_key",)),
    "template": OtherName("L", (), _TEMPLATE),
    "chat_template": OtherName("A", (), _TEMPLATE),
    "val_size": OtherName("L", (), _HELD_OUT),
    "val_set_size": OtherName("A", (), _HELD_OUT),
    "preprocessing_num_workers": OtherName("L", (), _WORKERS),
    "dataset_num_proc": OtherName("T", (), _WORKERS),
    "dataset_processes": OtherName("A", (), _WORKERS),
    "dataloader_num_workers": OtherName("TLA", (), _WORKERS),
    "train_on_inputs": OtherName("A", ("--sft_on_prompt",)),
    "completion_only_loss": OtherName("T", (), "prompts are not trained on unless --sft_on_prompt is given"),
    "assistant_only_loss": OtherName("T", ("--train_on all",), "all assistant messages; prompts are not trained on"),
    "mask_history": OtherName("L", ("--train_on last",)),
    "sample_packing": OtherName("A", ("--packing",)),
    "cutoff_len": OtherName("L", ("--max_seq_len", "--max_prompt_seq_len"), _LENGTH),
    "sequence_len": OtherName("A", ("--max_seq_len", "--max_prompt_seq_len"), _LENGTH),
    "max_length": OtherName("T", ("--max_seq_len", "--max_prompt_seq_len"), _LENGTH),
    "max_seq_length": OtherName("T", ("--max_seq_len", "--max_prompt_seq_len"), _LENGTH),
    # Batches, steps and the optimiser
    "micro_batch_size": OtherName("A", ("--per_device_train_batch_size", "--per_device_training_batch_size")),
    "per_device_train_batch_size": OtherName(
        "TL", ("--per_device_train_batch_size", "--per_device_training_batch_size")
    ),
    "batch_size": OtherName("A", ("--global_batch_size",)),
    "num_mini_batches": OtherName(
        "T", ("--global_batch_size",), "a rollout is divided into updates of this many responses"
    ),
    "local_rollout_forward_batch_size": OtherName(
        "T", ("--per_device_training_batch_size",), "responses per forward pass, also without gradients"
    ),
    "auto_find_batch_size": OtherName("TA", (), "dschat plan says whether a size fits, and which smaller one would"),
    "num_epochs": OtherName("A", ("--num_train_epochs",)),
    "max_steps": OtherName("TLA", ("--max_steps",)),
    "total_episodes": OtherName(
        "T", ("--max_steps",), "updates = episodes times --ppo_epochs, divided by --global_batch_size"
    ),
    "learning_rate": OtherName("TLA", ("--learning_rate", "--actor_learning_rate"), _CRITIC),
    "weight_decay": OtherName("TLA", ("--weight_decay", "--actor_weight_decay"), _CRITIC),
    "warmup_steps": OtherName("TLA", ("--num_warmup_steps",)),
    "lr_scheduler": OtherName("A", ("--lr_scheduler_type",)),
    "max_grad_norm": OtherName("TLA", ("--gradient_clipping",)),
    "optim": OtherName("TL", (), _OPTIMISER),
    "optimizer": OtherName("A", (), _OPTIMISER),
    "adam_beta1": OtherName("TLA", (), _BETAS),
    "adam_beta2": OtherName("TLA", (), _BETAS),
    "neftune_noise_alpha": OtherName("TLA", (), "no noise is added to embeddings"),
    "label_smoothing_factor": OtherName("TL", ("--label_smoothing",)),
    # Evaluation, saving and logging
    "eval_steps": OtherName("TLA", ("--eval_interval",)),
    "eval_strategy": OtherName("TLA", ("--eval_interval",), "the start and the end are always evaluated"),
    "evaluation_strategy": OtherName("TLA", ("--eval_interval",), "the start and the end are always evaluated"),
    "save_strategy": OtherName("TLA", ("--save_steps",)),
    "load_best_model_at_end": OtherName("TLA", (), _BEST),
    "early_stopping_patience": OtherName("A", (), f"a run is not stopped early; {_BEST}"),
    "logging_steps": OtherName("TLA", (), "every update is logged"),
    "log_completions": OtherName(
        "T",
        ("--print_answers",),
        "prints some held-out responses; those of training are in samples/ of the output folder",
    ),
    "logging_dir": OtherName("TL", ("--tensorboard_path",)),
    "use_wandb": OtherName("A", ("--report_to wandb",)),
    "wandb_project": OtherName("A", ("--report_to wandb",), _WANDB),
    "run_name": OtherName("TL", (), _WANDB),
    "push_to_hub": OtherName("TL", ("--push_to_hub",), "the repository, owner/name, not a boolean"),
    "hub_model_id": OtherName("TLA", ("--push_to_hub",), "the repository, owner/name, not a boolean"),
    "overwrite_cache": OtherName("L", (), "nothing to set: the cache is renewed when data or flags change"),
    # DPO
    "pref_beta": OtherName("L", ("--beta", "--kl_ctl")),
    "rl_beta": OtherName("A", ("--beta", "--kl_ctl")),
    # PPO, RLOO and GRPO
    "beta": OtherName("T", ("--beta", "--kl_ctl"), "TRL's default for GRPO is 0, here it is 0.05"),
    "init_kl_coef": OtherName("T", ("--kl_ctl",)),
    "ppo_target": OtherName("L", ("--adaptive_kl_target",)),
    "num_ppo_epochs": OtherName("T", ("--ppo_epochs",)),
    "num_iterations": OtherName("T", ("--ppo_epochs",)),
    "epsilon": OtherName("T", ("--cliprange",)),
    "epsilon_high": OtherName("T", ("--cliprange_high",)),
    "num_generations": OtherName("T", ("--samples_per_prompt", "--num_return")),
    "rloo_k": OtherName("T", ("--samples_per_prompt",)),
    "steps_per_generation": OtherName(
        "T",
        ("--generation_batches",),
        "TRL counts training micro-batches; here it is the generation batches of a rollout",
    ),
    "generation_batch_size": OtherName(
        "T",
        ("--per_device_generation_batch_size",),
        "in prompts per process; TRL counts the responses of all processes",
    ),
    "max_new_tokens": OtherName("TL", ("--max_answer_seq_len", "--max_new_tokens")),
    "max_completion_length": OtherName("T", ("--max_answer_seq_len", "--max_new_tokens")),
    "response_length": OtherName("T", ("--max_answer_seq_len", "--max_new_tokens")),
    "max_prompt_length": OtherName("T", ("--max_prompt_seq_len", "--max_prompt_len")),
    "stop_token": OtherName("T", ("--end_of_conversation_token",), _END),
    "stop_token_id": OtherName("T", ("--end_of_conversation_token",), _END),
    "eos_token": OtherName("T", ("--end_of_conversation_token",), _END),
    "whiten_rewards": OtherName("T", ("--normalize_scores",), _WHITENED),
    "ppo_score_norm": OtherName("L", ("--normalize_scores",)),
    "ppo_whiten_rewards": OtherName("L", ("--normalize_scores",), _WHITENED),
    "scale_rewards": OtherName(
        "T",
        ("--advantage_estimator",),
        "the value group is grpo, batch is reinforce_pp_baseline, none is dr_grpo or rloo",
    ),
    "loss_type": OtherName(
        "T",
        ("--loss_mean",),
        "the value grpo is response, dapo is token, dr_grpo is length; others are not offered. DPO has the sigmoid"
        " loss only",
    ),
    "importance_sampling_level": OtherName("T", ("--policy_ratio",), "the value sequence is sequence_mean (GSPO)"),
    "reward_funcs": OtherName("T", ("--reward_function",), "a model goes to --reward_model_name_or_path"),
    "mask_truncated_completions": OtherName(
        "T", (), "truncated responses are trained on; --missing_eos_penalty and --length_buffer lower their scores"
    ),
    "top_entropy_quantile": OtherName(
        "T", (), "tokens are not selected by entropy; --max_token_probability leaves out likely ones"
    ),
    "tools": OtherName("T", ("--environment",), _EPISODES),
    "environment_factory": OtherName("T", ("--environment",), _EPISODES),
    "rollout_func": OtherName("T", ("--environment",), _EPISODES),
    "max_tool_calling_iterations": OtherName("T", ("--max_turns",), "in replies"),
    "use_vllm": OtherName("T", ("--rollout_engine vllm",)),
    "vllm_mode": OtherName(
        "T", ("--rollout_engine vllm",), "colocate is this flag alone; server also needs --vllm_url"
    ),
    "vllm_server_base_url": OtherName("T", ("--vllm_url",)),
    "vllm_server_host": OtherName("T", ("--vllm_url",), "an address such as http://host:8000"),
    "vllm_server_port": OtherName("T", ("--vllm_url",), "an address such as http://host:8000"),
    "vllm_server_timeout": OtherName(
        "T", (), "a server must run before training starts; --vllm_timeout limits the wait for a response"
    ),
    "vllm_importance_sampling_correction": OtherName("T", ("--rollout_is_clip",), _IS_CLIP),
    "vllm_importance_sampling_cap": OtherName("T", ("--rollout_is_clip",), _IS_CLIP),
    "vllm_gpu_memory_utilization": OtherName("T", ("--vllm_gpu_memory",)),
    "vllm_tensor_parallel_size": OtherName("T", ("--vllm_tensor_parallel",)),
    # Which step
    "stage": OtherName("L", (), _STAGE),
    "rl": OtherName("A", (), _STAGE),
    "do_train": OtherName("L", (), _STAGE),
}

# Settings that are booleans here, but files of other trainers may give them another value → what to do instead.
OTHER_VALUES: dict[str, str] = {
    "deepspeed": "a JSON file of DeepSpeed settings goes to --deepspeed_config",
    "bf16": "leave it out for bf16 on a GPU and fp32 on a CPU",
}

_GROUPS = "dschat ppo --advantage_estimator grpo --samples_per_prompt 8"
_GRPO = f"{_GROUPS} --kl_in loss --kl_estimator k3"
_LENGTH_PENALTY = "--length_buffer N adds DAPO's length penalty"
# Algorithms and commands of other trainers → the commands here.
OTHER_COMMANDS: dict[str, OtherCommand] = {
    "grpo": OtherCommand(
        (f"{_GRPO} --kl_ctl 0.04 --loss_mean response",),
        "as in the paper of GRPO; TRL's defaults are --kl_ctl 0 --loss_mean token",
    ),
    "dr_grpo": OtherCommand(
        ("dschat ppo --advantage_estimator dr_grpo --samples_per_prompt 8 --kl_ctl 0 --loss_mean length",),
    ),
    "dapo": OtherCommand(
        (f"{_GROUPS} --kl_ctl 0 --cliprange_high 0.28 --loss_mean token --drop_equal_groups --refill_rounds 2",),
        _LENGTH_PENALTY,
    ),
    "gspo": OtherCommand(
        (f"{_GRPO} --policy_ratio sequence_mean --cliprange 0.0003 --cliprange_high 0.0004 --ppo_epochs 2",),
        "in the first update of a rollout all ratios are 1 and GSPO clips nothing, hence --ppo_epochs 2",
    ),
    "rloo": OtherCommand(("dschat ppo --advantage_estimator rloo --samples_per_prompt 4",)),
    "rm": OtherCommand(("dschat reward",)),
    "train": OtherCommand(("dschat sft", "dschat reward", "dschat dpo", "dschat ppo")),
    "pretrain": OtherCommand(("dschat sft --sft_on_prompt",), _PLAIN_TEXTS),
    "pt": OtherCommand(("dschat sft --sft_on_prompt",), _PLAIN_TEXTS),
    "kto": OtherCommand(("dschat dpo",), "KTO is not offered; DPO is the nearest and needs pairs"),
    "orpo": OtherCommand(("dschat dpo",), "ORPO is not offered; DPO is the nearest and also needs a reference"),
    "chat": OtherCommand(("dschat demo chat",)),
    "eval": OtherCommand(("dschat text", "dschat judge")),
    "vllm-serve": OtherCommand(("dschat serve-vllm",)),
}


def suggestion(name: str, command_has: Callable[[str], bool]) -> str:
    """Our flag for a setting of another trainer, as the end of a message; empty for an unknown name.

    Args:
        name: the name, without dashes and with underscores.
        command_has: whether the command has a flag, without dashes.
    """
    other = OTHER_NAMES.get(name)
    if other is None:
        return ""
    for words in other.flags:
        flag = words.split()[0].removeprefix("--")
        if command_has(flag):
            note = f": {other.note}" if other.note else ""
            return f"did you mean {words}? ({name} of {other.trainer_names}{note})"
    if other.flags:
        return f"{name} of {other.trainer_names} is {other.flags[0]} in other commands"
    return f"{name} of {other.trainer_names} has no flag here: {other.note}"


def command_suggestion(name: str) -> str:
    """Our command for one of another trainer, as the end of a question; empty for an unknown name."""
    other = OTHER_COMMANDS.get(name)
    if other is None:
        return ""
    note = f" ({other.note})" if other.note else ""
    return f"did you mean {other.described()}?{note}"


def page(commands_with: Callable[[str], list[str]]) -> str:
    """The tables of docs/coming-from-trl.md.

    Args:
        commands_with: the commands that have a flag, without dashes.
    """
    lines = ["| setting | of | here | note |", "|---|---|---|---|"]
    for names, other in _names_of_rows():
        ours = _flags_of_page(other.flags, commands_with)
        settings = ", ".join(f"`{name}`" for name in names)
        lines.append(_row(settings, other.trainer_names, ours, _note_of_page(other.note)))
    lines += ["", "| command or algorithm | here | note |", "|---|---|---|"]
    for name, command in OTHER_COMMANDS.items():
        lines.append(_row(f"`{name}`", command.described("`"), _note_of_page(command.note)))
    return "\n".join(lines) + "\n"


def _names_of_rows() -> list[tuple[list[str], OtherName]]:
    """The names of each row, and what they mean: names with the same flags and the same note share a row."""
    names_of: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, other in OTHER_NAMES.items():
        names_of.setdefault((other.flags, other.note), []).append(name)
    rows = []
    for (flags, note), names in names_of.items():
        letters = {letter for name in names for letter in OTHER_NAMES[name].trainers}
        trainers = "".join(letter for letter in TRAINERS if letter in letters)
        rows.append((names, OtherName(trainers, flags, note)))
    return rows


def _row(*cells: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _flags_of_page(flags: tuple[str, ...], commands_with: Callable[[str], list[str]]) -> str:
    """Flags as a cell of the table; where there are several, each with its commands."""
    if not flags:
        return "no flag"
    if len(flags) == 1:
        return f"`{flags[0]}`"
    cells = []
    for words in flags:
        names = commands_with(words.split()[0].removeprefix("--"))
        shown = [name for name in names if name in _STEPS] or names[:1]
        rest = " and others" if len(names) > 1 and shown[0] not in _STEPS else ""
        cells.append(f"`{words}` ({', '.join(shown)}{rest})")
    return ", ".join(cells)


def _note_of_page(note: str) -> str:
    """A note with its flags as code and its pages as links."""
    flag = r"--\w+(?: (?:\d[\d.]*|N|token)\b)?"
    coded = re.sub(rf"dschat plan|{flag}(?: {flag})*", r"`\g<0>`", note)
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", coded)
