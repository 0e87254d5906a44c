"""Numbers as people read them."""

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def of_bytes(count: float) -> str:
    """Return a number of bytes with three digits: `80.4 MB`."""
    for unit in _UNITS:
        if abs(count) < 999.5 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.3g} {unit}"


def of_count(count: float) -> str:
    """Return a large number with three digits: `13,338`, `4.81 million`, `1.2 billion`."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if abs(count) >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,.0f}"


def of_seconds(seconds: float) -> str:
    """Return a duration in its two largest units: `27 s`, `4 min 10 s`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, small, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {name}" + (f" {rest} {below}" if rest else "")
    if whole >= 60:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole} s"


def of_share(share: float) -> str:
    """Return a share in percent, exact at its ends: only all is `100 %`."""
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    percent = share * 100
    if percent < 0.01:
        return "< 0.01 %"
    if percent > 99.99:
        return "> 99.99 %"
    return f"{percent:.2f} %" if percent < 1 or percent > 99 else f"{percent:.1f} %"
