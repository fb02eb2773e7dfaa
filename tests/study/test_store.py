import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from bireme.errors import UserError
from bireme.study.grid import Options, Study, study_of
from bireme.study.store import STUDY_FILE, Folder, changed_setting

WriteRun = Callable[..., dict[str, Any]]


def links(**options: Any) -> Study:
    return study_of("links", Options(**options), 2)


def refusal(directory: Path, study: Study) -> str:
    with pytest.raises(UserError) as error, Folder(directory, study):
        pass
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_finished_cell_is_found_again_and_an_unfinished_one_makes_way(tmp_path: Path, write_run: WriteRun) -> None:
    study = links(links="1gbit", steps=2)
    first, second, third = study.cells
    with Folder(tmp_path / "new" / "study", study) as folder:
        assert orjson.loads((folder.directory / STUDY_FILE).read_bytes())["status"] == "running"
        folder.finish(first, write_run(first, folder.run_directory(first)))
        write_run(second, folder.run_directory(second))  # killed before it was finished
    with Folder(tmp_path / "new" / "study", study) as folder:
        found = folder.finished(first)
        assert found is not None and found[0]["link"] == "unlimited" and found[1].world_size == 1
        assert folder.finished(second) is None and folder.finished(third) is None
        folder.prepare(second)
        assert not folder.run_directory(second).exists()
        folder.finish(second, write_run(second, folder.run_directory(second)))
        assert folder.finished(second) is not None


def test_damaged_cells_are_run_again(tmp_path: Path, write_run: WriteRun) -> None:
    study = links(links="1gbit", steps=2)
    cell = study.cells[0]
    marker = tmp_path / "study" / "cells" / f"{cell.key}.json"
    with Folder(tmp_path / "study", study) as folder:
        folder.finish(cell, write_run(cell, folder.run_directory(cell)))
        good = marker.read_bytes()
        other = orjson.loads(good)
        other["cell"]["steps"] = 3
        for bad in (b"", b"[]", b"{}", b"\xff", orjson.dumps(other)):
            marker.write_bytes(bad)
            assert folder.finished(cell) is None
        marker.write_bytes(good)
        assert folder.finished(cell) is not None
        (folder.run_directory(cell) / "steps.jsonl").write_text("")
        assert folder.finished(cell) is None
        shutil.rmtree(folder.run_directory(cell))
        assert folder.finished(cell) is None


def test_the_folder_of_another_study_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "study"
    with Folder(directory, links(steps=5)):
        pass
    with Folder(directory, links(steps=5, links="10mbit")):  # more of what it varies
        pass
    assert "holds the study of links, not of ranks" in refusal(directory, study_of("ranks", Options(steps=5), 2))
    assert "holds a study with steps 5, not 20" in refusal(directory, links())
    assert "with sequence_length none, not 64" in refusal(directory, links(steps=5, sequence_length=64))
    assert "with cores_per_node 1, not 4" in refusal(directory, links(steps=5, cores_per_node=4))


def test_foreign_folders_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is not a directory" in refusal(tmp_path / "file", links())
    assert "cannot use" in refusal(tmp_path / "file" / "below", links())

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    assert "is not empty and holds no study" in refusal(foreign, links())
    assert [each.name for each in foreign.iterdir()] == ["notes.txt"]

    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".git").mkdir()
    assert "is not empty" in refusal(tmp_path / "hidden", links())

    (tmp_path / "empty" / "cells").mkdir(parents=True)  # killed before it had begun
    with Folder(tmp_path / "empty", links()):
        pass

    for text, said in (
        ("{", "is damaged"),
        ("[]", "is not a study of bireme"),
        ('{"format": "bireme-study"}', "is not a study of bireme"),
        ('{"format": "bireme-run", "settings": {}}', "is not a study of bireme"),
        ('{"format": "bireme-study", "settings": {}, "version": 9, "name": "links"}', "has version 9"),
        ('{"format": "bireme-study", "settings": {}, "version": 1, "name": "links"}', "with nodes unknown, not 2"),
    ):
        (tmp_path / "empty" / STUDY_FILE).write_text(text)
        assert said in refusal(tmp_path / "empty", links())
        assert (tmp_path / "empty" / STUDY_FILE).read_text() == text


def test_a_folder_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    with Folder(tmp_path / "study", links()):
        assert "another process runs the study" in refusal(tmp_path / "study", links())
    with Folder(tmp_path / "study", links()):
        pass


def test_an_axis_that_came_later_does_not_part_a_study_from_its_folder() -> None:
    study = links()
    later = ("sequence_length", "layout", "model")
    older = {name: value for name, value in study.settings().items() if name not in later}
    assert changed_setting(older, study) is None
    assert changed_setting(older, links(sequence_length=32)) == ("sequence_length", "none", "32")


def test_a_cell_of_before_there_were_layouts_is_finished(tmp_path: Path, write_run: WriteRun) -> None:
    study = links(links="1gbit", steps=2)
    cell = study.cells[1]
    with Folder(tmp_path / "study", study) as folder:
        folder.finish(cell, write_run(cell, folder.run_directory(cell), traffic=None))
        marker = tmp_path / "study" / "cells" / f"{cell.key}.json"
        value = orjson.loads(marker.read_bytes())
        del value["cell"]["layout"], value["cell"]["model"]
        marker.write_bytes(orjson.dumps(value))
        assert folder.finished(cell) is not None
        value["cell"]["layout"] = "fsdp"
        marker.write_bytes(orjson.dumps(value))
        assert folder.finished(cell) is None
