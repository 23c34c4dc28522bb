"""The one exception type that users see."""


class UserError(ValueError):
    """Something the user can fix: bad config, data, checkpoint or environment.

    The message is one line (or one line per violation): what is wrong, where, what was expected and how to
    fix it. Command-line entry points print it without a traceback and exit with status 2.
    """


def one_line(text: str) -> str:
    """Escape what would break a line or a terminal (control characters, lone surrogates)."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
