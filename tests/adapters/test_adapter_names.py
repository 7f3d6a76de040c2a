"""Names of adapters, and the folders that they stand for."""

import os
from pathlib import Path
from typing import Any

import pytest
from jitney.errors import InvalidArgumentError
from jitney.read_config import make_config
from jitney.text.intake import adapter_names, check_adapter


def test_a_name_that_no_file_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config({"model": "m", "adapters": str(tmp_path)})
    for name in ("x" * 300, "ä" * 200):
        with pytest.raises(InvalidArgumentError, match=r"lora_name is .* of at most 255 bytes"):
            check_adapter(name, config)

    stat = os.stat

    def refuse(path: Any, **more: Any) -> os.stat_result:
        if str(path).endswith("adapter_config.json"):
            raise PermissionError
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(InvalidArgumentError, match="must be the name of an adapter"):
        check_adapter("closed", config)


def test_files_are_found_as_long_as_they_are_there(tmp_path: Path) -> None:
    config = make_config({"model": "m", "adapters": str(tmp_path)})
    folder = tmp_path / "new"
    with pytest.raises(InvalidArgumentError, match="lora_name is 'new', but must be the name of"):
        check_adapter("new", config)
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    check_adapter("new", config)
    assert adapter_names(config) == ["new"]
    for name in ("", ".", "..", "new/", "../new", "new/../new", ".new", "a\0b", "neu"):
        with pytest.raises(InvalidArgumentError, match="lora_name"):
            check_adapter(name, config)
    with pytest.raises(InvalidArgumentError, match="did you mean 'new'"):
        check_adapter("newt", config)
    with pytest.raises(InvalidArgumentError, match="lora_name"):
        check_adapter("new", make_config({"model": "m"}))
    folder.rename(tmp_path / "other")
    with pytest.raises(InvalidArgumentError, match="lora_name is 'new', but must be the name of"):
        check_adapter("new", config)
