"""What outlives a borrowed machine: results, their log, and the caches of compiled kernels and of chosen plans.

A machine that is lent starts bare. One folder travels from call to call: `--out` of one is `--resume` of the next.
Needs the standard library only.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["MOST_BYTES", "Kept"]

#: Size of the archive of caches, which fits the limit of one file that comes back.
MOST_BYTES = 15 << 20
ARCHIVE = "caches.zip"


class Kept:
    """The folder of results and caches of a call. Local.

    Parameters
    ----------
    out
        Folder to write to, or None: caches are then where CuPy and halograd keep them, and nothing is copied.
    resume
        Folder of an earlier call; its files are copied to `out` unless that has its own, its caches are unpacked.

    Raises
    ------
    FileNotFoundError
        If `resume` is no folder.
    """

    def __init__(self, out: Path | None, resume: Path | None = None) -> None:
        self._out = out
        self._caches = Path(tempfile.gettempdir()) / f"halograd-gpu-caches-{os.getuid()}"
        if resume is not None and not resume.is_dir():
            raise FileNotFoundError(f"--resume: expected the folder of an earlier call, got none at {resume}; carry it")
        if out is None:
            return
        out.mkdir(parents=True, exist_ok=True)
        self._caches.mkdir(parents=True, exist_ok=True)
        for path in sorted(resume.iterdir()) if resume is not None else ():
            if path.is_file() and not (out / path.name).exists():
                shutil.copyfile(path, out / path.name)
        if (out / ARCHIVE).exists():
            with zipfile.ZipFile(out / ARCHIVE) as archive:
                archive.extractall(self._caches)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which CuPy and halograd use these caches."""
        if self._out is None:
            return {}
        return {"CUPY_CACHE_DIR": str(self._caches / "cupy"), "HALOGRAD_CACHE": str(self._caches / "halograd")}

    def save(self) -> None:
        """Write the caches as one archive, beside the old one and then in its place: plans first, then the newest."""
        if self._out is None:
            return
        paths = [path for path in self._caches.rglob("*") if path.is_file()]
        paths.sort(key=lambda path: ("cupy" in path.parts, -path.stat().st_mtime))
        fresh = self._out / f"{ARCHIVE}.fresh"
        with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in paths:
                assert archive.fp is not None
                if archive.fp.tell() + path.stat().st_size > MOST_BYTES:  # packed it is smaller
                    break
                archive.write(path, path.relative_to(self._caches))
        fresh.replace(self._out / ARCHIVE)
