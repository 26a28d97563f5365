"""Sizes as people write them."""

import re

from kvpin.errors import ConfigError

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE_MAX = 1 << 62


def parse_size(text: str, what: str) -> int:
    """Bytes of "512MiB", "4GB" or a plain number. Raises ConfigError naming `what`."""
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].lower()) if match else None
    size_bytes = float(match[1]) * factor if match and factor is not None else -1.0
    if not 0 <= size_bytes <= _SIZE_MAX:
        raise ConfigError(f'{what} = {text!r}: give a size such as "512MiB", "4GB" or a number of bytes')
    return int(size_bytes)


def parse_share(text: str, whole_bytes: int, what: str) -> int:
    """Bytes of "50%" or 0.5 of `whole_bytes`, or of a size. Raises ConfigError naming `what`."""
    number = text.strip()
    if not number.endswith("%") and not re.fullmatch(r"[01]?\.\d+", number, re.ASCII):
        return parse_size(text, what)
    try:
        share = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f'{what} = {text!r}: give "0%" to "100%", a fraction such as 0.5, or a size such as "2GiB"')
    return int(whole_bytes * share)
