"""Errors as one sentence on the error stream and an exit code; never a traceback.

The sentences for what a service refuses have the words of the official command, because scripts
read them.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from tinsmith import errors, extras


class CommandError(click.ClickException):
    """A command cannot do what it was asked: `Error: message`, details below it, exit code 1."""

    exit_code = 1

    def __init__(self, message: str, details: str | None = None) -> None:
        super().__init__(message)
        self.details = details

    def show(self, file: IO[Any] | None = None) -> None:
        stream = sys.stderr if file is None else file
        click.echo(f"Error: {self.message}", file=stream)
        if self.details:
            click.echo(self.details, file=stream)


class Interrupted(CommandError):
    """The user ended it; the exit code is the one that shells give for Ctrl-C."""

    exit_code = 130


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_disk_full(text: str) -> bool:
    """Whether an error's text, from whichever library or process, says that the disk is full."""
    words = [os.strerror(number) for number in _FULL]
    return any(each in text for each in (*words, "disk is full", "disk I/O error"))


@contextmanager
def explained() -> Iterator[None]:
    """Errors that are meant for the user leave as a `CommandError`; mistakes of ours do not."""
    try:
        yield
    except errors.TinkerError as error:
        raise _explain(error) from error
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tinsmith"):
            raise
        raise CommandError(
            f"this command needs the package {error.name!r}, which is not installed",
            f"Install it with: {extras.install_line_for(error.name or '')}",
        ) from error
    except UnicodeDecodeError as error:
        raise CommandError(f"a file that should be text is not UTF-8: {error}") from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader of our output has seen enough; click ends quietly
        if error.errno in _FULL:
            where = f" ({error.filename})" if error.filename else ""
            raise CommandError(
                f"no space is left on the disk{where}; free some, and run it again"
            ) from error
        raise CommandError(str(error)) from error
    except Exception as error:
        # Only commands with a database have the library, so it is known by its name here.
        if type(error).__module__.partition(".")[0] != "sqlalchemy":
            raise
        reason = getattr(error, "orig", None) or error
        raise CommandError(
            f"the database cannot be used: {reason}",
            "Is there room on the disk, may the data folder be written, does the URL lead to it?",
        ) from error


# The first that fits is used: an error's class before the class it is derived from.
_TITLES: tuple[tuple[type[errors.APIError], str, str], ...] = (
    (errors.NotFoundError, "Resource not found", ""),
    (
        errors.AuthenticationError,
        "Authentication failed",
        "Please check your API key or authentication credentials.\n",
    ),
    (
        errors.BillingError,
        "Billing issue",
        "There is a billing issue with your account. Please check that billing is set up.\n",
    ),
    (
        errors.PermissionDeniedError,
        "Permission denied",
        "You don't have permission to access this resource.\n",
    ),
    (errors.BadRequestError, "Invalid request", ""),
    (errors.UnprocessableEntityError, "Invalid data provided", ""),
    (
        errors.RateLimitError,
        "Rate limit exceeded",
        "Please wait a moment before trying again.\n",
    ),
    (
        errors.InternalServerError,
        "Internal server error",
        "The service met an error of its own; its log says which. Please try again later.\n",
    ),
    (
        errors.APITimeoutError,
        "Request timeout",
        "The service did not answer in time. Please try again.\n",
    ),
    (
        errors.APIConnectionError,
        "Connection failed",
        "Is a server running at TINKER_BASE_URL? `tinsmith serve` starts one, "
        "`tinsmith doctor` looks for the cause.\n",
    ),
)


def _explain(error: errors.TinkerError) -> CommandError:
    if not isinstance(error, errors.APIError):
        return CommandError(str(error))
    details = f"Details: {error.message}"
    for kind, title, advice in _TITLES:
        if isinstance(error, kind):
            return CommandError(title, advice + details)
    if isinstance(error, errors.APIStatusError):
        return CommandError(f"API error (status {error.status_code})", details)
    return CommandError("API error occurred", details)
