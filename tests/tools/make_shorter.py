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

from gguf_file import Reader, string

BLOCKS = {0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 12: (256, 144), 14: (256, 210)}


def read(path):
    """Keys as {name: their bytes}, tensors as [(name, dims, format, bytes)], and the alignment."""
    reader = Reader(path)
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
