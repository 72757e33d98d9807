#!/usr/bin/env python3
"""Makes a draft model for a llama GGUF file out of its own first layers and a head fitted to texts of one kind.

    tests/tools/make_draft.py FROM TO --texts TEXTS.json [--layers N] [--ridge R]

TEXTS.json: a list of lists of token ids, texts as the model writes them (prompt and greedy answer). The model reads them
(here, with numpy, in float32), and a linear map is fitted by ridge regression from the hidden state after layer N to the
normed hidden state that the head of the whole model reads: a "tuned lens" (Belrose et al. 2023, arXiv 2303.08112), fitted in one step. The
map is folded into a head of the draft's own. So there is no training, and the same texts give the same bytes. What comes
out is a llama file with the same vocabulary and tokenizer: N layers and the embedding as they were, output_norm.weight the
inverse deviation of each channel (so that quantised blocks hold weights of one size), output.weight in Q4_0.

It is good at texts of the kind it was fitted to and at no others. One text in eight is left out of the fit and the share of
its tokens on which draft and model agree is printed.
"""

import argparse
import json
import re
import struct

import numpy as np

from gguf_file import string
from make_shorter import read, write

F32, Q4_0, Q4_1, Q8_0 = 0, 2, 3, 8
HELD_OUT = 8  # one text of so many
BLOCK = 32


def from_file(dims, kind, content):
    """A tensor's values, [rows][columns]."""
    shape = dims[::-1]
    if kind == F32:
        return np.frombuffer(content, np.float32).reshape(shape)
    if kind == Q8_0:
        blocks = np.frombuffer(content, np.dtype([("d", "<f2"), ("q", "i1", 32)]))
        return (blocks["q"] * blocks["d"].astype(np.float32)[:, None]).reshape(shape)
    if kind == Q4_1:
        blocks = np.frombuffer(content, np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]))
        scale, least = (blocks[name].astype(np.float32)[:, None] for name in "dm")
    elif kind == Q4_0:
        blocks = np.frombuffer(content, np.dtype([("d", "<f2"), ("q", "u1", 16)]))
        scale = blocks["d"].astype(np.float32)[:, None]
        least = -8 * scale
    else:
        raise SystemExit(f"make_draft: tensors of format {kind} are not read here (F32, Q4_0, Q4_1, Q8_0 are)")
    quants = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
    return (quants * scale + least).reshape(shape)


def to_q4_0(values):
    """Blocks of 32 columns: the value of largest magnitude becomes -8."""
    blocks = values.reshape(-1, BLOCK)
    most = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = (most / -8).astype(np.float16)
    inverse = np.divide(1, scale.astype(np.float32), where=scale != 0, out=np.zeros_like(most))
    quants = np.clip(np.floor(blocks * inverse + 8.5), 0, 15).astype(np.uint8)
    out = np.empty(len(blocks), np.dtype([("d", "<f2"), ("q", "u1", 16)]))
    out["d"] = scale[:, 0]
    out["q"] = quants[:, :16] | quants[:, 16:] << 4
    return out.tobytes()


class Model:
    """A llama's layers in float32, read one at a time."""

    def __init__(self, path):
        self.keys, self.tensors, self.align = read(path)
        self.by_name = {name: rest for name, *rest in self.tensors}
        self.layers = self.integer("llama.block_count")
        self.heads = self.integer("llama.attention.head_count")
        self.kv_heads = self.integer("llama.attention.head_count_kv")
        self.base = self.real("llama.rope.freq_base")
        self.eps = self.real("llama.attention.layer_norm_rms_epsilon")

    def integer(self, key):
        return struct.unpack("<I", self.keys[key][-4:])[0]

    def real(self, key):
        return struct.unpack("<f", self.keys[key][-4:])[0]

    def tensor(self, name):
        return from_file(*self.by_name[name])

    def head(self):
        name = "output.weight" if "output.weight" in self.by_name else "token_embd.weight"
        return self.tensor(name)

    def norm(self, x):
        return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + self.eps)

    def rotate(self, x, places):
        """Pairs of neighbours, as GGUF stores a llama's query and key."""
        half = x.shape[2] // 2
        angles = places[:, None] * self.base ** (-np.arange(half) / half)
        cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)

    def attend(self, q, k, v, spans):
        """Every text by itself; q [tokens][heads][dims], k and v [tokens][kv heads][dims]."""
        out, group = np.empty_like(q), self.heads // self.kv_heads
        for start, end in spans:
            count = end - start
            hidden = np.triu(np.full((count, count), -np.inf, np.float32), 1)
            for head in range(self.heads):
                scores = q[start:end, head] @ k[start:end, head // group].T / np.float32(q.shape[2] ** 0.5) + hidden
                scores = np.exp(scores - scores.max(axis=1, keepdims=True))
                out[start:end, head] = scores @ v[start:end, head // group] / scores.sum(axis=1, keepdims=True)
        return out

    def layer(self, number, x, spans):
        def weight(name):
            return self.tensor(f"blk.{number}.{name}.weight")

        places = np.concatenate([np.arange(end - start) for start, end in spans])
        count, h = len(x), self.norm(x) * weight("attn_norm")
        q, k, v = ((h @ weight(f"attn_{name}").T).reshape(count, heads, -1)
                   for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)))
        seen = self.attend(self.rotate(q, places), self.rotate(k, places), v, spans)
        x = x + seen.reshape(count, -1) @ weight("attn_output").T
        h = self.norm(x) * weight("ffn_norm")
        gate = h @ weight("ffn_gate").T
        return x + (gate / (1 + np.exp(-gate)) * (h @ weight("ffn_up").T)) @ weight("ffn_down").T


