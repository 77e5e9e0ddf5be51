"""Every client gives the same answers: the cases of cases/*.yaml against the real service."""

import pytest

from conformance.place import Place
from conformance.reading import load_cases
from conformance.world import World
from serving import temporary_directory

CASES = load_cases()


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case, driver, shared_place, checkpoint):
    settings = case.get("server")
    place = shared_place if settings is None else Place(checkpoint, settings)
    try:
        with temporary_directory() as directory:
            world = World(driver, place, directory, is_proxied=case.get("proxy", False))
            try:
                for step in case["steps"]:
                    world.run(step, {})
                world.check_comparisons()
            finally:
                world.close()
    finally:
        if place is not shared_place:
            place.close()
