#!/usr/bin/env python3
"""Writes a small random llama as a GGUF file: for tests that need more KV heads than a small real model has.

    tests/tools/make_model.py --tokenizer models/MODEL.gguf --out FILE [--seed N] [--layers N] ...
    tests/tools/make_model.py --vocab N --out FILE ...

The tokenizer and chat template are those of another GGUF file, byte for byte, so that the whole of a
cluster runs with it; or, with --vocab, one token a byte, and names for the rest. Matrices are in the
formats there are kernels for: Q8_0 (embedding, query, key, value), Q4_1 (attention output, down) and
Q4_0 (gate, up); with --bf16, those of every second layer and a head of its own are BF16; with --q4-k,
down is Q4_K, which only CPUs have kernels for. The same options give the same bytes. What it says is nonsense, but no constant: weights are as large as a
trained model's.
"""

import argparse
import math
import random
import struct

from gguf_file import ARRAY, STRING, Reader, string

F32, Q4_0, Q4_1, Q8_0, Q4_K, BF16 = 0, 2, 3, 8, 12, 30
BLOCK, Q4_K_BLOCK = 32, 256
QUANT_BYTES = {Q4_0: 16, Q4_1: 16, Q8_0: 32}
ALIGN = 32
U32, REAL = 4, 6


def tokenizer_keys(path):
    """The raw key-value pairs of a model's tokenizer, and how many tokens it has."""
    reader = Reader(path)
    _, count = reader.number("Q"), reader.number("Q")
    pairs, vocab = [], 0
    for _ in range(count):
        start = reader.at
        name = reader.text()
        kind = reader.number("I")
        if name == "tokenizer.ggml.tokens":
            vocab = struct.unpack_from("<Q", reader.data, reader.at + 4)[0]
        reader.skip(kind)
        if name.startswith("tokenizer."):
            pairs.append(reader.data[start : reader.at])
    if vocab == 0:
        raise SystemExit(f"make_model: {path} has no tokenizer")
    return pairs, vocab


def byte_tokenizer(vocab):
    """As tokenizer_keys: byte-level BPE without merges. Token b is byte b, 256 ends a text."""
    spare = iter(range(256, 512))
    letters = [chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174 else chr(next(spare)) for b in range(256)]
    tokens = letters + ["<|end|>"] + [f"<|{n}|>" for n in range(257, vocab)]

    def key(name, kind, value):
        return string("tokenizer." + name) + struct.pack("<I", kind) + value

    def array(kind, values):
        return struct.pack("<IQ", kind, len(values)) + b"".join(values)

    types = [struct.pack("<i", 1 if n < 256 else 3) for n in range(vocab)]  # normal; control
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return [
        key("ggml.model", STRING, string("gpt2")),
        key("ggml.pre", STRING, string("gpt-2")),
        key("ggml.tokens", ARRAY, array(STRING, [string(token) for token in tokens])),
        key("ggml.token_type", ARRAY, array(5, types)),
        key("ggml.merges", ARRAY, array(STRING, [])),
        key("ggml.eos_token_id", U32, struct.pack("<I", 256)),
        key("chat_template", STRING, string(template)),
    ], vocab


def bf16_matrix(rng, rows, cols):
    """Sign and mantissa random, two exponents: a standard deviation of about 1 / sqrt(cols)."""
    count = rows * cols
    exponent = 127 - round(math.log2(cols) / 2 + 0.5)  # |value| in [2^e, 4 * 2^e), by the lowest bit
    high = bytes(((b & 1) << 7) | (exponent >> 1) for b in range(256))
    data = bytearray(2 * count)
    data[0::2] = rng.randbytes(count)
    data[1::2] = rng.randbytes(count).translate(high)
    return bytes(data)


