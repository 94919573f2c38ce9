# SPDX-License-Identifier: Apache-2.0
"""Loading a checkpoint that another number of processes wrote, at ZeRO 1 to 3."""

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.run.distributed import rank


class Piece(NamedTuple):
    """A rank's piece of a flattened parameter, in a flat tensor of pieces of many parameters."""

    group: int  # number of the flat tensor
    position: int  # of the piece's first element in the flat tensor
    start: int  # of that element in the parameter
    numel: int  # at stage 3 of a live parameter: padding included


class Keys(NamedTuple):
    """Names in DeepSpeed's state of a ZeRO optimiser."""

    weights: str
    adam: str


SHARDED_STATES = Keys("single_partition_of_fp32_groups", "base_optimizer_state")  # stages 1 and 2
SHARDED_WEIGHTS = Keys("fp32_flat_groups", "optimizer_state_dict")  # stage 3


class SavedPieces:
    """A checkpoint of ZeRO 1 to 3: all ranks' pieces of the trained parameters and of their Adam moments.

    The files are memory-mapped, so that only what is used of them is read.
    """

    def __init__(self, folder: Path, stage: int) -> None:
        prefix = "zero_pp_rank_0_" if stage == 3 else ""
        self.common = _load_mapped(folder, f"{prefix}mp_rank_00_model_states.pt")  # all but the optimiser
        self.keys = SHARDED_WEIGHTS if stage == 3 else SHARDED_STATES
        self.optimizers: list[dict[str, Any]] = []  # by rank
        for saved_rank in range(self.common["dp_world_size"]):
            file = _load_mapped(folder, f"*zero_pp_rank_{saved_rank}_mp_rank_00_optim_states.pt")
            self.optimizers.append(file["optimizer_state_dict"])
        self._pieces: defaultdict[str, list[tuple[int, Piece]]] = defaultdict(list)  # of each parameter, with the rank
        for saved_rank in range(len(self.optimizers)):
            if stage == 3:
                self._find_parts(saved_rank)
            else:
                self._find_slices(saved_rank)

    def _find_parts(self, saved_rank: int) -> None:
        """Stage 3: parameters are cut into equal parts, the last of which may be shorter or empty."""
        saved_ranks = len(self.optimizers)
        for group, shapes in enumerate(self.common["param_shapes"]):
            position = 0
            for name, shape in shapes.items():
                size = -(-shape.numel() // saved_ranks)
                start = saved_rank * size
                numel = max(0, min(size, shape.numel() - start))
                self._pieces[name].append((saved_rank, Piece(group, position, start, numel)))
                position += size

    def _find_slices(self, saved_rank: int) -> None:
        """Stages 1 and 2: all parameters one after the other are cut into equal parts, in the order of ranks."""
        for group, slices in enumerate(self.optimizers[saved_rank]["param_slice_mappings"]):
            for name, address in slices.items():
                start = sum(piece.numel for _, piece in self._pieces[name])
                piece = Piece(group, address.start, start, address.numel)
                self._pieces[name].append((saved_rank, piece))

    def fill(self, target: Tensor, name: str, start: int, moment: str | None) -> None:
        """Writes a parameter, or its `moment`, from element `start` on into `target`, which may end in padding."""
        end = start + target.numel()
        for saved_rank, piece in self._pieces[name]:
            first = max(start, piece.start)
            last = min(end, piece.start + piece.numel)
            if first >= last:
                continue
            optimizer = self.optimizers[saved_rank]
            if moment is None:
                flat = optimizer[self.keys.weights][piece.group]
            else:
                flat = optimizer[self.keys.adam]["state"][piece.group][moment]
            shift = piece.position - piece.start
            target[first - start : last - start] = flat[first + shift : last + shift]


def _load_mapped(folder: Path, pattern: str) -> Any:
    (file,) = folder.glob(pattern)
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)


def live_pieces(engine: Any) -> list[tuple[str, Piece]]:
    """This rank's pieces of the parameters that DeepSpeed's engine trains."""
    optimizer = engine.optimizer
    pieces: list[tuple[str, Piece]] = []
    if engine.zero_optimization_stage() == 3:
        for group, parameters in enumerate(optimizer.fp16_groups):
            position = 0
            for parameter in parameters:
                size = parameter.ds_tensor.numel()
                piece = Piece(group, position, rank() * size, size)
                pieces.append((engine.param_names[parameter], piece))
                position += size
        return pieces
    for parameter, name in engine.param_names.items():
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:  # None if the parameter is frozen, or on other ranks
            address = mapping.hp_fragment_address
            start = mapping.lp_fragment_address.start
            piece = Piece(mapping.param_group_index, address.start, start, address.numel)
            pieces.append((name, piece))
    return pieces


@torch.no_grad()
def load_resized(engine: Any, folder: Path) -> None:
    """Restores a checkpoint of another number of ranks: weights, optimiser, schedule, loss scale.

    Every rank must call it, with DeepSpeed's engine before it has loaded anything. DeepSpeed 0.19.8 converts such
    checkpoints, too, but into a second copy on the disk; and at stage 3 it gives all parameter groups the first one's
    weight decay, and all sub-groups one shared step counter, which each of them advances.

    Raises:
        UserError: the DeepSpeed config sets round_robin_gradients, with which it notes wrong places of parameters.
    """
    stage = engine.zero_optimization_stage()
    optimizer = engine.optimizer
    if getattr(optimizer, "round_robin_gradients", False):
        raise UserError(
            "--deepspeed_config: a run with round_robin_gradients continues only on the number of processes that wrote"
            " the checkpoint."
        )
    saved = SavedPieces(folder, stage)
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    engine.load_module_state_dict(saved.common, strict=False)  # at stage 3 buffers; it has no parameters
    saved_state = saved.optimizers[0]
    saved_adam = saved_state[saved.keys.adam]["state"].get(0, {})  # empty before the first update

    # This rank's pieces of weights, written in place, and of Adam's moments, by flat tensor.
    if stage == 3:
        weights = optimizer.fp32_partitioned_groups_flat
    else:
        weights = [group["params"][0] for group in optimizer.param_groups]
    moments = [key for key in saved_adam if key != "step"]
    states: dict[int, dict[str, Any]] = {}
    if saved_adam:
        for group, flat in enumerate(weights):
            states[group] = {"step": copy.deepcopy(saved_adam["step"])}
            for moment in moments:
                states[group][moment] = torch.zeros_like(flat)
    for name, piece in live_pieces(engine):
        elements = slice(piece.position, piece.position + piece.numel)
        saved.fill(weights[piece.group][elements], name, piece.start, None)
        for moment in moments:
            saved.fill(states[piece.group][moment][elements], name, piece.start, moment)

    # Learning rate and weight decay of each parameter group.
    saved_groups = saved_state[saved.keys.adam]["param_groups"]
    live_groups = optimizer.state_dict()[saved.keys.adam]["param_groups"]
    param_groups: list[dict[str, Any]] = []
    for saved_group, live_group in zip(saved_groups, live_groups, strict=True):
        param_groups.append(saved_group | {"params": live_group["params"]})

    local_state = saved_state | {
        saved.keys.weights: weights,
        saved.keys.adam: {"state": states, "param_groups": param_groups},
    }
    optimizer.load_state_dict({rank(): local_state}, load_from_fp32_weights=True)
    if stage == 3:
        optimizer.checkpoint_event_epilogue()
    engine.lr_scheduler.load_state_dict(saved.common["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, saved.common[name])
