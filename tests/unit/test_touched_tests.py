"""Touched tests: changed tests come first, then those that import changed modules, within the budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from durations import Durations
from scripts.touched_tests import Imports, recorded, select, touched

FILES = {
    "src/rillflow/__init__.py": "",
    "src/rillflow/box/__init__.py": "from rillflow.box.lid import Lid\nfrom rillflow.box.wall import Wall\n",
    "src/rillflow/box/lid.py": "from rillflow.box import hinge\nclass Lid: ...\n",
    "src/rillflow/box/wall.py": "class Wall: ...\n",
    "src/rillflow/box/hinge.py": "def turn():\n    from ..far import away\n",
    "src/rillflow/far.py": "if TYPE_CHECKING:\n    from rillflow.box.wall import Wall\n",
    "tests/conftest.py": "pytest_plugins = ['plugin']\n",
    "tests/plugin.py": "",
    "tests/helper.py": "from rillflow.box import Lid\n",
    "tests/killed.py": "",
    "tests/unit/box/test_lid.py": "from rillflow.box import Lid\n",
    "tests/unit/box/test_wall.py": "from rillflow.box import Wall\n",
    "tests/unit/test_helped.py": "import helper\nSCRIPT = 'killed.py'\n",
    "tests/unit/test_alone.py": "RECIPE = \"small\"\n",
    "tests/integration/test_run.py": "import pytest\nfrom rillflow.box import Lid\npytestmark = [pytest.mark.slow]\n",
}  # fmt: skip


@pytest.fixture
def imports(tmp_path: Path) -> Imports:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Imports(tmp_path)


def found(imports: Imports, *changed: str, reach: int = 3) -> list[tuple[str, int]]:
    return [(Path(one.path).name, one.steps) for one in touched(imports, changed, reach)[0]]


def test_importers_come_in_the_order_of_their_distance_the_mirrored_folder_first(imports: Imports) -> None:
    assert found(imports, "src/rillflow/box/lid.py") == [("test_lid.py", 1), ("test_run.py", 1), ("test_helped.py", 2)]


def test_a_name_that_a_package_hands_on_leads_to_its_module_alone(imports: Imports) -> None:
    assert found(imports, "src/rillflow/box/wall.py", reach=1) == [("test_wall.py", 1)]


def test_imports_in_functions_and_relative_ones_count_and_those_for_types_do_not(imports: Imports) -> None:
    assert imports.importers["rillflow.far"] == {"src/rillflow/box/hinge.py"}
    assert "src/rillflow/far.py" not in imports.importers["rillflow.box.wall"]


def test_the_reach_is_bounded(imports: Imports) -> None:
    assert found(imports, "src/rillflow/far.py", reach=2) == []
    assert sorted(found(imports, "src/rillflow/far.py", reach=3)) == [("test_lid.py", 3), ("test_run.py", 3)]
    assert {name for name, _ in found(imports, "src/rillflow/box/__init__.py", reach=1)} == {
        "test_lid.py",
        "test_wall.py",
        "test_run.py",
    }


def test_a_test_that_has_changed_is_first_and_a_deleted_module_still_counts(imports: Imports) -> None:
    (imports.root / "src/rillflow/box/lid.py").unlink()
    assert found(imports, "src/rillflow/box/lid.py", "tests/unit/test_alone.py")[0] == ("test_alone.py", 0)


def test_plugins_and_conftest_touch_every_test_of_their_folder(imports: Imports) -> None:
    tests = {Path(name).name for name in FILES if "/test_" in name}
    assert dict(found(imports, "tests/conftest.py")) == dict.fromkeys(tests, 3)
    assert dict(found(imports, "tests/plugin.py")) == dict.fromkeys(tests, 3)


@pytest.mark.parametrize(
    ("changed", "test"), [("recipes/small.yaml", "test_alone.py"), ("tests/killed.py", "test_helped.py")]
)
def test_files_that_are_named_and_not_imported(imports: Imports, changed: str, test: str) -> None:
    assert found(imports, changed) == [(test, 1)]


def test_the_budget_cuts_the_farthest_and_never_a_changed_test(imports: Imports) -> None:
    seconds = {"tests/unit/test_alone.py": 100.0, "tests/unit/box/test_lid.py": 6.0, "tests/unit/test_helped.py": 1.0}
    changed = ["src/rillflow/box/lid.py", "tests/unit/test_alone.py", "Makefile"]
    selection = select(imports, changed, seconds, budget=53.2)
    assert [Path(one.path).name for one in selection.chosen] == ["test_alone.py", "test_lid.py"]
    assert [Path(one.path).name for one in selection.left_out] == ["test_helped.py"]
    assert [Path(one.path).name for one in selection.slow] == ["test_run.py"]
    assert selection.unreached == ["Makefile"]


def test_a_folder_with_the_name_of_a_mark_is_no_mark() -> None:
    seen = Durations()
    for path, keywords in (("tests/unit/agents/test_a.py", ["agents"]), ("tests/other/test_b.py", ["agents", "other"])):
        where = (path, 1, "test_x")
        seen.pytest_runtest_logreport(
            pytest.TestReport(
                f"{path}::test_x", where, dict.fromkeys(keywords, 1), "passed", None, "call", duration=0.5
            )
        )
    assert seen.seconds == {"tests/unit/agents/test_a.py::test_x": 0.5}


def test_durations_are_summed_by_file(tmp_path: Path) -> None:
    path = tmp_path / "durations"
    assert recorded(path) == {}
    path.write_text(json.dumps({"tests/a.py::test_x[1]": 0.5, "tests/a.py::test_y": 1.0, "tests/b.py::T::test_z": 2.0}))
    assert recorded(path) == {"tests/a.py": 1.5, "tests/b.py": 2.0}
