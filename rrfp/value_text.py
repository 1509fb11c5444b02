"""What a value is, in a few words for an error message."""

import difflib
import hashlib
from collections.abc import Mapping

import torch

_MOST_NAMED = 4  # members of a tuple, list or dict
_LONGEST = 20_000  # characters of a text that travels between ranks: far below what a message holds


def nearest(text, names):
    """`` Did you mean 'zb-h1'?`` for the name that a text comes close to; empty for none.

    ``text`` may be anything; what is no text comes close to nothing.
    """
    if not isinstance(text, str):
        return ""
    written = text.strip().lower().replace("_", "-")
    found = difflib.get_close_matches(written, names, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def value_text(value):
    """Such as ``a tensor of shape (2, 4), float32`` or ``a tuple of (an int, None)``.

    Never raises and reads no element of a tensor.
    """
    try:
        return _describe(value, depth=2)
    except Exception:  # a type with attributes of its own; it is being reported on already
        return _with_article(type(value).__name__)


def repr_text(value):
    """Its repr, or what it is where that raises."""
    try:
        return repr(value)
    except Exception:
        return value_text(value)


def error_text(error):
    """An exception's own words, the middle of very many left out, or that it has none.

    Never raises.
    """
    try:
        return _cut(str.__str__(str(error)))  # a plain one, whatever class of text it gives
    except BaseException as broken:  # one is being told already, which matters more
        return f"its description raised {class_name(broken)}"


def key_text(value):
    """Its repr, to be compared with another's; a very long one is cut, with a checksum."""
    text = repr(value)
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{_cut(text)} (SHA-256 {digest})"


def _cut(text):
    left_out = len(text) - _LONGEST
    if left_out <= 0:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} ... ({left_out} characters left out) ... {text[-half:]}"


def class_name(value):
    """The name of a value's class, past what a metaclass makes of it."""
    return type.__dict__["__name__"].__get__(type(value))


def _describe(value, depth):
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(value.shape)}, {dtype}"
    name = _with_article(type(value).__name__)
    if not depth or not isinstance(value, (tuple, list, Mapping)):
        return name
    if isinstance(value, Mapping):
        members = [f"{key!r:.40}: {_describe(item, depth - 1)}" for key, item in value.items()]
    else:
        members = [_describe(item, depth - 1) for item in value]
    if len(members) > _MOST_NAMED:
        members[_MOST_NAMED:] = [f"{len(members) - _MOST_NAMED} more"]
    return f"{name} of ({'; '.join(members)})"


def _with_article(name):
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
