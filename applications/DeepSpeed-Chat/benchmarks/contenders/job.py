# SPDX-License-Identifier: Apache-2.0
"""What a contender's process is told: one JSON file, named on its command line."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from contenders.meter import Meter
from contenders.work import Work


@dataclass(frozen=True)
class Job:
    """One contender's process."""

    work: Work
    files: str  # folder that `make_files` filled
    folder: str  # of this process alone
    scoring: bool = False  # floor: score with actor and critic before training, too
    flags: list[str] = field(default_factory=list)  # ours: more of step 3's
    profile: str | None = None  # ours: folder for a trace of the second iteration
    iterations: int | None = None  # None: as standard input says
    threads: int = 1

    def write(self) -> Path:
        """For `read_job` in that process; returns the file."""
        file = Path(self.folder) / "job.json"
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return file


def read_job() -> tuple[Job, Meter]:
    """The job of this process, and its meter. The first thing that a contender does."""
    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    job = Job(**(content | {"work": Work.from_json(content["work"])}))
    meter = Meter(Path(job.folder), job.iterations)
    torch.set_num_threads(job.threads)
    return job, meter
