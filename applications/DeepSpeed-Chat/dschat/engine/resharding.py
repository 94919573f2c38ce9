# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's shards for another number of processes, by its universal checkpoints."""

import contextlib
import io
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.ds_to_universal import main as convert

from dschat.run.distributed import barrier, is_main


def universal(folder: Path, engine: Any, target: Path) -> None:
    """Puts the shards of a checkpoint together, and makes an engine read the result. Every rank must call it.

    Args:
        folder: that DeepSpeed wrote at ZeRO 1 or 2.
        engine: DeepSpeed's, not loaded yet.
        target: a folder for the result; what is there goes.
    """
    if is_main():
        shutil.rmtree(target, ignore_errors=True)
        arguments = Namespace(
            input_folder=str(folder),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
            reference_ckpt_dir=None,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            convert(arguments)
    barrier()
    engine._config.load_universal_checkpoint = True
