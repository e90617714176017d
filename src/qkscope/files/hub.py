"""The files of a dataset: in a local folder, or in a revision of a dataset on the Hugging Face Hub.

Both list relative names and return local paths. A file on the Hub is downloaded on first use into the cache of
huggingface_hub, which resumes interrupted downloads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qkscope.errors import DatasetError, HubError
from qkscope.files.atomic import as_url, is_url

_ATTEMPTS = 3
"""Number of attempts for an interrupted download."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
"""``owner/name``."""
_HUB_URL = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<prefix>.*))?")


class Files(Protocol):
    """The interface of a set of files: relative names, and a local copy of each file."""

    def names(self) -> list[str]:
        """All relative file names, with forward slashes."""

    def path(self, name: str) -> Path:
        """A local path of this file, downloaded if necessary."""

    def identity(self) -> dict[str, str]:
        """A description of the exact source, to record in results."""


@dataclass(frozen=True)
class LocalFiles:
    """Files below a folder."""

    folder: Path

    def names(self) -> list[str]:
        """The names of all files below the folder; links to folders are followed, each folder once."""
        if not self.folder.is_dir():
            problem = "is not a folder" if self.folder.exists() else "does not exist"
            raise DatasetError(f"{self.folder} {problem}; give a dataset folder, a Hub id or an hf:// URL")
        relative_names, visited = [], set()
        for parent, folders, files in os.walk(self.folder, onerror=_raise_unreadable, followlinks=True):
            visited.add(os.path.realpath(parent))
            folders[:] = [name for name in folders if os.path.realpath(Path(parent) / name) not in visited]
            relative_names += [(Path(parent) / file).relative_to(self.folder).as_posix() for file in files]
        return sorted(relative_names)

    def path(self, name: str) -> Path:
        """The file itself."""
        return self.folder / name

    def __str__(self) -> str:
        return str(self.folder)

    def identity(self) -> dict[str, str]:
        """The absolute path of the folder."""
        return {"kind": "folder", "path": str(self.folder.resolve())}


@dataclass(frozen=True)
class HubFiles:
    """Files of one commit of a Hub dataset."""

    repo: str
    revision: str
    commit: str
    listing: tuple[str, ...]

    @classmethod
    def resolve(cls, repo: str, revision: str | None) -> HubFiles:
        """Look up the revision on the Hub and list its files; downloads nothing else."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        requested = revision or "main"
        try:
            commit = str(HfApi().dataset_info(repo, revision=requested).sha)
            listing = HfApi().list_repo_files(repo, revision=commit, repo_type="dataset")
        except RevisionNotFoundError:
            raise DatasetError(f"the Hub dataset {repo} has no revision {requested!r}; {_revisions(repo)}") from None
        except GatedRepoError:
            raise DatasetError(f"the Hub dataset {repo} is gated; request access and run 'hf auth login'") from None
        except RepositoryNotFoundError:
            raise DatasetError(
                f"{repo!r} is neither a local folder nor a Hub dataset; check the spelling, and run 'hf auth login' "
                "if it is private"
            ) from None
        except HFValidationError as error:
            raise DatasetError(f"{repo!r} is neither a local folder nor a Hub id: {one_line(error)}") from None
        except (HfHubHTTPError, OSError, client_error()) as error:
            if status_of(error) == 401:
                raise DatasetError(TOKEN_REFUSED) from None
            raise _unreachable(f"the dataset {repo}", error) from None
        return cls(repo, requested, commit, tuple(sorted(listing)))

    def names(self) -> list[str]:
        """The names of all files of the commit."""
        return list(self.listing)

    def path(self, name: str) -> Path:
        """The cached copy, downloaded if necessary; an interrupted download is resumed."""
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.repo, name, revision=self.commit, repo_type="dataset")
        if isinstance(cached, str):
            return Path(cached)
        # By revision name, not commit, so that the cache also records which commit the name refers to.
        path = self._download(name, self.revision)
        if self.commit not in path.parts:
            raise DatasetError(f"{self.repo} at {self.revision} changed on the Hub meanwhile; rerun the command")
        return path

    def fetch(self, name: str, folder: Path) -> Path:
        """A copy below a folder, not in the cache; downloaded unless an earlier call already did."""
        return self._download(name, self.commit, folder)

    def _download(self, name: str, revision: str, folder: Path | None = None) -> Path:
        """Download one file; an interrupted download is resumed."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()  # the caller shows one progress bar for all files
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                return Path(hf_hub_download(self.repo, name, revision=revision, repo_type="dataset", local_dir=folder))
            except (HfHubHTTPError, OSError, client_error()) as error:
                is_final = isinstance(error, HfHubHTTPError | FileNotFoundError)  # a retry would not help
                if is_final or not attempts_left:
                    raise _unreachable(f"{self.repo}/{name}", error) from None
        raise AssertionError("unreachable")

    def __str__(self) -> str:
        return f"hf://datasets/{self.repo}@{self.revision}"

    def identity(self) -> dict[str, str]:
        """Repository, requested revision and its commit."""
        return {"kind": "hub", "repo": self.repo, "revision": self.revision, "commit": self.commit}


