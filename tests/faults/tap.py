"""Listens on the control plane between workers and router: every moment of a request is a message.

A tap accepts ZeroMQ connections where workers think their router is, makes one to the router for
each, and carries the bytes over. It reads ZMTP 3 frames and, in them, which message of
common/wire/messages.proto it is and of which request; whoever is curious is called before (or after) the frame goes
on. With a filter it loses single messages; told to hold a worker's, it keeps all of them back until it is
told to go on, as a cut does: nobody is told, and tcp sends again what was lost. It keeps what a direct connection has: an end on one side
is an end on the other."""

import collections
import contextlib
import os
import re
import selectors
import socket
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
READ_BYTES = 1 << 16
PENDING_MAX = 4 << 20


def _kinds():
    """{field number: "LeaseRequest"} of Envelope.body, read from the contract itself."""
    with open(os.path.join(ROOT, "common", "wire", "messages.proto"), encoding="utf-8") as file:
        body = re.search(r"oneof body \{(.*?)\}", file.read(), re.S).group(1)
    return {int(number): kind for kind, number in re.findall(r"(\w+) \w+ = (\d+);", body)}


KINDS = _kinds()


def _varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data):
    """Yields (number, value) of a protobuf message; bytes for what has a length."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
        elif wire == 1:
            value, at = int.from_bytes(data[at:at + 8], "little"), at + 8
        elif wire == 2:
            size, at = _varint(data, at)
            value, at = data[at:at + size], at + size
        elif wire == 5:
            value, at = int.from_bytes(data[at:at + 4], "little"), at + 4
        else:
            raise ValueError(f"wire type {wire}")
        yield tag >> 3, value


class Seen:
    """One message: its kind, the keys of the requests that it is about, and who said it to whom."""

    def __init__(self, kind, body, worker):
        self.kind, self.body, self.worker = kind, body, worker
        self.from_worker = False  # else to it

    def key(self):
        """(router, number, epoch), or None."""
        for number, value in fields(self.body):
            if number == 1 and isinstance(value, bytes):
                return self._key(value)
            break
        return None

    @staticmethod
    def _key(data):
        parts = dict(fields(data))
        return parts.get(1, 0), parts.get(2, 0), parts.get(3, 0)

    def tokens(self):
        """(request's number, index, finish) of each token of a StepTokens."""
        for number, value in fields(self.body):
            if number == 6:
                parts = dict(fields(value))
                yield self._key(parts.get(1, b""))[1], parts.get(2, 0), parts.get(4, 0)

    def text(self, number):
        for found, value in fields(self.body):
            if found == number and isinstance(value, bytes):
                return value.decode(errors="replace")
        return ""


class _Way:
    """One direction of a connection."""

    def __init__(self, source, sink, link):
        self.source, self.sink, self.link = source, sink, link
        self.buffer = bytearray()
        self.pending = bytearray()
        self.kept = collections.deque()  # (raw frame, body) of a worker that is held
        self.greeting = 64  # bytes of it that are still to come
        self.ended = False

    def take(self):
        """Yields (raw frame, body or None) for what has come whole."""
        if self.greeting > 0 and self.buffer:  # in pieces: each side waits for the other's
            raw = bytes(self.buffer[:self.greeting])
            del self.buffer[:len(raw)]
            self.greeting -= len(raw)
            yield raw, None
        while self.greeting == 0 and len(self.buffer) >= 2:
            flags = self.buffer[0]
            if flags & 2:
                if len(self.buffer) < 9:
                    return
                head, size = 9, int.from_bytes(self.buffer[1:9], "big")
            else:
                head, size = 2, self.buffer[1]
            if len(self.buffer) < head + size:
                return
            raw = bytes(self.buffer[:head + size])
            del self.buffer[:head + size]
            yield raw, None if flags & 4 else raw[head:]


class _Link:
    def __init__(self, near, far, channel):
        self.worker, self.channel = "", channel
        self.up, self.down = _Way(near, far, self), _Way(far, near, self)
        self.sockets = (near, far)
        self.closed = False


class Tap:
    """listen() -> a listening socket for each channel; connect(channel) -> a socket to the router, or OSError."""

    def __init__(self, listeners, connect):
        self.listeners, self.connect = listeners, connect
        self.watchers = []  # called with a Seen before it goes on; a true answer: call it again once it is on its way
        self.drop = None  # Seen -> True: it is lost
        self.held = frozenset()  # names of workers whose messages wait, both ways
        self.selector = selectors.DefaultSelector()
        self.links = set()
        self.lock = threading.RLock()
        self.stopping = False
        self.wake_read, self.wake_write = socket.socketpair()
        self.selector.register(self.wake_read, selectors.EVENT_READ, None)
        for channel, listener in listeners.items():
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ, channel)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def close(self):
        self.stopping = True
        with contextlib.suppress(OSError):
            self.wake_write.send(b"x")
        self.thread.join(10)
        for link in list(self.links):
            self._end(link)
        for listener in self.listeners.values():
            listener.close()
        self.selector.close()
        self.wake_read.close()
        self.wake_write.close()

    def watch(self, watcher):
        with self.lock:
            self.watchers.append(watcher)

    def forget(self, watcher):
        with self.lock, contextlib.suppress(ValueError):
            self.watchers.remove(watcher)

    def hold(self, workers):
        """Their messages wait from now on, and those of nobody else."""
        self.held = frozenset(workers)
        with contextlib.suppress(OSError):
            self.wake_write.send(b"h")

    def _go_on(self):
        """What was kept of those who are held no longer."""
        self.wake_read.recv(64)
        for link in list(self.links):
            if link.worker not in self.held and (link.up.kept or link.down.kept or link.up.ended or link.down.ended):
                for way in (link.up, link.down):
                    self._carry(way)
                self._settle(link)

    def _run(self):
        while not self.stopping:
            for key, events in self.selector.select(0.5):
                if key.data is None:
                    self._go_on()
                    continue
                if isinstance(key.data, str):
                    self._accept(key.fileobj, key.data)
                elif not key.data.closed:
                    with contextlib.suppress(OSError, ValueError):
                        self._serve(key.data, key.fileobj, events)

    def _accept(self, listener, channel):
        try:
            near, _ = listener.accept()
        except OSError:
            return
        try:
            far = self.connect(channel)
        except OSError:
            near.close()  # there is no router: the worker tries again
            return
        link = _Link(near, far, channel)
        self.links.add(link)
        for sock in link.sockets:
            sock.setblocking(False)
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.selector.register(sock, selectors.EVENT_READ, link)

    def _serve(self, link, sock, events):
        if events & selectors.EVENT_READ:
            way = link.up if sock is link.sockets[0] else link.down
            try:
                data = sock.recv(READ_BYTES)
            except BlockingIOError:
                data = None
            except OSError:
                data = b""
            if data == b"":
                way.ended = True
            elif data:
                way.buffer += data
                self._carry(way)
        self._settle(link)

    def _settle(self, link):
        """Sends what can be sent; an end on one side is one on the other, once that is known there."""
        for way in (link.up, link.down):
            self._flush(way)
            if way.ended and not way.pending and link.worker not in self.held:
                self._end(link)
                return
        self._interest(link)

    def _interest(self, link):
        """Reads where there is room behind it, writes where something waits."""
        for way, back in ((link.up, link.down), (link.down, link.up)):
            wanted = selectors.EVENT_READ if len(way.pending) < PENDING_MAX and not way.ended else 0
            wanted |= selectors.EVENT_WRITE if back.pending else 0
            known = self.selector.get_map().get(way.source.fileno())
            if known is None and wanted:
                self.selector.register(way.source, wanted, link)
            elif known is not None and not wanted:
                self.selector.unregister(way.source)
            elif known is not None and known.events != wanted:
                self.selector.modify(way.source, wanted, link)

    def _carry(self, way):
        way.kept.extend(way.take())
        while way.kept:
            raw, body = way.kept[0]
            seen = self._read(way.link, body) if body else None
            if way.link.worker in self.held:
                return
            way.kept.popleft()
            if seen is None:
                way.pending += raw
                continue
            seen.from_worker = way is way.link.up
            if self.drop is not None and self.drop(seen):
                continue
            with self.lock:
                watchers = list(self.watchers)
            again = [watcher for watcher in watchers if watcher(seen)]
            way.pending += raw
            if again:
                self._flush(way)
                for watcher in again:
                    watcher(seen)

    @staticmethod
    def _read(link, body):
        try:
            for number, value in fields(body):
                if number in KINDS and isinstance(value, bytes):
                    kind = KINDS[number]
                    if kind == "Hello" or (kind == "StepTokens" and not link.worker):
                        link.worker = dict(fields(value)).get(1, b"").decode(errors="replace")
                    return Seen(kind, value, link.worker)
        except (IndexError, ValueError):
            pass  # an identity, a delimiter: not an Envelope
        return None

    @staticmethod
    def _flush(way):
        while way.pending:
            try:
                sent = way.sink.send(way.pending)
            except BlockingIOError:
                return
            except OSError:
                way.ended = True
                way.pending.clear()
                return
            del way.pending[:sent]

    def _end(self, link):
        if link.closed:
            return
        link.closed = True
        self.links.discard(link)
        for sock in link.sockets:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(sock)
            sock.close()
