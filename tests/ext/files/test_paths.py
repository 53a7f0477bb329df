"""The files that paths, directories and globs match, and the errors if nothing matches."""

import os
from pathlib import Path

import pytest

from lightning_dilated.data import ByteDataModule
from lightning_dilated.ext.files.files import HINT, collect_files, path_list


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "a/b/c.txt",
        "a/b/d.md",
        "a/z.txt",
        "a-b/x.txt",
        "top.txt",
        ".hidden.txt",
        ".git/config",
        "a/.e/f.txt",
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path


def names(tree: Path, paths: list[str], suffixes: list[str] | None = None) -> list[str]:
    return [os.path.relpath(file, tree) for file in collect_files(paths, suffixes)]


@pytest.mark.parametrize(
    ("patterns", "suffixes", "expected"),
    [
        (["."], None, ["a-b/x.txt", "a/b/c.txt", "a/b/d.md", "a/z.txt", "top.txt"]),
        (["."], [".md"], ["a/b/d.md"]),
        (["top.txt", "a"], None, ["top.txt", "a/b/c.txt", "a/b/d.md", "a/z.txt"]),
        (["a/z.txt", "a", "a/*.txt"], None, ["a/z.txt", "a/b/c.txt", "a/b/d.md"]),
        (["a/b/d.md"], [".txt"], ["a/b/d.md"]),
        (["*.txt"], None, ["top.txt"]),
        (["*/*.txt"], None, ["a-b/x.txt", "a/z.txt"]),
        (["**/*.txt"], None, ["a-b/x.txt", "a/b/c.txt", "a/z.txt", "top.txt"]),
        (["a/**"], None, ["a/b/c.txt", "a/b/d.md", "a/z.txt"]),
        (["a*/**/?.txt"], None, ["a-b/x.txt", "a/b/c.txt", "a/z.txt"]),
        (["**/b/**/c.*"], None, ["a/b/c.txt"]),
        (["a/b/[cd].*"], None, ["a/b/c.txt", "a/b/d.md"]),
        ([".git", ".hidden.txt"], None, [".git/config", ".hidden.txt"]),
    ],
)
def test_paths_stand_for(tree: Path, patterns: list[str], suffixes: list[str] | None, expected: list[str]) -> None:
    assert names(tree, [str(tree / pattern) for pattern in patterns], suffixes) == expected


