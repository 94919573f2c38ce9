# SPDX-License-Identifier: Apache-2.0
"""Names of settings and commands in TRL, LLaMA-Factory and Axolotl, and what they are called here.

Messages about unknown flags use them, and the tables of docs/coming-from-trl.md are made of them:

    python -m dschat.settings.other_names
"""

from collections.abc import Callable
from dataclasses import dataclass

TRAINERS = {"T": "TRL", "L": "LLaMA-Factory", "A": "Axolotl"}


@dataclass(frozen=True)
class OtherName:
    """A setting of another trainer.

    Attributes:
        trainers: keys of TRAINERS, one letter for each trainer that has the setting: "TL" is TRL and LLaMA-Factory.
        flags: our flags for it, some with a value. A message names the first one that the command has.
        note: an explanation; if there is no flag, why not.
    """

    trainers: str
    flags: tuple[str, ...] = ()
    note: str = ""

    @property
    def trainer_names(self) -> str:
        """Names of the trainers that have the setting."""
        return ", ".join(TRAINERS[letter] for letter in self.trainers)


_QUANTISED = "weights are not quantised: --lora_dim with --gradient_checkpointing, or --zero_stage 3, saves memory"
_TEMPLATE = "the tokenizer's own chat template is used"
_WORKERS = "nothing to set: large data are tokenised by worker processes and kept"
_OPTIMISER = "the optimiser is AdamW"
_WANDB = "set the variables of W&B, such as WANDB_PROJECT and WANDB_NAME"
_BEST = "the best checkpoint is kept beside the newest (--save_total_limit)"
_STAGE = "the command says it: dschat sft, reward, dpo or ppo"
_COLUMNS = "name the columns: --prompt_key, --chosen_key, --rejected_key, --response_key, --messages_key"

