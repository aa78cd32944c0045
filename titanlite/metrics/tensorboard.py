"""TensorBoard's event files, written like the other files of a run: at once, by no thread, and later if not now."""

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.base.errors import TitanliteError
from titanlite.base.files import AppendedFile


class EventWriter:
    """Collects scalars and pictures; `take` has them as the bytes of an event file, to be appended to `file`.

    torch's `SummaryWriter` writes in a thread that ends with a traceback at the first error, and with it every later
    point.

    Args:
        folder: of the event files; each process writes one of its own.
        start_step: TensorBoard hides points after it that an earlier run left in the same folder.

    Raises:
        TitanliteError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        # Imported here: 0.1 to 1 s, and only rank 0 needs it.
        try:
            from tensorboard.compat.proto import event_pb2
            from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
            from torch.utils.tensorboard import summary
        except ImportError as error:
            raise TitanliteError(
                f"metrics: enable_tensorboard = true, but tensorboard cannot be imported ({error}). "
                "Install tensorboard or set metrics.enable_tensorboard = false."
            ) from error
        protocol: Any = event_pb2  # its names are made when it is imported
        self._event, self._crc, self._summary = protocol.Event, masked_crc32c, summary
        # Event files are read in the order of their names, which begin with the time in seconds.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self.file = AppendedFile(folder / name)
        self._records: list[bytes] = []
        self._add(0, file_version="brain.Event:2")
        self._add(start_step + 1, session_log=protocol.SessionLog(status=protocol.SessionLog.START))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """One point of a curve."""
        self._add(step, summary=self._summary.scalar(name, value))

    def add_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Add a picture: [height, width, channels], uint8."""
        self._add(step, summary=self._summary.image(name, image, dataformats="HWC"))

    def take(self) -> bytes:
        """Return what was added since the last call."""
        records, self._records = b"".join(self._records), []
        return records

    def _add(self, step: int, **content: Any) -> None:
        event = self._event(wall_time=time.time(), step=step, **content).SerializeToString()
        length = struct.pack("<Q", len(event))
        self._records += [length, struct.pack("<I", self._crc(length)), event, struct.pack("<I", self._crc(event))]
