"""What the GPUs say of themselves while they encode: utilisation and memory, through NVIDIA's management library.

The pool's process asks, not the workers: the library answers for the whole device, and asking from outside neither
needs a CUDA context nor holds up a forward pass. Where the library or the driver is missing there are no figures, and
nothing else is different.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 0.5


class GpuGauge:
    """Samples the devices of a pool, at most every half second.

    Args:
        devices: as the pool names them; those that are not CUDA devices are left out.
        library: what `import pynvml` gives (package nvidia-ml-py), looked for when it is None.
    """

    def __init__(self, devices: Sequence[str], library: Any = None) -> None:
        self._nvml = library
        self._handles: list[Any] = []
        self._due = 0.0
        numbers = sorted({int(device.partition(":")[2] or 0) for device in devices if device.startswith("cuda")})
        if not numbers:
            return
        try:
            if self._nvml is None:
                self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handles = [self._handle(number) for number in numbers]
        except Exception as error:  # a missing package, driver or device: each library version has its own error
            log.info("no figures of GPU utilisation and memory: %s", str(error) or type(error).__name__)

    def sample(self) -> tuple[float, int] | None:
        """Mean utilisation (0 to 1) and bytes in use of all devices; None when it is not due or nothing answers."""
        now = time.monotonic()
        if not self._handles or now < self._due:
            return None
        self._due = now + _INTERVAL_SECONDS
        try:
            rates = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles]
            used = [int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles]
        except Exception as error:
            log.info("the GPUs no longer say how busy they are: %s", error)
            self._handles = []
            return None
        return sum(rates) / len(rates), sum(used)

    def _handle(self, number: int) -> Any:
        """The device that CUDA calls `number`: CUDA_VISIBLE_DEVICES renumbers, the library does not."""
        visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
        name = visible[number] if number < len(visible) else str(number)
        if name.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)
