"""The OpenVINO backend: what holds for it alone."""

from __future__ import annotations

import subprocess
import sys

_RACE = """
import os, sys, threading
import surge_dagster.engine.inference.openvino_backend
import openvino

sys.setswitchinterval(1e-6)
barrier = threading.Barrier(2)

def convert():
    barrier.wait()
    openvino.Type.f32.to_dtype()

threads = [threading.Thread(target=convert) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_two_streams_that_convert_types_first_at_the_same_time_do_not_deadlock():
    # A deadlock holds the GIL, so the child cannot end itself.
    subprocess.run([sys.executable, "-c", _RACE], check=True, timeout=60)


def test_openvino_cannot_report_its_use() -> None:
    code = "import surge_dagster.engine.inference.openvino_backend, openvino_telemetry"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ModuleNotFoundError" in ended.stderr
