"""Every error we raise on purpose, as one tree.

    TinkerError
    ├─ ValidationError          a value, message or body is not what it must be; names the field
    │  └─ TooLargeError         ... because it exceeds a stated limit
    ├─ EngineError              the engine could not do what it was asked
    │  └─ EngineDiedError       ... because its process is gone
    ├─ ClosedError              the client was closed before or during the call
    ├─ RequestFailedError       the service accepted a request and then failed it
    ├─ RetryableException       the service has lost a request that it had accepted
    └─ APIError                 a call to the service failed
       ├─ APIResponseValidationError
       ├─ APIConnectionError
       │  └─ APITimeoutError
       └─ APIStatusError        400 … 5xx, one class per status below

The root and the API branch have the names and constructors of the official `tinker` package,
because programs catch them by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinsmith.types.futures import RequestErrorCategory


class TinkerError(Exception):
    """The root: catching this catches everything the package raises on purpose."""


class ValidationError(TinkerError, ValueError):
    """A value is not what it must be.

    `path` says where, as in `prompt.chunks[2].tokens`; it is empty when the whole value is
    meant. `problem` says what is wrong, and `str()` gives both.
    """

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.problem = problem
        self.path = path

    def under(self, prefix: str) -> ValidationError:
        """The same error, seen from the container that holds the value at `prefix`."""
        joint = "" if not self.path or self.path.startswith("[") else "."
        return type(self)(self.problem, f"{prefix}{joint}{self.path}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem, self.path)


class TooLargeError(ValidationError):
    """The value exceeds a limit, which the message names."""


class EngineError(TinkerError):
    """The engine could not do what it was asked; the message says why."""


class EngineDiedError(EngineError):
    """The engine's process ended; everything it held in memory is gone."""


class ClosedError(TinkerError, RuntimeError):
    """The client was closed; create a new one."""


class RetryableException(TinkerError):
    """The service has lost the promise: the whole request has to be made again."""


class RequestFailedError(TinkerError):
    """The service accepted a request and later reported that it failed."""

    def __init__(self, message: str, request_id: str, category: RequestErrorCategory) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = category

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.request_id, self.category)


class APIError(TinkerError):
    """A call to the service failed. `body` is the decoded answer, if there was one."""

    # Request and response objects belong to the transport, which this layer cannot name.
    request: Any
    message: str
    body: object | None

    def __init__(self, message: str, request: Any, *, body: object | None) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.body = body


class APIResponseValidationError(APIError):
    """The service answered with something that is not what the protocol says."""

    def __init__(self, response: Any, body: object | None, message: str | None = None) -> None:
        super().__init__(
            message or "The service's answer does not have the expected form.",
            response.request,
            body=body,
        )
        self.response = response
        self.status_code: int = response.status_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.response, self.body, self.message)


class APIConnectionError(APIError):
    """No answer came: the connection could not be made or broke."""

    def __init__(self, request: Any, message: str = "Connection error.") -> None:
        super().__init__(message, request, body=None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.request, self.message)


class APITimeoutError(APIConnectionError):
    """No answer came in time."""

    def __init__(self, request: Any) -> None:
        super().__init__(request=request, message="Request timed out.")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.request,)


class APIStatusError(APIError):
    """The service answered with a status of 400 or above."""

    status_code: int

    def __init__(self, message: str, response: Any, body: object | None) -> None:
        super().__init__(message, response.request, body=body)
        self.response = response
        self.status_code = response.status_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.response, self.body)


class BadRequestError(APIStatusError):
    """400: the request is malformed or asks for something impossible."""

    status_code: int = 400


class AuthenticationError(APIStatusError):
    """401: the credentials are missing or not accepted."""

    status_code: int = 401


class BillingError(APIStatusError):
    """402: the account has a billing problem."""

    status_code: int = 402


class PermissionDeniedError(APIStatusError):
    """403: the credentials do not allow this."""

    status_code: int = 403


class NotFoundError(APIStatusError):
    """404: there is no such thing, or it belongs to somebody else."""

    status_code: int = 404


class ConflictError(APIStatusError):
    """409: the request conflicts with the present state."""

    status_code: int = 409


class UnprocessableEntityError(APIStatusError):
    """422: the request is well formed but cannot be carried out."""

    status_code: int = 422


class RateLimitError(APIStatusError):
    """429: too many requests; wait and try again."""

    status_code: int = 429


class InternalServerError(APIStatusError):
    """500 and above: the service failed."""
