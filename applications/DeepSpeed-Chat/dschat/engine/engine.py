# SPDX-License-Identifier: Apache-2.0
"""A model under DeepSpeed, for training or frozen, with DeepSpeed's own method names."""

import contextlib
import io
import math
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from dschat.base.errors import UserError
from dschat.engine import zero3
from dschat.engine.deepspeed_config import EngineSettings, deepspeed_config
from dschat.engine.process_group import prepare_op
from dschat.engine.reduction import ReductionCheck, check_of
from dschat.engine.rehearsal import bytes_to_come, gradients_dropped
from dschat.models.compiled import Compiler, compile_layers
from dschat.models.finetuning import enable_gradient_checkpointing
from dschat.models.lora import adapters_off
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.run.distributed import barrier, device, is_main, world_size

ADAM_BETAS = (0.9, 0.95)
M = TypeVar("M", PolicyModel, ScalarModel)


def accumulation_of(parameter: nn.Parameter) -> Any:
    """The node of the graph where a parameter's gradient arrives; it remembers the shape the parameter has now."""
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")), torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class SkippingAdamW(torch.optim.AdamW):
    """AdamW that does nothing while `overflow` is set; by that name DeepSpeed knows, and leaves the schedule alone."""

    overflow = False

    def step(self, closure: Any = None) -> Any:
        return None if self.overflow else super().step(closure)


class FiniteWatch:
    """Watches this process's own losses and gradients of an update; nothing waits for the device until `read`."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hangs on every trained parameter, where its gradient arrives: before DeepSpeed sums it over processes."""
        self.reset()
        # Kept: a node that nobody holds is made anew, without the hook.
        self.nodes = {parameter: accumulation_of(parameter) for parameter in parameters if parameter.requires_grad}
        for node in self.nodes.values():
            node.register_prehook(self._note)

    def reset(self) -> None:
        """Forgets what was noted."""
        # The largest magnitudes so far: NaN and infinities prevail over everything else.
        self._loss, self._gradient = torch.zeros(2, device=device()).unbind()

    def _note(self, gradients: tuple[Tensor | None, ...]) -> None:
        for gradient in gradients:
            if gradient is not None and gradient.numel():
                largest = torch.linalg.vector_norm(gradient.detach(), math.inf).float()
                self._gradient = torch.maximum(self._gradient, largest)

    def factor(self, loss: Tensor) -> Tensor:
        """Notes a loss. 1, or NaN where the loss is not finite: its gradient may be, and must not be applied."""
        loss = loss.detach().float()
        self._loss = torch.maximum(self._loss, loss.abs())
        return torch.where(loss.isfinite(), 1.0, math.nan)

    def read(self, norm: Tensor | float) -> tuple[bool, bool, float]:
        """Whether the losses and the gradients since the last call were finite; and a number, read with them."""
        norm = torch.as_tensor(norm, dtype=torch.float32, device=self._loss.device)
        loss, gradient, number = torch.stack([self._loss, self._gradient, norm]).tolist()
        self.reset()
        return math.isfinite(loss), math.isfinite(gradient), number


