"""A JSON file is replaced as a whole or left as it was."""

import json

import pytest

from lcfl.files import write_json


def test_a_failed_write_changes_nothing(tmp_path):
    path = tmp_path / "folder" / "file.json"
    write_json(path, {"a": [1]})
    with pytest.raises(TypeError):
        write_json(path, {"a": [2], "b": object()})
    assert json.loads(path.read_text()) == {"a": [1]}
    assert [each.name for each in path.parent.iterdir()] == ["file.json"]
    write_json(path, {"a": [3]})
    assert json.loads(path.read_text()) == {"a": [3]}
