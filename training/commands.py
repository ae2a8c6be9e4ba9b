"""How a command ends: its status, and what a user reads where something cannot be done."""

import sys
from collections.abc import Callable


def status_of(command: Callable[[], object]) -> int:
    """Runs a command; 0, or its own status, or 2 and one message where the fault is the user's."""
    try:
        found = command()
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    return found if isinstance(found, int) else 0