def adam_steps(adam: torch.optim.Optimizer | None) -> Tensor:
    """How many updates Adam has made of what this process holds (0-d); nothing waits for the device."""
    state: dict[str, Any] = {} if adam is None else next(iter(adam.state.values()), {})
    return torch.as_tensor(state.get("step", 0)).clone()


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimiser and schedule of one model."""

    learning_rate: float
    weight_decay: float
    total_updates: int
    warmup_updates: int = 0
    schedule: str = "linear"
    gradient_clipping: float = 1.0
    epsilon: float = 1e-8  # of Adam


class Engine(Generic[M]):
    """DeepSpeed's engine, where the losses of an update's micro-batches on all ranks add up to the update's mean loss.

    A trainer divides each micro-batch's sum by the count of the whole update (all micro-batches, all ranks); DeepSpeed
    would divide again by the accumulation steps and average over ranks. ``backward`` undoes both, so that the update's
    gradient is that of the global mean.
    """

    def __init__(
        self,
        engine: Any,
        clipping: float = 0.0,
        adam: torch.optim.Optimizer | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """Takes DeepSpeed's engine, and what it trains with: the largest gradient norm, 0 = no clipping (with ZeRO,
        the engine sees to it itself), and the optimiser; and the compiler of its layers, if they are compiled.
        """
        self._compiler = compiler
        self._engine, self._clipping, self._adam = engine, clipping, adam
        self.grad_norm = math.nan  # of the last update, before clipping
        self.skipped = False  # the last update was left out, see `step`
        self.nonfinite: str | None = None  # why the last update was left out, see `step`
        self._left: int | None = None  # micro-batches of this update; None where DeepSpeed counts them
        self._watch = FiniteWatch(engine.module.parameters())
        self._reduction: ReductionCheck | None = None  # of the next updates
        self._rehearses = False  # inside `rehearsing`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._rehearses:
            return self._engine.module(*args, **kwargs)
        return self._engine(*args, **kwargs)

    @property
    def module(self) -> M:
        return self._engine.module

    @property
    def layers(self) -> str:
        return "eager" if self._compiler is None else self._compiler.words

    @property
    def learning_rate(self) -> float:
        return self._engine.get_lr()[0]

    def train(self) -> None:
        """Training mode: gradient checkpointing acts. There is no dropout to switch on."""
        self._engine.train()

    def eval(self) -> None:
        self._engine.eval()

    def check_reduction(self) -> None:
        self._reduction = check_of(self._engine, self._watch.nodes)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """See `Trained.rehearsing`. DeepSpeed's own buffers of a reduction are not taken."""
        room = torch.empty(bytes_to_come(self._engine, self._adam), dtype=torch.uint8, device=device())
        self._rehearses = True
        try:
            with gradients_dropped(self._engine):
                yield
        finally:
            self._rehearses = False
            self._watch.reset()
            del room

    def begin_update(self, micro_batches: int) -> None:
        if not self._rehearses:
            self._left = micro_batches

    def backward(self, loss: Tensor) -> None:
        if self._rehearses:
            loss.backward()
            return
        if self._left is not None:
            self._engine.set_gradient_accumulation_boundary(self._left == 1)
            self._left -= 1
        self._engine.backward(loss * (world_size() * self._watch.factor(loss)), scale_wrt_gas=False)

    def step(self) -> None:
        """Ends a micro-batch; on the last of an update, clips and applies the optimiser and the schedule.

        An update with gradients that are not finite is left out: weights, optimiser and schedule stay as they are. In
        fp16, where scaled gradients may overflow, that is ordinary (`skipped`), and the next update is scaled less.
        Otherwise `nonfinite` says what this process saw: "losses", "gradients", or "gradient norms" where its own
        gradients are finite. An update that DeepSpeed leaves out for another reason is `skipped` in any precision.

        Raises UserError where gradients are wrong, see `check_reduction`, or where an update that had to be left out
        was applied.
        """
        if self._rehearses:
            return
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()
            return
        if self._reduction is not None and self._reduction.compare():
            self._reduction = None
        steps = adam_steps(self._adam)
        if self._engine.zero_optimization_stage() == 0:  # from stage 1 on, DeepSpeed clips and skips itself
            losses, gradients, self.grad_norm = self._watch.read(self._clip())
            self._engine.optimizer.overflow = not math.isfinite(self.grad_norm)
            self._engine.step()
        else:
            self._engine.step()
            losses, gradients, self.grad_norm = self._watch.read(self._engine.get_global_grad_norm())
        self.nonfinite = self._nonfinite(losses, gradients)
        self.skipped = not self._engine.was_step_applied() and self.nonfinite is None
        is_finite = losses and gradients and math.isfinite(self.grad_norm)
        if not is_finite and not torch.equal(adam_steps(self._adam), steps):
            raise UserError(
                f"DeepSpeed {deepspeed.__version__} applied an update with numbers that are not finite: the weights "
                "are spoiled. Install deepspeed>=0.19.8, and go on from the last checkpoint."
            )

    def _nonfinite(self, losses: bool, gradients: bool) -> str | None:
        if not losses:
            return "losses"
        if self._engine.fp16_enabled() or (gradients and math.isfinite(self.grad_norm)):
            return None
        return "gradient norms" if gradients else "gradients"

    def _clip(self) -> Tensor:
        """Clips the gradients of an engine without ZeRO; their norm before that."""
        trained = [p for p in self._engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        if self._clipping:
            torch.nn.utils.clip_grads_with_norm_(trained, self._clipping, norm)
        return norm

    @contextmanager
    def gathered(self) -> Iterator[M]:
        """The module with whole weights on this process, for generation; see :mod:`dschat.engine.zero3`."""
        with zero3.gathered(self._engine):
            yield self.module

    def save_checkpoint(self, folder: Path) -> None:
        """Writes weights, optimiser, schedule and loss scale; frozen weights are not. Every rank must call it."""
        where, tag = str(folder.parent), folder.name
        self._engine.save_checkpoint(where, tag=tag, save_latest=False, exclude_frozen_parameters=True)
        for script in folder.parent.glob("zero_to_*.py") if is_main() else ():  # DeepSpeed adds converters
            script.unlink()

    def load_checkpoint(self, folder: Path, scratch: Path | None = None) -> None:
        """Restores what `save_checkpoint` wrote; if another number of ranks did, shards of ZeRO 1 and 2 are put
        together in `scratch` first. Every rank must call it.
        """
        stage = self._engine.zero_optimization_stage()
        if scratch is not None and stage == 3:
            zero3.load_resized(self._engine, folder)
            return
        if scratch is not None and stage > 0:
            _put_shards_together(folder, self._engine, scratch)
            folder = scratch
        self._engine.load_checkpoint(str(folder.parent), tag=folder.name, load_module_strict=False)

    def parts(self) -> dict[str, Tensor]:
        return zero3.parts(self._engine)

    def whole_weights(self, instead: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        return zero3.whole_weights(self._engine, instead or {})


def _put_shards_together(folder: Path, engine: Any, target: Path) -> None:
    """Puts the shards of a checkpoint of ZeRO 1 or 2 together in `target`, and makes an engine that is not loaded yet
    read the result. Every rank must call it.
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


def train_engine(model: M, optimizer: OptimizerSettings, settings: EngineSettings) -> Engine[M]:
    """Puts a model under DeepSpeed with AdamW (β = 0.9, 0.95) and a schedule. Raises UserError for an unreadable
    ``--deepspeed_config``, or one that sets the batch sizes differently.
    """
    settings = _without_half_precision_at_stage_0(settings)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model.inner, settings.checkpoint_every)
    model.to(device())
    adam = _adamw(_parameter_groups(model, optimizer.weight_decay), optimizer, settings)
    schedule = schedule_of(adam, optimizer)
    config = deepspeed_config(settings, optimizer.gradient_clipping)
    clipping = config["gradient_clipping"]
    if settings.zero_stage == 0:  # then DeepSpeed would compute the norm a second time
        config["gradient_clipping"] = 0.0
    zero3.share_fetches(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, lr_scheduler=schedule, config=config)
    zero3.hold_head(engine)
    engine.train()
    return Engine(engine, clipping, adam, compiler_for(model) if settings.compile else None)


def compiler_for(model: PolicyModel | ScalarModel) -> Compiler:
    """Has the layers of a model compiled, and of a policy the passes over its logits."""
    compiler = compile_layers(model.inner, warns=is_main())
    if isinstance(model, PolicyModel):
        model.compile_with(compiler)
    return compiler


def schedule_of(adam: torch.optim.Optimizer, optimizer: OptimizerSettings) -> LambdaLR:
    """The learning-rate schedule: transformers', but the warm-up's first update has a rate above 0.

    Update k of W warm-up updates, counted from 0, has (k + 1) / W of the peak. transformers gives it k / W, which
    leaves the first update without effect. From update W on, the schedule is that of transformers.
    """
    warmup = optimizer.warmup_updates
    schedule = get_scheduler(
        optimizer.schedule, adam, num_warmup_steps=warmup, num_training_steps=max(optimizer.total_updates, 1)
    )

    def factor(update: int, after_warmup: Callable[[int], float]) -> float:
        return (update + 1) / warmup if update < warmup else after_warmup(update)

    return LambdaLR(adam, [partial(factor, after_warmup=function) for function in schedule.lr_lambdas])


def frozen_engine(model: M, settings: EngineSettings) -> Engine[M]:
    """Puts a model that never trains under DeepSpeed: reference and reward model."""
    model.requires_grad_(False)
    model.to(device())
    config = deepspeed_config(settings, 0.0)
    config["zero_optimization"].pop("offload_optimizer", None)
    zero3.share_fetches(model)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    zero3.hold_head(engine)
    engine.eval()
    return Engine(engine, compiler=compiler_for(model) if settings.compile else None)


def _without_half_precision_at_stage_0(settings: EngineSettings) -> EngineSettings:
    """Stage 1 instead of 0 in bf16 and fp16.

    DeepSpeed's stage-0 wrapper for half precision begins with an Adam step on zero gradients and adds up micro-batches
    in half precision. Stage 1 does neither, and with one process it shards nothing.
    """
    if settings.dtype == torch.float32 or settings.zero_stage > 0:
        return settings
    return replace(settings, zero_stage=1)


def _adamw(
    groups: list[dict[str, Any]], optimizer: OptimizerSettings, settings: EngineSettings
) -> torch.optim.Optimizer:
    """AdamW, in one kernel on a GPU; DeepSpeed's vectorised one where the states live in CPU memory."""
    options: dict[str, Any] = {"lr": optimizer.learning_rate, "betas": ADAM_BETAS, "eps": optimizer.epsilon}
    if settings.offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        prepare_op("cpu_adam")
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    kind = torch.optim.AdamW if settings.zero_stage else SkippingAdamW
    on_gpu = all(p.is_cuda for group in groups for p in group["params"])
    return kind(groups, fused=on_gpu or None, **options)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay acts on matrices; norms and biases (one dimension) are left alone."""
    trained = [(p, len(getattr(p, "ds_shape", p.shape))) for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p, dimensions in trained if dimensions >= 2], "weight_decay": weight_decay},
        {"params": [p for p, dimensions in trained if dimensions < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class AdaptersOff:
    """The reference of a LoRA run: the actor's engine with its adapters off, no second copy of the weights."""

    def __init__(self, actor: Engine[PolicyModel]) -> None:
        self._actor = actor

    @property
    def module(self) -> PolicyModel:
        return self._actor.module

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), adapters_off(self._actor.module):
            return self._actor(*args, **kwargs)
