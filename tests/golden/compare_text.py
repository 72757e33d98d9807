#!/usr/bin/env python3
"""Compare our text code with reference libraries (PyPI: jinja2, tokenizers), on many inputs.

usage: compare_text.py TEXT_TOOL MODEL.gguf [--seed N] [--strings N]

Templates: each snippet below is rendered by Jinja2, in the environment that chat templates are
usually rendered in (trim_blocks, lstrip_blocks, loop controls, sandboxed, a tojson that does not
escape), and by us: equal text, or both refuse. Strings: random ones are encoded by both.
Exit status 0: all equal. 77: a library is missing.
"""
import json, os, random, struct, subprocess, sys

try:
    import jinja2, jinja2.ext, jinja2.sandbox, tokenizers
except ImportError as missing:
    print("compare_text: %s" % missing)
    sys.exit(77)

HERE = os.path.dirname(os.path.abspath(__file__))

CONVERSATION = {
    "messages": [
        {"role": "system", "content": "  be brief \n"},
        {"role": "user", "content": "Grüße, 'you' & \"me\" <b>\n two  lines ", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "look_up", "arguments": {"q": "tide", "n": 3, "f": 1.5, "l": [1, None, True]}}}]},
        {"role": "tool", "content": "14:20", "tool_call_id": "c1"},
        {"role": "user", "content": "thanks\u0301 😀 a/b/c</think>x"},
    ],
    "tools": [{"type": "function", "function": {
        "name": "look_up", "description": "finds é \u2028 \x7f \t things",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "items": {"type": "array"}}, "required": ["q"]}}}],
    "extra": {"flag": True, "nothing": None, "number": 7, "real": 2.5, "big": 1e22, "small": 1e-7,
              "words": ["pear", "Apple", "fig", "apple"], "table": {"b": 1, "a": 2, "C": [1, {"x": "it's"}]}},
    "add_generation_prompt": True,
}

