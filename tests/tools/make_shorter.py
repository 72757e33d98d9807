#!/usr/bin/env python3
"""Writes a llama GGUF file with only some of the layers of another: a draft model for it.

    tests/tools/make_shorter.py FROM TO [--layers N | --keep 0,1,2,28,29]

Whole layers are left out and the rest is renumbered; embedding, head, norms and tokenizer are the same bytes. What is
left still says much of what the whole says, since each layer adds to the same stream (Elhoushi et al. 2024, LayerSkip),
and it is far from good. --layers N keeps the first and the last ones, as many of each.
"""

import argparse
import re
import struct

SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
BLOCKS = {0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 12: (256, 144), 14: (256, 210)}


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

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
            self.text_bytes()
        elif kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            for _ in range(count if inner not in SCALAR_BYTES else 0):
                self.skip(inner)
            self.at += count * SCALAR_BYTES.get(inner, 0)
        else:
            self.at += SCALAR_BYTES[kind]

    def text_bytes(self):
        length = self.number("Q")
        self.at += length


def read(path):
    """Keys as {name: their bytes}, tensors as [(name, dims, format, bytes)], and the alignment."""
    with open(path, "rb") as file:
        reader = Reader(file.read())
    if reader.data[:4] != b"GGUF" or struct.unpack_from("<I", reader.data, 4)[0] not in (2, 3):
        raise SystemExit(f"make_shorter: {path} is no GGUF file of version 2 or 3")
    reader.at = 8
    tensors_count, keys_count = reader.number("Q"), reader.number("Q")
    keys, align = {}, 32
    for _ in range(keys_count):
        name, start = None, reader.at
        name = reader.text()
        kind = reader.number("I")
        if name == "general.alignment":
            align = struct.unpack_from("<I", reader.data, reader.at)[0]
        reader.skip(kind)
        keys[name] = reader.data[start : reader.at]
    infos = []
    for _ in range(tensors_count):
        name = reader.text()
        dims = [reader.number("Q") for _ in range(reader.number("I"))]
        infos.append((name, dims, reader.number("I"), reader.number("Q")))
    base = (reader.at + align - 1) // align * align
    tensors = []
    for name, dims, kind, at in infos:
        if kind not in BLOCKS:
            raise SystemExit(f"make_shorter: {name} has format {kind}, which is not known here")
        weights, size = BLOCKS[kind]
        count = 1
        for dim in dims:
            count *= dim
        tensors.append((name, dims, kind, reader.data[base + at : base + at + count // weights * size]))
    return keys, tensors, align


def write(path, keys, tensors, align):
    infos, data, at = [], [], 0
    for name, dims, kind, content in tensors:
        infos.append(string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at))
        pad = -len(content) % align
        data += [content, bytes(pad)]
        at += len(content) + pad
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join(keys.values()) + b"".join(infos)
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % align))
        file.writelines(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("to")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--layers", type=int)
    which.add_argument("--keep", help="numbers of layers, from 0, with commas between")
    o = parser.parse_args()
    keys, tensors, align = read(o.source)
    total = struct.unpack_from("<I", keys["llama.block_count"], len(keys["llama.block_count"]) - 4)[0]
    if o.keep is not None:
        keep = [int(number) for number in o.keep.split(",")]
    else:
        keep = list(range((o.layers + 1) // 2)) + list(range(total - o.layers // 2, total))
    if not keep or len(set(keep)) != len(keep) or not all(0 <= layer < total for layer in keep):
        parser.error(f"the layers are 0 to {total - 1}, each once: {keep}")
    kept = []
    for name, dims, kind, content in tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if match is None:
            kept.append((name, dims, kind, content))
        elif int(match[1]) in keep:
            kept.append((f"blk.{keep.index(int(match[1]))}.{match[2]}", dims, kind, content))
    keys["llama.block_count"] = string("llama.block_count") + struct.pack("<II", 4, len(keep))
    write(o.to, keys, kept, align)


if __name__ == "__main__":
    main()
