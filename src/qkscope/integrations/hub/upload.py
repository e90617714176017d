"""Upload files to a dataset repository on the Hub: large files first, in groups, then commits that list all files.

After an interruption, files that already arrived are not sent again: the Hub identifies large files by SHA-256 even
before a commit lists them, and small ones are part of a commit. Up to ``_FILES_PER_COMMIT`` files appear in one step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.errors import HubError
from qkscope.files.checksums import digest
from qkscope.files.hub import HUB_ID, TOKEN_REFUSED, HubFiles, one_line, pushing
from qkscope.progress import progress

_FILES_PER_COMMIT = 1000
"""Commits of more files may take longer than the Hub waits."""
_FILES_PER_GROUP, _BYTES_PER_GROUP = 64, 2**26
"""Largest number of files, or bytes, between two updates of the progress bar."""
_ATTRIBUTES = ".gitattributes"
"""A file that the Hub itself adds to every repository."""


@dataclass(frozen=True)
class Upload:
    """One file of the repository, as a local file or as bytes."""

    name: str
    content: Path | bytes
    sha256: str
    size: int

    @classmethod
    def of(cls, name: str, content: Path | bytes, sha256: str | None = None) -> Upload:
        """A file with its digest, which is computed unless given."""
        if isinstance(content, bytes):
            return cls(name, content, hashlib.sha256(content).hexdigest(), len(content))
        return cls(name, content, sha256 or digest(content), content.stat().st_size)

    @property
    def git_sha1(self) -> str:
        """The SHA-1 by which git identifies the content."""
        content = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Branch:
    """A branch of a repository as it is on the Hub."""

    repo: str
    revision: str
    commit: str
    digests: Mapping[str, str]
    """Digest of each file: SHA-256 for a large one, git's SHA-1 for a small one."""

    @property
    def files(self) -> HubFiles:
        """The files of the branch, for reading."""
        return HubFiles(self.repo, self.revision, self.commit, tuple(sorted(self.digests)))

    @property
    def names(self) -> set[str]:
        """The names of all files except the Hub's own."""
        return set(self.digests) - {_ATTRIBUTES}

    def has(self, upload: Upload) -> bool:
        """True if the branch already has a file, with this content."""
        present = self.digests.get(upload.name)
        if present is None:
            return False
        return present == (upload.sha256 if len(present) == len(upload.sha256) else upload.git_sha1)


def check_repository_name(repo: str, revision: str) -> None:
    """Raise an error for names that the Hub does not allow."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        if not isinstance(repo, str) or HUB_ID.fullmatch(repo) is None:
            raise HFValidationError("expected owner/name")
        validate_repo_id(repo)
    except HFValidationError as error:
        raise HubError(f"{repo!r} cannot be the name of a repository ({one_line(error)})") from None
    if not revision or set(revision) & set(" ~^:?*[\\") or ".." in revision or revision.startswith(("-", "/", "refs/")):
        raise HubError(f"{revision!r} cannot be the name of a branch; use letters, digits, dots and dashes")


def signed_in(repo: str) -> str:
    """The name of the user whose token is used; an error if there is none, or if the Hub does not accept it."""
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise HubError("HF_HUB_OFFLINE is set, so nothing can be pushed; unset it")
    token = get_token()
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise HubError(TOKEN_REFUSED)
    with pushing(repo):
        return str(HfApi().whoami()["name"])


def existing(repo: str, revision: str) -> Branch | None:
    """A branch of a repository; None if there is no such repository or branch."""
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    with pushing(repo):
        try:
            commit = str(HfApi().dataset_info(repo, revision=revision).sha)
            tree = list(HfApi().list_repo_tree(repo, recursive=True, revision=commit, repo_type="dataset"))
        except GatedRepoError:
            raise
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return None
    files = [file for file in tree if isinstance(file, RepoFile)]
    return Branch(repo, revision, commit, {f.path: f.lfs.sha256 if f.lfs else f.blob_id for f in files})


def create(repo: str, revision: str, *, private: bool) -> Branch:
    """Create the repository and the branch, if they do not exist."""
    from huggingface_hub import HfApi

    with pushing(repo):
        HfApi().create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        if revision != "main":
            HfApi().create_branch(repo, branch=revision, repo_type="dataset", exist_ok=True)
    branch = existing(repo, revision)
    if branch is None:
        raise HubError(f"{repo} exists, but this token may not see it; choose another name or token")
    return branch


def send(branch: Branch, uploads: Sequence[Upload], message: str) -> str:
    """Make a branch contain exactly these files; returns its commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()  # one progress bar is shown for all files
    api = HfApi()
    target: Any = {"repo_type": "dataset", "revision": branch.revision}
    changed = [upload for upload in uploads if not branch.has(upload)]
    surplus = sorted(branch.names - {upload.name for upload in uploads})
    operations: list[Any] = [CommitOperationDelete(name, is_folder=False) for name in surplus]
    commit = branch.commit
    total, sent = sum(upload.size for upload in changed), 0
    with pushing(branch.repo), progress("sending", "B", delay=2.0) as on_progress:
        for group in _groups(changed):
            added = [CommitOperationAdd(upload.name, upload.content) for upload in group]
            api.preupload_lfs_files(branch.repo, added, free_memory=False, **target)
            operations += added
            sent += sum(upload.size for upload in group)
            on_progress(sent, total)
        for first in range(0, len(operations), _FILES_PER_COMMIT):
            part = operations[first : first + _FILES_PER_COMMIT]
            commit = api.create_commit(branch.repo, part, commit_message=message, parent_commit=commit, **target).oid
    return commit


def _groups(uploads: Iterable[Upload]) -> Iterator[list[Upload]]:
    """Yield groups of consecutive files, small enough for one update of the progress bar."""
    group: list[Upload] = []
    for upload in uploads:
        if len(group) == _FILES_PER_GROUP or (group and sum(u.size for u in group) + upload.size > _BYTES_PER_GROUP):
            yield group
            group = []
        group.append(upload)
    if group:
        yield group