def q4_k_matrix(rng, rows, cols):
    """Two scales a block of 256, eight times 6 bits for either, 256 nibbles."""
    scale = 1 / 4.6 / 32 / cols**0.5  # 6 bits are 32 on average
    head = struct.pack("<ee", scale, 7.5 * scale)
    return b"".join(head + rng.randbytes(12 + Q4_K_BLOCK // 2) for _ in range(rows * cols // Q4_K_BLOCK))


def matrix(rng, kind, rows, cols):
    """Random blocks, weights of standard deviation about 1 / sqrt(cols), a scale of its own each."""
    if kind == BF16:
        return bf16_matrix(rng, rows, cols)
    if kind == Q4_K:
        return q4_k_matrix(rng, rows, cols)
    size = QUANT_BYTES[kind]
    spread = 73.9 if kind == Q8_0 else 4.6  # of a uniform int8, of a uniform nibble
    scales = []
    for step in range(64):
        scale = (0.5 + step / 64) / spread / cols**0.5
        head = struct.pack("<e", scale)
        if kind == Q4_1:  # the quants are 0 .. 15: about as much below zero as above
            head += struct.pack("<e", -7.5 * scale)
        scales.append(head)
    blocks = rows * cols // BLOCK
    quants, choices = rng.randbytes(blocks * size), rng.randbytes(blocks)
    return b"".join(scales[choices[i] & 63] + quants[i * size : (i + 1) * size] for i in range(blocks))


def norm(rng, count):
    return struct.pack(f"<{count}f", *(0.75 + 0.5 * rng.random() for _ in range(count)))


def tensors(o, vocab):
    """(name, format, columns, rows) in the order they are written."""
    q, kv = o.heads * o.head_dim, o.kv_heads * o.head_dim
    yield "token_embd.weight", Q8_0, o.hidden, vocab
    for layer in range(o.layers):
        for name, kind, cols, rows in (
            ("attn_norm", F32, o.hidden, 1),
            ("attn_q", Q8_0, o.hidden, q),
            ("attn_k", Q8_0, o.hidden, kv),
            ("attn_v", Q8_0, o.hidden, kv),
            ("attn_output", Q4_1, q, o.hidden),
            ("ffn_norm", F32, o.hidden, 1),
            ("ffn_gate", Q4_0, o.hidden, o.ffn),
            ("ffn_up", Q4_0, o.hidden, o.ffn),
            ("ffn_down", Q4_K if o.q4_k else Q4_1, o.ffn, o.hidden),
        ):
            kind = BF16 if o.bf16 and layer % 2 == 1 and kind != F32 else kind
            yield f"blk.{layer}.{name}.weight", kind, cols, rows
    yield "output_norm.weight", F32, o.hidden, 1
    if o.bf16:
        yield "output.weight", BF16, o.hidden, vocab


def write(o):
    pairs, vocab = byte_tokenizer(o.vocab) if o.tokenizer is None else tokenizer_keys(o.tokenizer)
    rng = random.Random(o.seed)

    def add(name, kind, form, value):
        pairs.append(string(name) + struct.pack("<I" + form, kind, value))

    pairs.append(string("general.architecture") + struct.pack("<I", STRING) + string("llama"))
    pairs.append(string("general.name") + struct.pack("<I", STRING) + string(f"random-{o.kv_heads}-{o.seed}"))
    for name, value in (
        ("block_count", o.layers),
        ("embedding_length", o.hidden),
        ("feed_forward_length", o.ffn),
        ("context_length", o.context),
        ("attention.head_count", o.heads),
        ("attention.head_count_kv", o.kv_heads),
        ("attention.key_length", o.head_dim),
        ("attention.value_length", o.head_dim),
        ("rope.dimension_count", o.head_dim),
        ("vocab_size", vocab),
    ):
        add("llama." + name, U32, "I", value)
    add("llama.rope.freq_base", REAL, "f", 10000.0)
    add("llama.attention.layer_norm_rms_epsilon", REAL, "f", 1e-5)
    infos, data = [], []
    at = 0
    for name, kind, cols, rows in tensors(o, vocab):
        bytes_ = norm(rng, cols) if kind == F32 else matrix(rng, kind, rows, cols)
        dims = (cols,) if kind == F32 else (cols, rows)
        infos.append(string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at))
        pad = -len(bytes_) % ALIGN
        data += [bytes_, bytes(pad)]
        at += len(bytes_) + pad
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    with open(o.out, "wb") as file:
        file.write(head + bytes(-len(head) % ALIGN))
        file.writelines(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a GGUF file to take the tokenizer from")
    parser.add_argument("--vocab", type=int, help="in place of --tokenizer: so many tokens, at least 257")
    parser.add_argument("--bf16", action="store_true", help="every second layer and the head in BF16")
    parser.add_argument("--q4-k", action="store_true", help="down in Q4_K")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    o = parser.parse_args()
    if o.hidden % BLOCK or o.ffn % BLOCK or o.heads * o.head_dim % BLOCK:
        parser.error("hidden, ffn and heads times head-dim are multiples of 32")
    if o.q4_k and o.ffn % Q4_K_BLOCK:
        parser.error("with --q4-k, ffn is a multiple of 256")
    if (o.tokenizer is None) == (o.vocab is None) or (o.vocab is not None and o.vocab < 257):
        parser.error("either --tokenizer, or --vocab of at least 257")
    if o.heads % o.kv_heads:
        parser.error("kv-heads divides heads")
    write(o)


if __name__ == "__main__":
    main()
