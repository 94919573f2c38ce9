# SPDX-License-Identifier: Apache-2.0
"""A model under DeepSpeed, trained or frozen, with DeepSpeed's method names.

What only some runs do is imported where it begins: the check of the reduction over several processes, the rehearsal on
a GPU, a checkpoint of another number of processes, compiled layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import deepspeed
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from dschat.base.errors import UserError
from dschat.engine import zero3
from dschat.engine.bf16_sums import add_in_one_pass
from dschat.engine.deepspeed_config import EngineSettings, deepspeed_config, offloads_optimizer
from dschat.engine.process_group import prepare_op
from dschat.models.finetuning import enable_gradient_checkpointing
from dschat.models.parameters import whole_shape
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.run.distributed import barrier, device, is_main, world_size

if TYPE_CHECKING:
    from dschat.engine.reduction import ReductionCheck
    from dschat.models.compiled import Compiler

ADAM_BETAS = (0.9, 0.95)
M = TypeVar("M", PolicyModel, ScalarModel)


def accumulation_node(parameter: nn.Parameter) -> Any:
    """The autograd node that accumulates a parameter's gradient.

    Under ZeRO 3 the parameter is gathered here, because a node expects gradients of the shape that its parameter has
    when the node is created.
    """
    # The graph of a view is view → AccumulateGrad, which is the node.
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")), torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class SkippingAdamW(torch.optim.AdamW):
    """AdamW that skips updates while `overflow` is set; DeepSpeed then skips the schedule, too."""

    overflow = False

    def step(self, closure: Any = None) -> Any:
        return None if self.overflow else super().step(closure)


class FiniteWatch:
    """Records whether this process's losses and gradients of an update are finite.

    Numbers stay on the device until `read`, so that no micro-batch waits for the device.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hooks into the accumulation of every trained parameter's gradient, before DeepSpeed sums over processes."""
        self.reset()
        # Autograd frees a node that nothing refers to, and creates another one without the hook.
        self.nodes: dict[nn.Parameter, Any] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                self.nodes[parameter] = accumulation_node(parameter)
        for node in self.nodes.values():
            node.register_prehook(self._record_gradients)

    def reset(self) -> None:
        """Forgets the losses and gradients so far."""
        # Largest magnitudes so far; NaN and infinities propagate.
        self._largest_loss = torch.zeros((), device=device())
        self._largest_gradient = torch.zeros((), device=device())

    def _record_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        for gradient in gradients:
            if gradient is not None and gradient.numel():
                largest = torch.linalg.vector_norm(gradient.detach(), math.inf).float()
                self._largest_gradient = torch.maximum(self._largest_gradient, largest)

    def loss_factor(self, loss: Tensor) -> Tensor:
        """Records a loss, and returns the factor that it is multiplied by before the backward pass.

        The factor is 1, or NaN for a loss that is not finite: its gradient may be finite, as that of a clamped loss,
        and NaN makes all ranks skip the update.
        """
        loss = loss.detach().float()
        self._largest_loss = torch.maximum(self._largest_loss, loss.abs())
        return torch.where(loss.isfinite(), 1.0, math.nan)

    def read(self, norm: Tensor | float) -> tuple[bool, bool, float]:
        """Reads what was recorded since the last call, in one transfer from the device.

        Args:
            norm: gradient norm of the update.

        Returns:
            Whether all losses were finite, whether all gradients were, and the norm.
        """
        norm = torch.as_tensor(norm, dtype=torch.float32, device=self._largest_loss.device)
        numbers = torch.stack([self._largest_loss, self._largest_gradient, norm]).tolist()
        largest_loss, largest_gradient, norm_number = numbers
        self.reset()
        return math.isfinite(largest_loss), math.isfinite(largest_gradient), norm_number


