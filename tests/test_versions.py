"""Versions of other packages: those that were tested are pinned, the lowest that are allowed can be installed."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools import constraints, lowest

PROJECT = tomllib.loads((lowest.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("", *PROJECT["optional-dependencies"])
PINS = [line for line in constraints.FILE.read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_direct_dependency_is_pinned_within_its_range(extra):
    pinned = constraints.pins()
    for needed in lowest.direct(extra):
        version = pinned.get(canonicalize_name(needed.name))
        assert version is not None, f"{needed.name} is not in constraints.txt; run: make constraints"
        assert version in needed.specifier, (
            f"{needed.name} {version} is pinned, pyproject.toml wants {needed.specifier}"
        )


def test_pins_are_names_and_versions_alone():
    """No path, no address, and no build such as +cpu, which other machines do not find."""
    assert [pin for pin in PINS if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", pin)] == []
    assert len(constraints.pins()) == len(PINS) == len(set(PINS))
    assert sorted(PINS, key=lambda pin: pin.split("==")[0].lower()) == PINS


def test_the_torch_of_the_makefile_is_the_pinned_one():
    named = re.findall(r"torch==([\w.]+)", (lowest.ROOT / "Makefile").read_text())
    assert set(named) == {constraints.pins()["torch"]}


def test_the_lowest_versions_are_the_lower_bounds():
    needed = [needed for extra in ("", *lowest.EXTRAS) for needed in lowest.direct(extra)]
    for pin, allowed in zip(map(Requirement, lowest.lowest()), needed, strict=True):
        (version,) = (part.version for part in pin.specifier)
        assert pin.name == allowed.name
        assert version in allowed.specifier
        assert pin.name == "torch" or f">={version}" in str(allowed.specifier).split(",")


@pytest.mark.parametrize("line", ["numpy", "numpy<3", "numpy==2.1"])
def test_a_dependency_without_a_lower_bound_is_named(line):
    with pytest.raises(ValueError, match=f"pyproject.toml: {line} has 0 lower bounds"):
        lowest.lower_bound(Requirement(line))


def test_what_is_installed_is_pinned_without_its_build():
    names = [pin.split("==")[0] for pin in constraints.installed()]
    assert "numpy" in names
    assert not {"qkscope", *constraints.PYTHONS_OWN} & set(names)
    assert not [pin for pin in constraints.installed() if "+" in pin or "@" in pin]
