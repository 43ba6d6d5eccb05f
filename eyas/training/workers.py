"""The processes that train one head, through accelerate: one, or as many as `torchrun` or `accelerate launch` started.

Distribution is applied to the objective from outside: DDP, or FSDP2 (`shard`), which torch's own `fully_shard` applies, since
accelerate leaves it out on CPUs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, LoggerType, broadcast_object_list
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from eyas.errors import EyasError
from eyas.heads.head import DraftHead
from eyas.training.config import Precision
from eyas.training.objective import Objective

_MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def first_process() -> bool:
    """Whether this is the first of the processes that `torchrun` started, or the only one; known before there are `Workers`."""
    return os.environ.get("RANK", "0") == "0"


def own_device(device: str, device_map: str | None = None) -> str:
    """Where this process keeps its target: of several, each has the GPU of its own number.

    Raises EyasError when all would take the same one, or spread a target over the GPUs of the others.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return device
    if device_map is not None:
        raise EyasError("several processes each hold the whole target; leave out --device-map, or train in one process")
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return device
    if index:
        raise EyasError(f"several processes cannot share {device}; say --device {kind}, and each takes its own")
    return f"{kind}:{os.environ.get('LOCAL_RANK', '0')}"


class Workers:
    """This process among those that train one head on `device`; `track` names accelerate's trackers, whose files go to `out`.

    Raises EyasError for fp16 on the CPU and for trackers that are unknown or not installed.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, precision: Precision = "fp32", shard: bool = False,
        track: Sequence[str] = (), out: Path | None = None,
    ) -> None:  # fmt: skip
        device = torch.device(device)
        on_cpu = device.type == "cpu"
        if precision == "fp16" and on_cpu:
            raise EyasError("precision fp16 needs a GPU (its gradients are scaled there); choose bf16 or fp32")
        _check_trackers(track)
        AcceleratorState._reset_state()  # settings of a run that this process trained before
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # or accelerate would take the first one
        patient = InitProcessGroupKwargs(timeout=timedelta(days=1))  # the first process may read features for hours
        self._accelerator = Accelerator(
            cpu=on_cpu, mixed_precision=_MIXED[precision], log_with=list(track) or None, project_dir=out,
            kwargs_handlers=[patient, DistributedDataParallelKwargs(broadcast_buffers=False)],  # they are frozen
        )  # fmt: skip
        self.count, self.number = self._accelerator.num_processes, self._accelerator.process_index
        self.first = self._accelerator.is_main_process
        self.shard = shard and self.count > 1
        self._tracked = bool(track)

    # -- the model --------------------------------------------------------------------------------------------------

    def prepare(self, objective: Objective, optimizer_of: Callable[[Any], Optimizer]) -> tuple[Any, Any]:
        """The objective and its optimiser as this process uses them."""
        self._objective = objective
        if self.shard:
            self._whole: DraftHead | None = copy.deepcopy(objective.head)
            self._model: Any = fully_shard(objective)  # type: ignore[call-overload]
        else:
            self._whole = None
            self._model = self._accelerator.prepare_model(objective)
        self._optimizer: Any = self._accelerator.prepare_optimizer(optimizer_of(self._model.parameters()))
        return self._model, self._optimizer

    def head(self) -> DraftHead:
        """The head with all its weights; every process must ask."""
        if self._whole is None:
            return self._objective.head
        for whole, part in zip(self._whole.parameters(), self._objective.head.parameters(), strict=True):
            assert isinstance(part.data, DTensor)
            whole.data.copy_(part.data.full_tensor())
        return self._whole

    def load_head(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of a whole head."""
        if self._whole is None:
            self._objective.head.load_state_dict(weights)
            return
        self._whole.load_state_dict(weights)
        for whole, part in zip(self._whole.parameters(), self._objective.head.parameters(), strict=True):
            local = part.data
            assert isinstance(local, DTensor)
            local.copy_(torch.distributed.tensor.distribute_tensor(whole.data, local.device_mesh, local.placements))

    def optimizer_state(self) -> dict[str, Any]:
        """The optimiser's whole state; every process must ask."""
        if not self.shard:
            return self._optimizer.state_dict()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(self._model, self._optimizer.optimizer, options=options)

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Take over a whole optimiser state."""
        if not self.shard:
            self._optimizer.load_state_dict(state)
            return
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self._model, self._optimizer.optimizer, state, options=options)

    def scaler_state(self) -> dict[str, Any] | None:
        """The state of the gradient scaler (fp16); None where there is none."""
        scaler = self._accelerator.scaler
        return None if scaler is None else scaler.state_dict()

    def load_scaler(self, state: dict[str, Any] | None) -> None:
        """Take over a scaler's state; a run that goes on in another precision has no use for it."""
        if state and self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(state)

    # -- a step -----------------------------------------------------------------------------------------------------

    def computing(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around the backward pass of a micro-batch: gradients are exchanged with the `last` one only."""
        return nullcontext() if last else self._accelerator.no_sync(self._model)

    def forward(self, *inputs: Any) -> Any:
        """The objective in the run's precision."""
        with self._accelerator.autocast():
            return self._model(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Gradients of the sum of all processes' losses."""
        self._accelerator.backward(loss * self.count)  # DDP and FSDP2 average

    def clip(self, largest: float) -> float:
        """Clip the gradient's norm and return what it was."""
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), largest)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @property
    def scales_gradients(self) -> bool:
        """Whether a gradient scaler (fp16) decides itself to leave out a step that is not finite."""
        return self._accelerator.scaler is not None

    # -- between processes ------------------------------------------------------------------------------------------

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all processes' `part`."""
        return self._accelerator.reduce(part, "sum") if self.count > 1 else part

    def agree(self, told: Any) -> Any:
        """What the first process tells; the others' `told` is ignored."""
        if self.count == 1:
            return told
        return broadcast_object_list([told], from_process=0)[0]

    def first_alone(self) -> AbstractContextManager[Any]:
        """The first process runs the block before the others do."""
        return self._accelerator.main_process_first()

    # -- trackers ---------------------------------------------------------------------------------------------------

    def begin_tracking(self, settings: dict[str, Any]) -> None:
        """Open the trackers, telling them the run's flat `settings`."""
        if self._tracked:
            self._accelerator.init_trackers("eyas", config=settings)

    def track(self, figures: dict[str, float], step: int) -> None:
        """Tell the trackers `figures` of optimiser step `step`."""
        if self._tracked:
            self._accelerator.log(figures, step=step)

    def end_tracking(self) -> None:
        """Close the trackers."""
        if self._tracked:
            for tracker in self._accelerator.trackers:
                tracker.finish()


def _check_trackers(names: Sequence[str]) -> None:
    known = [kind.value for kind in LoggerType if kind is not LoggerType.ALL]
    for name in names:
        if name not in known:
            raise EyasError(f"there is no tracker '{name}'; choose one of {', '.join(known)}")
        if LoggerType(name) not in get_available_trackers():
            raise EyasError(f"the tracker '{name}' is not installed; run: pip install {name}")