def test_relative_and_home_paths(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    monkeypatch.setenv("HOME", str(tree))
    assert names(tree, ["**/d.md"]) == names(tree, ["~/a/b/d.md"]) == names(tree, ["~/**/*.md"]) == ["a/b/d.md"]


def test_a_name_with_brackets_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x[1].txt").write_text("x")
    assert names(tmp_path, [str(tmp_path / "x[1].txt")]) == ["x[1].txt"]


@pytest.mark.parametrize("pattern", ["", "**", "**/*.txt"])
def test_link_loops_end_and_links_are_followed(
    tree: Path, tmp_path_factory: pytest.TempPathFactory, pattern: str
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "far.txt").write_text("far")
    for link in ("a/up", "a/up2", "a/b/up"):  # with several loops, following the links would never end
        (tree / link).symlink_to(tree, target_is_directory=True)
    (tree / "far").symlink_to(other, target_is_directory=True)
    files = names(tree, [str(tree / pattern)])
    assert [name for name in files if name.endswith(".txt")] == [
        "a-b/x.txt",
        "a/b/c.txt",
        "a/z.txt",
        "far/far.txt",
        "top.txt",
    ]


@pytest.mark.parametrize(
    ("path", "suffixes", "message"),
    [
        ("missing.txt", None, "missing.txt does not exist"),
        ("top.txt/b", None, "top.txt/b does not exist"),
        ("no\0name", None, "does not exist"),
        ("*.nothing", None, r"glob .*\*\.nothing matches no regular file"),
        ("**/*.nothing", None, "matches no regular file"),
        ("gone/**", None, "matches no regular file"),
        ("a*", None, "matches no regular file"),
        ("empty", None, "directory .*empty holds no regular files"),
        ("a", [".py", ".rs"], r"holds no regular files ending in \.py, \.rs"),
    ],
)
def test_nothing_found(tree: Path, path: str, suffixes: list[str] | None, message: str) -> None:
    (tree / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=message) as caught:
        collect_files([str(tree / path)], suffixes)
    assert HINT in str(caught.value)
    with pytest.raises(FileNotFoundError, match=message):
        ByteDataModule(str(tree / path), suffixes=suffixes).check()


def test_a_dangling_link_is_named(tree: Path) -> None:
    (tree / "a" / "link.txt").symlink_to(tree / "gone")
    with pytest.raises(FileNotFoundError, match=r"a/link\.txt is a link to a file that does not exist"):
        collect_files([str(tree)])
    assert names(tree, [str(tree)], [".md"]) == ["a/b/d.md"]


def test_special_files(tree: Path) -> None:
    os.mkfifo(tree / "a" / "fifo")
    for path in (str(tree / "a" / "fifo"), os.devnull):
        with pytest.raises(ValueError, match="neither a regular file nor a directory"):
            collect_files([path])
    assert "a/fifo" not in names(tree, [str(tree)])
    assert "a/fifo" not in names(tree, [str(tree / "a" / "*")])


def test_links_to_themselves(tree: Path) -> None:
    (tree / "a" / "loop.txt").symlink_to("loop.txt")
    for path in (tree / "a", tree / "a" / "loop.txt", tree / "a" / "**"):
        if path.name == "**":
            assert "a/loop.txt" not in names(tree, [str(path)])
            continue
        with pytest.raises(
            FileNotFoundError, match=r"loop\.txt (does not exist|is a link to a file that does not exist)"
        ):
            collect_files([str(path)])


def test_special_files_that_are_named_like_data(tree: Path) -> None:
    os.mkfifo(tree / "a" / "fifo.fa")
    with pytest.raises(ValueError, match=r"fifo\.fa is neither a regular file nor a directory"):
        collect_files([str(tree / "a")], [".fa"])


def test_unreadable_files_and_directories(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the tests may run as root, for whom permissions are not checked
    def denied(path: str, *_: object) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not path.endswith("z.txt"))
        with pytest.raises(PermissionError, match=r"a/z\.txt cannot be read by this user"):
            ByteDataModule(str(tree / "a")).check()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", denied)
        with pytest.raises(PermissionError, match="cannot be listed by this user"):
            ByteDataModule(str(tree / "a")).check()
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", denied)
        with pytest.raises(PermissionError, match="cannot be reached by this user"):
            collect_files([str(tree / "a")])


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        ([], ValueError, "data.paths is an empty list"),
        ((), ValueError, "data.paths is an empty list"),
        ("", ValueError, "holds an empty string"),
        (["a", ""], ValueError, "holds an empty string"),
        ([None], TypeError, r"holds None \(NoneType\)"),
        (["a", 3], TypeError, r"holds 3 \(int\)"),
        (3, TypeError, r"holds 3 \(int\)"),
        (b"a", TypeError, r"holds b'a' \(bytes\)"),
    ],
)
def test_values_that_are_no_paths(paths: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ByteDataModule(paths)  # type: ignore[arg-type]


def test_path_objects_are_taken_too() -> None:
    assert path_list(Path("a") / "b") == path_list([Path("a/b")]) == ["a/b"]
    assert path_list(None) is None


def test_standard_library() -> None:
    files = collect_files(None)
    parts = {part for file in files for part in Path(file).parts}
    assert len(files) > 200
    assert {"json", "argparse.py", "asyncio"} <= parts
    assert not parts & {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    assert all(file.endswith(".py") for file in files)
    assert collect_files(None) == files


def test_missing_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for root in (tmp_path, tmp_path / "python.zip"):
        monkeypatch.setattr("sysconfig.get_paths", lambda root=root: {"stdlib": str(root)})
        with pytest.raises(FileNotFoundError, match=r"standard library has no source files in .*data\.paths"):
            ByteDataModule().check()
