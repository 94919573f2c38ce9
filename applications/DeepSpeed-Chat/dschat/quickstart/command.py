# SPDX-License-Identifier: Apache-2.0
"""`dschat quickstart`: on synthetic reviews, or with --model on a real language model."""

from dschat.quickstart import reviews
from dschat.quickstart.options import QuickstartOptions
from dschat.quickstart.real import pipeline


def run(options: QuickstartOptions) -> str:
    """Runs the pipeline that the flags ask for; returns its last lines of output. Raises UserError."""
    return reviews.run(options) if options.model is None else pipeline.run(options)
