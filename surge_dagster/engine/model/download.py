"""Downloads a model from the hub in a process of its own, which ends at once when nobody waits for it any more.

The hub's client downloads in threads that nothing can stop, and Python ends no process before them: an interrupt would
be heard only when the last file is there. What is whole by then is in the client's cache, and the next download begins
with the rest.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.support.child_process import (
    how_it_ended,
    leave_signals_to_parent,
    module_command,
    module_environment,
    wait_for_parents_end,
)
from surge_dagster.engine.support.waiting import wait_in_turns

_MODULE = "surge_dagster.engine.model.download"
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "[0-9]*/*"]
_UNWANTED = ["onnx/*", "openvino/*", "*.bin", "*.h5", "*.ot", "*.msgpack"]
_WEIGHTS = ["*.safetensors"]
_LITTER = re.compile(r"\.[0-9a-f]{8}\.incomplete$")
_TIDY_SECONDS = 2.0
_LONGEST_REPORT = 5_000


class DownloadFailed(Exception):
    """The hub's client said no, in its own words."""


def download_model(repository: str) -> Path:
    """The folder of a model in the hub client's cache; `DownloadFailed` where it could not be had.

    Progress is shown on stderr. An interrupted download leaves no process behind and keeps every file that is whole.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Its socket is its lifeline: whatever ends this block, or this process, ends the download.
    with ours:
        with theirs:
            process = subprocess.Popen(
                module_command(_MODULE, theirs.fileno(), os.getpid(), repository),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=module_environment(),
            )
        try:
            answers = select.poll()
            answers.register(ours, select.POLLIN)
            wait_in_turns(lambda turn: bool(answers.poll(1_000 * turn)))
            received = protocol.receive(ours)
        finally:
            ours.close()
            code = _end(process)
    if received is None:
        raise DownloadFailed(f"its process ended with {how_it_ended(code)}")
    answer, _ = received
    if "folder" not in answer:
        failed = DownloadFailed(answer["message"])
        failed.add_note(answer["trace"])
        raise failed
    return Path(answer["folder"])


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Waits until a process has tidied up; one that does not is killed. Its exit code, None where it goes on."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TIDY_SECONDS)
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TIDY_SECONDS)
    return process.returncode


def _download(repository: str) -> protocol.Message:
    try:
        from huggingface_hub import snapshot_download  # imported here: it costs a second, and few runs download

        # Weights come last: a folder that has them has everything.
        snapshot_download(repository, allow_patterns=_FILES, ignore_patterns=[*_UNWANTED, *_WEIGHTS])
        return {"folder": snapshot_download(repository, allow_patterns=_FILES, ignore_patterns=_UNWANTED)}
    except Exception as error:  # the hub client raises many unrelated types
        return {"message": str(error)[:_LONGEST_REPORT], "trace": traceback.format_exc()[-_LONGEST_REPORT:]}


def _end_with_parent(lifeline: int, parent: int) -> None:
    wait_for_parents_end(lifeline, parent)
    _remove_litter()
    os._exit(1)


def _remove_litter() -> None:
    """Removes the files that are being written, where their names are of this process alone: nobody could resume them.

    Older clients name them <etag>.incomplete and resume them; newer ones put eight random digits in between.
    """
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            file = descriptor.readlink()
            if _LITTER.search(file.name):
                file.unlink()


def main(arguments: list[str]) -> None:
    """Entry point: descriptor of the socket, the parent's process id, and the repository."""
    leave_signals_to_parent()
    connection = socket.socket(fileno=int(arguments[0]))
    threading.Thread(target=_end_with_parent, args=(connection.fileno(), int(arguments[1])), daemon=True).start()
    answer = _download(arguments[2])
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        protocol.send(connection, answer)
    # The hub's client may have threads that are still at work.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
