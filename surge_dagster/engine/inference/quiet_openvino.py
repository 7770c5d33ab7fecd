"""OpenVINO without its reports: import it from here.

`openvino_telemetry` would report each conversion to the vendor, from a process that it forks in a
worker. OpenVINO has no setting for it and works without the package, so it is made unimportable
before OpenVINO is loaded.
"""

from __future__ import annotations

import sys

sys.modules["openvino_telemetry"] = None  # pyright: ignore[reportArgumentType]

import openvino as ov  # noqa: E402

__all__ = ["ov"]
