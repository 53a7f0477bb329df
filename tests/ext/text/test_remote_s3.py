"""DataModules on s3:// of moto's server: the samples of local files, on one rank and on two, and by range."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_dilated.data.opener import FileOpener
from lightning_dilated.ext.text.remote import BLOCK

from ...data.runs import run
from .stores import equal, s3_server, same_samples, tokens, upload
from .test_remote_data import genome_data, slide_data, token_data

pytest.importorskip("s3fs", reason="s3:// is read by s3fs: pip install 'lightning-dilated[s3]'")
pytest.importorskip(
    "moto.server", reason="the tests of s3:// need moto's server: pip install 'moto[s3]' flask flask-cors"
)

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as url:
        yield url


@pytest.fixture
def root(bucket: str, tmp_path: Path) -> str:
    return f"{bucket}/{tmp_path.name}"


@pytest.fixture
def cached(tmp_path: Path) -> dict[str, str]:
    return {"cache_dir": str(tmp_path / "cache")}


class Bytes:
    """Counts bytes of objects that s3fs fetches in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import s3fs

        self.count, cat = 0, s3fs.S3FileSystem._cat_file

        async def counted(fs: Any, path: str, **options: Any) -> bytes:
            data = await cat(fs, path, **options)
            self.count += len(data)
            return data

        monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", counted)


def test_tokens(root: str, tmp_path: Path, cached: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens(tmp_path / "a.bin", 8 * BLOCK // 2)
    upload(tmp_path, root)
    fetched = Bytes(monkeypatch)
    options = {"seq_len": 10_000, "scan": False}
    local, remote = token_data(str(tmp_path), **options), token_data(root, **options, **cached)
    assert equal(remote.dataset("train")[300], local.dataset("train")[300])
    assert fetched.count <= 3 * BLOCK  # the file has 8 blocks
    same_samples(local, remote)
    assert fetched.count == 8 * BLOCK
    assert remote.dataset("train").fingerprint() == local.dataset("train").fingerprint()


def test_slides(root: str, folder: str, cached: dict[str, str]) -> None:
    upload(folder, root)
    same_samples(slide_data(folder), slide_data(root, **cached))


@pytest.mark.parametrize("index", [True, False])
def test_genome(root: str, lambda_virus: str, cached: dict[str, str], index: bool) -> None:
    local = genome_data(lambda_virus)
    local.check()
    if not index:
        Path(f"{lambda_virus}.fai").unlink()
    upload(Path(lambda_virus).parent, root)
    remote = genome_data(f"{root}/lambda_virus.fa", **cached)
    same_samples(local, remote)
    assert bool(list(Path(cached["cache_dir"]).glob("*.fai")))


@pytest.mark.parametrize("kind", ["tokens", "slides"])
def test_workers_after_a_fork(root: str, tmp_path: Path, folder: str, cached: dict[str, str], kind: str) -> None:
    tokens(tmp_path / "a.bin", 2000)
    make, source = (token_data, str(tmp_path)) if kind == "tokens" else (slide_data, folder)
    local, remote = make(source), make(upload(source, root), num_workers=2, **cached)
    remote.setup("fit")  # a forked worker lacks the thread of s3fs, which this process has used
    batches = list(remote.train_dataloader())
    assert all(equal(a, b) for a, b in zip(local.train_dataloader(), batches, strict=True))


class Ranks(Callback):
    """Writes the batches of each rank to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (self.folder / f"rank{trainer.global_rank}").write_text(repr([list(batch) for _, batch in pl_module.seen]))


def test_two_ranks_and_a_run_that_goes_on(root: str, tmp_path: Path, cached: dict[str, str]) -> None:
    tokens(tmp_path / "a.bin", 2000)
    upload(tmp_path, root)
    whole, _ = run(token_data(str(tmp_path)), max_steps=20)
    remote = token_data(root, batch_size=1, **cached)
    run(remote, callbacks=[Ranks(tmp_path)], max_steps=7, strategy="ddp_fork", devices=2)
    halves = [eval((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == [list(batch) for _, batch in whole.seen[:7]]
    _, trainer = run(token_data(root, **cached), max_steps=7)
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed, _ = run(token_data(root, **cached), tmp_path / "stopped.ckpt", max_steps=20)
    assert resumed.seen == whole.seen[7:]


def test_a_changed_object(root: str, tmp_path: Path, cached: dict[str, str]) -> None:
    tokens(tmp_path / "a.bin", 2 * BLOCK)
    upload(tmp_path, root)
    samples = token_data(root, scan=False, **cached).dataset("train")
    samples[0]
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[::-1])
    upload(tmp_path, root)
    with pytest.raises(ValueError, match=r"a\.bin had .* keep the data unchanged while it is in use"):
        samples[len(samples) - 1]
    fresh, local = (token_data(x, vocab_size=65536, **cached).dataset("train") for x in (root, str(tmp_path)))
    assert equal(fresh[0], local[0])


def test_what_is_not_there(bucket: str, root: str, tmp_path: Path) -> None:
    opener = FileOpener(str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=r"s3://no-such-bucket/a\.bin is no file .*spelling of bucket"):
        opener.expand("s3://no-such-bucket/a.bin", None, "hint")
    with pytest.raises(FileNotFoundError, match=r"s3://no-such-bucket/\*\.bin .*hint|is no file"):
        opener.expand("s3://no-such-bucket/*.bin", None, "hint")
    with pytest.raises(FileNotFoundError, match=r"the glob s3://bucket/none/\*\.bin matches no file .*; hint"):
        opener.expand(f"{bucket}/none/*.bin", None, "hint")


def test_a_server_that_is_gone(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    waits: list[float] = []
    monkeypatch.setattr("lightning_dilated.ext.text.remote.time.sleep", waits.append)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # no server listens there
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(ConnectionError, match=rf"{root}/a\.bin could not be read in 5 tries .*last checkpoint"):
            FileOpener(str(tmp_path)).size(f"{root}/a.bin")
        assert len(waits) == 4
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_no_login(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(
            PermissionError, match=rf"{root}/a\.bin may not be read .* set AWS_PROFILE, .*FSSPEC_S3_ANON"
        ):
            FileOpener(str(tmp_path)).size(f"{root}/a.bin")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
