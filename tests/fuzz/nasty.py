"""What hostile and sloppy inputs look like: pieces that a mutation puts in the place of others."""

from __future__ import annotations

import json
import random
from typing import Any

_HUGE = "9" * 400  # an int beyond every float
_LONG = "1" * 4400  # an int of more digits than Python converts
TEXTS = (
    *(
        "",
        " ",
        "\t",
        "\r\n",
        "\ufeff",
        "\0",
        "\x1b[31m",
        "\x85",
        "\u2028",
        "\xa0",
        "é",
        "🦆",
        "\ud800",
        "a\nb",
        "x" * 300,
    ),
    *(
        "0",
        "-0",
        "+1",
        "-1",
        "007",
        "1_000",
        "\u0663",
        "\u00b2",
        "1.5",
        "1e5",
        "0x10",
        "NaN",
        "Infinity",
        "-Infinity",
    ),
    *("1e999", "inf", "65535", "65536", "4294967296", "9223372036854775808", _HUGE, _LONG),
    *(
        "::1",
        "[::1]:1",
        "fe80::1%eth0",
        "[fe80::1%25eth0]:80",
        "a:b:c",
        "host:0",
        "host:65536",
        ":",
        "=",
        ",",
        ",,",
    ),
    *(
        "../../etc/passwd",
        "..",
        ".",
        "/",
        "//",
        "~",
        "$(A)",
        "$$",
        "%s",
        "{}",
        "'",
        '"',
        "\\",
        "`id`",
        "#",
        "-",
        "--",
    ),
    *("true", "null", "auto", "none", "[", "]" * 5, "{" * 5, "*", "&a", "!!int ''"),
)
RAW_JSON = (
    *(
        "null",
        "true",
        "false",
        "0",
        "-1",
        "1.5",
        "1e5",
        "-0.0",
        "1e400",
        "NaN",
        "Infinity",
        "-Infinity",
        _HUGE,
        _LONG,
    ),
    *(
        "9007199254740993",
        "9223372036854775808",
        '""',
        '"\\u0000"',
        '"\\ud800"',
        '"a\\nb"',
        '"\\u001b[2J"',
        "[]",
        "{}",
    ),
    *(
        "[[]]",
        "[1]",
        '[null,"",0,0.0]',
        '{"":0}',
        '{"a":1,"a":2}',
        "[" * 60 + "]" * 60,
        "[" * 3000,
        '"' + "x" * 400 + '"',
    ),
)
RAW_YAML = (
    *(
        "null",
        "~",
        "true",
        "yes",
        "0",
        "-1",
        "1.5",
        ".inf",
        ".nan",
        "0o17",
        "017",
        "0x1F",
        "0b11",
        "1_000",
        "1:30",
        "1e3",
    ),
    *(
        "2026-01-02",
        "2026-13-45",
        "''",
        "'1'",
        "|",
        ">",
        "[]",
        "{}",
        "[1, [2]]",
        "{a: 1, a: 2}",
        "{? [1] : 2}",
        "{1: 2}",
    ),
    *(
        "!!int ''",
        "!!int x",
        "!!float ''",
        "!!bool x",
        "!!timestamp x",
        "!!binary é",
        "!!map [a]",
        "!!map x",
        "!!set [a]",
    ),
    *(
        "!!seq {a: 1}",
        "!!str [a]",
        "!!null x",
        "!!omap [a]",
        "!!pairs [a]",
        "!!python/object:os.system x",
        "!x y",
        "!<a> b",
    ),
    *(
        "&a [*a]",
        "*a",
        "{<<: *a}",
        "{<<: [1]}",
        "{<<: {a: 1}}",
        "= ",
        "%YAML 1.1",
        "---",
        "...",
        "@x",
        "`x",
        "\t- x",
    ),
    *(
        "0x" + "f" * 4000,
        "[" * 70,
        _LONG,
        "'../../x'",
        "'a/b'",
        "$(A)",
        "!!int '0x'",
        "!!int '-'",
        "!!float '-'",
        "!!int '0b'",
    ),
)
_MARK = "\x01RAW%d\x01"


def changed_json(data: bytes, chance: random.Random) -> bytes | None:
    """Another value somewhere, one more, one less, or one twice; None when it is no JSON."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return None
    places = list(_places(tree))
    if not places:
        return chance.choice(RAW_JSON).encode()
    holder, key = chance.choice(places)
    deed = chance.randrange(6)
    if deed == 0:
        del holder[key]
    elif deed == 1:
        holder[key] = chance.choice(TEXTS)
    elif deed == 2 and isinstance(holder, dict):
        holder[chance.choice(TEXTS)] = holder[key]
    elif deed == 2:
        holder.append(holder[key])
    elif deed == 3:
        other, name = chance.choice(places)
        holder[key] = other[name] if not isinstance(other[name], dict | list) else holder[key]
    else:
        holder[key] = _MARK % chance.randrange(len(RAW_JSON))
    try:
        text = json.dumps(tree)
    except (ValueError, RecursionError):
        return None
    for number, raw in enumerate(RAW_JSON):
        text = text.replace(json.dumps(_MARK % number), raw)
    return text.encode("utf-8", "surrogatepass")


def _places(tree: Any, depth: int = 0) -> Any:
    if depth > 40:
        return
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key], depth + 1)


def changed_lines(data: bytes, chance: random.Random) -> bytes | None:
    """One line of JSON changed, doubled, moved or dropped; in a conversation a byte stands before each."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    deed = chance.randrange(5)
    if deed == 0:
        lines.insert(chance.randrange(len(lines) + 1), lines[at])
    elif deed == 1 and len(lines) > 1:
        del lines[at]
    elif deed == 2:
        other = chance.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        start = lines[at].find(b"{")
        made = changed_json(lines[at][start:], chance) if start >= 0 else None
        if made is None:
            return None
        lines[at] = lines[at][:start] + made.replace(b"\n", b" ")
    return b"\n".join(lines)


def changed_yaml(data: bytes, chance: random.Random) -> bytes:
    """Another value behind a colon or a dash, or a line twice, gone or moved in."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    deed = chance.randrange(8)
    piece = chance.choice(RAW_YAML + TEXTS if deed == 4 else RAW_YAML).encode("utf-8", "surrogatepass")
    if deed == 0:
        lines.insert(at, lines[chance.randrange(len(lines))])
    elif deed == 1 and len(lines) > 1:
        del lines[at]
    elif deed == 2:
        lines[at] = b"  " + lines[at]
    elif deed == 3:
        lines[at] = lines[at].removeprefix(b"  ")
    else:
        for sign in (b": ", b"- ", b"{", b"["):
            head, found, _ = lines[at].partition(sign)
            if found:
                lines[at] = head + found + piece
                break
        else:
            lines[at] = piece
    return b"\n".join(lines)


def changed_text(data: bytes, chance: random.Random, sign: bytes = b"") -> bytes:
    """A nasty piece put in, or in the place of a run of letters and digits."""
    piece = chance.choice(TEXTS).encode("utf-8", "surrogatepass")
    if sign and chance.random() < 0.5:
        words = data.split(sign)
        at = chance.randrange(len(words))
        head, equals, _ = words[at].partition(b"=")
        words[at] = head + equals + piece if equals and chance.random() < 0.7 else piece
        return sign.join(words)
    start = chance.randrange(len(data) + 1)
    end = start
    while end < len(data) and chance.random() < 0.8 and data[end : end + 1].isalnum():
        end += 1
    return data[:start] + piece + data[end:]
