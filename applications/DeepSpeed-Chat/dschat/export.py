# SPDX-License-Identifier: Apache-2.0
"""`dschat export`: the models of a checkpoint."""

import tempfile
from pathlib import Path

from dschat.base.errors import UserError
from dschat.base.jsonl import read_object
from dschat.cli import COMMANDS, train_step
from dschat.run.record import run_of_checkpoint
from dschat.run.state import has_steps
from dschat.settings.commands import ExportOptions
from dschat.settings.parse import as_yaml, resolve

# Flags of a run that its export does not have: it writes the models, and nothing else to any other place.
NOT_EXPORTED = (
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "max_steps", "save_steps", "save_minutes"),
    *("save_models", "report_to", "enable_tensorboard", "tensorboard_path", "push_to_hub"),
)


def run_export(options: ExportOptions) -> int:
    """Resumes the run of a checkpoint into a new folder, with no update left to make. Returns the exit status.

    Raises:
        UserError: the folder is no checkpoint of a run, or was written inside a rollout.
    """
    checkpoint = options.checkpoint
    if options.folder.exists():
        raise UserError(f"{options.folder} exists: give a new folder, which the models are written into.")
    manifest = read_object(checkpoint / "manifest.json")
    flags_file = run_of_checkpoint(checkpoint) / "config.yaml"
    names = {command.step: name for name, command in COMMANDS.items() if command.step}
    if manifest.get("step") not in names or not flags_file.is_file():
        raise UserError(f"{checkpoint} is not a checkpoint of a run: give OUTPUT_DIR/checkpoints/step-N.")
    if has_steps(read_object(checkpoint / "state.json")["rollout"]):
        raise UserError(
            f"{checkpoint} was written inside a rollout, between two updates of its models: give one that --save_steps"
            " or --save_minutes wrote."
        )
    name = names[manifest["step"]]
    flags_class = COMMANDS[name].flags_class()
    resolved = resolve(flags_class, [], command=name, config=str(flags_file), checks=False)
    values = resolved.given(without=NOT_EXPORTED)
    values["output_dir"] = str(options.folder)
    values["resume_from_checkpoint"] = str(checkpoint)
    values["max_steps"] = manifest["update"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "export.yaml"
        file.write_text(as_yaml(flags_class, values, {}), encoding="utf-8")
        return train_step(name, [f"--config={file}"], may_launch=True)
