# SPDX-License-Identifier: Apache-2.0
"""The batch flags of a preset for a number of processes; the training scripts ask for them.

    python -m dschat.config.preset_batches --processes 8 --global_batch_size 256 --per_device_training_batch_size 4 \\
        --per_device_generation_batch_size 32 -- [flags given to the script]

A preset states the batch of one update and, per process, the most that fits into a GPU's memory. Printed are the
largest sizes up to those that divide a process's share; in step 3 a rollout holds one update's prompts. Flags given to
the script win.
"""

import argparse
import sys
from collections.abc import Sequence

from dschat.config.batches import largest_part
from dschat.errors import UserError

TRAIN, TRAINING = "per_device_train_batch_size", "per_device_training_batch_size"
GENERATION, GLOBAL = "per_device_generation_batch_size", "global_batch_size"
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
        preset: its global batch, and the most examples per process, by flag.
        given: what the user chose instead, by flag.
        processes: how many share the global batch.

    Raises:
        UserError: they cannot share it evenly.
    """
    batch = given.get(GLOBAL) or preset[GLOBAL]
    share, rest = divmod(batch, processes)
    if rest:
        sizes = ", ".join(str(number) for number in range(1, MOST_NAMED + 1) if batch % number == 0)
        raise UserError(
            f"{processes} GPUs cannot share the global batch of {batch} evenly: set NUM_GPUS so that the number of"
            f" GPUs is one of {sizes}, or add --global_batch_size {share * processes or processes} or another"
            f" multiple of {processes}."
        )
    flags = {GLOBAL: batch}
    flags |= {name: largest_part(share, preset[name]) for name in (TRAIN, TRAINING, GENERATION) if preset.get(name)}
    if GENERATION in flags:
        flags["generation_batches"] = max(1, share // (given.get(GENERATION) or flags[GENERATION]))
    return flags


def _parser() -> argparse.ArgumentParser:
    """Reads batch sizes and leaves everything else to the step's main, which says what is wrong with it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in (GLOBAL, TRAIN, TRAINING, GENERATION):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=_size)
    return parser


def _size(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


if __name__ == "__main__":
    sys.exit(main())
