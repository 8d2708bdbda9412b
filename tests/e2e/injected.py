"""One fault at one operation on files: the n-th open, write, fsync, rename, ...
below a folder fails, or kills.

Python's audit tells of each operation before it happens, whoever asks for it, except writes, fsyncs
and the cuts of an open file. A hook cannot be removed, so a process that injects has to be a fork.
"""

import builtins
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

AUDITED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir")
ERRORS = (errno.ENOSPC, errno.EIO)
KILL = -1  # instead of the number of an error


class Injection:
    """Lets one operation below a folder fail with an error number, or kill the process;
    ``log`` lists them all.
    """

    def __init__(
        self, folder: Path, log: Path, *, at: int | None = None, fault: int = KILL
    ) -> None:
        self._folder, self._at, self._fault = os.path.realpath(folder), at, fault
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._number = -1

    def begin(self) -> None:
        sys.addaudithook(self._audit)
        real_open, real_fsync = io.open, os.fsync

        def opened(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not self._is_inside(path) or set(mode).isdisjoint("wax+") or "b" not in mode:
                return real_open(path, mode, *args, **options)
            file = _File(path, mode, opener=options.get("opener"))
            file.injection = self
            return file

        def synced(number: int) -> None:
            self.meet("fsync")
            real_fsync(number)

        io.open = builtins.open = opened  # type: ignore[assignment]
        os.fsync = synced

    def meet(self, operation: str, before: Callable[[], object] = lambda: None) -> None:
        """Count an operation; if it is the chosen one, do a part of it and fail."""
        os.write(self._log, f"{operation}\n".encode())
        self._number += 1
        if self._number != self._at:
            return
        before()
        if self._fault == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self._fault, os.strerror(self._fault))

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        # of rmtree, in an open folder
        is_relative = event in ("os.remove", "os.rmdir") and args[1] != -1
        if event in AUDITED and (is_relative or any(self._is_inside(path) for path in args[:2])):
            self.meet(f"{event} {os.path.basename(str(args[0]))}")
        elif event == "fcntl.flock":
            self.meet(event)

    def _is_inside(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(
            self._folder
        )


class _File(io.FileIO):
    injection: Injection

    def write(self, content: Any) -> int:
        half = memoryview(content).cast("B")[: memoryview(content).nbytes // 2]
        self.injection.meet("write", lambda: super(_File, self).write(half))
        return super().write(content) or 0

    def truncate(self, size: int | None = None) -> int:
        self.injection.meet("truncate")
        return super().truncate(size)