def adam_steps(adam: torch.optim.Optimizer | None) -> Tensor:
    """Number of Adam's updates on this process (0-d), without waiting for the device."""
    first_state: dict[str, Any] = {} if adam is None else next(iter(adam.state.values()), {})
    return torch.as_tensor(first_state.get("step", 0)).clone()


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimiser and schedule of one model."""

    learning_rate: float
    weight_decay: float
    total_updates: int
    warmup_updates: int = 0
    schedule: str = "linear"
    gradient_clipping: float = 1.0
    epsilon: float = 1e-8  # epsilon of Adam


class Engine(Generic[M]):
    """DeepSpeed's engine, for losses that add up to the mean over the update's micro-batches and ranks.

    A trainer divides each micro-batch's sum by the count of the whole update (all micro-batches, all ranks); DeepSpeed
    would divide again by the accumulation steps and average over ranks. ``backward`` undoes both, so that the gradient
    is that of the global mean.
    """

    def __init__(
        self,
        engine: Any,
        clipping: float = 0.0,
        adam: torch.optim.Optimizer | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """Wraps DeepSpeed's engine.

        Args:
            engine: the engine that DeepSpeed has initialised.
            clipping: maximum gradient norm, 0 for no clipping. Used at ZeRO 0 only; at higher stages DeepSpeed clips.
            adam: the optimiser; None for a frozen model.
            compiler: compiler of the decoder layers, if they are compiled.
        """
        self._engine = engine
        self._clipping = clipping
        self._adam = adam
        self._compiler = compiler
        self.grad_norm = math.nan  # gradient norm of the last update, before clipping
        self.skipped = False  # whether DeepSpeed skipped the last update though all was finite, see `step`
        self.nonfinite: str | None = None  # what was not finite, so that the last update was skipped, see `step`
        self._micro_batches_left: int | None = None  # left in this update; None if DeepSpeed counts
        self._watch = FiniteWatch(engine.module.parameters())
        self._reduction_check: ReductionCheck | None = None
        self._is_rehearsing = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_rehearsing:
            return self._engine.module(*args, **kwargs)
        return self._engine(*args, **kwargs)

    @property
    def module(self) -> M:
        return self._engine.module

    @property
    def layers(self) -> str:
        """How the decoder layers are computed: "eager", "compiled", or why they are not compiled."""
        return "eager" if self._compiler is None else self._compiler.words

    @property
    def learning_rate(self) -> float:
        return self._engine.get_lr()[0]

    def train(self) -> None:
        """Training mode, with gradient checkpointing. Models have no dropout."""
        self._engine.train()

    def eval(self) -> None:
        self._engine.eval()

    def check_reduction(self) -> None:
        """Compares the reduced gradients of the next updates with those of the processes, see `ReductionCheck`."""
        if world_size() == 1:
            return  # nothing is reduced
        from dschat.engine.reduction import reduction_check

        self._reduction_check = reduction_check(self._engine, self._watch.nodes)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside, updates measure peak memory: forward and backward passes run, and no gradient is kept.

        See `Trained.rehearsing`. DeepSpeed's reduction buffers are not allocated.
        """
        from dschat.engine.rehearsal import first_update_bytes, gradients_dropped

        size = first_update_bytes(self._engine, self._adam)
        reserved = torch.empty(size, dtype=torch.uint8, device=device())  # stands in for memory of the first update
        self._is_rehearsing = True
        try:
            with gradients_dropped(self._engine):
                yield
        finally:
            self._is_rehearsing = False
            self._watch.reset()
            del reserved

    def begin_update(self, micro_batches: int) -> None:
        """Announces how often `backward` will be called in the next update."""
        if not self._is_rehearsing:
            self._micro_batches_left = micro_batches

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a micro-batch; see the class for the loss."""
        if self._is_rehearsing:
            loss.backward()
            return
        if self._micro_batches_left is not None:
            self._engine.set_gradient_accumulation_boundary(self._micro_batches_left == 1)
            self._micro_batches_left -= 1
        self._engine.backward(loss * (world_size() * self._watch.loss_factor(loss)), scale_wrt_gas=False)

    def step(self) -> None:
        """Ends a micro-batch; after the last one of an update, clips gradients and steps optimiser and schedule.

        An update with non-finite gradients is skipped: weights, optimiser and schedule do not change. Two attributes
        tell why it was skipped:

        - `nonfinite` names what was not finite on this process: "losses", "gradients", or "gradient norms" if only
          other processes' gradients were not finite. It is None in fp16 unless a loss was not finite.
        - `skipped` is True if DeepSpeed skipped the update and `nonfinite` is None. This is ordinary in fp16, where
          scaled gradients may overflow and the loss scale is then reduced.

        Raises:
            UserError: the reduced gradients are wrong, see `check_reduction`; or an update that had to be skipped was
                applied.
        """
        if self._is_rehearsing:
            return
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()
            return
        if self._reduction_check is not None:
            is_complete = self._reduction_check.compare()
            if is_complete:
                self._reduction_check = None
        steps_before = adam_steps(self._adam)
        if self._engine.zero_optimization_stage() == 0:  # from stage 1 on, DeepSpeed clips and skips itself
            losses_finite, gradients_finite, self.grad_norm = self._watch.read(self._clip())
            self._engine.optimizer.overflow = not math.isfinite(self.grad_norm)
            self._engine.step()
        else:
            self._engine.step()
            norm = self._engine.get_global_grad_norm()
            losses_finite, gradients_finite, self.grad_norm = self._watch.read(norm)
        self.nonfinite = self._nonfinite_part(losses_finite, gradients_finite)
        self.skipped = not self._engine.was_step_applied() and self.nonfinite is None
        all_finite = losses_finite and gradients_finite and math.isfinite(self.grad_norm)
        if not all_finite and not torch.equal(adam_steps(self._adam), steps_before):
            raise UserError(
                f"DeepSpeed {deepspeed.__version__} applied an update with numbers that are not finite: the weights "
                "are damaged. Install deepspeed>=0.19.8, and continue from the last checkpoint."
            )

    def _nonfinite_part(self, losses_finite: bool, gradients_finite: bool) -> str | None:
        """The value of `nonfinite`, see `step`."""
        if not losses_finite:
            return "losses"
        if self._engine.fp16_enabled():
            return None
        if not gradients_finite:
            return "gradients"
        return None if math.isfinite(self.grad_norm) else "gradient norms"

    def _clip(self) -> Tensor:
        """Clips the gradients at ZeRO 0. Returns their norm before clipping."""
        trained = []
        for parameter in self._engine.module.parameters():
            if parameter.grad is not None:
                trained.append(parameter)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained])
        if self._clipping:
            torch.nn.utils.clip_grads_with_norm_(trained, self._clipping, norm)
        return norm

    @contextmanager
    def gathered(self) -> Iterator[M]:
        """The module with whole weights on this process, for generation; see `zero3.gathered`."""
        with zero3.gathered(self._engine):
            yield self.module

    def save_checkpoint(self, folder: Path) -> None:
        """Writes trained weights, optimiser, schedule and loss scale. Every rank must call it."""
        self._engine.save_checkpoint(
            str(folder.parent), tag=folder.name, save_latest=False, exclude_frozen_parameters=True
        )
        if is_main():
            for script in folder.parent.glob("zero_to_*.py"):  # DeepSpeed adds converters
                script.unlink()

    def load_checkpoint(self, folder: Path, is_resized: bool = False) -> None:
        """Restores a checkpoint of `save_checkpoint`. Every rank must call it.

        Args:
            folder: folder of the checkpoint.
            is_resized: another number of ranks wrote it.
        """
        if is_resized and self._engine.zero_optimization_stage() > 0:
            from dschat.engine.resized import load_resized

            load_resized(self._engine, folder)
            return
        # Not strict, because frozen weights are not in the checkpoint.
        self._engine.load_checkpoint(str(folder.parent), tag=folder.name, load_module_strict=False)

    def parts(self) -> dict[str, Tensor]:
        return zero3.parts(self._engine)

    def whole_weights(self, instead: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        return zero3.whole_weights(self._engine, instead or {})


def wait_for_files(engine: Any) -> None:
    """Lets each save of DeepSpeed's engine wait for the files of other ranks for as long as `barrier` waits.

    Its own collectives wait for --ddp_timeout alone. The first of them after the files is the optimiser's epilogue.
    """
    has_epilogue = engine._optimizer_has_ckpt_event_epilogue

    def has_epilogue_after_files() -> bool:
        barrier()
        return bool(has_epilogue())

    engine._optimizer_has_ckpt_event_epilogue = has_epilogue_after_files


def train_engine(model: M, optimizer: OptimizerSettings, settings: EngineSettings) -> Engine[M]:
    """Wraps a model that is trained in DeepSpeed, with AdamW (β = 0.9, 0.95) and a learning-rate schedule.

    Raises:
        UserError: ``--deepspeed_config`` is refused, see `deepspeed_config`.
    """
    settings = _without_half_precision_at_stage_0(settings)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model.inner, settings.gradient_checkpointing_every)
    model.to(device())
    config = deepspeed_config(settings, optimizer.gradient_clipping)
    groups = _parameter_groups(model, optimizer.weight_decay)
    is_offloaded = settings.offload or offloads_optimizer(config)
    adam = _adamw(groups, optimizer, settings.zero_stage, is_offloaded)
    schedule = schedule_of(adam, optimizer)
    clipping = config["gradient_clipping"]
    if settings.zero_stage == 0:  # `Engine` clips; DeepSpeed would compute the norm again
        config["gradient_clipping"] = 0.0
    zero3.share_fetches(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, lr_scheduler=schedule, config=config)
    add_in_one_pass(engine.optimizer)
    wait_for_files(engine)
    zero3.hold_head(engine)
    engine.train()
    return Engine(engine, clipping, adam, compiler_for(model) if settings.compile else None)


def compiler_for(model: PolicyModel | ScalarModel) -> Compiler:
    """Compiles a model's decoder layers, and a policy's passes over logits."""
    from dschat.models.compiled import compile_layers

    compiler = compile_layers(model.inner, warns=is_main())
    if isinstance(model, PolicyModel):
        model.compile_with(compiler)
    return compiler


def schedule_of(adam: torch.optim.Optimizer, optimizer: OptimizerSettings) -> LambdaLR:
    """The learning-rate schedule of transformers, with a first warm-up update above 0.

    Update k of W warm-up updates, counted from 0, has (k + 1) / W of the peak learning rate. In transformers it has
    k / W, so the first update has no effect. From update W on, the schedule is that of transformers.
    """
    warmup = optimizer.warmup_updates
    # The second schedule of the optimiser begins at the peak learning rate, which the first one keeps.
    after_warmup_schedule = get_scheduler(
        optimizer.schedule, adam, num_warmup_steps=warmup, num_training_steps=max(optimizer.total_updates, 1)
    )

    def factor(update: int, after_warmup: Callable[[int], float]) -> float:
        return (update + 1) / warmup if update < warmup else after_warmup(update)

    return LambdaLR(adam, [partial(factor, after_warmup=function) for function in after_warmup_schedule.lr_lambdas])


def frozen_engine(model: M, settings: EngineSettings) -> Engine[M]:
    """Wraps a frozen model in DeepSpeed: the reference or the reward model."""
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
    """Replaces stage 0 by stage 1 in bf16 and fp16.

    DeepSpeed's stage-0 wrapper for half precision begins with an Adam step on zero gradients, and accumulates
    micro-batches in bf16 where stage 1 has float32 sums. Stage 1 shards nothing with one process.
    """
    if settings.dtype == torch.float32 or settings.zero_stage > 0:
        return settings
    return replace(settings, zero_stage=1)


def _adamw(
    groups: list[dict[str, Any]], optimizer: OptimizerSettings, zero_stage: int, is_offloaded: bool
) -> torch.optim.Optimizer:
    """AdamW: a fused kernel on a GPU, DeepSpeed's vectorised version for offloaded states."""
    options: dict[str, Any] = {"lr": optimizer.learning_rate, "betas": ADAM_BETAS, "eps": optimizer.epsilon}
    if is_offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        prepare_op("cpu_adam")
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    parameters = [parameter for group in groups for parameter in group["params"]]
    is_fused = all(parameter.is_cuda for parameter in parameters) or None
    if zero_stage:
        return torch.optim.AdamW(groups, fused=is_fused, **options)
    return SkippingAdamW(groups, fused=is_fused, **options)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay applies to matrices, not to norms and biases, which are vectors."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_matrix = len(whole_shape(parameter)) >= 2
            (matrices if is_matrix else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