OTHER_NAMES: dict[str, OtherName] = {
    # Models
    "model_name_or_path": OtherName("TL", ("--model_name_or_path", "--actor_model_name_or_path", "--model")),
    "base_model": OtherName("A", ("--model_name_or_path", "--actor_model_name_or_path", "--model")),
    "sft_model_path": OtherName("T", ("--actor_model_name_or_path",)),
    "reward_model": OtherName("L", ("--reward_model_name_or_path",)),
    "reward_model_path": OtherName("T", ("--reward_model_name_or_path",)),
    "value_model": OtherName("T", ("--critic_model_name_or_path",)),
    "ref_model": OtherName("TL", (), "the reference is the model that training starts from, frozen"),
    "torch_dtype": OtherName("TA", ("--dtype",)),
    "fp16": OtherName("TLA", ("--dtype fp16",)),
    "tf32": OtherName("TA", (), "matrices in float32 are multiplied in float32"),
    "load_in_4bit": OtherName("TA", (), _QUANTISED),
    "load_in_8bit": OtherName("TA", (), _QUANTISED),
    "quantization_bit": OtherName("L", (), _QUANTISED),
    "trust_remote_code": OtherName("TLA", (), "no code of a repository is run"),
    "flash_attn": OtherName("L", ("--attn_implementation flash_attention_2",)),
    "flash_attention": OtherName("A", ("--attn_implementation flash_attention_2",)),
    "use_liger_kernel": OtherName("TL", (), "log-probs are computed in chunks without it"),
    # What is trained
    "use_peft": OtherName("T", ("--lora_dim",)),
    "finetuning_type": OtherName("L", ("--finetune_mode",)),
    "adapter": OtherName("A", ("--finetune_mode lora",)),
    "lora_r": OtherName("TA", ("--lora_dim",)),
    "lora_rank": OtherName("L", ("--lora_dim",)),
    "lora_target": OtherName("L", ("--lora_module_name",)),
    "lora_target_modules": OtherName("TA", ("--lora_module_name",)),
    "lora_target_linear": OtherName("A", ("--lora_module_name",), "all linear layers if not given"),
    # Data
    "dataset": OtherName("L", ("--data_path",), "files, folders or hub ids"),
    "datasets": OtherName("A", ("--data_path",), "files, folders or hub ids"),
    "dataset_name": OtherName("T", ("--data_path",), "files, folders or hub ids"),
    "dataset_dir": OtherName("L", ("--data_path",)),
    "dataset_text_field": OtherName("T", (), _COLUMNS),
    "field_messages": OtherName("A", ("--messages_key",)),
    "template": OtherName("L", (), _TEMPLATE),
    "chat_template": OtherName("A", (), _TEMPLATE),
    "val_size": OtherName("L", (), "5 % of the rows are held out where a source has no evaluation rows"),
    "val_set_size": OtherName("A", (), "5 % of the rows are held out where a source has no evaluation rows"),
    "preprocessing_num_workers": OtherName("L", (), _WORKERS),
    "dataset_num_proc": OtherName("T", (), _WORKERS),
    "dataset_processes": OtherName("A", (), _WORKERS),
    "dataloader_num_workers": OtherName("TLA", (), _WORKERS),
    "train_on_inputs": OtherName("A", ("--sft_on_prompt",)),
    "completion_only_loss": OtherName("T", (), "prompts are not trained on unless --sft_on_prompt is given"),
    "assistant_only_loss": OtherName("T", ("--train_on all",)),
    "mask_history": OtherName("L", ("--train_on last",)),
    "sample_packing": OtherName("A", ("--packing",)),
    "cutoff_len": OtherName("L", ("--max_seq_len", "--max_prompt_seq_len")),
    "sequence_len": OtherName("A", ("--max_seq_len", "--max_prompt_seq_len")),
    "max_length": OtherName("T", ("--max_seq_len", "--max_prompt_seq_len")),
    "max_seq_length": OtherName("T", ("--max_seq_len", "--max_prompt_seq_len")),
    # Batches, steps and the optimiser
    "micro_batch_size": OtherName("A", ("--per_device_train_batch_size", "--per_device_training_batch_size")),
    "per_device_train_batch_size": OtherName(
        "TL", ("--per_device_train_batch_size", "--per_device_training_batch_size")
    ),
    "batch_size": OtherName("A", ("--global_batch_size",)),
    "auto_find_batch_size": OtherName("TA", (), "dschat plan says whether a size fits, and which smaller one would"),
    "num_epochs": OtherName("A", ("--num_train_epochs",)),
    "max_steps": OtherName("TLA", ("--max_steps",)),
    "learning_rate": OtherName("TLA", ("--learning_rate", "--actor_learning_rate"), "the critic has its own"),
    "weight_decay": OtherName("TLA", ("--weight_decay", "--actor_weight_decay"), "the critic has its own"),
    "warmup_steps": OtherName("TLA", ("--num_warmup_steps",)),
    "lr_scheduler": OtherName("A", ("--lr_scheduler_type",)),
    "max_grad_norm": OtherName("TLA", ("--gradient_clipping",)),
    "optim": OtherName("TL", (), _OPTIMISER),
    "optimizer": OtherName("A", (), _OPTIMISER),
    "label_smoothing_factor": OtherName("TL", ("--label_smoothing",)),
    # Evaluation, saving and logging
    "eval_steps": OtherName("TLA", ("--eval_interval",)),
    "eval_strategy": OtherName("TLA", ("--eval_interval",), "the start and the end are always evaluated"),
    "evaluation_strategy": OtherName("TLA", ("--eval_interval",), "the start and the end are always evaluated"),
    "save_strategy": OtherName("TLA", ("--save_steps",)),
    "load_best_model_at_end": OtherName("TLA", (), _BEST),
    "early_stopping_patience": OtherName("A", (), _BEST),
    "logging_steps": OtherName("TLA", (), "every update is logged"),
    "logging_dir": OtherName("TL", ("--tensorboard_path",)),
    "use_wandb": OtherName("A", ("--report_to wandb",)),
    "wandb_project": OtherName("A", ("--report_to wandb",), _WANDB),
    "run_name": OtherName("TL", (), _WANDB),
    "hub_model_id": OtherName("TLA", ("--push_to_hub",), "it takes owner/name"),
    "overwrite_cache": OtherName("L", (), "changed data or flags are tokenised anew"),
    # DPO
    "pref_beta": OtherName("L", ("--beta", "--kl_coef")),
    "rl_beta": OtherName("A", ("--beta", "--kl_coef")),
    # PPO, RLOO and GRPO
    "beta": OtherName("T", ("--beta", "--kl_coef")),
    "init_kl_coef": OtherName("T", ("--kl_coef",)),
    "ppo_target": OtherName("L", ("--adaptive_kl_target",)),
    "num_ppo_epochs": OtherName("T", ("--ppo_epochs",)),
    "num_iterations": OtherName("T", ("--ppo_epochs",)),
    "epsilon": OtherName("T", ("--cliprange",)),
    "epsilon_high": OtherName("T", ("--cliprange_high",)),
    "num_generations": OtherName("T", ("--samples_per_prompt", "--num_return")),
    "rloo_k": OtherName("T", ("--samples_per_prompt",)),
    "steps_per_generation": OtherName("T", ("--generation_batches",)),
    "max_new_tokens": OtherName("TL", ("--max_answer_seq_len", "--max_new_tokens")),
    "max_completion_length": OtherName("T", ("--max_answer_seq_len", "--max_new_tokens")),
    "response_length": OtherName("T", ("--max_answer_seq_len", "--max_new_tokens")),
    "max_prompt_length": OtherName("T", ("--max_prompt_seq_len", "--max_prompt_len")),
    "stop_token": OtherName("T", ("--end_of_conversation_token",)),
    "whiten_rewards": OtherName("T", ("--normalize_scores",), "by moments of all scores so far"),
    "ppo_score_norm": OtherName("L", ("--normalize_scores",)),
    "ppo_whiten_rewards": OtherName("L", ("--normalize_scores",), "by moments of all scores so far"),
    "scale_rewards": OtherName(
        "T", (), "--advantage_estimator grpo divides by the deviation of a group, rloo does not"
    ),
    "loss_type": OtherName("T", ("--loss_mean",), "token is that of DAPO"),
    "importance_sampling_level": OtherName("T", ("--policy_ratio",), "sequence_mean is that of GSPO"),
    "reward_funcs": OtherName("T", ("--reward_function",)),
    "use_vllm": OtherName("T", ("--rollout_engine vllm",)),
    "vllm_server_base_url": OtherName("T", ("--vllm_url",)),
    "vllm_gpu_memory_utilization": OtherName("T", ("--vllm_gpu_memory",)),
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

_RATIO_OF_GSPO = "--policy_ratio sequence_mean"
_GRPO = "dschat ppo --advantage_estimator grpo --samples_per_prompt 8"
# Algorithms and commands of other trainers → the command here.
OTHER_COMMANDS: dict[str, str] = {
    "grpo": _GRPO,
    "dapo": f"{_GRPO} --cliprange_high 0.28 --loss_mean token --drop_equal_groups",
    "gspo": f"{_GRPO} {_RATIO_OF_GSPO}",
    "rloo": "dschat ppo --advantage_estimator rloo --samples_per_prompt 4",
    "rm": "dschat reward",
    "train": "dschat sft, reward, dpo or ppo",
    "pretrain": "dschat sft --sft_on_prompt",
    "pt": "dschat sft --sft_on_prompt",
    "kto": "dschat dpo",
    "orpo": "dschat dpo",
    "chat": "dschat demo chat",
    "eval": "dschat text, or judge",
    "vllm-serve": "dschat serve-vllm",
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


def page() -> str:
    """The tables of docs/coming-from-trl.md."""
    lines = ["| setting | of | here |", "|---|---|---|"]
    for name, other in OTHER_NAMES.items():
        texts = [", ".join(f"`{words}`" for words in other.flags), other.note]
        ours = "; ".join(text for text in texts if text)
        lines.append(f"| `{name}` | {other.trainer_names} | {ours} |")
    lines += ["", "| command or algorithm | here |", "|---|---|"]
    for name, command in OTHER_COMMANDS.items():
        lines.append(f"| `{name}` | `{command}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
