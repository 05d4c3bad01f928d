import json
import os

import pytest

from tritonpack.cli.files import STANDARD_OUTPUT, make_folder, require_writable, write_json, write_whole


def test_replaced_file_is_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("a longer content than the next")
    path.chmod(0o640)
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_new_file_has_default_mode(tmp_path):
    (tmp_path / "usual").touch()
    write_whole(tmp_path / "a", b"1")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_failed_write_leaves_only_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_link_is_kept_and_its_target_replaced(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_device_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    require_writable(pipe)
    write_whole(pipe, "text")
    assert os.read(reader, 10) == b"text"
    assert pipe.is_fifo()
    os.close(reader)


def test_dash_is_standard_output(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    require_writable(STANDARD_OUTPUT)
    write_json(STANDARD_OUTPUT, [1])
    assert json.loads(capsys.readouterr().out) == [1]
    assert list(tmp_path.iterdir()) == []


def test_require_writable_makes_folders_and_changes_no_file(tmp_path):
    (tmp_path / "there").write_text("old")
    require_writable(tmp_path / "there")
    require_writable(tmp_path / "new")
    require_writable(tmp_path / "folder" / "in" / "folder")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "in", "there"]
    assert (tmp_path / "there").read_text() == "old"


def test_output_that_is_an_input_is_refused(tmp_path):
    source = tmp_path / "a.json"
    source.write_text("[1]")
    (tmp_path / "link").symlink_to(source)
    os.link(source, tmp_path / "hard")
    for output in (source, tmp_path / "link", tmp_path / "hard", tmp_path / "." / "a.json"):
        with pytest.raises(ValueError, match=r"it is the same file as .*a\.json, which would be lost"):
            require_writable(output, inputs=[source])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file/a.json", r"--json .*a\.json can't be written: (File exists|Not a directory); name another file"),
        (".", "it is a folder; name a file"),
    ],
)
def test_refuses_what_cannot_be_written(tmp_path, path, message):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=message):
        require_writable(tmp_path / path)


def test_folder_is_made_and_its_files_are_checked(tmp_path):
    make_folder(tmp_path / "a" / "b", "picture.png")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "a" / "picture.png").mkdir()
    with pytest.raises(ValueError, match=r"--out .*picture\.png can't be written: it is a folder; name a file"):
        make_folder(tmp_path / "a", "picture.png")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out .*file can't be made: File exists; name another folder"):
        make_folder(tmp_path / "file")