def spans_of(texts):
    ends = np.cumsum([len(text) for text in texts])
    return [(end - len(text), end) for end, text in zip(ends, texts)]


def hidden_states(model, texts, wanted):
    """{layers: the state after so many}, of all texts, one after the other."""
    spans, states = spans_of(texts), {}
    x = model.tensor("token_embd.weight")[np.concatenate(texts)]
    for number in range(model.layers):
        x = model.layer(number, x, spans)
        if number + 1 in wanted:
            states[number + 1] = x
    return states


def fit(source, target, ridge):
    """The map [columns of target][columns of source] with the least squared error."""
    gram = source.T @ source
    gram[np.diag_indices_from(gram)] += ridge * np.trace(gram) / len(gram)
    return np.linalg.solve(gram.astype(np.float64), (source.T @ target).astype(np.float64)).T.astype(np.float32)


def scaled(model, state, deviation=None):
    """What the draft's head reads: normed, each channel by its deviation. A text's first token, which is unlike all
    others, does not count in that."""
    x = model.norm(state)
    if deviation is None:
        deviation = np.sqrt(np.mean(np.minimum(x * x, 100 * np.median(x * x, axis=0)), axis=0)) + 1e-6
    return x / deviation, deviation


def parts(texts):
    """Rows of the fit, and of the texts left out of it; the first token of a text is in neither."""
    used, left = [], []
    for number, (start, end) in enumerate(spans_of(texts)):
        (left if number % HELD_OUT == HELD_OUT - 1 else used).extend(range(start + 1, end))
    return np.array(used), np.array(left, int)


def make(model, texts, layers, ridge, states=None):
    """output_norm and output of the draft, and the share of tokens left out of the fit on which it agrees."""
    states = states or hidden_states(model, texts, {layers, model.layers})
    target = model.norm(states[model.layers]) * model.tensor("output_norm.weight")
    used, left = parts(texts)
    _, deviation = scaled(model, states[layers][used])
    source, _ = scaled(model, states[layers], deviation)
    weights = fit(source[used], target[used], ridge)
    head = model.head()
    agreed = np.nan
    if len(left):
        whole = (target[left] @ head.T).argmax(axis=1)
        agreed = np.mean(((source[left] @ weights.T) @ head.T).argmax(axis=1) == whole)
    return (1 / deviation).astype(np.float32), head @ weights, agreed


def tensors_of(model, layers, norm, head):
    for name, dims, kind, content in model.tensors:
        match = re.match(r"blk\.(\d+)\.", name)
        if name in ("output_norm.weight", "output.weight") or match is not None and int(match[1]) >= layers:
            continue
        yield name, dims, kind, content
    yield "output_norm.weight", [len(norm)], F32, norm.tobytes()
    yield "output.weight", [head.shape[1], head.shape[0]], Q4_0, to_q4_0(head)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("to")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ridge", type=float, default=1e-4, help="of the mean of the source's squares")
    o = parser.parse_args()
    model = Model(o.source)
    with open(o.texts, encoding="utf-8") as file:
        texts = [np.array(text) for text in json.load(file)]
    if not 0 < o.layers < model.layers or len(texts) < 2 or min(len(text) for text in texts) < 2:
        parser.error(f"1 to {model.layers - 1} layers, and two texts of two tokens at least")
    norm, head, agreed = make(model, texts, o.layers, o.ridge)
    model.keys["llama.block_count"] = string("llama.block_count") + struct.pack("<II", 4, o.layers)
    write(o.to, model.keys, list(tensors_of(model, o.layers, norm, head)), model.align)
    print(f"{o.layers} of {model.layers} layers, {sum(map(len, texts))} tokens of text; agrees on {agreed:.3f} of the tokens "
          f"left out")


if __name__ == "__main__":
    main()
