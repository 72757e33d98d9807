#!/usr/bin/env python3
"""Write malformed GGUF files for cases A13, A14 and A15 (standard library only).

usage: gen_gguf_bad.py OUTDIR
Writes *.gguf and manifest.tsv (file, case, what is wrong). base_ok.gguf is a
well-formed container (it is not a runnable model): a parser has to accept it,
so that "reject everything" does not pass. full_ok.gguf is a whole, tiny model; the
a15_* files and the full_* ones are that model with one thing wrong.
"""
import os, struct, sys

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
M64 = (1 << 64) - 1


def s(b):
    b = b if isinstance(b, bytes) else b.encode()
    return struct.pack("<Q", len(b)) + b


def kv(key, typ, payload):
    return s(key) + struct.pack("<I", typ) + payload


def u32(v):
    return struct.pack("<I", v & 0xFFFFFFFF)


def arr(elem, count, payload):
    return struct.pack("<IQ", elem, count & M64) + payload


TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", " ", "\u0120a"]


SHAPE = {"llama.feed_forward_length": 16, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
         "llama.rope.dimension_count": 4}


def full_kv(shape=None, rms=True, drop=None, **kw):
    """The keys of a whole model: 1 layer, 8 wide, 2 heads that share 1 key-value head."""
    extra = list(kw.pop("extra", ()))
    out = [k for k in std_kv(**kw) if drop is None or drop not in k] + extra
    for key, value in dict(SHAPE, **(shape or {})).items():
        if value is not None:
            out = [k for k in out if key.encode() + struct.pack("<I", U32) not in k]
            out.append(kv(key, U32, u32(value)))
    if rms:
        out.append(kv("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)))
    out.append(kv("tokenizer.ggml.pre", STR, s("gpt-2")))
    return out


def full_infos(change=None, n=8):
    """The tensors of that model, F32, 32-byte aligned; change: name -> (dims, format) or None."""
    shapes = {"token_embd.weight": [8, n], "output_norm.weight": [8], "blk.0.attn_norm.weight": [8],
              "blk.0.attn_q.weight": [8, 8], "blk.0.attn_k.weight": [8, 4], "blk.0.attn_v.weight": [8, 4],
              "blk.0.attn_output.weight": [8, 8], "blk.0.ffn_norm.weight": [8], "blk.0.ffn_gate.weight": [8, 16],
              "blk.0.ffn_up.weight": [8, 16], "blk.0.ffn_down.weight": [16, 8]}
    types = {}
    for name, what in (change or {}).items():
        shapes.pop(name, None)
        if what is not None:
            shapes[name], types[name] = what
    infos, off = [], 0
    for name, dims in shapes.items():
        infos.append(tinfo(name, dims, types.get(name, 0), off))
        off += 4 * max(8, dims[0] * (dims[1] if len(dims) > 1 else 1))
        off += -off % 32
    return infos, bytes(off)


def full(change=None, n=8, shape=None, rms=True, drop=None, extra_infos=(), **kw):
    infos, data = full_infos(change, n)
    return build(kvs=full_kv(shape=shape, rms=rms, drop=drop, **kw), infos=infos + list(extra_infos), data=data)


def std_kv(align=None, tokens=TOKENS, extra=(), scores=None, ttypes=None, eos=2, add_bos=None, bos=1):
    out = [
        kv("general.architecture", STR, s("llama")),
        kv("llama.context_length", U32, u32(128)),
        kv("llama.embedding_length", U32, u32(8)),
        kv("llama.block_count", U32, u32(1)),
        kv("tokenizer.ggml.model", STR, s("gpt2")),
        kv("tokenizer.ggml.tokens", ARR, arr(STR, len(tokens), b"".join(s(t) for t in tokens))),
        kv("tokenizer.ggml.token_type", ARR,
           ttypes if ttypes is not None else arr(I32, len(tokens), struct.pack("<%di" % len(tokens), *[1] * len(tokens)))),
        kv("tokenizer.ggml.scores", ARR,
           scores if scores is not None else arr(F32, len(tokens), struct.pack("<%df" % len(tokens), *[0.0] * len(tokens)))),
        kv("tokenizer.ggml.merges", ARR, arr(STR, 1, s("a b"))),
        kv("tokenizer.ggml.eos_token_id", U32, u32(eos)),
    ]
    if bos is not None:
        out.append(kv("tokenizer.ggml.bos_token_id", U32, u32(bos)))
    if add_bos is not None:
        out.append(kv("tokenizer.ggml.add_bos_token", BOOL, bytes([add_bos])))
    if align is not None:
        out.append(kv("general.alignment", U32, u32(align)))
    out.extend(extra)
    return out


def tinfo(name, dims, typ=0, off=0, ndims=None):
    return (s(name) + u32(len(dims) if ndims is None else ndims)
            + b"".join(struct.pack("<Q", d & M64) for d in dims)
            + u32(typ) + struct.pack("<Q", off & M64))


def build(kvs=None, infos=None, data=None, n_tensors=None, n_kv=None, align=32, version=3, pad=True):
    kvs = std_kv() if kvs is None else kvs
    if infos is None:
        infos = [tinfo("token_embd.weight", [8, 8], 0, 0), tinfo("output_norm.weight", [8], 0, 256)]
    if data is None:
        data = bytes(range(256)) + struct.pack("<8f", *[1.0] * 8)
    head = b"GGUF" + u32(version)
    head += struct.pack("<Q", (len(infos) if n_tensors is None else n_tensors) & M64)
    head += struct.pack("<Q", (len(kvs) if n_kv is None else n_kv) & M64)
    body = head + b"".join(kvs) + b"".join(infos)
    if pad:
        body += b"\0" * (-len(body) % align)
    return body + data


def main(out):
    os.makedirs(out, exist_ok=True)
    rows = []

    def put(name, case, why, blob):
        with open(os.path.join(out, name), "wb") as f:
            f.write(blob)
        rows.append((name, case, why))

    good = build()
    put("base_ok.gguf", "baseline", "well-formed container; must parse", good)

    # A13: counts and dimensions
    put("a13_ntensors_2p61.gguf", "A13", "tensor count 2^61 in a small file", build(n_tensors=1 << 61))
    put("a13_ntensors_minus1.gguf", "A13", "tensor count all ones (negative if signed)", build(n_tensors=M64))
    put("a13_ntensors_size_product.gguf", "A13", "count fits when multiplied by 64, wraps when multiplied by 336",
        build(n_tensors=(1 << 64) // 300))
    put("a13_nkv_2p60.gguf", "A13", "metadata count 2^60", build(n_kv=1 << 60))
    put("a13_nkv_one_too_many.gguf", "A13", "metadata count one more than present", build(n_kv=len(std_kv()) + 1))
    put("a13_ndims_5.gguf", "A13", "five dimensions", build(infos=[tinfo("token_embd.weight", [2, 2, 2, 2, 2])], data=b"\0" * 128))
    put("a13_ndims_ffffffff.gguf", "A13", "dimension count 2^32-1",
        build(infos=[tinfo("token_embd.weight", [8, 8], ndims=0xFFFFFFFF)]))
    put("a13_dim_product_zero.gguf", "A13", "2^32 x 2^32 elements: the product wraps to 0",
        build(infos=[tinfo("token_embd.weight", [1 << 32, 1 << 32])]))
    put("a13_dim_product_small.gguf", "A13", "64 x (2^58+1) elements: the product wraps to 64",
        build(infos=[tinfo("token_embd.weight", [64, (1 << 58) + 1])]))
    put("a13_dim_bytes_wrap.gguf", "A13", "2^62+8 elements of 4 bytes: the byte size wraps to 32",
        build(infos=[tinfo("token_embd.weight", [(1 << 62) + 8])]))
    put("a13_dim_negative.gguf", "A13", "dimension with the top bit set", build(infos=[tinfo("token_embd.weight", [1 << 63, 1])]))

    # A14: alignment, truncation, extents
    for a, tag in ((0, "0"), (3, "3"), (12, "12"), (1 << 30, "1GiB"), (1 << 31, "2p31")):
        put("a14_align_%s.gguf" % tag, "A14", "general.alignment = %d" % a, build(kvs=std_kv(align=a)))
    for cut, tag in ((0, "empty"), (3, "in_magic"), (15, "in_counts"), (60, "in_first_kv")):
        put("a14_trunc_%s.gguf" % tag, "A14", "file cut after %d bytes" % cut, good[:cut])
    nodata = build(data=b"", pad=False)
    put("a14_trunc_in_tensor_info.gguf", "A14", "cut inside the last tensor record", nodata[:-7])
    put("a14_trunc_before_padding.gguf", "A14", "ends right after the tensor records: aligned data start lies past the end", nodata)
    put("a14_trunc_last_byte.gguf", "A14", "last tensor one byte short", good[:-1])
    put("a14_trunc_half_data.gguf", "A14", "tensor data half there", good[:-144])
    put("a14_offset_past_end.gguf", "A14", "tensor offset beyond the file",
        build(infos=[tinfo("token_embd.weight", [8, 8], 0, 1 << 20), tinfo("output_norm.weight", [8], 0, 256)]))
    put("a14_offset_unaligned.gguf", "A14", "tensor offset not a multiple of the alignment",
        build(infos=[tinfo("token_embd.weight", [8, 7], 0, 4), tinfo("output_norm.weight", [8], 0, 256)]))

    # A15: tokenizer metadata
    n = len(TOKENS)
    put("a15_scores_u8.gguf", "A15", "scores stored as bytes, right count", full(scores=arr(U8, n, b"\1" * n)))
    put("a15_token_type_u8.gguf", "A15", "token types stored as bytes, right count", full(ttypes=arr(U8, n, b"\1" * n)))
    put("a15_scores_short.gguf", "A15", "two scores for eight tokens", full(scores=arr(F32, 2, b"\0" * 8)))
    put("a15_token_type_is_scalar.gguf", "A15", "token_type is one integer, not an array",
        full(drop=b"token_type", extra=[kv("tokenizer.ggml.token_type", U32, u32(1))]))
    put("a15_tokens_duplicate.gguf", "A15", "same token text twice", full(tokens=TOKENS[:-1] + ["ab"]))
    put("a15_eos_out_of_range.gguf", "A15", "end-of-sequence id 2^32-1", full(eos=0xFFFFFFFF))
    put("a15_bos_out_of_range.gguf", "A15", "begin-of-sequence id = vocabulary size", full(bos=n))
    put("a15_add_bos_without_bos.gguf", "A15", "add_bos_token true, no bos id", full(bos=None, add_bos=1))
    put("a15_merge_without_space.gguf", "A15", "merge rule with no separator",
        full(drop=b"merges", extra=[kv("tokenizer.ggml.merges", ARR, arr(STR, 1, s("ab")))]))
    put("a15_merge_unknown_piece.gguf", "A15", "merge rule whose result is not a token",
        full(drop=b"merges", extra=[kv("tokenizer.ggml.merges", ARR, arr(STR, 1, s("b b")))]))
    put("a15_tokens_empty.gguf", "A15", "token array of length 0", full(tokens=[]))
    put("a15_token_not_utf8.gguf", "A15", "token text is the single byte 0xff: refuse, or keep the byte",
        full(tokens=TOKENS[:-1] + [b"\xff"]))

    # a whole model, and what is wrong with others
    put("full_ok.gguf", "baseline", "a whole model; must load", full())
    put("full_no_heads.gguf", "model", "llama.attention.head_count is missing", full(shape={"llama.attention.head_count": None}))
    put("full_heads_3.gguf", "model", "heads do not divide the width", full(shape={"llama.attention.head_count": 3}))
    put("full_heads_0.gguf", "model", "no heads", full(shape={"llama.attention.head_count": 0}))
    put("full_kv_heads_3.gguf", "model", "key-value heads do not divide heads", full(shape={"llama.attention.head_count_kv": 3}))
    put("full_rope_odd.gguf", "model", "an odd number of rotated dimensions", full(shape={"llama.rope.dimension_count": 3}))
    put("full_layers_2.gguf", "model", "a layer more than there are tensors", full(shape={"llama.block_count": 2}))
    put("full_layers_max.gguf", "model", "2^32-1 layers", full(shape={"llama.block_count": 0xFFFFFFFF}))
    put("full_no_rms.gguf", "model", "no epsilon", full(rms=False))
    put("full_vocab_9.gguf", "model", "llama.vocab_size is not the number of tokens", full(shape={"llama.vocab_size": 9}))
    put("full_q_shape.gguf", "model", "attn_q has a row too few", full({"blk.0.attn_q.weight": ([8, 7], 0)}))
    put("full_no_down.gguf", "model", "ffn_down is missing", full({"blk.0.ffn_down.weight": None}))
    put("full_norm_f16.gguf", "model", "a norm that is not F32", full({"blk.0.attn_norm.weight": ([8], 1)}))
    put("full_format_99.gguf", "model", "an unknown number format", full({"blk.0.attn_q.weight": ([8, 8], 99)}))
    put("full_bias.gguf", "model", "a tensor that is not read", full({"blk.0.attn_q.bias": ([8], 0)}))
    put("full_columns_q8.gguf", "model", "8 columns are no multiple of a block", full({"blk.0.attn_q.weight": ([8, 8], 8)}))
    put("full_experts.gguf", "model", "a mixture of experts", full(shape={"llama.expert_count": 8}))
    put("full_rope_scaled.gguf", "model", "scaled rotary positions", full(extra=[kv("llama.rope.scaling.type", STR, s("linear"))]))
    put("full_key_twice.gguf", "model", "a key twice", full(extra=[kv("tokenizer.ggml.model", STR, s("gpt2"))]))
    put("full_tensor_twice.gguf", "model", "a tensor twice", full(extra_infos=[tinfo("output_norm.weight", [8], 0, 0)]))
    put("full_architecture.gguf", "model", "another architecture",
        full(drop=b"general.architecture", extra=[kv("general.architecture", STR, s("mamba"))]))
    put("full_version_1.gguf", "model", "version 1", full()[:4] + u32(1) + full()[8:])
    put("full_magic.gguf", "model", "another magic", b"GGML" + full()[4:])
    put("full_array_huge.gguf", "model", "an array of 2^61 u64", full(extra=[kv("x", ARR, arr(U64, 1 << 61, b""))]))
    put("full_array_deep.gguf", "model", "arrays in arrays in arrays", full(extra=[kv("x", ARR, arr(ARR, 1, b"") * 100)]))
    put("full_string_huge.gguf", "model", "a string of 2^64-1 bytes", full(extra=[kv("x", STR, struct.pack("<Q", M64))]))

    with open(os.path.join(out, "manifest.tsv"), "w") as f:
        for r in rows:
            f.write("\t".join(r) + "\n")
    print("%d files in %s" % (len(rows), out))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gguf-bad")