SNIPPETS = r"""
{% for m in messages %}{{ m.role }}: {{ m['content'] }}|{% endfor %}
---
{%- for m in messages -%}
  [{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}]
{%- endfor -%} end
---
{% for m in messages %}
    {% if loop.first %}
first
    {% elif m.role == 'tool' or m.role == "user" and not loop.last %}
  tool {{ m.role }}
    {% else %}
        else
    {%+ endif +%}
{% endfor %}
  tail
---
{% for x in [] %}a{% else %}none{% endfor %}{% for k, v in table.items() %}{{ k }}={{ v }};{% endfor %}
---
{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {{ m.content|trim }}{{ "," if not loop.last }}{% endfor %}
---
{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }} {% endfor %}
---
{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.found = true %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{{ ns.found }} {{ ns.n }}
---
{% set x = 1 %}{% for i in range(3) %}{{ x }}{% set x = i + 10 %}{{ x }} {% endfor %}{{ x }}
---
{% for i in range(5) %}{{ loop.previtem if loop.previtem is defined else '-' }}{{ loop.nextitem|default('+') }}{{ loop.cycle('a', 'b') }}{% endfor %}
---
{{ messages[0].content|trim }}|{{ messages[0]['content'].strip() }}|{{ messages[-1].content[:3] }}|{{ messages[-1].content[-3:] }}|{{ messages[1:3]|length }}|{{ messages[::-1]|map(attribute='role')|join(',') }}|{{ 'abcdef'[::2] }}|{{ 'abcdef'[4:1:-1] }}|{{ 'abc'[-9:9] }}|{{ 'Grüße'[2] }}
---
{{ tools|tojson }}
{{ tools|tojson(indent=2) }}
{{ table|tojson(sort_keys=true) }} {{ {}|tojson(indent=4) }} {{ []|tojson }} {{ [[]]|tojson(indent=1) }}
---
{{ table }} {{ words }} {{ (1, 'a') }} {{ (1,) }} {{ none }} {{ true }} {{ 1.0 }} {{ real }} {{ big }} {{ small }} {{ 1e16 }} {{ 123456789.125 }} {{ 0.1 + 0.2 }} {{ "it's" }} {{ ["it's", 'a"b', 'a"\'b', '\n\t\\'] }}
---
{{ missing }}|{{ missing|default('d') }}|{{ ''|default('d') }}|{{ ''|default('d', true) }}|{{ none|d('x', boolean=true) }}|{{ missing is defined }}|{{ messages[0].missing is undefined }}|{{ missing|length }}|{{ missing|upper }}
---
{{ missing.attr }}
---
{{ missing + 'a' }}
---
{{ nothing + 'a' }}
---
{{ none.attr }}|{{ messages[99] }}|{{ messages[0][5] }}|
---
{{ 1 + 2 * 3 - 4 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ -2 ** 2 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ (1 + 2) * 3 }} {{ 1 - -1 }} {{ +5 }} {{ 1_000 }} {{ 2 * 'ab' }} {{ [1] * 2 }} {{ [1] + [2] }} {{ 10 / 4 }}
---
{{ 1 < 2 < 3 }} {{ 1 < 2 > 5 }} {{ 'a' < 'b' }} {{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' == 1 }} {{ [1, 2] == [1, 2] }} {{ {'a': 1} == {'a': 1} }} {{ 'ell' in 'hello' }} {{ 'q' not in table }} {{ 2 in [1, 2] }} {{ 'role' in messages[0] }} {{ not 'x' in 'y' }}
---
{{ 'a' ~ 1 ~ none ~ true ~ 1.5 ~ missing }} {{ 'a' ~ 'b' + 'c' }} {{ 1 ~ 2 * 3 }}
---
{{ 'yes' if flag else 'no' }} {{ 'yes' if nothing }} {{ (flag and number) or 'x' }} {{ nothing or 'y' }} {{ '' and 'z' }} {{ not flag }} {{ 'a' if false else 'b' if true else 'c' }}
---
{{ 'a' 'b' "c" }} {{ 'tab\tnl\\n \x41 \u00e9 \' \" \q' }} {{ "multi
line" }}
---
{{ ' x y  z '.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ 'a b c'.rsplit(' ', 1) }} {{ 'x</think>y'.split('</think>')[-1] }} {{ 'l1\nl2\r\nl3\n'.splitlines() }} {{ ' a b '.split(None, 1) }}
---
{{ 'xxaxx'.strip('x') }} {{ 'abc'.lstrip('ab') }} {{ 'abc'.rstrip('c') }} {{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abc'.replace('b', 'BB') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'ab'.replace('', '-') }} {{ 'hello'.find('l') }} {{ 'hello'.rfind('l') }} {{ 'hello'.count('l') }} {{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ ', '.join(['a', 'b']) }} {{ '12'.isdigit() }}
---
{{ 'hello wORLD'|title }} {{ 'hello wORLD'|capitalize }} {{ 'Grüße'|upper|replace('SS', 'ß') if false else 'grün'|upper }} {{ 'ÄÖ'|lower }} {{ "it's a-b (c)"|title }} {{ 'hello world'.title() }} {{ 'Ab'|lower }} {{ 'hELLO'.capitalize() }}
---
{{ words|first }} {{ words|last }} {{ words|length }} {{ words|count }} {{ words|sort }} {{ words|sort(reverse=true) }} {{ words|unique|list }} {{ words|reverse|list }} {{ 'abc'|reverse }} {{ table|dictsort }} {{ 'abc'|list }} {{ table|list }} {{ words|join }} {{ [1, 2]|join('-') }} {{ words|sort(case_sensitive=true) }}
---
{{ '3'|int + 4 }} {{ '3.7'|int }} {{ 'x'|int }} {{ 'x'|int(5) }} {{ '2.5'|float }} {{ 3|float }} {{ 3.9|int }} {{ -3|abs }} {{ 5|string + '!' }} {{ ' 42 '|int }}
---
{{ messages|map(attribute='role')|list }} {{ words|map('upper')|list }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ messages|rejectattr('role', 'eq', 'user')|map(attribute='role')|join('/') }} {{ [1, none, 2]|select|list }} {{ [1, 'a']|select('string')|list }} {{ [1, 2, 3]|reject('odd')|list }} {{ messages|selectattr('tool_calls', 'defined')|list|length }} {{ messages|selectattr('name')|map(attribute='name')|first }}
---
{{ 1 is odd }} {{ 2 is even }} {{ 6 is divisibleby 3 }} {{ 6 is divisibleby(4) }} {{ 'a' is string }} {{ 1 is number }} {{ 1.0 is float }} {{ 1 is integer }} {{ true is boolean }} {{ true is true }} {{ none is none }} {{ none is not none }} {{ table is mapping }} {{ words is sequence }} {{ words is iterable }} {{ 'x' is iterable and 'x' is not mapping }} {{ 3 is in [3] }} {{ 1 is eq 1 }} {{ 1 is sameas true }} {{ 'ab' is lower }} {{ 'AB' is upper }} {{ 1 is lt 2 }} {{ true is integer }} {{ true is number }}
---
{% set block %}
 some {{ number }} text
{% endset %}[{{ block }}]{% set b2 | trim | upper %}  x  {% endset %}[{{ b2 }}]
---
{% macro greet(name, sign='!') %}Hi {{ name }}{{ sign }}{% endmacro %}{{ greet('A') }} {{ greet('B', '?') }} {{ greet(sign='.', name='C') }} {{ greet('D')|upper }}
---
{% macro tree(x, d=0) %}{% if x is mapping %}{% for k in x %}{{ k }}({{ tree(x[k], d + 1) }}){% endfor %}{% elif x is iterable and x is not string %}{% for i in x %}{{ tree(i, d + 1) }};{% endfor %}{% else %}{{ x }}@{{ d }}{% endif %}{% endmacro %}{{ tree(table) }}
---
{# a comment #}a{#- b -#}  c
  {# whole line #}
d {# tail #}
e
---
   {%- if flag -%}   x   {%- endif -%}   y
---
{% raw %}{{ not }} {% this %}{% endraw %} after{%- raw -%}  a {% endraw -%}   b
---
a {{- ' b ' -}} c {{ 'd' }}
 e
{{ 'f' }}

g

---
{% if flag %}
  {{ 'indented' }}
   {% if flag %}x{% endif %}
{% endif %}
---
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set t = (3, 4) %}{{ t[0] }}{{ t[1] }}{% for a, b in [(1, 2), [3, 4]] %}{{ a + b }} {% endfor %}{{ a }}
---
{% set d = {'a': 1, 'b': {'c': [1, 2]}} %}{{ d.a }} {{ d['b'].c[1] }} {{ d.get('x') }} {{ d.get('x', 'y') }} {{ d.get('a') }} {{ d.keys()|list }} {{ d.values()|list|length }} {{ d.b.c.0 }} {{ d|length }} {{ dict(x=1, y=2) }}
---
{{ tools[0].function.parameters.properties['items'].type }} {{ tools[0].function.parameters.properties.q.type }}
---
{{ 'a\nb\n\nc'|indent }} {{ 'a\nb'|indent(2, true) }} {{ 'a\n\nb'|indent(width=1, blank=true) }}
---
{{ '<a href="x">\'&'|e }} {{ 'x'|safe }}
---
{{ raise_exception('no: ' + messages[0].role) }}
---
{% if messages[0].role != 'system' %}{{ raise_exception('x') }}{% endif %}ok
---
{{ messages|length + tools|length }} {{ messages | selectattr("role", "in", ["user", "tool"]) | list | length }}
---
{% for i in range(3) %}{% for j in range(i) %}{{ i }}{{ j }}{{ loop.index }}{{ loop.depth }} {% endfor %}{% endfor %}{{ range(5)|list }} {{ range(5, 0, -2)|list }} {{ range(2, 4)|list }}
---
{% for c in 'aü😀' %}[{{ c }}]{% endfor %}{{ 'aü😀'|length }}
---
{% for m in messages %}{{ loop.changed(m.role) }}{% endfor %}
---
{{ {'a': missing}|tojson }}
---
{{ 5 // 0 }}
---
{{ 'a' < 1 }}
---
{{ [1, 2].index(2) }} {{ [1, 1].count(1) }}
---
{% if words and words[0] is defined and (words|length > 2 or not flag) %}A{% endif %}{% if 'pear' in words and 'x' not in words %}B{% endif %}
---
{%- set tool_names = [] %}{%- for t in tools %}{%- set tool_names = tool_names + [t.function.name] %}{{ tool_names }}{%- endfor %}{{ tool_names }}
---
{{- bos_token }}{%- for m in messages %}{{- '<|start|>' + m.role + '<|end|>\n' + m.content | trim + '<|eot|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
---
{{ messages[1].content.split('\n')[0].strip() }}{{ messages[4].content.split('</think>')[0].rstrip('\n').split('/')[-1].lstrip('\n') }}
---
{{ true and 1 }}{{ 0 or none }}{{ 1 if missing else 2 }}{{ -number }}{{ - 3|abs }}{{ not missing }}
---
{% generation %}x{% endgeneration %}
""".strip("\n").split("\n---\n")


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    env.globals["raise_exception"] = raise_exception
    return env


