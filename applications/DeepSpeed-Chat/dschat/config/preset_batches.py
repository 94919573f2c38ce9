# SPDX-License-Identifier: Apache-2.0
"""The batch flags of a preset for a number of processes; the training scripts ask for them.

    python -m dschat.config.preset_batches --processes 8 --global_batch_size 256 --per_device_training_batch_size 4 \\
        --per_device_generation_batch_size 32 -- [flags given to the script]

A preset states the batch of one update and, per process, the most that fits into a GPU's memory. Printed are the
largest sizes up to those that divide a process's share; in step 3 a rollout holds one update's responses, and a prompt
has all of its --samples_per_prompt on one process. Flags given to the script win.
"""

import argparse
import sys
from collections.abc import Sequence

from dschat.config.batches import largest_part
from dschat.errors import UserError

TRAIN, TRAINING = "per_device_train_batch_size", "per_device_training_batch_size"
GENERATION, GLOBAL = "per_device_generation_batch_size", "global_batch_size"
SAMPLES = "samples_per_prompt"
MOST_NAMED = 128  # GPUs named in a message


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the flags on one line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    border = words.index("--")
    parser = _parser()
    parser.add_argument("--processes", type=int)
    preset = parser.parse_args(words[:border])
    given, _ = _parser().parse_known_args(words[border + 1 :])
    try:
        sizes = preset_batches(vars(preset), {name: n for name, n in vars(given).items() if n}, preset.processes)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(" ".join(f"--{name} {size}" for name, size in sizes.items()))
    return 0


def preset_batches(preset: dict[str, int], given: dict[str, int], processes: int) -> dict[str, int]:
    """Batch sizes by flag.

    Args:
        preset: its global batch, and the most examples (of step 3: responses) per process, by flag.
        given: what the user chose instead, by flag.
        processes: how many share the global batch.

    Raises:
        UserError: they cannot share it evenly.
    """
    batch = given.get(GLOBAL) or preset[GLOBAL]
    samples = given.get(SAMPLES) or preset.get(SAMPLES) or 1
    if batch % (processes * samples):
        raise _uneven(batch, samples, processes)
    share = batch // processes
    flags = {GLOBAL: batch} | ({SAMPLES: samples} if preset.get(SAMPLES) else {})
    flags |= {name: largest_part(share, preset[name]) for name in (TRAIN, TRAINING) if preset.get(name)}
    if preset.get(GENERATION):
        prompts = share // samples
        flags[GENERATION] = largest_part(prompts, max(1, preset[GENERATION] // samples))
        flags["generation_batches"] = max(1, prompts // (given.get(GENERATION) or flags[GENERATION]))
    return flags


def _uneven(batch: int, samples: int, processes: int) -> UserError:
    """The global batch has no equal shares of whole prompts."""
    whole, together = processes * samples, f", {samples} responses of a prompt together" if samples > 1 else ""
    sizes = ", ".join(str(number) for number in range(1, MOST_NAMED + 1) if batch % (number * samples) == 0)
    fewer = f"set NUM_GPUS so that the number of GPUs is one of {sizes}, or " if sizes else ""
    return UserError(
        f"{processes} GPUs cannot share the global batch of {batch} evenly{together}: {fewer}add"
        f" --global_batch_size {batch // whole * whole or whole} or another multiple of {whole}."
    )


def _parser() -> argparse.ArgumentParser:
    """Reads batch sizes and leaves everything else to the step's main, which says what is wrong with it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in (GLOBAL, TRAIN, TRAINING, GENERATION, SAMPLES):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=_size)
    return parser


def _size(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


if __name__ == "__main__":
    sys.exit(main())
