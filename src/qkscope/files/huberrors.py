"""Errors of the Hub's client in one line each, with a way out and without the user's token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qkscope.errors import HubError

NO_TOKEN = "this needs a token of the Hub, and there is none; run 'hf auth login', or set HF_TOKEN"
TOKEN_REFUSED = "the Hub does not accept this token; run 'hf auth login' again (HF_TOKEN, if it is set, comes first)"


def one_line(error: BaseException) -> str:
    """What an error says, in one line and without the user's token, which errors of the HTTP client may quote."""
    from huggingface_hub import get_token

    text, token = " ".join(str(error).split()), get_token()
    return (text.replace(token, "…") if token else text)[:300]


def client_error() -> type[Exception]:
    """The base error of the HTTP client behind huggingface_hub, whose name differs between its versions."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


def status_of(error: BaseException) -> int | None:
    """The status of the answer that an error is about; None if there was no answer."""
    return getattr(getattr(error, "response", None), "status_code", None)


@contextmanager
def pushing(repo: str) -> Iterator[None]:
    """Turn what the client raises while something is sent to a repository into a ``HubError``."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        yield
    except LocalTokenNotFoundError:
        raise HubError(NO_TOKEN) from None
    except (HfHubHTTPError, OSError, client_error(), RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.filename:
            raise  # a file of this machine
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
        raise HubError(_problem(repo, cause)) from None


def _problem(repo: str, error: BaseException) -> str:
    """What is wrong, by the status of the answer."""
    status = status_of(error)
    if status == 401:
        return TOKEN_REFUSED
    if status == 403:
        return f"this token may not write to {repo}; use one with write access to it, or a repository of your own"
    if status == 404:
        return f"{repo} does not exist on the Hub, or this token may not see it; check the spelling"
    if status in (409, 412):
        return f"{repo} was changed by somebody else meanwhile; rerun the same command"
    if status is not None and status < 500 and status != 429:
        return f"the Hub does not accept this for {repo} ({one_line(error)})"
    return (
        f"cannot reach the Hub for {repo} ({type(error).__name__}: {one_line(error)}); check the network and rerun the "
        "same command, which resumes"
    )
