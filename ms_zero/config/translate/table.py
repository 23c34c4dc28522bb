"""The regular part of a translation: tables of keys that go over one by one."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ms_zero.config.findings import show
from ms_zero.config.translate.result import Notes
from ms_zero.resources import nearest

DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32", "torch.float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16", "torch.half"), "fp16"),
    **dict.fromkeys(("bf16", "bfp16", "bfloat16", "torch.bfloat16"), "bf16"),
}
"""Names of dtypes in other tools -> names here."""


@dataclass(frozen=True)
class To:
    """The key is written as `target`.

    Args:
        target: Dotted key of the run file.
        convert: From the source's value to the target's; raises ValueError with a reason when there is none.
        remark: What to look after.

    """

    target: str
    convert: Callable[[Any], Any] = lambda value: value
    remark: str = ""


@dataclass(frozen=True)
class Only:
    """The target does what one value of the key asks for, and nothing else.

    Args:
        value: That value.
        same: Why it needs no key.
        other: Why other values cannot be translated.

    """

    value: Any
    same: str
    other: str


@dataclass(frozen=True)
class No:
    """The target has no such thing."""

    reason: str


Entry = To | Only | No


def apply(notes: Notes, table: Mapping[str, Entry], prefixes: Mapping[str, str] | None = None) -> None:
    """Give every key its fate that is in the table, or below one of the prefixes (prefix -> reason)."""
    for source in notes.left():
        entry = table.get(source)
        if isinstance(entry, To):
            put(notes, source, entry.target, entry.convert, entry.remark)
        elif isinstance(entry, Only):
            value = notes.get(source)
            if value == entry.value and isinstance(value, bool) == isinstance(entry.value, bool):
                notes.same(source, entry.same)
            else:
                notes.drop(source, entry.other)
        elif isinstance(entry, No):
            notes.drop(source, entry.reason)
        else:
            section = below(source, prefixes or {})
            if section is not None:
                notes.drop(source, prefixes[section])


def put(
    notes: Notes,
    source: str,
    target: str,
    convert: Callable[[Any], Any] = lambda value: value,
    remark: str = "",
) -> bool:
    """Write the converted value of a source key; a ValueError of `convert` becomes the reason why not."""
    try:
        value = convert(notes.get(source))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        reason = str(error) if type(error) is ValueError else f"{show(notes.get(source))} is not understood"
        notes.drop(source, reason)
        return False
    return notes.put(source, target, value, remark)


def put_context(notes: Notes, source: str, degree: str, methods: Mapping[str, str]) -> None:
    """Write how context parallelism works; the key `degree` says between how many ranks.

    Args:
        notes: of the translation.
        source: the key that names the method.
        degree: the key of the number of ranks.
        methods: names in the source -> names here.

    """
    if not notes.has(source):
        return
    value = notes.get(source)
    if notes.get(degree, 1) in (1, None):
        notes.ignored(source, f"only read when {degree} is above 1")
    elif value in methods:
        notes.put(source, "parallel.context", methods[value])
    else:
        notes.drop(source, f"{show(value)} is not offered; see parallel.context")


def below(source: str, prefixes: Iterable[str]) -> str | None:
    """Return the prefix that a dotted key is or lies below."""
    found = (prefix for prefix in prefixes if source == prefix or source.startswith(f"{prefix}."))
    return max(found, key=len, default=None)


def finish_unknown(notes: Notes, known: Iterable[str], tool: str) -> None:
    """Note the keys that are left as unknown, each with the nearest key of the tool."""
    known = tuple(known)
    for source in notes.left():
        near = nearest(source, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        notes.note(source, "unknown", f"not a key of {tool}{hint}")


def dtype(value: Any) -> str:
    """Return the name here of a dtype that another tool names; raises ValueError."""
    name = DTYPES.get(str(value).lower())
    if name is None:
        raise ValueError(f"{show(value)} is not a dtype that a policy here knows")
    return name


def whole(value: Any) -> Any:
    """Return 5e8 as 500000000; other values as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def number(value: Any) -> float:
    """Return a number, also from text such as 1e-5, which some YAML readers take for text."""
    if isinstance(value, bool):
        raise ValueError(f"{show(value)} is not a number")
    return float(value)


def integer(value: Any) -> int:
    """Return a whole number, also from text; raises ValueError."""
    found = number(value)
    if not found.is_integer():
        raise ValueError(f"{show(value)} is not a whole number")
    return int(found)