def reference(env, source, c, bos, eos):
    try:
        return {"text": env.from_string(source).render(
            messages=c["messages"], tools=c.get("tools"), documents=None, bos_token=bos, eos_token=eos,
            add_generation_prompt=c["add_generation_prompt"], **c.get("extra", {}))}
    except Exception as error:  # whatever it raises, the template cannot be rendered
        return {"raised": str(error)}


def compare_templates(tool):
    env, wrong = environment(), 0
    sources = list(SNIPPETS)
    cases = os.path.join(HERE, "..", "cases", "chat")
    for name in sorted(os.listdir(cases)):
        if name.endswith(".jinja"):
            sources.append(open(os.path.join(cases, name), newline="").read())
    sources += [s + "\n" for s in sources] + [s.replace("\n", "\r\n") for s in sources]
    sources += sys.modules[__name__].__dict__.get("MORE", [])
    lines = []
    for source in sources:
        lines.append(json.dumps(dict(CONVERSATION, template=source, bos="<s>", eos="</s>")))
    out = subprocess.run([tool, "render"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    for source, line in zip(sources, out.stdout.split("\n")):
        ours, theirs = json.loads(line), reference(env, source, CONVERSATION, "<s>", "</s>")
        if ("text" in theirs and ours != theirs) or ("text" not in theirs and "text" in ours):
            wrong += 1
            print("template %r\n  ours   %r\n  theirs %r" % (source, ours, theirs))
    return len(sources), wrong


def read_tables(path):
    data, at = open(path, "rb").read(1 << 25), 24
    keys, count = {}, struct.unpack_from("<Q", data, 16)[0]
    sizes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}

    def string():
        nonlocal at
        n = struct.unpack_from("<Q", data, at)[0]
        at += 8 + n
        return data[at - n:at].decode()

    def value(kind):
        nonlocal at
        if kind == 8:
            return string()
        if kind == 9:
            item, n = struct.unpack_from("<IQ", data, at)
            at += 12
            return [value(item) for _ in range(n)]
        v = struct.unpack_from("<" + sizes[kind], data, at)[0]
        at += struct.calcsize(sizes[kind])
        return v

    for _ in range(count):
        key = string()
        kind = struct.unpack_from("<I", data, at)[0]
        at += 4
        keys[key] = value(kind)
    return keys


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")


def tokenizer_of(keys, pre):
    p, d = tokenizers.pre_tokenizers, tokenizers.decoders
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in keys["tokenizer.ggml.merges"]]
    t = tokenizers.Tokenizer(tokenizers.models.BPE(
        vocab={x: i for i, x in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "smollm":
        t.pre_tokenizer = p.Sequence([p.Digits(individual_digits=True), p.ByteLevel(add_prefix_space=False)])
    elif pre == "gpt-2":
        t.pre_tokenizer = p.ByteLevel(add_prefix_space=False)
    else:
        regex = LLAMA3 if pre == "llama-bpe" else LLAMA3.replace("{1,3}", "")
        t.pre_tokenizer = p.Sequence([p.Split(tokenizers.Regex(regex), "isolated"),
                                      p.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = d.ByteLevel()
    t.add_special_tokens([tokenizers.AddedToken(x, special=True, normalized=False)
                          for x, kind in zip(tokens, types) if kind == 3])
    return t


def random_string(r):
    pools = ["abc XYZ", "  \t\n\r", "0123456789", "'sS'tT're'LL'd", ".,!?-_()[]{}<>|/\\\"'", "äöüßéñçÅ", "漢字かな中文", "😀👍🏽\u200d👩",
             "\u0301\u0308", "\u00a0\u2003\u3000\u1680\u180e\u200b\u2028\x85\x1c\x0b", "①½²Ⅷ٣", "\u017f\u212a", "<|im_end|>", "<|im_start|>"]
    out = ""
    for _ in range(r.randrange(1, 30)):
        pool = r.choice(pools)
        if pool.startswith("<|"):
            out += pool[:r.choice([3, len(pool), len(pool)])]
        else:
            out += "".join(r.choice(pool) for _ in range(r.randrange(1, 5)))
    if r.random() < 0.1:
        out += chr(r.choice([r.randrange(0x20, 0xd800), r.randrange(0xe000, 0x30000)]))
    return out


def compare_strings(tool, model, seed, count):
    r, keys, wrong = random.Random(seed), read_tables(model), 0
    for pre in ("smollm", "gpt-2", "llama-bpe", "qwen2"):
        theirs = tokenizer_of(keys, pre)
        strings = [random_string(r) for _ in range(count)]
        out = subprocess.run([tool, "encode", model, pre], input="".join(json.dumps(s) + "\n" for s in strings),
                             capture_output=True, text=True, check=True)
        for s, line in zip(strings, out.stdout.split("\n")):
            want = theirs.encode(s, add_special_tokens=False).ids
            if json.loads(line) != want:
                wrong += 1
                if wrong < 10:
                    print("%s %r\n  ours   %s\n  theirs %s" % (pre, s, line, want))
    return 4 * count, wrong


def main():
    args = [a for a in sys.argv[1:] if not a.startswith("--")]
    options = dict(zip(sys.argv, sys.argv[1:]))
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    seed = int(options.get("--seed", random.randrange(1 << 30)))
    print("compare_text: seed %d" % seed)
    templates, bad_templates = compare_templates(args[0])
    strings, bad_strings = compare_strings(args[0], args[1], seed, int(options.get("--strings", 5000)))
    print("%d templates, %d differ; %d strings, %d differ" % (templates, bad_templates, strings, bad_strings))
    sys.exit(1 if bad_templates + bad_strings else 0)


if __name__ == "__main__":
    main()
