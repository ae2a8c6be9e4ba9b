"""JSON as strangers write it: whatever is wrong with it is one kind of error."""

import json


def parsed(text: bytes | str) -> object:
    """The value that a text says.

    Raises:
        ValueError: no UTF-8, no JSON, nested deeper than Python goes, or with a NaN or an infinity, which nothing can
            be compared with.
    """
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    except RecursionError:
        raise ValueError("no JSON that can be read: it is nested too deeply") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number that can be compared")
