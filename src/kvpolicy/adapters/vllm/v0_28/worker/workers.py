"""Workers that build our runners; vLLM resolves them by their dotted names (``worker_cls``)."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from kvpolicy.adapters.vllm.v0_28.worker.runner_v1 import PolicyCPUModelRunner, PolicyGPUModelRunner


class PolicyCPUWorker(CPUWorker):
    """The CPU worker with our runner.

    The stock worker builds its runner inside ``init_device``, without a factory: ours takes its place before the
    weights are loaded.
    """

    def init_device(self) -> None:
        """Set up the device, then replace the runner."""
        super().init_device()
        self.model_runner: Any = None  # the stock one goes before ours is made: both hold large buffers
        self.model_runner = PolicyCPUModelRunner(self.vllm_config, self.device)


class PolicyGPUWorker(Worker):
    """The CUDA worker with our V1 runner."""

    def init_device(self) -> None:
        """Set up the device, then replace the runner."""
        super().init_device()
        self.model_runner: Any = None
        self.model_runner = PolicyGPUModelRunner(self.vllm_config, self.device)
