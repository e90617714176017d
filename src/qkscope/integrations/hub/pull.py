"""Pull a run or results from the Hub into a folder, which appears only once complete and verified by checksums."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

from qkscope.errors import DatasetError, HubError
from qkscope.files.atomic import check_writable, sync
from qkscope.files.checksums import digest
from qkscope.files.hub import HubFiles, locate
from qkscope.files.locks import HOLDER, held
from qkscope.files.pushed import HUB_MARK, HubMark, Pushed, find_pushed
from qkscope.options import check_path


def pull(repo: str, folder: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Download a pushed run or results from ``owner/name`` into a new folder; returns it.

    Files are collected in a hidden folder next to the target, which is renamed when all files are there and match their
    checksums. Calling ``pull`` again resumes an interrupted pull.
    """
    if not isinstance(repo, str):
        raise HubError(f"expected the owner/name of a pushed run or results, got {repo!r:.60}")
    check_path(folder, "folder")
    target = Path(folder)
    check_writable(target)
    located = locate(repo, revision)
    if not isinstance(located.files, HubFiles):
        raise HubError(
            f"{repo} is not on the Hub; give the owner/name of a pushed run or results, and no HF_HUB_OFFLINE"
        )
    pushed = find_pushed(located)
    if pushed is None:
        raise HubError(f"{repo} was not pushed by qkscope: it has no {HUB_MARK}; open or analyse it as a dataset")
    pushed.check_finished()
    if target.is_dir() and any(target.iterdir()):
        _check_same(target, pushed.mark, repo)
        return target
    _collect(pushed, located.files, target)
    return target


def _check_same(target: Path, mark: HubMark, repo: str) -> None:
    """Raise an error unless a folder already contains the pushed files."""
    mark_file = target / HUB_MARK
    if not mark_file.is_file() or mark_file.read_bytes() != mark.content:
        raise HubError(f"{target} contains something other than {repo}; choose another folder")
    for name, file in mark.files.items():
        if not (target / name).is_file() or digest(target / name) != file.sha256:
            raise HubError(f"{target / name} differs from what was pushed; move {target} away, and pull again")


def _collect(pushed: Pushed, files: HubFiles, target: Path) -> None:
    """Fetch all files into a folder next to the target, and rename it when it is complete."""
    unfinished = target.with_name(f".{target.name}.pulling")
    if unfinished.is_symlink():
        raise HubError(f"{unfinished} is a symbolic link, which a pull never creates; remove it")
    with held(unfinished):
        names = [HUB_MARK, *pushed.mark.files]
        pushed.download(list(pushed.mark.files), partial(files.fetch, folder=unfinished))
        (unfinished / HUB_MARK).write_bytes(pushed.mark.content)
        _remove_unlisted(unfinished, names)
        for name in names:
            sync(unfinished / name)
        (unfinished / HOLDER).unlink(missing_ok=True)
        try:
            unfinished.rename(target)
        except OSError as error:
            raise DatasetError(
                f"cannot rename {unfinished} to {target} ({error.strerror}); choose another folder"
            ) from None
        sync(target.parent)


def _remove_unlisted(folder: Path, names: list[str]) -> None:
    """Remove leftovers of earlier attempts: the client's cache, and files of other commits."""
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(folder).as_posix() not in names:
            path.unlink()
