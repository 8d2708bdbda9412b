"""Every process hears, at once, that another one ended: none waits in a collective for one that will not come.

Rank 0 listens; the others hold a connection to it. When a process ends in whatever way, a kill included, its kernel
closes the connection, and rank 0 tells the others. A machine that is gone is noticed by TCP's keepalive. A process that
is only slow is never taken for one that ended, which a heartbeat sent by its threads could not tell apart.
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from det_callbacks.errors import RankError
from det_callbacks.trace.peers import Peers

KEEPALIVE_SECONDS = 30
"""After which a machine that no longer answers is taken for gone; an ended process is noticed at once."""

_CONNECT_SECONDS = 20
_MAX_LINE = 4096
_open_watches: "weakref.WeakSet[Watch]" = weakref.WeakSet()
_registered = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process left the others.

    Attributes:
        rank: of the process.
        how: "raised" an exception, "gone" without a word: killed, or its machine is not there any more.
        reason: what it said.
        step: the last one that it began; -1 before the first.
        exit_code: that the others end with.
    """

    rank: int
    how: Literal["raised", "gone"]
    reason: str
    step: int
    exit_code: int


class Watch:
    """A thread that hears how the other processes of a run end.

    Args:
        peers: the processes, at least 2; they tell each other where rank 0 listens.
        on_ended: called in the thread, once, when another process ended.

    Attributes:
        step: of this process.

    Raises:
        RankError, OSError: rank 0 cannot be reached.
    """

    def __init__(self, peers: Peers, *, on_ended: Callable[[Ended], object]) -> None:
        self.step = -1
        self._rank = peers.rank
        self._on_ended = on_ended
        self._ended: Ended | None = None
        self._heard = threading.Event()
        self._is_closing = False
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, int] = {}
        self._buffers: dict[socket.socket, bytes] = {}
        self._steps: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._connect(peers)
        for peer in self._peers:
            peer.setblocking(True)
            self._selector.register(peer, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        _close_in_children(self)
        self._thread = threading.Thread(target=self._run, name="det_callbacks-watch", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> Ended | None:
        """The first other process that ended before this one closed the watch; None as long as none has."""
        return self._ended

    def wait(self, seconds: float) -> Ended | None:
        """Return how another process ended, waiting a little for the news; None when there is none."""
        self._heard.wait(seconds)
        return self._ended

    def note_step(self, step: int) -> None:
        """Tell rank 0 which step this process begins: a line to a socket, some 10 microseconds."""
        self.step = step
        if self._rank:
            self._send({"step": step})

    def tell(self, reason: str, exit_code: int) -> None:
        """Tell all others that this process ends with an error."""
        self._send({"ended": reason[:1000], "exit_code": exit_code, "step": self.step, "rank": self._rank})

    def close(self) -> None:
        """Leave the watch: all is well here. May be called more than once."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._ended is None:
            self._send({"done": True})
        with contextlib.suppress(OSError):  # the thread has ended by itself
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._drop()

    def _connect(self, peers: Peers) -> None:
        host = socket.gethostname()
        listener = socket.create_server(("", 0), backlog=peers.world_size) if self._rank == 0 else None
        port = 0 if listener is None else listener.getsockname()[1]
        leader_host, port, token = peers.agree(lambda: [host, port, os.urandom(16).hex()], task="opening the watch")[0]
        if listener is not None:
            with listener:
                peers.do(lambda: self._accept(listener, peers.world_size, token), task="opening the watch")
            return
        # a machine need not be able to look its own name up
        address = ("127.0.0.1" if leader_host == host else leader_host, port)
        peers.do(lambda: self._call(address, token), task="opening the watch")

    def _call(self, address: tuple[str, int], token: str) -> None:
        try:
            peer = socket.create_connection(address, timeout=_CONNECT_SECONDS)
            peer.sendall(json.dumps({"token": token, "rank": self._rank}).encode() + b"\n")
        except OSError as error:
            raise RankError(
                f"Rank {self._rank} cannot reach rank 0 at {address[0]}, port {address[1]}: {error}. The ranks hear "
                "there when one of them ends. Let these machines connect to each other, as the training needs it too.",
                self._rank,
            ) from error
        self._add(peer, 0)

    def _accept(self, listener: socket.socket, world_size: int, token: str) -> None:
        listener.settimeout(_CONNECT_SECONDS)
        while len(self._peers) < world_size - 1:
            try:
                peer, _ = listener.accept()
            except TimeoutError as error:
                missing = sorted({*range(1, world_size)}.difference(self._peers.values()))
                raise RankError(
                    f"Ranks {missing} did not reach rank 0 within {_CONNECT_SECONDS} seconds, so it would not hear "
                    "when they end. Let these machines connect to each other.",
                    missing[0],
                ) from error
            peer.settimeout(_CONNECT_SECONDS)
            rank = _greeting(peer, token)
            if rank is None or not 0 < rank < world_size or rank in self._peers.values():
                peer.close()  # a stranger who knocked at this port
                continue
            self._add(peer, rank)

    def _add(self, peer: socket.socket, rank: int) -> None:
        _keep_alive(peer)
        self._peers[peer] = rank
        self._buffers[peer] = b""
        self._steps[rank] = -1

    def _send(self, message: Mapping[str, Any], *, but: socket.socket | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for peer in list(self._peers):
                # a peer that is gone is the reading side's business
                if peer is not but:
                    with contextlib.suppress(OSError):  # see above
                        peer.sendall(line)

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    return
                assert isinstance(key.fileobj, socket.socket)
                self._read(key.fileobj)

    def _read(self, peer: socket.socket) -> None:
        rank = self._peers[peer]
        lost = "it ended without a word: killed, most likely"
        try:
            content = peer.recv(65536)
        except ConnectionResetError:  # it ended with lines that it had not read
            content = b""
        except OSError as error:
            content, lost = b"", f"its connection broke ({error})"
        if not content:
            self._forget(peer)
            self._note(Ended(rank=rank, how="gone", reason=lost, step=self._steps[rank], exit_code=2), peer)
            return
        *lines, self._buffers[peer] = (self._buffers[peer] + content).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "step" in message and "ended" not in message:
                self._steps[rank] = message["step"]
            elif "ended" in message:
                self._note(
                    Ended(
                        rank=message["rank"],
                        how=message.get("how", "raised"),
                        reason=message["ended"],
                        step=message["step"],
                        exit_code=message["exit_code"],
                    ),
                    peer,
                )
            else:
                self._forget(peer)
                return

    def _forget(self, peer: socket.socket) -> None:
        with self._lock:
            self._selector.unregister(peer)
            del self._peers[peer]
        peer.close()

    def _note(self, ended: Ended, source: socket.socket) -> None:
        if self._ended is not None or self._is_closing:
            return
        self._ended = ended
        if self._rank == 0:
            message = {"ended": ended.reason, "how": ended.how, "exit_code": ended.exit_code}
            self._send({**message, "step": ended.step, "rank": ended.rank}, but=source)
        self._heard.set()
        self._on_ended(ended)

    def _drop(self) -> None:
        for peer in [*self._peers, self._wake, self._waker]:
            peer.close()
        self._peers.clear()
        self._selector.close()


def _greeting(peer: socket.socket, token: str) -> int | None:
    content = b""
    try:
        while b"\n" not in content and len(content) < _MAX_LINE:
            part = peer.recv(1)
            if not part:
                return None
            content += part
        message = json.loads(content)
    except (OSError, ValueError):
        return None
    is_ours = isinstance(message, dict) and message.get("token") == token and isinstance(message.get("rank"), int)
    return int(message["rank"]) if is_ours else None


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", (KEEPALIVE_SECONDS - 10) // 5)):
        if hasattr(socket, name):  # not every system lets them be set
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close_in_children(watch: Watch) -> None:
    """Let no forked child, such as a worker of a loader, keep the connection open after this process has ended."""
    global _registered
    _open_watches.add(watch)
    if not _registered:
        os.register_at_fork(after_in_child=_close_all)
        _registered = True


def _close_all() -> None:
    for watch in list(_open_watches):
        for peer in [*watch._peers, watch._wake, watch._waker]:
            peer.close()
        watch._peers.clear()
        watch._is_closing = True
    _open_watches.clear()