@dataclass(frozen=True)
class Located:
    """Files, and the requested prefix within them."""

    files: Files
    prefix: str = ""


def locate(location: str | os.PathLike[str], revision: str | None = None) -> Located:
    """Find a dataset: an existing folder, ``hf://datasets/owner/name[@revision][/prefix]`` or ``owner/name``."""
    text = os.fspath(location)
    if is_url(text):
        raise DatasetError(f"{as_url(text)} is not a folder; copy it to one, or give a Hub id or an hf:// URL")
    if text.startswith("hf://"):
        return _locate_url(text, revision)
    if revision is None and Path(text).exists():
        return Located(LocalFiles(Path(text)))
    if Path(text).is_dir() and revision is not None:
        raise DatasetError(f"{text} is a local folder, and local folders have no revisions; leave out {revision!r}")
    if HUB_ID.fullmatch(text):
        return Located(_hub(text, revision))
    return Located(LocalFiles(Path(text)))


def _locate_url(url: str, revision: str | None) -> Located:
    match = _HUB_URL.fullmatch(url)
    if match is None:
        raise DatasetError(f"expected hf://datasets/owner/name[@revision][/prefix], got {url!r}")
    return Located(_hub(match["repo"], match["revision"] or revision), (match["prefix"] or "").strip("/"))


def _hub(repo: str, revision: str | None) -> Files:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return LocalFiles(_cached_snapshot(repo, revision))
    return HubFiles.resolve(repo, revision)


def _cached_snapshot(repo: str, revision: str | None) -> Path:
    """The folder of a revision in huggingface_hub's cache, where some of its files may be missing."""
    from huggingface_hub import constants

    requested = revision or "main"
    cache = Path(constants.HF_HUB_CACHE) / f"datasets--{repo.replace('/', '--')}"
    reference = cache / "refs" / requested
    snapshot = cache / "snapshots" / (reference.read_text().strip() if reference.is_file() else requested)
    if not snapshot.is_dir():
        raise DatasetError(
            f"HF_HUB_OFFLINE is set and {repo} at {requested} is not in the cache; unset it, or give a local folder"
        )
    return snapshot


def _revisions(repo: str) -> str:
    """The revisions of a dataset, to help correct a misspelled one."""
    from huggingface_hub import HfApi

    try:
        branches = sorted(branch.name for branch in HfApi().list_repo_refs(repo, repo_type="dataset").branches)
    except Exception as error:  # the list is optional help; a failure here must not hide the first error
        return f"its revisions could not be listed ({one_line(error)})"
    return f"it has {', '.join(branches[:30]) or 'none'}"


def _unreachable(name: str, error: Exception) -> DatasetError:
    return DatasetError(
        f"cannot read {name} from the Hub ({type(error).__name__}: {one_line(error)}); check the network and try "
        "again (finished files are kept), or give the path of a local folder"
    )


def _raise_unreadable(error: OSError) -> None:
    raise DatasetError(f"{error.filename} cannot be read ({error.strerror})") from None


NO_TOKEN = "no Hub token found; run 'hf auth login', or set HF_TOKEN"
TOKEN_REFUSED = "the Hub does not accept this token; run 'hf auth login' again (HF_TOKEN, if it is set, comes first)"


def one_line(error: BaseException) -> str:
    """The text of an error, in one line and without the user's token, which HTTP errors may contain."""
    from huggingface_hub import get_token

    text, token = " ".join(str(error).split()), get_token()
    return (text.replace(token, "…") if token else text)[:300]


def client_error() -> type[Exception]:
    """The base error of the HTTP client behind huggingface_hub, which differs between versions of huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


def status_of(error: BaseException) -> int | None:
    """The HTTP status of the response behind an error; None if there was no response."""
    return getattr(getattr(error, "response", None), "status_code", None)


@contextmanager
def pushing(repo: str) -> Iterator[None]:
    """Turn errors of the client, while files are sent to a repository, into a ``HubError``."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        yield
    except LocalTokenNotFoundError:
        raise HubError(NO_TOKEN) from None
    except (HfHubHTTPError, OSError, client_error(), RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.filename:
            raise  # it is about a local file
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
        raise HubError(_explanation(repo, cause)) from None


def _explanation(repo: str, error: BaseException) -> str:
    """The error text for the HTTP status of the response."""
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
