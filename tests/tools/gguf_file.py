"""GGUF files read by hand, for the tools that write models: what a file begins with, and its strings."""

import struct

SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


class Reader:
    """Goes through the bytes of a file, from behind its magic and version."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = file.read()
        if self.data[:4] != b"GGUF" or struct.unpack_from("<I", self.data, 4)[0] not in (2, 3):
            raise SystemExit(f"{path} is no GGUF file of version 2 or 3")
        self.at = 8

    def number(self, form):
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def text(self):
        length = self.number("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def skip(self, kind):
        if kind == STRING:
            length = self.number("Q")
            self.at += length
        elif kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in SCALAR_BYTES:
                self.at += count * SCALAR_BYTES[inner]
            else:
                for _ in range(count):
                    self.skip(inner)
        else:
            self.at += SCALAR_BYTES[kind]
