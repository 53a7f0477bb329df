"""Stores for tests of URLs: files copied to memory:// or to moto's server for s3://, and records of requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

#: AWS credentials that need neither configuration files nor the metadata service; variables that name a proxy
AWS = {
    "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
PROXIES = [x for name in ("http_proxy", "https_proxy", "all_proxy") for x in (name, name.upper())]


def upload(folder: str | Path, url: str) -> str:
    """Copy the files in a local folder and its subfolders to a URL. Return the URL."""
    fs, root = fsspec.core.url_to_fs(url)
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            fs.pipe_file(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    return url


@contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of an empty bucket on moto's server (127.0.0.1). Environment variables select this server."""
    from moto.server import ThreadedMotoServer

    for name in PROXIES:
        patch.delenv(name, raising=False)
    for name, value in AWS.items():
        patch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # may be connected to a different server
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        fs = fsspec.filesystem("s3", skip_instance_cache=True)
        fs.mkdir("bucket")
        yield "s3://bucket"
    finally:
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()


class Fetched:
    """Records requests for contents in a file system: (path, first byte, end byte), where None means the whole file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
        self.requests: list[tuple[str, int | None, int | None]] = []
        cls = fsspec.get_filesystem_class(scheme)
        cat = cls.cat_file

        def counted(fs: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
            self.requests.append((path, start, end))
            return cat(fs, path, start=start, end=end, **options)

        monkeypatch.setattr(cls, "cat_file", counted)

    def count(self) -> int:
        """Return the number of bytes requested since the last call."""
        total = sum(stop - start for _, start, stop in self.requests)
        self.requests.clear()
        return total


def equal(a: Any, b: Any) -> bool:
    """Return whether two samples are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[x], b[x]) for x in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def same_samples(local: Any, remote: Any, splits: tuple[str, ...] = ("train", "val", "test")) -> None:
    """Assert that two DataModules have the same samples in the same order."""
    for split in splits:
        a, b = local.dataset(split), remote.dataset(split)
        assert len(a) == len(b) > 0
        assert all(equal(a[i], b[i]) for i in range(len(a)))


def tokens(path: Path, count: int, vocab_size: int = 1000) -> Path:
    np.random.default_rng(0).integers(0, vocab_size, count).astype(np.uint16).tofile(path)
    return path
